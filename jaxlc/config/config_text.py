"""Writes resolved settings as a config file: one setting per line, with its complete path. Imports no jax."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxlc.config.checks.stage_checks import SCHEDULE
from jaxlc.config.differences import NAMED_PARTS
from jaxlc.config.frozen import to_dict
from jaxlc.config.stage_schema import FROM_LENGTHS, Stage, StageConfig, refusal
from jaxlc.config.values import as_python, defaults_of

_HEAD = '''"""All settings of a run as `jaxlc train` resolved them; --config=FILE reads them."""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults

'''
_FUNCTION = """

def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, ())
    config = defaults()
    config.stages = STAGES
    config.update_from_flattened_dict(SETTINGS)
    return config
"""


def config_text(stages: Sequence[Stage]) -> str:
    """The text of a config file, from which `read_config` and `load_stages` return `stages` again.

    It does not depend on defaults, presets, or a config.json that may change later. Relative paths stay relative.
    """
    first = stages[0]
    settings = {path: value for path, value in _flat(first) if not (first.name and path in FROM_LENGTHS)}
    for index, stage in enumerate(stages[1:], start=1):
        settings |= {f"stages.{stage.name}.{path}": value for path, value in _changes(first, stage, index)}
    lines = [f"    {as_python(path)}: {as_python(value)}," for path, value in settings.items()]
    heads = [f"    dict({_arguments(stage)})," for stage in stages if stage.name]
    tables = [*_table("STAGES = [", heads, "]"), *_table("SETTINGS = {", lines, "}")]
    return _HEAD + "\n".join(tables) + "\n" + _FUNCTION


def _table(start: str, lines: Sequence[str], end: str) -> list[str]:
    return [start, *lines, end] if lines else [start + end]


def _arguments(stage: Stage) -> str:
    """The fields of a stage that are not sections, with its length in steps."""
    values = dict(name=stage.name, steps=stage.num_steps)
    own = {name: getattr(stage, name) for name in defaults_of(StageConfig) if name not in ("steps", "tokens")}
    values |= {name: value for name, value in own.items() if value != defaults_of(StageConfig)[name]}
    return ", ".join(f"{name}={as_python(value)}" for name, value in values.items())


def _flat(stage: Stage) -> Iterator[tuple[str, Any]]:
    """(path, value) of the settings, those of a source as data.mixture.NAME.FIELD; the sources replace data.sources."""
    for section, fields in to_dict(stage.config).items():
        for name, value in fields.items():
            path = f"{section}.{name}"
            if (section, name) in NAMED_PARTS:
                yield from ((f"{path}.{key}.{field}", x) for key, part in value.items() for field, x in part.items())
            elif path != "data.sources" or not stage.config.data.mixture:
                yield path, value


def _changes(first: Stage, stage: Stage, index: int) -> Iterator[tuple[str, Any]]:
    """The settings with which a stage differs from the first one; `index`: its position, from 0."""
    given = dict(_flat(first)) | {"data.seed": first.config.data.seed + index}  # the seed that a stage has by default
    for path, value in _flat(stage):
        is_derived = path in FROM_LENGTHS or refusal(stage.name, path)
        if stage.schedule == "continue" and path.removeprefix("optimizer.") in SCHEDULE:
            is_derived = True
        is_new_mixture = path.startswith("data.mixture.") and stage.config.data.mixture != first.config.data.mixture
        if not is_derived and (is_new_mixture or path not in given or value != given[path]):
            yield path, value
