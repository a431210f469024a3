"""The trainer, read top to bottom: config, mesh, step, corpus, state, loop."""

import time
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxlc import runtime
from jaxlc.config import Config, check_num_devices, load, to_dict
from jaxlc.core import hardware
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.core.flops import training_flops
from jaxlc.data import Corpus, batches, open_corpus
from jaxlc.sharding.layout import zigzag_order
from jaxlc.sharding.mesh import make_mesh
from jaxlc.sharding.table import sharding_table
from jaxlc.train.batch import BATCH_SPEC, Batch
from jaxlc.train.checkpoint import CHECKPOINTS_DIRECTORY, Checkpoints, prepare_workdir
from jaxlc.train.evaluation import Evaluation, Evaluator
from jaxlc.train.final_report import write_report
from jaxlc.train.metrics import MetricsLog
from jaxlc.train.mixed_precision import is_retried
from jaxlc.train.preemption import SIGTERM_EXIT_STATUS, PreemptionGuard
from jaxlc.train.progress import Progress
from jaxlc.train.state import TrainState, memory_lines
from jaxlc.train.step import StepMetrics, TrainStep, build_step
from jaxlc.train.verify_compiled import verify_compiled_step

# Simulated CPU devices of jax 0.10 and 0.11 hang with many steps in flight, so some are fetched between log rows too.
_MAX_STEPS_IN_FLIGHT = 8


class TrainingStopped(RuntimeError):
    """A loss or gradient was not finite; the text names the step and the last good checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Result:
    step: int  # optimizer steps done, earlier runs in the same workdir included
    evaluation: Evaluation | None  # on the held-out rows, at the end; None where the run was told to stop before
    exit_status: int  # 0, or 143 after SIGTERM


def run(config: ConfigDict | Config, workdir: str | Path, *, config_path: str = "") -> Result:
    """Trains `config` in `workdir`; goes on from the newest checkpoint there, if there is one.

    Args:
      config_path: where the config comes from, FILE[:variant], for advice.
    Raises:
      UserError: whatever the user can mend; before anything is compiled.
      TrainingStopped: a loss or gradient that is not finite, unless train.nonfinite is "skip".
    """
    config = load(config)
    runtime.start(config.runtime)
    check_num_devices(config, jax.device_count(), "the devices here are", config_path)
    flops = training_flops(
        config.model, rows=config.train.global_batch_size, seq_len=config.data.seq_len, attention="causal"
    )
    device = hardware.find(jax.devices()[0].device_kind)
    with Progress(
        config.train.steps,
        flops_per_step=flops,
        peak_flops_per_second=device and device.bf16_flops_per_second * jax.device_count(),
        is_primary=jax.process_index() == 0,
    ) as progress:
        return _Training(config, prepare_workdir(workdir), progress).run()


class _Training:
    """One run: everything it needs, made in order, and the loop over steps."""

    def __init__(self, config: Config, workdir: Path, progress: Progress):
        self.config, self.workdir, self.progress = config, workdir, progress
        self.is_primary = jax.process_index() == 0
        self.mesh = make_mesh(config.mesh)
        self.step: TrainStep = build_step(config, self.mesh)
        self.order = zigzag_order(config.data.seq_len, self.mesh.shape[CONTEXT])
        progress.say(_description(config, self.step))
        self.corpus = _open_corpus(config, progress)
        directory = workdir / CHECKPOINTS_DIRECTORY
        self.checkpoints = Checkpoints(directory, keep=config.train.keep_checkpoints, warn=progress.say)
        self.metrics = MetricsLog(workdir, is_primary=self.is_primary)
        self.evaluate = Evaluator(self.step, self.corpus.heldout, config.train.eval_sequences, self.order)
        self.sigterm = PreemptionGuard()
        self.state, self.next_row = self._first_state()
        self.done = int(self.state.step)
        self.evaluation: Evaluation | None = None

    def run(self) -> Result:
        if self.done < self.config.train.steps:
            with self.sigterm:
                self._train()
        else:
            self.progress.say(
                f"{self.workdir} is already trained to step {self.done}; train on with"
                f" --config.train.steps={2 * self.done}, or start anew with another --workdir"
            )
        stopped_early = self.done < self.config.train.steps
        if not stopped_early:
            self.evaluation = self.evaluation or self.evaluate(self.state.params)
            if self.is_primary:
                self.progress.say(write_report(self.workdir, self.config, self.corpus, self.evaluation))
        self.checkpoints.close()
        self.metrics.close()
        return Result(
            step=self.done,
            evaluation=self.evaluation,
            exit_status=SIGTERM_EXIT_STATUS if stopped_early else 0,
        )

    def _train(self) -> None:
        config = self.config.train
        with self.progress.compiling("the training step"):
            run_step = self.step.compile()
        for line in verify_compiled_step(self.step, run_step):
            self.progress.say(line)
        stream = batches(
            self.corpus.train,
            first_sequence=self.next_row,
            global_batch_size=config.global_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            sequence_order=self.order,
            sharding=NamedSharding(self.mesh, BATCH_SPEC),
            prefetch_steps=self.config.data.prefetch_steps,
        )
        if self.done == 0 and config.eval_every_steps:
            self._evaluate()
        window = _PendingMetrics(self.done)
        for arrays in stream:
            self.state, metrics = run_step(self.state, Batch(**arrays))
            self.done, self.next_row = self.done + 1, self.next_row + config.global_batch_size
            window.add(self.done, metrics)
            is_last = self.done == config.steps
            is_told_to_stop = self.sigterm.arrived(self.done)
            evaluates = is_last or _is_due(self.done, config.eval_every_steps)
            saves = is_last or is_told_to_stop or _is_due(self.done, config.checkpoint_every_steps)
            logs = is_last or _is_due(self.done, config.log_every_steps)
            if logs or evaluates or saves or window.in_flight >= _MAX_STEPS_IN_FLIGHT:
                self._check_finite(window.fetch())
            if logs:
                self._log(window)
            if evaluates:
                self._evaluate()
            if saves:  # after the rows of this step, so that none is missing where a run goes on from here
                self._save()
            if evaluates or saves:
                window.restart(self.done)
            if is_last or is_told_to_stop:
                break
        stream.close()

    def _first_state(self) -> tuple[TrainState, int]:
        """The newest checkpoint and the row after it, or the state of step 0."""
        restored = self.checkpoints.restore_latest(self.step.abstract_state, model=to_dict(self.config)["model"])
        if restored is None:
            self.metrics.rewind(-1)
            return self.step.init(), 0
        state, meta = restored
        self.metrics.rewind(int(state.step))
        self.progress.say(f"resuming from step {int(state.step)} of {self.workdir}; another --workdir starts anew")
        if meta["corpus"] != self.corpus.fingerprint:
            self.progress.say(
                "the corpus, tokenizer, data.seq_len, data.eval_fraction or data.seed changed since that"
                " checkpoint: training goes on with other rows, from the same row number"
            )
        return state, meta["next_row"]

    def _save(self) -> None:
        meta = dict(
            step=self.done,
            next_row=self.next_row,
            corpus=self.corpus.fingerprint,
            config=to_dict(self.config),
        )
        self.checkpoints.save(self.done, self.state, meta)

    def _evaluate(self) -> None:
        with self.progress.working("evaluating"):
            self.evaluation = self.evaluate(self.state.params)
        self.metrics.write(step=self.done, eval_loss=self.evaluation.loss)

    def _log(self, window: "_PendingMetrics") -> None:
        metrics, seconds = window.last, window.seconds_per_step
        tokens = self.config.train.global_batch_size * self.config.data.seq_len
        row = dict(
            step=self.done,
            loss=float(metrics.loss),
            tokens_per_second=tokens / seconds,
            step_seconds=seconds,
            grad_norm=float(metrics.grad_norm),
            learning_rate=float(metrics.learning_rate),
        )
        if metrics.loss_scale is not None:
            row |= dict(loss_scale=float(metrics.loss_scale), skipped_steps=int(metrics.skipped_steps))
        self.metrics.write(**row)
        self.progress.update(**row)
        window.restart(self.done)

    def _check_finite(self, fetched: list[tuple[int, StepMetrics]]) -> None:
        for step, metrics in fetched:
            if metrics.is_finite:
                continue
            if is_retried(metrics.loss_scale, self.config.precision):
                self.progress.say(f"step {step} overflows at loss scale {metrics.loss_scale:g}: its update is left out")
                continue
            what = f"step {step} has loss {metrics.loss} and gradient norm {metrics.grad_norm}"
            if self.config.train.nonfinite == "skip":
                self.progress.say(f"{what}: its update is left out")
                continue
            self.checkpoints.close()
            good = max(self.checkpoints.steps(), default=None)
            where = "there is no checkpoint yet" if good is None else f"the last good checkpoint is step {good}"
            raise TrainingStopped(
                f"{what}, and its update was left out; {where} in {self.workdir}; lower optimizer.learning_rate,"
                " or go on past such steps with --config.train.nonfinite=skip"
            )


class _PendingMetrics:
    """The steps since the last metrics row: their metrics, fetched in order, and their time.

    Evaluations and the wait for a checkpoint are left out of it by `restart`.
    """

    def __init__(self, step: int):
        self.last: StepMetrics | None = None  # of the newest fetched step
        self._pending: list[tuple[int, StepMetrics]] = []
        self.restart(step)

    def restart(self, step: int) -> None:
        self._first_step, self._start_seconds = step, time.perf_counter()

    def add(self, step: int, metrics: StepMetrics) -> None:
        self._pending.append((step, metrics))

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def fetch(self) -> list[tuple[int, StepMetrics]]:
        """Waits for the steps in flight; numpy metrics of each."""
        fetched = [(step, jax.device_get(metrics)) for step, metrics in self._pending]
        self._pending, (self._last_step, self.last) = [], fetched[-1]
        return fetched

    @property
    def seconds_per_step(self) -> float:
        return (time.perf_counter() - self._start_seconds) / (self._last_step - self._first_step)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _open_corpus(config: Config, progress: Progress) -> Corpus:
    with progress.counting("reading the corpus") as count:
        corpus = open_corpus(config.data, progress=count)
    if corpus.tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer {config.data.tokenizer} has {corpus.tokenizer.vocab_size} tokens and the model"
            f" {config.model.vocab_size}; set --config.model.vocab_size={corpus.tokenizer.vocab_size}"
        )
    return corpus


def _description(config: Config, step: TrainStep) -> str:
    """What is printed at the start: the mesh, where the parameters lie, the kernel, the work of a step."""
    device = step.mesh.devices.flat[0]
    axes = " x ".join(f"{axis}={size}" for axis, size in step.mesh.shape.items())
    flops = training_flops(
        config.model, rows=config.train.global_batch_size, seq_len=config.data.seq_len, attention="causal"
    )
    return "\n".join(
        [
            f"mesh       {axes}: {step.mesh.size} x {device.device_kind}, {jax.process_count()} processes",
            f"attention  {config.attention.strategy}, tokens in zigzag order;"
            f" kernel {step.kernel.name} ({step.kernel.reason})",
            *_transport_lines(config, step),
            *memory_lines(config.memory, step.mesh),
            f"step       {config.train.global_batch_size} rows of {config.data.seq_len:,} tokens,"
            f" {flops / 1e12:.3g} TFLOP (model FLOPs, causal attention, all devices)",
            "",
            sharding_table(step.abstract_state.params, step.dims, step.mesh),
        ]
    )


def _transport_lines(config: Config, step: TrainStep) -> list[str]:
    if step.transport is not None:
        return [f"transport  {step.transport.name} ({step.transport.reason})"]
    if config.runtime.transport != "auto":
        return [f"transport  {config.runtime.transport} is without effect on simulated devices"]
    return []
