"""Rollouts during training (config.rollouts).

`jaxlc.posttrain` makes those of the policy. It is in a higher layer than this package, so it is imported by its name,
and only by runs with config.rollouts.source='model'.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jaxlc.core.errors import Unsupported
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.step.step import TrainStep

_MODULE = "jaxlc.posttrain.embedded_rollouts"
DIRECTORY = "rollouts"  # in the workdir


class RolloutMaker(Protocol):
    """Makes the rollouts of a step with the parameters before it."""

    def __call__(self, params: dict, step: int, path: Path, log: Callable[[str], None]) -> None:
        """Writes the rollouts of `step` to `path`, unless it exists. Every process of a run makes the same call."""


def make_rollout_maker(step: TrainStep, tokenizer: Tokenizer) -> RolloutMaker | None:
    """None: another program writes the files, or there are no rollouts.

    Raises:
      UserError: the prompts or the reward cannot be loaded.
      Unsupported: a custom model.
    """
    if step.config.rollouts.source != "model":
        return None
    if step.model is not None:
        raise Unsupported("config.rollouts.source='model' is unsupported with a custom model: it has no KV cache")
    return importlib.import_module(_MODULE).EmbeddedRollouts(step, tokenizer)
