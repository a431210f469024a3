"""Which checkpoints of a run are kept: the latest, every n-th, the best, and those at stage boundaries."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxlc.checkpoints.checkpoint_files import committed_steps, read_valid_meta


class BestLosses:
    """A policy of Orbax: preserves the checkpoints with the lowest held-out losses of each stage.

    Orbax's BestN reads metrics from files of its own, which checkpoints of earlier versions do not have.
    """

    def __init__(self, num_kept: int, directory: Path):
        """
        Args:
          num_kept: of each stage; losses of different stages are those of different sequences.
          directory: of the checkpoints.
        """
        self._num_kept = num_kept
        self._losses: dict[int, tuple[str, float]] = {}
        for step in committed_steps(directory) if num_kept else []:
            try:
                self.add(step, read_valid_meta(directory / str(step)))
            except (OSError, ValueError):  # damaged
                continue

    def add(self, step: int, meta: dict) -> None:
        """Adds a checkpoint with this meta, as `StageRun.save` makes it."""
        self._losses.pop(step, None)
        if (loss := meta.get("eval_loss")) is not None:
            self._losses[step] = (meta.get("stage", {}).get("name", ""), loss)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Called by Orbax with the steps of all checkpoints."""
        steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step in self._losses]
        kept = set()
        for stage in {self._losses[step][0] for step in steps}:
            of_stage = [step for step in steps if self._losses[step][0] == stage]
            kept |= set(sorted(of_stage, key=lambda step: (self._losses[step][1], step))[: self._num_kept])
        return [checkpoint.step in kept for checkpoint in checkpoints]


def policy_of(keep: int, keep_steps: Sequence[int], keep_every: int, best: BestLosses) -> Any:
    """The policy with the arguments of `Checkpoints`."""
    policies = ocp.checkpoint_managers
    kept: list[Any] = [policies.LatestN(keep), policies.CustomSteps(list(keep_steps)), best]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    return policies.AnyPreservationPolicy(kept)
