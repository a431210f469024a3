"""What a run does between its steps: actions with a period. They get the position of the run and may add to it."""

import enum
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxlc.step.state import TrainState
from jaxlc.train.evaluation.held_out import Evaluation


class TrainingStopped(RuntimeError):
    """A loss or gradient was not finite, or a gate at the end of a stage stopped the run. The message names the
    checkpoint."""


class Stop(enum.Enum):
    """Why a run stops after a step; the value is its exit status, which is 128 + the number of a signal."""

    DONE = 0  # the last step of a stage, the end of the batches, or StopTraining
    SIGHUP = 128 + signal.SIGHUP
    SIGINT = 128 + signal.SIGINT
    SIGTERM = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where training is: what a checkpoint holds."""

    state: TrainState
    step: int  # optimizer steps done
    next_sequence: int  # index of the first training sequence of the stage that no step has used
    evaluation: Evaluation | None = None  # None: the parameters were not evaluated
    rows: Sequence[dict[str, Any]] = ()  # of metrics.jsonl, which may not have them yet


class Action(NamedTuple):
    """Something that a run does every `every` steps, and after its last step."""

    every: int  # 0: after the last step only
    run: Callable[[Position], Position]
    at_start: bool = False  # also before step 1
    at_signal: bool = False  # also when a signal stops the run
    at_resume: bool = False  # also before the first step after a resume, and so not when a signal stops the run

    def is_due(self, step: int, stop: Stop | None) -> bool:
        """Whether it runs after `step`, after which the run stops if `stop` is not None."""
        if step == 0:
            return self.at_start and self.every > 0
        if stop not in (None, Stop.DONE) and (self.at_signal or self.at_resume):
            return self.at_signal
        return stop is Stop.DONE or is_period(step, self.every)


def run_due(actions: Iterable[Action], position: Position, stop: Stop | None = None) -> Position:
    """Runs the actions that are due, in order; returns the position with what they added."""
    for action in actions:
        if action.is_due(position.step, stop):
            position = action.run(position)
    return position


def is_period(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; never if that is 0."""
    return every > 0 and step % every == 0
