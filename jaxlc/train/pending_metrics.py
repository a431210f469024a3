"""Metrics of steps that are still in flight, and the time per step."""

import time

import jax

from jaxlc.train.step import StepMetrics


class PendingMetrics:
    """The metrics of the steps since the last fetch, in order, and a clock over the steps since it was started.

    The caller restarts the clock after evaluations and checkpoints, so that their time does not count.
    """

    def __init__(self, step: int):
        """
        Args:
          step: the step after which the clock starts.
        """
        self.last: StepMetrics | None = None  # of the newest fetched step, numpy
        self._pending: list[tuple[int, StepMetrics]] = []
        self.restart_clock(step)

    @property
    def num_steps(self) -> int:
        """Number of steps that were added and not fetched."""
        return len(self._pending)

    def add(self, step: int, metrics: StepMetrics) -> None:
        self._pending.append((step, metrics))

    def fetch(self) -> list[tuple[int, StepMetrics]]:
        """Waits for the steps in flight and returns (step, numpy metrics) of each."""
        fetched = [(step, jax.device_get(metrics)) for step, metrics in self._pending]
        self._pending, (self._last_step, self.last) = [], fetched[-1]
        return fetched

    def restart_clock(self, step: int) -> None:
        """Starts the clock after `step`."""
        self._first_step, self._start_seconds = step, time.perf_counter()

    @property
    def seconds_per_step(self) -> float:
        """Mean time of the fetched steps since the clock was started."""
        return (time.perf_counter() - self._start_seconds) / (self._last_step - self._first_step)
