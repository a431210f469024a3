"""Checks of the stages of a config, of settings that no stage uses, and of evaluations, with the
names of their scores. Imports no jax.
"""

import functools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlc.config.checks.layer_checks import without_effect
from jaxlc.config.frozen import RUN_LENGTHS, Config, Stage, StageConfig, merged_settings
from jaxlc.config.schema import RULER_TASKS, EvalsConfig, EvalSettings
from jaxlc.config.values import invalid_value, range_problems, typed
from jaxlc.core import SettingError, UserError, did_you_mean, nearest_name, raise_first

NEEDLE = "needle"
PASSKEY = "passkey"
LOSS = "loss"
RULER = "ruler"
_MIN_LOSS_LENGTH = 16
# whose loss is compared between full and limited context; half of a shorter document
LAST_TOKENS = 500
EVAL_TASKS = (NEEDLE, PASSKEY, LOSS, RULER, *RULER_TASKS)


def eval_problems(evals: EvalsConfig) -> Iterator[str]:
    """Yields what is wrong with the settings, one line each."""
    for task in evals.tasks:
        if task not in EVAL_TASKS:
            yield f"unknown task {task!r}: {did_you_mean(task, EVAL_TASKS)}"
    yield from range_problems("evals", evals)
    if any(not 0 <= depth <= 1 for depth in evals.depths):
        yield f"invalid depths {evals.depths}: expected numbers from 0 to 1"
    if LOSS in evals.tasks and not evals.documents:
        yield "the task loss needs documents: files, directories or glob patterns with texts"
    if LOSS in evals.tasks and min(evals.lengths, default=_MIN_LOSS_LENGTH) < _MIN_LOSS_LENGTH:
        yield f"invalid lengths {evals.lengths}: expected at least {_MIN_LOSS_LENGTH} tokens with the task loss"


def training_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong with config.evals in a run."""
    evals = config.evals
    for problem in eval_problems(evals):
        yield f"config.evals: {problem}"
    if set(evals.tasks) - {LOSS} and config.memory.parameters == "host":
        yield (
            "unsupported: config.evals.tasks that generate text with config.memory.parameters='host'; evaluate the"
            " checkpoints with `jaxlc eval`"
        )


def lengths_in_training(config: Config) -> tuple[int, ...]:
    """The context lengths at which a run is evaluated, in tokens."""
    return config.evals.lengths or (config.data.seq_len,)


def num_last_tokens(length: int) -> int:
    """The number of last tokens of a document of this length whose loss is compared."""
    return min(LAST_TOKENS, length // 2)


def used_limits(evals: EvalsConfig, length: int) -> list[int]:
    """The context limits that are smaller than the number of tokens before the last ones."""
    return [limit for limit in evals.context_limits if limit + num_last_tokens(length) < length]


def parse_min_scores(items: Sequence[str], path: str) -> dict[str, float]:
    """The limits of a gate: "needle@4096=80" is {"needle@4096": 80.0}.

    Args:
      path: the setting, for the error.
    Raises:
      SettingError: an item has another form.
    """
    limits = {}
    for item in items:
        match = re.fullmatch(r"(\w+@\d+)=(-?\d+(?:\.\d+)?)", item)
        if match is None:
            raise SettingError(
                invalid_value(path, item, "TASK@LENGTH=SCORE, such as needle@65536=80")
            )
        limits[match[1]] = float(match[2])
    return limits


def eval_settings(values: Mapping[str, Any]) -> EvalsConfig:
    """The settings of an evaluation that has at least one task and one length; the default task is
    needle.

    Raises:
      UserError: an unknown setting or task, or a value of a wrong type or out of range.
    """
    hints = typing.get_type_hints(EvalSettings)
    for name in values:
        if name not in hints:
            raise UserError(
                f"unknown setting {name!r} of an evaluation: {did_you_mean(name, hints)}"
            )
    fields: dict[str, Any] = {"tasks": (NEEDLE,)}
    for name, value in values.items():
        fields[name] = typed(f"evals.{name}", value, hints[name])
    settings = EvalsConfig(**fields)
    raise_first(eval_problems(settings))
    if not settings.tasks or not settings.lengths:
        raise UserError("an evaluation needs at least one task and one length")
    return settings


# Settings of the optimizer that make up a learning-rate schedule.
SCHEDULE = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "initial_learning_rate_ratio",
    "final_learning_rate_ratio",
)


def contradictions(
    stages: Sequence[StageConfig], changes: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Settings of stages that contradict each other, before they are resolved."""
    first = stages[0]
    last = stages[-1]
    for stage in stages:
        parse_min_scores(stage.min_scores, f"stages.{stage.name}.min_scores")
        yield from range_problems(f"stages.{stage.name}", stage)
    for name, default in (("schedule", "new"), ("optimizer_state", "carry")):
        if getattr(first, name) != default:
            yield invalid_value(
                f"stages.{first.name}.{name}", getattr(first, name), f"{default!r} in stage one"
            )
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
    """What is wrong with the resolved stages of a run, as messages: differences, missing scores,
    unused settings.
    """
    first = stages[0].config
    last_step = stages[-1].config.train.steps
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
        if stage.config.optimizer.name != first.optimizer.name:
            yield (
                f"unsupported: the stages {stages[0].name} and {stage.name} have another optimizer.name, which changes"
                " the state of the optimizer; use one in all stages"
            )
        evals = stage.config.evals
        names = list[str]()
        for length in lengths_in_training(stage.config):
            tasks = [
                name
                for task in evals.tasks
                for name in (RULER_TASKS if task == RULER else (task,))
                if name != LOSS
            ]
            gains = [
                f"context_gain_{limit}"
                for limit in used_limits(evals, length)
                if LOSS in evals.tasks
            ]
            names += [f"{name}@{length}" for name in (*tasks, *gains)]
        for name in parse_min_scores(stage.min_scores, "min_scores"):
            if name not in names:
                known = did_you_mean(name, names) if names else "no evals.tasks"
                yield f"config.stages.{stage.name}.min_scores: no score {name!r} in this stage: {known}"
    if not any(stage.config.evals.tasks for stage in stages):
        for evals in dict.fromkeys(stage.config.evals for stage in stages):
            reason = "without config.evals.tasks; set tasks"
            yield from without_effect("evals", evals, vars(evals), reason)
    is_known = not first.train.epochs
    if is_known and first.profile.steps and first.profile.traced_steps[0] > last_step:
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
    is_length = path in RUN_LENGTHS  # each stage has its own
    mark: Any = object()  # a value that no stage has, and a config that sets only this one
    marked = functools.reduce(lambda inner, name: {name: inner}, reversed(path.split(".")), mark)
    if not is_length and any(
        _value(merged_settings(marked, stage), path) is mark for stage in stages.values()
    ):
        return
    own = [name for name, stage in stages.items() if is_length or _value(stage, path) is not None]
    sources = sorted(
        {source for stage in stages.values() for source in stage.get("data", {}).get("mixture", {})}
    )
    if own:
        settings = ", ".join(
            f"--config.stages.{name}.{'steps' if is_length else path}" for name in own
        )
        reason = f"the stages set it themselves; use {settings}"
    elif path.startswith("data.mixture."):
        source = path.split(".")[2]
        nearest = nearest_name(source, sources)
        known = (
            f"did you mean {nearest}?"
            if nearest
            else f"their sources are {', '.join(sources) or 'data.sources'}"
        )
        reason = f"no stage has this source in its mixture; {known}"
    else:
        reason = f"the stages have mixtures; set --config.data.mixture.NAME.paths of {', '.join(sources)}"
    raise UserError(f"config.{path} has no effect: {reason}")


def _value(values: Any, path: str) -> Any:
    """The value at a path in nested dictionaries; None if there is none."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values
