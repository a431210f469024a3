"""Callbacks: code of the user's own that runs at documented points of a training run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxlc.core.errors import UserError

EVENTS = ("on_start", "on_step", "on_log", "on_evaluation", "on_checkpoint", "on_end")


class StopTraining(Exception):
    """A callback raises it to end training: the run saves a checkpoint, evaluates, and returns its result."""


class Callback:
    """The events of a training run. Subclass it and override those that you need.

    All processes of a run call every event, in the same order; print on one of them only. An exception ends the run,
    except `StopTraining`, which ends it after a checkpoint. With several processes, all of them must raise it at the
    same event.
    """

    def on_start(self, run: "RunInfo") -> None:
        """Before the first step of this run, when the step is compiled."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """After each optimizer step, in order, with its loss, grad_norm, learning_rate and target_tokens.

        Metrics are fetched when they are logged and at least every 8 steps, so the call may be late by that many steps.
        """

    def on_log(self, row: dict[str, float]) -> None:
        """After a row of metrics.jsonl with the loss is written."""

    def on_evaluation(self, step: int, evaluation: Any) -> None:
        """After an evaluation of the parameters of `step` on held-out sequences."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint was copied from the devices; it is written to `path` in the background."""

    def on_end(self, result: Any) -> None:
        """At the end of the run, also of one that a signal or `StopTraining` stopped, with what `run` returns."""


class RunInfo:
    """What `Callback.on_start` receives: the config, the mesh, the workdir, and the step that training starts from."""

    def __init__(self, config, mesh, workdir: Path, first_step: int):
        self.config, self.mesh, self.workdir, self.first_step = config, mesh, workdir, first_step


class Callbacks:
    """Calls the events of several callbacks, and remembers whether one of them raised `StopTraining`."""

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = tuple(callbacks)
        self.stop_requested = False
        for callback in self._callbacks:
            if not any(callable(getattr(callback, event, None)) for event in EVENTS):
                raise UserError(
                    f"invalid callback {callback!r}: expected an object with a method"
                    f" {', '.join(EVENTS[:-1])} or {EVENTS[-1]}, such as a subclass of jaxlc.train.Callback"
                )

    def __call__(self, event: str, *arguments) -> None:
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            try:
                method(*arguments)
            except StopTraining:
                self.stop_requested = True
