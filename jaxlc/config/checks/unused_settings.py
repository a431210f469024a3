"""Settings of a run that no stage uses, which are errors. Imports no jax."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlc.config.frozen import Config
from jaxlc.config.stage_schema import merged_settings
from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import nearest_name


def unused_settings(configs: Sequence[Config]) -> Iterator[str]:
    """Settings without effect in a run, as messages.

    Args:
      configs: those of all stages.
    """
    every_steps = max(config.evals.every_steps for config in configs)
    if every_steps and not any(config.evals.tasks for config in configs):
        yield f"config.evals.every_steps={every_steps} has no effect without config.evals.tasks; set tasks"
    profile, last_step = configs[0].profile, configs[-1].train.steps
    if profile.steps and profile.traced_steps[0] > last_step:
        yield (
            f"config.profile.steps={profile.steps} has no effect: the last step of the run is {last_step}; use"
            f" --config.profile.steps={last_step}:{last_step + 1}, or earlier steps"
        )


def check_used(stages: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """Checks that a stage takes the value of a setting from the config.

    Args:
      stages: what each stage sets, by its name.
      path: the setting, such as "data.seq_len" or "data.mixture.books.paths".
    Raises:
      UserError: all stages have their own value; the message names their settings.
    """
    is_length = path == "train.steps"  # each stage has its own
    mark: Any = object()
    marked = functools.reduce(lambda inner, name: {name: inner}, reversed(path.split(".")), mark)
    if not is_length and any(_value(merged_settings(marked, stage), path) is mark for stage in stages.values()):
        return
    own = [name for name, stage in stages.items() if is_length or _value(stage, path) is not None]
    sources = sorted({source for stage in stages.values() for source in stage.get("data", {}).get("mixture", {})})
    if own:
        settings = ", ".join(f"--config.stages.{name}.{'steps' if is_length else path}" for name in own)
        reason = f"the stages set it themselves; use {settings}"
    elif path.startswith("data.mixture."):
        source = path.split(".")[2]
        nearest = nearest_name(source, sources)
        known = f"did you mean {nearest}?" if nearest else f"their sources are {', '.join(sources) or 'data.sources'}"
        reason = f"no stage has this source in its mixture; {known}"
    else:
        reason = f"the stages have mixtures; set --config.data.mixture.NAME.paths of {', '.join(sources)}"
    raise UserError(f"config.{path} has no effect: {reason}")


def _value(values: Any, path: str) -> Any:
    """The value at a path in nested dictionaries; None if there is none."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values
