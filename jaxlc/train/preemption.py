"""Stopping on a signal: SIGTERM, which schedulers send before they kill a job, and SIGINT (Ctrl-C)."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from jaxlc.train.actions import Stop

_num_calls = itertools.count(1)  # JAX's sync points must increase in a process
_CTRL_C_MESSAGE = b"\nCtrl-C: saving a checkpoint after this step; press Ctrl-C again to stop now without saving\n"


class PreemptionGuard:
    """While it is entered, the first SIGTERM or SIGINT asks for a stop; a second SIGINT raises KeyboardInterrupt.

    With several processes, a signal to any of them stops all of them after the same step: JAX's preemption service
    catches SIGTERM, and SIGINT is passed on as SIGTERM. Outside the main thread signals cannot be caught; with one
    process `stop` is then always None.
    """

    def __init__(self, on_signal: Callable[[], None] = lambda: None):
        """on_signal: called in the main thread when this process catches a signal."""
        self._on_signal = on_signal
        self._signal: signal.Signals | None = None
        self._stop: Stop | None = None
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> "PreemptionGuard":
        if self._is_main_thread:
            caught = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
            self._previous_handlers = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        if number == signal.SIGINT:
            if self._signal == signal.SIGINT:
                raise KeyboardInterrupt
            with contextlib.suppress(OSError):
                os.write(2, _CTRL_C_MESSAGE)  # not print: the signal may have interrupted one
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
