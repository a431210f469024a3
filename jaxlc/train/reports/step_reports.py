"""Reports on training steps: rows of metrics, progress, callbacks, and an error for a loss that is not finite."""

import math
from dataclasses import dataclass
from pathlib import Path

from jaxlc.checkpoints.checkpoint import Checkpoints
from jaxlc.config import Config
from jaxlc.core.flops import step_flops
from jaxlc.step.mixed_precision import is_retried
from jaxlc.step.step_function import StepMetrics
from jaxlc.train.callbacks import Callbacks
from jaxlc.train.reports.metrics import MetricsLog
from jaxlc.train.reports.pending_metrics import PendingMetrics
from jaxlc.train.reports.progress import Progress

_STEP_METRICS = ("loss", "grad_norm", "learning_rate", "target_tokens")  # passed to `Callback.on_step`
# Simulated CPU devices of JAX 0.10 and 0.11 hang with many steps in flight, so metrics are also fetched between logs.
_MAX_STEPS_IN_FLIGHT = 8


class TrainingStopped(RuntimeError):
    """A loss or gradient was not finite, or a gate at the end of a stage stopped the run. The message names the
    checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StepReports:
    """Fetches, checks and reports the metrics of the steps that the loop adds to `pending`."""

    config: Config
    workdir: Path
    progress: Progress
    metrics_log: MetricsLog
    callbacks: Callbacks
    checkpoints: Checkpoints
    pending: PendingMetrics

    def report(self, step: int, *, is_last: bool, fetches: bool = False) -> None:
        """Fetches and checks the metrics up to `step`: if it is logged, if `fetches`, or with too many in flight.

        Args:
          is_last: whether the newest step is the last one of the run, which is always logged.
        Raises:
          TrainingStopped: a loss or gradient is not finite, unless loss scaling retries the step or train.nonfinite is
            "skip".
        """
        every, pending = self.config.train.log_every_steps, self.pending
        logs = (every > 0 and step % every == 0) or (is_last and step == pending.newest_step)
        if step > pending.last_step and (logs or fetches or pending.num_steps >= _MAX_STEPS_IN_FLIGHT):
            self._check_finite(pending.fetch(step))
        if logs and pending.logged_step < step <= pending.last_step:
            self._log(step)
            pending.logged_step = step
            pending.restart_clock(step)

    def _log(self, step: int) -> None:
        """Writes one metrics row: the metrics of `step` and the mean time of the steps since the clock was started."""
        metrics, seconds = self.pending.last, self.pending.seconds_per_step
        row = dict(
            step=step,
            loss=float(metrics.loss),
            tokens_per_second=self.config.tokens_per_step / seconds,
            step_seconds=seconds,
            grad_norm=float(metrics.grad_norm),
        )
        if metrics.attention_pairs is not None:
            row |= self._document_rates(seconds)
        if not math.isnan(metrics.learning_rate):  # a custom optimizer may not store it
            row |= dict(learning_rate=float(metrics.learning_rate))
        if metrics.loss_scale is not None:
            row |= dict(loss_scale=float(metrics.loss_scale), skipped_steps=int(metrics.skipped_steps))
        self.metrics_log.write(**row)
        self.progress.update(**row)
        self.callbacks("on_log", row)

    def _document_rates(self, step_seconds: float) -> dict[str, float]:
        """Model FLOP/s with the query-key pairs of the documents, and as a fraction of the peak if that is known."""
        pairs, peak = self.pending.attention_pairs_per_step, self.progress.peak_flops_per_second
        rate = step_flops(self.config.model, num_tokens=self.config.tokens_per_step, num_pairs=pairs) / step_seconds
        rates = dict(flops_per_second_documents=rate)
        return rates | dict(mfu_documents=rate / peak) if peak else rates

    def _check_finite(self, fetched: list[tuple[int, StepMetrics]]) -> None:
        """Calls `on_step`; reports steps whose loss or gradient is not finite, whose update the step has skipped."""
        for step, metrics in fetched:
            self.callbacks("on_step", step, {name: float(getattr(metrics, name)) for name in _STEP_METRICS})
            if metrics.is_finite:
                continue
            if is_retried(metrics.loss_scale, self.config.precision):
                scale = f"{metrics.loss_scale:g}"
                self.progress.log(f"step {step} overflows at loss scale {scale}: its update is skipped")
                continue
            problem = f"step {step} has loss {metrics.loss} and gradient norm {metrics.grad_norm}"
            if self.config.train.nonfinite == "skip":
                self.progress.log(f"{problem}: its update is skipped")
                continue
            self.checkpoints.close()
            last_good = max(self.checkpoints.steps(), default=None)
            where = (
                "there is no checkpoint yet" if last_good is None else f"the last good checkpoint is step {last_good}"
            )
            raise TrainingStopped(
                f"{problem}, and its update was skipped; {where} in {self.workdir}; lower optimizer.learning_rate,"
                " or continue past such steps with --config.train.nonfinite=skip"
            )
