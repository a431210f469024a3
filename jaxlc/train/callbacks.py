"""What a run does between its steps: actions with a period, callbacks of the user, and stopping on
a signal.

Actions get the position of the run and may add to it. The signals are SIGTERM, which schedulers
send before they kill a job, SIGHUP of a terminal that is closed, and SIGINT (Ctrl-C). SIGUSR1 and SIGUSR2,
which `sbatch --signal` may name, count as SIGTERM.
"""

import contextlib
import enum
import inspect
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlc import interrupts
from jaxlc.config import Config
from jaxlc.core import UserError, suggestion
from jaxlc.runtime import watchdog
from jaxlc.step.state import TrainState
from jaxlc.train.evaluation import Evaluation


class TrainingStopped(RuntimeError):
    """A loss or gradient was not finite, or a gate at the end of a stage stopped the run. The
    message names the checkpoint."""


class Stop(enum.Enum):
    """Why a run stops after a step; the value is its exit status, which is 128 + the number of a
    signal.
    """

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
    num_tokens: int = 0  # of these steps, over all devices, padding included
    evaluation: Evaluation | None = None  # None: the parameters were not evaluated
    rows: Sequence[dict[str, Any]] = ()  # of metrics.jsonl, which may not have them yet
    loads: Sequence[dict[str, Any]] = ()  # the same of expert_loads.jsonl
    reference: dict[str, str] = field(default_factory=dict)  # see `stage_setup.Reference`


class Action(NamedTuple):
    """Something that a run does every `every` steps, and after its last step."""

    every: int  # 0: after the last step only
    run: Callable[[Position], Position]
    at_start: bool = False  # also before step 1
    at_signal: bool = False  # also when a signal stops the run
    # also before the first step after a resume, and so not when a signal stops the run
    at_resume: bool = False

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


_num_calls = itertools.count(1)  # JAX's sync points must increase in a process
_AGAIN = {signal.SIGINT: "press Ctrl-C again to stop now without saving"}
_NAMES = {signal.SIGINT: "\nCtrl-C"}  # below the ^C of a terminal
_AS_SIGTERM = (signal.SIGUSR1, signal.SIGUSR2)  # unless the program handles them itself


class PreemptionGuard:
    """While it is entered, the first signal asks for a stop, and a second one raises
    KeyboardInterrupt.

    With several processes, a signal to any of them stops all of them after the same step: JAX's
    preemption service catches SIGTERM, and the others are passed on as SIGTERM. Signals that are
    ignored, as SIGHUP after nohup, still are. Outside the main thread signals cannot be caught;
    with one process `stop` is then always None.
    """

    def __init__(self):
        self._on_signal: Callable[[], None] = lambda: None
        self._signal: signal.Signals | None = None
        self._seconds = 0.0  # of the first signal
        self._stop: Stop | None = None
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, object] = {}

    def calling(self, on_signal: Callable[[], None]) -> "PreemptionGuard":
        """The same guard, which calls `on_signal` in the main thread when this process catches a
        signal.
        """
        self._on_signal = on_signal
        return self

    def __enter__(self) -> "PreemptionGuard":
        if self._is_main_thread:
            caught = [
                signal.SIGINT,
                signal.SIGHUP,
                *([signal.SIGTERM] if jax.process_count() == 1 else []),
            ]
            caught = [number for number in caught if signal.getsignal(number) != signal.SIG_IGN]
            caught += [x for x in _AS_SIGTERM if signal.getsignal(x) == signal.SIG_DFL]
            self._previous_handlers = {
                number: signal.signal(number, self._handle) for number in caught
            }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        if self._signal is not None:
            is_pressed_twice = self._signal == number == signal.SIGINT
            if is_pressed_twice or not interrupts.is_repeat(self._seconds):
                interrupts.interrupt(number)
        else:
            self._seconds = time.monotonic()
            with contextlib.suppress(OSError):
                # not print: the signal may have interrupted one
                os.write(2, _message(signal.Signals(number)))
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)
        self._signal = signal.SIGTERM if number in _AS_SIGTERM else signal.Signals(number)
        # otherwise the others would go on: all stop at the same call of `stop`
        if jax.process_count() == 1:
            self._on_signal()

    def stop(self) -> Stop | None:
        """The signal that stops the run now, if there was one. Every process must make the same
        calls.
        """
        if jax.process_count() > 1:
            # A sync point is a call, not a step: a run that waits for rollouts makes several calls
            # in a step.
            is_requested = self._stop is not None or multihost_utils.reached_preemption_sync_point(
                next(_num_calls)
            )
        else:
            is_requested = self._signal is not None
        if is_requested:
            self._stop = Stop(128 + (self._signal or signal.SIGTERM))
        return self._stop


def _message(number: signal.Signals) -> bytes:
    again = _AGAIN.get(number, "a second signal stops now without saving")
    return f"{_NAMES.get(number, number.name)}: saving a checkpoint after this step; {again}\n".encode()


EVENTS = ("on_start", "on_step", "on_log", "on_evaluation", "on_checkpoint", "on_end")


class StopTraining(Exception):
    """Raised by a callback to end training: the run saves a checkpoint, evaluates, and returns its
    result.
    """


class Callback:
    """Methods that a training run calls at its events. Override the ones that you need.

    All processes of a run call every event, in the same order; print on one of them only. An
    exception ends the run, except `StopTraining`, which ends it after a checkpoint. With several
    processes, all of them must raise it at the same event.
    """

    def on_start(self, run: "RunInfo") -> None:
        """Called before the first step of this run and of each later stage, after its step is
        compiled.
        """

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Called for each optimizer step, in order, with its loss, grad_norm, learning_rate and
        target_tokens.

        Metrics are fetched when they are logged, and at least every 8 steps, so the call may be up
        to 8 steps late. With a callback, the metrics of a logged step are fetched before the next
        step is dispatched, during which devices are idle; train.log_every_steps makes that rarer.
        """

    def on_log(self, row: dict[str, float]) -> None:
        """Called after a row of metrics.jsonl with the loss is written; `row` is that row."""

    def on_evaluation(self, step: int, evaluation: Any) -> None:
        """Called after an evaluation of the parameters of `step` on held-out sequences; see
        `Result.evaluation`.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called after a checkpoint is copied from the devices, which is before the other events of
        its step. It is written to `path` in the background."""

    def on_end(self, result: Any) -> None:
        """Called at the end of the run, also after a signal or `StopTraining`; `run` returns
        `result`.
        """


@dataclass(frozen=True)
class RunInfo:
    """The argument of `Callback.on_start`."""

    config: Config  # of the run, or of the stage that starts
    mesh: Mesh
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
    events = [
        name
        for name in dir(callback)
        if name.startswith("on_") and callable(getattr(callback, name))
    ]
    if not events:
        raise UserError(
            f"invalid callback {callback!r}: expected an object with some of the methods {known}"
        )
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
