"""Settings of a run that no stage uses, which are errors. Imports no jax."""

from collections.abc import Iterator, Sequence

from jaxlc.config.frozen import Config
from jaxlc.config.mixture import is_source_path, split_source_path
from jaxlc.config.stage_configs import StageConfig
from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import nearest_name


def unused_settings(configs: Sequence[Config]) -> Iterator[str]:
    """Settings without effect in a run, as messages.

    Args:
      configs: of all stages.
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


def check_used(stages: Sequence[StageConfig], path: str) -> None:
    """Checks that a stage takes the value of a setting from the config. Passes without stages.

    Args:
      path: the setting, such as "data.seq_len" or "data.mixture.books.paths".
    Raises:
      UserError: all stages have their own value; the message names their settings.
    """
    if not stages or any(_is_inherited(stage, path) for stage in stages):
        return
    own = [stage.name for stage in stages if _has_own(stage, path)]
    sources = sorted({name for stage in stages for name in stage.overrides.get("data", {}).get("mixture", {})})
    if own:
        settings = ", ".join(f"--config.stages.{name}.{path}" for name in own)
        reason = f"the stages set it themselves; use {settings}"
    elif is_source_path(path):
        nearest = nearest_name(split_source_path(path)[0], sources)
        known = f"did you mean {nearest}?" if nearest else f"their sources are {', '.join(sources) or 'data.sources'}"
        reason = f"no stage has this source in its mixture; {known}"
    else:
        reason = f"the stages have mixtures; set --config.data.mixture.NAME.paths of {', '.join(sources)}"
    raise UserError(f"config.{path} has no effect: {reason}")


def _is_inherited(stage: StageConfig, path: str) -> bool:
    section, _, name = path.partition(".")
    own = stage.overrides.get(section, {})
    if is_source_path(path):
        source = split_source_path(path)[0]
        is_used = source in own["mixture"] if "mixture" in own else "sources" not in own
        return is_used and not _has_own(stage, path)
    return name not in own and not (path == "data.sources" and "mixture" in own)


def _has_own(stage: StageConfig, path: str) -> bool:
    """Whether the stage sets the setting itself."""
    section, _, name = path.partition(".")
    own = stage.overrides.get(section, {})
    if not is_source_path(path):
        return name in own
    source, field = split_source_path(path)
    return field in own.get("mixture", {}).get(source, {})
