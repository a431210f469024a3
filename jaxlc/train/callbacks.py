"""Callbacks: user code that a training run calls at certain events."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import suggestion
from jaxlc.runtime import watchdog

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxlc.config import Config

EVENTS = ("on_start", "on_step", "on_log", "on_evaluation", "on_checkpoint", "on_end")


class StopTraining(Exception):
    """Raised by a callback to end training: the run saves a checkpoint, evaluates, and returns its result."""


class Callback:
    """Methods that a training run calls at its events. Override the ones that you need.

    All processes of a run call every event, in the same order; print on one of them only. An exception ends the run,
    except `StopTraining`, which ends it after a checkpoint. With several processes, all of them must raise it at the
    same event.
    """

    def on_start(self, run: "RunInfo") -> None:
        """Called before the first step of this run and of each later stage, after its step is compiled."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Called for each optimizer step, in order, with its loss, grad_norm, learning_rate and target_tokens.

        Metrics are fetched when they are logged, and at least every 8 steps, so the call may be up to 8 steps late.
        With a callback, the metrics of a logged step are fetched before the next step is dispatched, during which
        devices are idle; train.log_every_steps makes that rarer.
        """

    def on_log(self, row: dict[str, float]) -> None:
        """Called after a row of metrics.jsonl with the loss is written; `row` is that row."""

    def on_evaluation(self, step: int, evaluation: Any) -> None:
        """Called after an evaluation of the parameters of `step` on held-out sequences; see `Result.evaluation`."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called after a checkpoint is copied from the devices, which is before the other events of its step. It is
        written to `path` in the background."""

    def on_end(self, result: Any) -> None:
        """Called at the end of the run, also after a signal or `StopTraining`; `run` returns `result`."""


@dataclass(frozen=True)
class RunInfo:
    """The argument of `Callback.on_start`."""

    config: "Config"  # of the run, or of the stage that starts
    mesh: "Mesh"
    workdir: Path  # directory of metrics, plots and checkpoints
    first_step: int  # number of optimizer steps done before this run; 0 unless it resumes


class Callbacks:
    """Calls several callbacks; `stop_requested` is True after one of them raised `StopTraining`."""

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = tuple(callbacks)
        self.stop_requested = False
        for callback in self._callbacks:
            _check(callback)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._callbacks)

    def __call__(self, event: str, *arguments) -> None:
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            try:
                with watchdog.phase("callback", repeats=False):
                    method(*arguments)
            except StopTraining:
                self.stop_requested = True


def _check(callback: Callback) -> None:
    """Raises UserError for a method that would never be called, or not with its arguments."""
    known = f"{', '.join(EVENTS[:-1])} and {EVENTS[-1]}"
    events = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    if not events:
        raise UserError(f"invalid callback {callback!r}: expected an object with some of the methods {known}")
    for event in events:
        if event not in EVENTS:
            raise UserError(
                f"{type(callback).__name__}.{event} is never called{suggestion(event, EVENTS)}: callbacks have"
                f" the methods {known}"
            )
        arguments = list(inspect.signature(getattr(Callback, event)).parameters)[1:]
        try:
            inspect.signature(getattr(callback, event)).bind(*arguments)
        except TypeError as error:
            raise UserError(
                f"{type(callback).__name__}.{event} cannot be called as {event}({', '.join(arguments)}): {error}"
            ) from None
