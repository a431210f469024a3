"""Settings of a run that no stage uses, which are errors. Imports no jax."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlc.config.frozen import Config
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
    """Checks that a stage takes the value of a setting from the config. Passes without stages.

    Args:
      stages: what each stage sets, by its name.
      path: the setting, such as "data.seq_len" or "data.mixture.books.paths".
    Raises:
      UserError: all stages have their own value; the message names their settings.
    """
    if not stages or any(_is_inherited(stage, path) for stage in stages.values()):
        return
    own = [name for name, stage in stages.items() if _has(stage, path)]
    sources = sorted({source for stage in stages.values() for source in stage.get("data", {}).get("mixture", {})})
    source = _source(path)
    if own:
        setting = "steps" if path == "train.steps" else path
        settings = ", ".join(f"--config.stages.{name}.{setting}" for name in own)
        reason = f"the stages set it themselves; use {settings}"
    elif source:
        nearest = nearest_name(source, sources)
        known = f"did you mean {nearest}?" if nearest else f"their sources are {', '.join(sources) or 'data.sources'}"
        reason = f"no stage has this source in its mixture; {known}"
    else:
        reason = f"the stages have mixtures; set --config.data.mixture.NAME.paths of {', '.join(sources)}"
    raise UserError(f"config.{path} has no effect: {reason}")


def _is_inherited(stage: Mapping[str, Any], path: str) -> bool:
    if _has(stage, path):
        return False
    data = stage.get("data", {})
    if source := _source(path):
        return source in data["mixture"] if "mixture" in data else "sources" not in data
    return not (path == "data.sources" and "mixture" in data)


def _source(path: str) -> str:
    """The NAME in data.mixture.NAME.FIELD; "" for other paths."""
    return path.split(".")[2] if path.startswith("data.mixture.") else ""


def _has(stage: Mapping[str, Any], path: str) -> bool:
    """Whether the stage sets the setting itself; each has its own number of steps."""
    if path == "train.steps":
        return True
    value: Any = stage
    for name in path.split("."):
        if name not in value:
            return False
        value = value[name]
    return True
