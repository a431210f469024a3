"""Checks of the stages of a config, and of settings that no stage uses. Imports no jax."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlc.config.checks.eval_checks import gate_names, parse_min_scores
from jaxlc.config.ranges import range_problems
from jaxlc.config.stage_schema import Stage, StageConfig, merged_settings
from jaxlc.config.values import invalid_value
from jaxlc.core.errors import UserError
from jaxlc.core.text import did_you_mean, nearest_name

# Settings of the optimizer that make up a learning-rate schedule.
SCHEDULE = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "initial_learning_rate_ratio",
    "final_learning_rate_ratio",
)


def contradictions(stages: Sequence[StageConfig], changes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Settings of stages that contradict each other, before they are resolved."""
    first, last = stages[0], stages[-1]
    for stage in stages:
        parse_min_scores(stage.min_scores, f"stages.{stage.name}.min_scores")
        yield from range_problems(f"stages.{stage.name}", stage)
    for name, default in (("schedule", "new"), ("optimizer_state", "carry")):
        if getattr(first, name) != default:
            yield invalid_value(f"stages.{first.name}.{name}", getattr(first, name), f"{default!r} in stage one")
    if last.max_eval_loss:
        yield (
            f"config.stages.{last.name}.max_eval_loss={last.max_eval_loss} has no effect: no stage follows; use 0, or"
            " add a stage"
        )
    if last.min_scores:
        yield f"config.stages.{last.name}.min_scores has no effect: no stage follows; remove it, or add a stage"
    for stage in stages:
        if (stage.schedule, stage.optimizer_state) == ("continue", "reset"):
            yield (
                f"config.stages.{stage.name} has schedule='continue' and optimizer_state='reset': moments of zero need"
                f" a warm-up; use --config.stages.{stage.name}.schedule=new"
            )
        own = [key for key in SCHEDULE if key in changes[stage.name].get("optimizer", {})]
        if stage.schedule == "continue" and own:
            yield (
                f"config.stages.{stage.name}.optimizer.{own[0]} has no effect with its schedule='continue'; use"
                f" --config.stages.{stage.name}.schedule=new"
            )
        if (stage.steps > 0) == (stage.tokens > 0):
            wrong = "both steps and tokens" if stage.steps else "neither steps nor tokens"
            yield f"config.stages.{stage.name} has {wrong}: set one of them"


def run_problems(stages: Sequence[Stage]) -> Iterator[str]:
    """What is wrong with the resolved stages of a run, as messages: differences, missing scores, unused settings."""
    first, last_step = stages[0].config, stages[-1].config.train.steps
    for stage in stages:
        if stage.config.mesh.num_devices != first.mesh.num_devices:
            yield (
                f"stage {stage.name} has a mesh of {stage.config.mesh.num_devices} devices and stage {stages[0].name}"
                f" one of {first.mesh.num_devices}; a run uses the same devices in all stages"
            )
        if bool(stage.config.optimizer.max_grad_norm) != bool(first.optimizer.max_grad_norm):
            yield (
                f"unsupported: optimizer.max_grad_norm is 0 in one of the stages {stages[0].name} and {stage.name}"
                " only, which changes the state of the optimizer; use a large value instead of 0"
            )
        names = gate_names(stage.config)
        for name in parse_min_scores(stage.min_scores, "min_scores"):
            if name not in names:
                known = did_you_mean(name, names) if names else "no evals.tasks"
                yield f"config.stages.{stage.name}.min_scores: no score {name!r} in this stage: {known}"
    every_steps = max(stage.config.evals.every_steps for stage in stages)
    if every_steps and not any(stage.config.evals.tasks for stage in stages):
        yield f"config.evals.every_steps={every_steps} has no effect without config.evals.tasks; set tasks"
    if first.profile.steps and first.profile.traced_steps[0] > last_step:
        yield (
            f"config.profile.steps={first.profile.steps} has no effect: the last step of the run is {last_step}; use"
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
    mark: Any = object()  # a value that no stage has, and a config that sets only this one
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
