"""Checks of the settings of an evaluation, and the names of its scores. Imports no jax."""

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlc.config.frozen import Config
from jaxlc.config.ranges import range_problems
from jaxlc.config.schema import RULER_TASKS, EvalsConfig, EvalSettings
from jaxlc.config.values import SettingError, invalid_value, typed
from jaxlc.core.errors import UserError, raise_first
from jaxlc.core.text import did_you_mean

NEEDLE, PASSKEY, LOSS, RULER = "needle", "passkey", "loss", "ruler"
_MIN_LOSS_LENGTH = 16
LAST_TOKENS = 500  # whose loss is compared between full and limited context; half of a shorter document
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
    yield from (f"config.evals: {problem}" for problem in eval_problems(evals))
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


def gate_names(config: Config) -> list[str]:
    """The scores of config.evals that a gate of a stage may name, as TASK@LENGTH: all but losses."""
    evals, names = config.evals, list[str]()
    for length in lengths_in_training(config):
        tasks = [name for task in evals.tasks for name in (RULER_TASKS if task == RULER else (task,)) if name != LOSS]
        gains = [f"context_gain_{limit}" for limit in used_limits(evals, length) if LOSS in evals.tasks]
        names += [f"{name}@{length}" for name in (*tasks, *gains)]
    return names


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
            raise SettingError(invalid_value(path, item, "TASK@LENGTH=SCORE, such as needle@65536=80"))
        limits[match[1]] = float(match[2])
    return limits


def eval_settings(values: Mapping[str, Any]) -> EvalsConfig:
    """The settings of an evaluation that has at least one task and one length; the default task is needle.

    Raises:
      UserError: an unknown setting or task, or a value of a wrong type or out of range.
    """
    hints = typing.get_type_hints(EvalSettings)
    for name in values:
        if name not in hints:
            raise UserError(f"unknown setting {name!r} of an evaluation: {did_you_mean(name, hints)}")
    fields: dict[str, Any] = {"tasks": (NEEDLE,)}
    for name, value in values.items():
        fields[name] = typed(f"evals.{name}", value, hints[name])
    settings = EvalsConfig(**fields)
    raise_first(eval_problems(settings))
    if not settings.tasks or not settings.lengths:
        raise UserError("an evaluation needs at least one task and one length")
    return settings
