"""Writes the recommended settings as a config file: a Python file that `--config=FILE` takes. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import PRESETS, Config, Stage, to_dict
from jaxlc.core.errors import UserError
from jaxlc.plan.output_files import check_output_file

MARK = "Written by `jaxlc recommend`"
_OF_STAGES = ("attention", "data", "memory", "mesh", "optimizer", "train")  # sections that a stage may change
_FROM_STEPS = ("train.steps", "optimizer.schedule_steps", "optimizer.schedule_start")  # set by the lengths of stages

Sections = dict[str, dict[str, Any]]


def check_path(path: Path) -> None:
    """Checks that the config file can be written.

    Raises:
      UserError: the file cannot be written, or this command did not write the existing file.
    """
    if path.suffix != ".py":
        raise UserError(f"invalid --out={path}: expected the name of a config file, such as recommended.py")
    check_output_file("out", path)
    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise UserError(f"--out={path}: the file exists, and this command did not write it; choose another name")


def config_source(source: str, model: str, title: str, base: Sequence[Stage], recommended: Sequence[Config]) -> str:
    """The text of the config file.

    Args:
      source: name and variant of the given config; "": none, only a model.
      model: --model of the command; "": that of the given config.
      title: what was recommended for what, in one line.
      base: the stages of the given config as its file defines them, with `model`, without other overrides.
      recommended: the config of each stage.
    """
    in_run, in_stages = _changes(base, recommended)
    lines = [
        f'"""{title}',
        "",
        f"{MARK}. Change it as any other config file.",
        '"""',
        "",
        "from ml_collections import ConfigDict",
        "",
        f"from jaxlc.config import check_variant, {'read_config' if source else 'defaults'}",
        "",
        "",
        'def get_config(variant: str = "") -> ConfigDict:',
        "    check_variant(variant, ())",
        f"    config = {f'read_config({_value(source)})' if source else 'defaults()'}",
    ]
    if model:
        lines.append(f"    config.model.{'preset' if model in PRESETS else 'init_from'} = {_value(model)}")
    for section, values in in_run.items():
        lines.append(f"    config.{section}.update({_arguments(values)})")
    if in_stages:
        lines.append("    changes = {")
        for name, sections in in_stages.items():
            texts = (
                f"{section}=dict({_arguments(values)})" if isinstance(values, Mapping) else f"{section}={values!r}"
                for section, values in sections.items()
            )
            lines.append(f"        {_value(name)}: dict({', '.join(texts)}),")
        lines.append("    }")
        lines.append("    config.stages = [stage.changed(**changes.get(stage.name, {})) for stage in config.stages]")
    return "\n".join([*lines, "    return config", ""])


def _changes(base: Sequence[Stage], recommended: Sequence[Config]) -> tuple[Sections, dict[str, Sections]]:
    """Settings that differ from the base: those of the run by section, and those of each stage by its name."""
    in_run: Sections = {}
    in_stages: dict[str, Sections] = {}
    for stage, config in zip(base, recommended, strict=True):
        given = to_dict(stage.config)
        for section, settings in to_dict(config).items():
            values = {name: value for name, value in settings.items() if value != given[section][name]}
            if not stage.name or section not in _OF_STAGES:
                in_run.setdefault(section, {}).update(values)
            elif values := {name: x for name, x in values.items() if f"{section}.{name}" not in _FROM_STEPS}:
                in_stages.setdefault(stage.name, {})[section] = values
    return {section: values for section, values in in_run.items() if values}, in_stages


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"({''.join(f'{_value(item)}, ' for item in value).rstrip(' ' if len(value) == 1 else ', ')})"
    return repr(value)
