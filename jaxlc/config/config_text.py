"""Writes resolved settings as a config file: one setting per line, with its complete path. Imports no jax."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlc.config.checks.stage_checks import SCHEDULE
from jaxlc.config.frozen import to_dict
from jaxlc.config.stage_schema import FROM_LENGTHS, Stage, StageConfig, refusal
from jaxlc.config.values import as_python, defaults_of, flattened

_FILE = '''"""{title}"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, {function}


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, ())
{body}
    return config
'''


def file_text(title: str, base: str, settings: Mapping[str, Any], lines: Sequence[str] = ()) -> str:
    """The text of a config file.

    Args:
      title: its docstring.
      base: the call that returns the config to change, such as "defaults()".
      settings: the new values by their paths.
      lines: statements before these are set.
    """
    body = [f"config = {base}", *lines, f"config.update_from_flattened_dict({as_python(settings)})"]
    return _FILE.format(title=title, function=base.partition("(")[0], body=textwrap.indent("\n".join(body), "    "))


def config_text(stages: Sequence[Stage]) -> str:
    """The text of a config file, from which `read_config` and `load_stages` return `stages` again.

    It does not depend on defaults, presets, or a config.json that may change later. Relative paths stay relative.
    """
    first = stages[0]
    settings = {path: x for path, x in _settings(first).items() if not (first.name and path in FROM_LENGTHS)}
    for index, stage in enumerate(stages[1:], start=1):
        settings |= {f"stages.{stage.name}.{path}": value for path, value in _changes(first, stage, index)}
    heads = [f"    dict({_arguments(stage)})," for stage in stages if stage.name]
    return file_text(
        "All settings of a run as `jaxlc train` resolved them; --config=FILE reads them.",
        "defaults()",
        settings,
        ["config.stages = [", *heads, "]"] if heads else [],
    )


def _arguments(stage: Stage) -> str:
    """The fields of a stage that are not sections, with its length in steps."""
    values = dict(name=stage.name, steps=stage.num_steps)
    own = {name: getattr(stage, name) for name in defaults_of(StageConfig) if name not in ("steps", "tokens")}
    values |= {name: value for name, value in own.items() if value != defaults_of(StageConfig)[name]}
    return ", ".join(f"{name}={as_python(value)}" for name, value in values.items())


def _settings(stage: Stage) -> dict[str, Any]:
    """The settings by their paths; the sources of a mixture replace data.sources."""
    settings = flattened(to_dict(stage.config))
    if stage.config.data.mixture:
        del settings["data.sources"]
    return settings


def _changes(first: Stage, stage: Stage, index: int) -> Iterator[tuple[str, Any]]:
    """The settings with which a stage differs from the first one; `index`: its position, from 0."""
    given = _settings(first) | {"data.seed": first.config.data.seed + index}  # the seed that a stage has by default
    for path, value in _settings(stage).items():
        is_derived = path in FROM_LENGTHS or refusal(stage.name, path)
        if stage.schedule == "continue" and path.removeprefix("optimizer.") in SCHEDULE:
            is_derived = True
        is_new_mixture = path.startswith("data.mixture.") and stage.config.data.mixture != first.config.data.mixture
        if not is_derived and (is_new_mixture or path not in given or value != given[path]):
            yield path, value
