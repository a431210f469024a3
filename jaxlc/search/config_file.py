"""Writes the recommended settings as a config file: a Python file that `--config=FILE` takes. Imports no jax."""

from collections.abc import Sequence
from typing import Any

from jaxlc.config import PRESETS, Config, Stage, to_dict
from jaxlc.config.config_text import file_text
from jaxlc.config.stage_schema import FROM_LENGTHS, refusal
from jaxlc.config.values import as_python, flattened
from jaxlc.core.files import local_path

MARK = "Written by `jaxlc recommend`"


def config_source(source: str, model: str, title: str, base: Sequence[Stage], recommended: Sequence[Config]) -> str:
    """The text of the config file.

    Args:
      source: name and variant of the given config; "": none, only a model.
      model: --model of the command; "": that of the given config.
      title: what was recommended for what, in one line.
      base: the stages of the given config as its file defines them, with `model`, without other overrides.
      recommended: the config of each stage.
    """
    is_preset, path = model in PRESETS, local_path(model)
    if model and not is_preset and path.is_dir():  # absolute, so that the file can be read from other directories
        model = str(path.resolve())
    lines = [f"config.model.{'preset' if is_preset else 'init_from'} = {as_python(model)}"] if model else []
    title = f"{title}\n\n{MARK}. Change it as any other config file.\n"
    given = f"read_config({as_python(source)})" if source else "defaults()"
    return file_text(title, given, _changes(base, recommended), lines)


def _changes(base: Sequence[Stage], recommended: Sequence[Config]) -> dict[str, Any]:
    """Settings that differ from the base, or that it lacks, by their paths.

    They are settings of a stage, or of the run where stages have no own value.
    """
    changes: dict[str, Any] = {}
    for stage, config in zip(base, recommended, strict=True):
        given = flattened(to_dict(stage.config))
        for path, value in flattened(to_dict(config)).items():
            if (path not in given or value != given[path]) and not (stage.name and path in FROM_LENGTHS):
                is_shared = not stage.name or refusal(stage.name, path)
                changes[path if is_shared else f"stages.{stage.name}.{path}"] = value
    return changes
