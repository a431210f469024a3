"""Writes the recommended settings as a config file: a Python file that `--config=FILE` takes. Imports no jax."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import PRESETS, Config, Stage, to_dict
from jaxlc.config.stage_schema import FROM_LENGTHS, refusal
from jaxlc.config.values import as_python
from jaxlc.core.errors import UserError
from jaxlc.core.paths import local_path
from jaxlc.plan.output_files import check_output_file

MARK = "Written by `jaxlc recommend`"


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
        f"    config = {f'read_config({as_python(source)})' if source else 'defaults()'}",
    ]
    if model in PRESETS:
        lines.append(f"    config.model.preset = {as_python(model)}")
    elif model:  # a path is absolute, so that the file can be read from other directories
        path = local_path(model)
        lines.append(f"    config.model.init_from = {as_python(str(path.resolve()) if path.is_dir() else model)}")
    changes = _changes(base, recommended)
    lines += [
        "    config.update_from_flattened_dict({",
        *(f"        {as_python(path)}: {as_python(value)}," for path, value in changes.items()),
        "    })",
    ]
    return "\n".join([*lines, "    return config", ""])


def _changes(base: Sequence[Stage], recommended: Sequence[Config]) -> dict[str, Any]:
    """Settings that differ from the base by their paths: of a stage, or of the run where stages have no own value."""
    changes: dict[str, Any] = {}
    for stage, config in zip(base, recommended, strict=True):
        given = to_dict(stage.config)
        for section, settings in to_dict(config).items():
            for path, value in ((f"{section}.{name}", x) for name, x in settings.items() if x != given[section][name]):
                if not (stage.name and path in FROM_LENGTHS):
                    is_shared = not stage.name or refusal(stage.name, path)
                    changes[path if is_shared else f"stages.{stage.name}.{path}"] = value
    return changes
