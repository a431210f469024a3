"""Stopping on a signal: SIGTERM, which schedulers send before they kill a job, SIGHUP of a terminal that is closed, and
SIGINT (Ctrl-C)."""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from jaxlc.core import interrupts
from jaxlc.train.actions import Stop

_num_calls = itertools.count(1)  # JAX's sync points must increase in a process
_AGAIN = {signal.SIGINT: "press Ctrl-C again to stop now without saving"}
_NAMES = {signal.SIGINT: "\nCtrl-C"}  # below the ^C of a terminal


class PreemptionGuard:
    """While it is entered, the first signal asks for a stop, and a second one raises KeyboardInterrupt.

    With several processes, a signal to any of them stops all of them after the same step: JAX's preemption service
    catches SIGTERM, and the others are passed on as SIGTERM. Signals that are ignored, as SIGHUP after nohup, still
    are. Outside the main thread signals cannot be caught; with one process `stop` is then always None.
    """

    def __init__(self):
        self._on_signal: Callable[[], None] = lambda: None
        self._signal: signal.Signals | None = None
        self._seconds = 0.0  # of the first signal
        self._stop: Stop | None = None
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, object] = {}

    def calling(self, on_signal: Callable[[], None]) -> "PreemptionGuard":
        """The same guard, which calls `on_signal` in the main thread when this process catches a signal."""
        self._on_signal = on_signal
        return self

    def __enter__(self) -> "PreemptionGuard":
        if self._is_main_thread:
            caught = [signal.SIGINT, signal.SIGHUP, *([signal.SIGTERM] if jax.process_count() == 1 else [])]
            caught = [number for number in caught if signal.getsignal(number) != signal.SIG_IGN]
            self._previous_handlers = {number: signal.signal(number, self._handle) for number in caught}
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
                os.write(2, _message(signal.Signals(number)))  # not print: the signal may have interrupted one
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)
        self._signal = signal.Signals(number)
        if jax.process_count() == 1:  # otherwise the others would go on: all stop at the same call of `stop`
            self._on_signal()

    def stop(self) -> Stop | None:
        """The signal that stops the run now, if there was one. Every process must make the same calls."""
        if jax.process_count() > 1:
            # A sync point is a call, not a step: a run that waits for rollouts makes several calls in a step.
            is_requested = self._stop is not None or multihost_utils.reached_preemption_sync_point(next(_num_calls))
        else:
            is_requested = self._signal is not None
        if is_requested:
            self._stop = Stop(128 + (self._signal or signal.SIGTERM))
        return self._stop


def _message(number: signal.Signals) -> bytes:
    again = _AGAIN.get(number, "a second signal stops now without saving")
    return f"{_NAMES.get(number, number.name)}: saving a checkpoint after this step; {again}\n".encode()
