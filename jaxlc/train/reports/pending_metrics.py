"""Metrics of steps that are still in flight, and the time per step."""

import time

import jax

from jaxlc.runtime import watchdog
from jaxlc.step.step_function import StepMetrics


class PendingMetrics:
    """The metrics of the steps that were not fetched, in order, and a clock over the steps since it was started.

    The caller restarts the clock after evaluations and checkpoints, so that their time does not count.

    Attributes:
      last: metrics of the newest fetched step, numpy; None before the first fetch.
      last_step: the newest fetched step.
    """

    def __init__(self, step: int):
        """
        Args:
          step: the step after which the clock starts.
        """
        self.last: StepMetrics | None = None
        self.last_step = step
        self._pending: list[tuple[int, StepMetrics]] = []
        self.restart_clock(step)

    @property
    def num_steps(self) -> int:
        """Number of steps that were added and not fetched."""
        return len(self._pending)

    def add(self, step: int, metrics: StepMetrics) -> None:
        self._pending.append((step, metrics))

    def fetch(self, until: int) -> list[tuple[int, StepMetrics]]:
        """Waits for the steps up to `until` and returns (step, numpy metrics) of each that was not fetched."""
        with watchdog.fetching(until):
            fetched = [(step, jax.device_get(metrics)) for step, metrics in self._pending if step <= until]
        self._pending = self._pending[len(fetched) :]
        self.last_step, self.last = fetched[-1]
        if self.last.attention_pairs is not None:
            self._attention_pairs += sum(float(metrics.attention_pairs) for _, metrics in fetched)
        return fetched

    def restart_clock(self, step: int) -> None:
        """Starts the clock after `step`."""
        self._first_step, self._start_seconds = step, time.perf_counter()
        self._attention_pairs = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Mean time of the fetched steps since the clock was started."""
        return (time.perf_counter() - self._start_seconds) / (self.last_step - self._first_step)

    @property
    def attention_pairs_per_step(self) -> float:
        """Mean of the same steps; 0 without a document mask."""
        return self._attention_pairs / (self.last_step - self._first_step)
