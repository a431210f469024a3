"""Reports on training steps: rows of metrics, progress, callbacks, and an error for a loss that is
not finite.
"""

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlc.config import Config
from jaxlc.generation.generate_text import SAMPLES
from jaxlc.generation.rollouts import adapters_directory
from jaxlc.posttrain.rollouts import DECODED, EXPORTED, RolloutSequences, write_rollouts
from jaxlc.step.loss import ExpertMetrics
from jaxlc.step.precision import is_retried
from jaxlc.step.step import StepMetrics
from jaxlc.train.callbacks import Position, TrainingStopped, is_period
from jaxlc.train.reports.metrics import PendingMetrics
from jaxlc.train.reports.run_report import is_recorded, loads_row, write_loads
from jaxlc.train.stage import StageRun
from jaxlc.train.stage_setup import PreparedStage

# passed to `Callback.on_step`
_STEP_METRICS = ("loss", "grad_norm", "learning_rate", "target_tokens")
# Simulated CPU devices of JAX 0.10 and 0.11 hang with many steps in flight, so metrics are also
# fetched between logs.
_MAX_STEPS_IN_FLIGHT = 8


class StepReports:
    """Fetches and checks the metrics of the steps that the loop adds to `pending`, then writes its
    reports on them.

    Between both, the loop saves the state: a report may fail, and callbacks are code of the user.

    Attributes:
      rows: of metrics.jsonl, which `write` has not written yet.
      loads: the same of expert_loads.jsonl, in process 0.
    """

    def __init__(self, run: StageRun, step: int):
        """
        Args:
          step: the step after which the stage starts or resumes.
        """
        self._run = run
        self._config = run.stage.config
        self.pending = PendingMetrics(step)
        self._logged_step = step
        self.rows: list[dict[str, float]] = []
        self.loads: list[dict[str, Any]] = []
        self._reports: list[Callable[[], None]] = []  # in their order

    def fetch(self, until: int, *, waits: bool = False) -> None:
        """Prepares the reports on the steps up to `until` that are due, and checks the metrics of the steps before
        them.

        Args:
          waits: fetches the metrics of all steps up to `until`. That also happens if too many are in flight.
        Raises:
          TrainingStopped: a loss or gradient is not finite, unless loss scaling retries the step or train.nonfinite is
            "skip".
        """
        for step in range(self.pending.last_step + 1, until + 1):
            logs = is_period(step, self._config.train.log_every_steps)
            if logs or (
                step == until and (waits or self.pending.num_steps >= _MAX_STEPS_IN_FLIGHT)
            ):
                self._check_finite(self.pending.fetch(step))
                self._add(self._run.progress.first_step_ended, self.pending.first_end_seconds)
            if logs:
                self._log(step)
            if self._config.rollouts.source:
                self._log_rollouts(step)

    def fetch_last(self, step: int) -> None:
        """`fetch` for the last step of the run, which is always logged."""
        self.fetch(step, waits=True)
        if self._logged_step < step:
            self._log(step)

    def added_to(self, position: Position) -> Position:
        """`position` with the rows that are not written yet, for its checkpoint."""
        return dataclasses.replace(position, rows=self.rows, loads=self.loads)

    def write(self) -> None:
        """Writes the reports on the steps that were fetched, and calls the callbacks."""
        reports = self._reports
        self._reports = []
        self.rows = []
        self.loads = []
        for report in reports:
            report()

    def _log(self, step: int) -> None:
        """Prepares a metrics row: the metrics of `step` and the mean time of the steps since the
        last row.
        """
        metrics = self.pending.last
        seconds = self.pending.seconds_per_step
        row = dict(
            step=step,
            loss=float(metrics.loss),
            tokens_per_second=self._config.tokens_per_step / seconds,
            step_seconds=seconds,
            grad_norm=float(metrics.grad_norm),
        )
        if metrics.attention_pairs is not None:
            row |= self._document_rates(seconds)
        if not math.isnan(metrics.learning_rate):  # a custom optimizer may not store it
            row |= dict(learning_rate=float(metrics.learning_rate))
        if metrics.policy is not None:
            means = {
                name: float(x)
                for name, x in metrics.policy._asdict().items()
                if x is not None and name != "loss"
            }
            row |= {name: x for name, x in means.items() if not math.isnan(x)}  # NaN: it is unknown
        if metrics.loss_scale is not None:
            row |= dict(
                loss_scale=float(metrics.loss_scale), skipped_steps=int(metrics.skipped_steps)
            )
        if metrics.experts is not None:
            row |= _balance(metrics.experts)
            every = self._config.train.log_every_steps
            end_step = self._run.stage.end_step
            if jax.process_index() == 0 and is_recorded(step, every, end_step):
                loads = loads_row(step, metrics.experts.load_LE)
                self.loads.append(loads)
                self._add(write_loads, self._run.workdir, loads)
        row |= self._run.timings.take()
        self.rows.append(row)
        for report in (self._run.metrics.write, self._run.progress.update):
            self._reports.append(functools.partial(report, **row))
        self._add(self._run.callbacks, "on_log", row)
        self._logged_step = step
        self.pending.start_row()

    def _log_rollouts(self, step: int) -> None:
        """Prepares a row with means over the rollouts of a step, and some of another program as texts."""
        run = self._run
        rollouts = run.stage.source.train
        means = rollouts.at_step(step).rewards
        row = dict(step=step) | {f"rollouts/{name}": value for name, value in means.items()}
        self.rows.append(row)
        self._add(functools.partial(run.metrics.write, **row))
        if run.stage.rollout_maker is None and jax.process_index() == 0:
            self._add(_write_decoded, rollouts, run.workdir, step)

    def _add(self, report: Callable[..., None], *arguments: Any) -> None:
        self._reports.append(functools.partial(report, *arguments))

    def _document_rates(self, step_seconds: float) -> dict[str, float]:
        """Model FLOP/s with the query-key pairs of the documents, and as a fraction of the peak if
        that is known.
        """
        pairs = self.pending.attention_pairs_per_step
        peak = self._run.progress.peak_flops_per_second
        rate = self._config.step_flops(pairs).total / step_seconds
        rates = dict(flops_per_second_documents=rate)
        return rates | dict(mfu_documents=rate / peak) if peak else rates

    def _check_finite(self, fetched: list[tuple[int, StepMetrics]]) -> None:
        """Prepares the calls of `on_step`, and reports on steps whose loss or gradient is not
        finite, whose update was skipped."""
        for step, metrics in fetched:
            self._add(
                self._run.callbacks,
                "on_step",
                step,
                {name: float(getattr(metrics, name)) for name in _STEP_METRICS},
            )
            if metrics.is_finite:
                continue
            if is_retried(metrics.loss_scale, self._config.precision):
                scale = f"{metrics.loss_scale:g}"
                self._add(
                    self._run.progress.log,
                    f"step {step} overflows at loss scale {scale}: its update is skipped",
                )
                continue
            problem = f"step {step} has loss {metrics.loss} and gradient norm {metrics.grad_norm}"
            if self._config.train.nonfinite == "skip":
                self._add(self._run.progress.log, f"{problem}: its update is skipped")
                continue
            self._run.checkpoints.wait()
            last_good = max(self._run.checkpoints.steps(), default=None)
            where = (
                "there is no checkpoint yet"
                if last_good is None
                else f"the last good checkpoint is step {last_good}"
            )
            raise TrainingStopped(
                f"{problem}, and its update was skipped; {where} in {self._run.workdir}; lower optimizer.learning_rate,"
                " or continue past such steps with --config.train.nonfinite=skip"
            )


def write_lost_files(stage: PreparedStage, workdir: Path, position: Position) -> None:
    """Writes what reports on the last steps before a checkpoint write besides metrics.jsonl: the run
    may have been killed before them.
    """
    for row in position.loads:
        write_loads(workdir, row)
    if stage.config.rollouts.source == "files":
        for step in {row["step"] for row in position.rows}:
            if stage.source.train.path(step).is_file():  # another program may have removed it
                _write_decoded(stage.source.train, workdir, step)


def remove_later_outputs(config: Config, workdir: Path, step: int) -> None:
    """Removes the samples and exports of steps after a checkpoint: with other settings or on another mesh, these steps
    make others.
    """
    adapters = adapters_directory(config, workdir)
    for directory in (workdir / SAMPLES, workdir / EXPORTED, adapters):
        for path in directory.glob("[0-9]*"):
            name = path.name.removesuffix(".jsonl")
            if name.isdigit() and int(name) > step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_decoded(rollouts: RolloutSequences, workdir: Path, step: int) -> None:
    write_rollouts(rollouts.decoded(step), workdir / DECODED / f"{step}.jsonl")


def _balance(experts: ExpertMetrics) -> dict[str, float]:
    """The losses of the router, and of each layer with experts the load of the most used expert as
    a multiple of the mean, the entropy of the assignments as a fraction of that of equal loads, and
    the number of unused experts."""
    load_LE = np.asarray(experts.load_LE, np.float64)
    num_experts = load_LE.shape[1]
    fraction_LE = load_LE / num_experts
    entropy_L = -(fraction_LE * np.log(np.where(fraction_LE > 0, fraction_LE, 1))).sum(1)
    row = dict(balance_loss=float(experts.balance_loss), router_z_loss=float(experts.router_z_loss))
    for layer, load_E in enumerate(load_LE):
        row[f"expert_load_{layer}"] = float(load_E.max())
        row[f"expert_entropy_{layer}"] = float(entropy_L[layer]) / math.log(max(2, num_experts))
        row[f"unused_experts_{layer}"] = float((load_E == 0).sum())
    return row
