"""SIGTERM, by which schedulers ask a run to end: it saves, then exits with the status that says so."""

import signal
import threading

import jax
from jax.experimental import multihost_utils

SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM


class PreemptionGuard:
    """Whether somebody asked the run to end. With several processes they agree on the step at which it ends."""

    def __init__(self):
        self._arrived = False
        # jax.distributed catches SIGTERM itself; in threads other than the main one signals cannot be caught.
        self._catches = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "PreemptionGuard":
        if self._catches:
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._catches:
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, _signal, _frame) -> None:
        self._arrived = True

    def arrived(self, step: int) -> bool:
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._arrived
