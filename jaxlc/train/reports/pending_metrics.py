"""Metrics of steps that are still in flight, and the time of each step.

Devices process steps in order. The time of a step is the time from the end of the step before it, or from its own
dispatch if that is later, to its end. So it includes nothing that the host does while the devices are idle between two
steps: evaluations, checkpoints, callbacks, the start and the end of a trace, and waiting for data. They have their own
times (phases of `jaxlc.runtime.watchdog`).

A thread waits for each step and records its end. The thread of the loop cannot do so: it may fetch the metrics of a
step long after its end, since the dispatch of the next step, a report or a callback may take any time.
"""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax

from jaxlc.runtime import watchdog
from jaxlc.step.step_function import StepMetrics


class _Step(NamedTuple):
    number: int
    metrics: StepMetrics
    dispatch_seconds: float  # when the host began to dispatch it
    end_seconds: Future[float]


class PendingMetrics:
    """The metrics of the steps that were not fetched, in order, and the times of the steps since the last row.

    Attributes:
      last: metrics of the newest fetched step, numpy; None before the first fetch.
      last_step: the newest fetched step.
      first_end_seconds: when the first step ended, as `now`; NaN before the first fetch.
    """

    def __init__(self, step: int):
        """
        Args:
          step: the step after which the stage starts or resumes.
        """
        self.last: StepMetrics | None = None
        self.last_step = step
        self.first_end_seconds = math.nan
        self._pending: list[_Step] = []
        self._dispatch_seconds = self._last_end_seconds = -math.inf
        # No daemon thread: if Python ends while one waits in JAX, the process aborts.
        self._clock = ThreadPoolExecutor(1, "jaxlc-step-clock")
        self.start_row()

    @property
    def num_steps(self) -> int:
        """Number of steps that were added and not fetched."""
        return len(self._pending)

    def dispatching(self) -> None:
        """The host begins to dispatch the next step."""
        self._dispatch_seconds = now()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """The step was dispatched; `metrics` may still be computed."""
        self._pending.append(_Step(step, metrics, self._dispatch_seconds, self._clock.submit(end_of, metrics)))

    def fetch(self, until: int) -> list[tuple[int, StepMetrics]]:
        """Waits for the steps up to `until` and returns (step, numpy metrics) of each that was not fetched."""
        steps = [step for step in self._pending if step.number <= until]
        with watchdog.fetching(until) as measured:
            fetched = [(step.number, jax.device_get(step.metrics)) for step in steps]
            seconds = [self._seconds_of(step) for step in steps]
            measured.extend(seconds)
        self._pending = self._pending[len(steps) :]
        self.last_step, self.last = fetched[-1]
        self._num_steps += len(steps)
        self._seconds += sum(seconds)
        if self.last.attention_pairs is not None:
            self._attention_pairs += sum(float(metrics.attention_pairs) for _, metrics in fetched)
        return fetched

    def start_row(self) -> None:
        """The means below are over the steps that are fetched from now on."""
        self._num_steps, self._seconds, self._attention_pairs = 0, 0.0, 0.0

    @property
    def seconds_per_step(self) -> float:
        """Mean time of the fetched steps since the last row."""
        return self._seconds / self._num_steps

    @property
    def attention_pairs_per_step(self) -> float:
        """Mean of the same steps; 0 without a document mask."""
        return self._attention_pairs / self._num_steps

    def close(self) -> None:
        """Ends the thread, after the steps that were added."""
        self._clock.shutdown(wait=False)

    def _seconds_of(self, step: _Step) -> float:
        end_seconds = step.end_seconds.result()
        if math.isnan(self.first_end_seconds):
            self.first_end_seconds = end_seconds
        start_seconds = max(step.dispatch_seconds, self._last_end_seconds)
        self._last_end_seconds = end_seconds
        return end_seconds - start_seconds


def now() -> float:
    """Seconds of the clock of steps."""
    return time.perf_counter()


def end_of(metrics: StepMetrics) -> float:
    """Waits for the step that computes `metrics`; returns the time of its end."""
    jax.block_until_ready(metrics)
    return now()
