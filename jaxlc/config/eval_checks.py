"""Checks of the settings of an evaluation. Imports no jax."""

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlc.config.schema import RULER_TASKS, EvalsConfig
from jaxlc.config.values import did_you_mean, typed
from jaxlc.core.errors import UserError

NEEDLE, PASSKEY, LOSS, RULER = "needle", "passkey", "loss", "ruler"
EVAL_TASKS = (NEEDLE, PASSKEY, LOSS, RULER, *RULER_TASKS)


def eval_problems(evals: EvalsConfig) -> Iterator[str]:
    """Yields what is wrong with the settings, one line each."""
    for task in evals.tasks:
        if task not in EVAL_TASKS:
            yield f"unknown task {task!r}: {did_you_mean(difflib.get_close_matches(task, EVAL_TASKS, n=1), EVAL_TASKS)}"
    smallest = min((*evals.lengths, *evals.context_limits, evals.num_examples, evals.batch_size))
    if smallest < 1 or not evals.num_needles > 0:
        yield (
            "invalid value for an evaluation: expected lengths, context_limits, num_examples, num_needles and"
            " batch_size of at least 1"
        )
    if any(not 0 <= depth <= 1 for depth in evals.depths):
        yield f"invalid depths {evals.depths}: expected numbers from 0 to 1"
    if LOSS in evals.tasks and not evals.documents:
        yield "the task loss needs documents: files, directories or glob patterns with texts"


def eval_settings(values: Mapping[str, Any]) -> EvalsConfig:
    """The settings of an evaluation that has at least one task and one length; the default task is needle.

    Raises:
      UserError: an unknown setting or task, or a value of a wrong type or out of range.
    """
    hints = typing.get_type_hints(EvalsConfig)
    for name in values:
        if name not in hints:
            nearest = difflib.get_close_matches(name, hints, n=1)
            raise UserError(f"unknown setting {name!r} of an evaluation: {did_you_mean(nearest, hints)}")
    fields = {name: typed(f"evals.{name}", value, hints[name]) for name, value in values.items()}
    settings = EvalsConfig(**{"tasks": (NEEDLE,)} | fields)
    for problem in eval_problems(settings):
        raise UserError(problem)
    if not settings.tasks or not settings.lengths:
        raise UserError("an evaluation needs at least one task and one length")
    return settings
