"""Scores of the parameters during training (config.evals).

`jaxlc.evals` computes them. It is in a higher layer than this package, so it is imported by its name, and only by runs
with config.evals.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxlc.core.errors import Unsupported
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.step.step import TrainStep

_MODULE = "jaxlc.evals.during_training"


class NamedScore(NamedTuple):
    """A mean over examples or documents."""

    name: str  # TASK@LENGTH
    score: float  # percent, or nats per token
    standard_error: float  # NaN for one example
    num_examples: int
    seconds: float


class Scorer(Protocol):
    """Computes the scores of config.evals. Its programs are compiled once, for all evaluations of a stage."""

    def check(self) -> None:
        """Makes an example of each task, without a model.

        Raises:
          UserError: a file cannot be read, or a task has no example of the lengths.
        """

    def __call__(self, params: dict, step: int, workdir: Path, log: Callable[[str], None]) -> list[NamedScore]:
        """Evaluates the parameters of `step` and writes predictions, scores and figures to `workdir`/evals.

        Predictions of the same parameters that an interrupted evaluation has stored there are used. Every process of a
        run makes the same call.

        Args:
          log: prints a line.
        """


def make_scorer(step: TrainStep, tokenizer: Tokenizer) -> Scorer | None:
    """The scorer of a stage; None without config.evals.tasks.

    Raises:
      Unsupported: a custom model.
    """
    if not step.config.evals.tasks:
        return None
    if step.model is not None:
        raise Unsupported("config.evals.tasks is unsupported with a custom model, whose attention has no KV cache")
    return importlib.import_module(_MODULE).TrainingScorer(step, tokenizer)
