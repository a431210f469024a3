"""The training run, top to bottom: config, devices, data, state, compilation, the loop over steps, the report."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxlc import runtime
from jaxlc.config import Config, check_evaluation, check_num_devices, load, to_dict
from jaxlc.core import hardware
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.data import Corpus, batches, open_corpus
from jaxlc.sharding.layout import zigzag_order
from jaxlc.sharding.mesh import make_mesh
from jaxlc.train.batch import BATCH_SPEC, Batch
from jaxlc.train.checkpoint import CHECKPOINTS_DIRECTORY, Checkpoints, prepare_workdir
from jaxlc.train.evaluation import Evaluation, Evaluator
from jaxlc.train.final_report import write_report
from jaxlc.train.metrics import MetricsLog, open_metrics
from jaxlc.train.mixed_precision import is_retried
from jaxlc.train.pending_metrics import PendingMetrics
from jaxlc.train.preemption import PreemptionGuard
from jaxlc.train.progress import Progress
from jaxlc.train.start_report import corpus_lines, resume_lines, sharding_lines, step_lines
from jaxlc.train.state import TrainState
from jaxlc.train.step import StepMetrics, TrainStep, build_step
from jaxlc.train.verify_compiled import verify_compiled_step

# Simulated CPU devices of JAX 0.10 and 0.11 hang with many steps in flight, so metrics are also fetched between logs.
_MAX_STEPS_IN_FLIGHT = 8


class TrainingStopped(RuntimeError):
    """A loss or gradient was not finite; the message names the step and the last good checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Result:
    step: int  # optimizer steps done, including those of earlier runs in the same workdir
    evaluation: Evaluation | None  # held-out loss after the last step; None if a signal stopped the run before it
    exit_status: int  # 0, or 128 + the number of the signal that stopped the run: SIGTERM 143, SIGINT (Ctrl-C) 130


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What set-up returns and the loop uses; none of it changes from step to step."""

    config: Config
    workdir: Path
    progress: Progress
    step: TrainStep
    corpus: Corpus
    sequence_order: np.ndarray
    evaluator: Evaluator
    checkpoints: Checkpoints
    metrics: MetricsLog


@dataclass(frozen=True, kw_only=True)
class _Position:
    """Where training is: what a checkpoint holds."""

    state: TrainState
    step: int  # optimizer steps done
    next_sequence: int  # index of the first training sequence that no step has used


def run(config: ConfigDict | Config, workdir: str | Path, *, config_path: str = "") -> Result:
    """Trains `config` in `workdir`; resumes from the latest valid checkpoint there, if there is one.

    The first SIGTERM or Ctrl-C during the loop saves a checkpoint after the current step and returns; a second Ctrl-C
    raises KeyboardInterrupt at once.

    Args:
      config_path: where the config comes from, NAME[:VARIANT]; used in error messages.
    Raises:
      UserError: invalid user input (config, paths, environment); raised before anything is compiled.
      TrainingStopped: a loss or gradient is not finite, unless train.nonfinite is "skip".
    """
    # Config and devices.
    config = load(config)
    runtime.start(config.runtime)
    check_num_devices(config, jax.device_count(), "the number of available devices is", config_path)
    check_evaluation(config)
    workdir = prepare_workdir(workdir)
    with _make_progress(config) as progress:
        # Training step: shapes and shardings. Nothing is allocated or compiled yet.
        step = build_step(config, make_mesh(config.mesh))
        description = step_lines(config, step)

        # Data. Errors in it come before anything is printed.
        corpus = _open_corpus(config, progress)
        progress.log("\n".join([*description, *corpus_lines(config, corpus), "", *sharding_lines(step)]))

        # State: restored from the latest valid checkpoint, or initialized.
        checkpoints = Checkpoints(
            workdir / CHECKPOINTS_DIRECTORY, keep=config.train.keep_checkpoints, warn=progress.log
        )
        start = _first_position(config, workdir, step, corpus, checkpoints, progress)
        sequence_order = zigzag_order(config.data.seq_len, step.mesh.shape[CONTEXT])
        run = _Run(
            config=config,
            workdir=workdir,
            progress=progress,
            step=step,
            corpus=corpus,
            sequence_order=sequence_order,
            evaluator=Evaluator(step, corpus.heldout, config.train.eval_sequences, sequence_order),
            checkpoints=checkpoints,
            metrics=open_metrics(workdir, resume_step=start.step or None, is_primary=jax.process_index() == 0),
        )

        # Training, and the report after the last step.
        end, evaluation, exit_status = _train(run, start) if start.step < config.train.steps else (start, None, 0)
        if exit_status == 0:
            evaluation = _report(run, end, evaluation)
        checkpoints.close()
        run.metrics.close()
        if exit_status:
            progress.log(f"stopped after step {end.step}, saved a checkpoint; run the same command again to resume")
        return Result(step=end.step, evaluation=evaluation, exit_status=exit_status)


def _train(run: _Run, start: _Position) -> tuple[_Position, Evaluation | None, int]:
    """Runs the steps after `start`; returns where training ended, the last evaluation, and the exit status."""
    config, state, next_sequence = run.config.train, start.state, start.next_sequence

    # Compilation.
    with run.progress.compiling("the training step"):
        run_step = run.step.compile()
    for line in verify_compiled_step(run.step, run_step):
        run.progress.log(line)

    # The loop over steps. Metrics are fetched only when needed, so that the devices always have a step in flight.
    evaluation = None
    if start.step == 0 and config.eval_every_steps:
        evaluation = _evaluate(run, start)
    pending = PendingMetrics(start.step)
    with PreemptionGuard() as guard, contextlib.closing(_batches(run, next_sequence)) as stream:
        for step, arrays in enumerate(stream, start.step + 1):
            state, metrics = run_step(state, Batch(**arrays))
            next_sequence += config.global_batch_size
            position = _Position(state=state, step=step, next_sequence=next_sequence)
            pending.add(step, metrics)
            is_last, stops = step == config.steps, guard.requested(step)
            evaluates = is_last or _is_due(step, config.eval_every_steps)
            saves = is_last or stops or _is_due(step, config.checkpoint_every_steps)
            logs = is_last or _is_due(step, config.log_every_steps)
            if logs or evaluates or saves or pending.num_steps >= _MAX_STEPS_IN_FLIGHT:
                _check_finite(run, pending.fetch())
            if logs:
                _log(run, step, pending)
            if evaluates:
                evaluation = _evaluate(run, position)
            if saves:  # after this step's metrics are written: see metrics.py
                _save(run, position)
            if logs or evaluates or saves:
                pending.restart_clock(step)
            if is_last or stops:
                return position, evaluation, 0 if is_last else guard.exit_status
    raise AssertionError("batches() is endless")


# Set-up: each function returns what it made.


def _make_progress(config: Config) -> Progress:
    device = hardware.find(jax.devices()[0].device_kind)
    return Progress(
        config.train.steps,
        flops_per_step=config.flops_per_step,
        peak_flops_per_second=device and device.bf16_flops_per_second * jax.device_count(),
        is_primary=jax.process_index() == 0,
    )


def _open_corpus(config: Config, progress: Progress) -> Corpus:
    with progress.progress_bar("reading the corpus") as update:
        corpus = open_corpus(config.data, progress=update)
    if corpus.tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer {config.data.tokenizer} has {corpus.tokenizer.vocab_size} tokens and the model"
            f" {config.model.vocab_size}; set --config.model.vocab_size={corpus.tokenizer.vocab_size}"
        )
    for warning in corpus.warnings:
        progress.log(f"warning: {warning}")
    return corpus


def _first_position(
    config: Config, workdir: Path, step: TrainStep, corpus: Corpus, checkpoints: Checkpoints, progress: Progress
) -> _Position:
    """The position of the latest valid checkpoint, or of step 0."""
    restored = checkpoints.restore_latest(step.abstract_state, model=to_dict(config)["model"])
    if restored is None:
        return _Position(state=step.init(), step=0, next_sequence=0)
    state, meta = restored
    position = _Position(state=state, step=int(state.step), next_sequence=meta["next_row"])
    for line in resume_lines(config, workdir, corpus, position.step, meta):
        progress.log(line)
    return position


def _batches(run: _Run, next_sequence: int) -> Iterator[dict[str, jax.Array]]:
    return batches(
        run.corpus.train,
        first_sequence=next_sequence,
        global_batch_size=run.config.train.global_batch_size,
        gradient_accumulation_steps=run.config.train.gradient_accumulation_steps,
        sequence_order=run.sequence_order,
        sharding=NamedSharding(run.step.mesh, BATCH_SPEC),
        prefetch_steps=run.config.data.prefetch_steps,
    )


# Parts of the loop.


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(run: _Run, position: _Position) -> Evaluation:
    with run.progress.spinner("evaluating"):
        evaluation = run.evaluator(position.state.params)
    run.metrics.write(step=position.step, eval_loss=evaluation.loss)
    return evaluation


def _save(run: _Run, position: _Position) -> None:
    meta = dict(
        step=position.step,
        next_row=position.next_sequence,  # the stored name is part of the checkpoint format
        corpus=run.corpus.fingerprint,
        config=to_dict(run.config),
    )
    run.checkpoints.save(position.step, position.state, meta)


def _log(run: _Run, step: int, pending: PendingMetrics) -> None:
    """Writes one metrics row: the newest step's metrics and the mean time of the steps since the clock was started."""
    metrics, seconds = pending.last, pending.seconds_per_step
    row = dict(
        step=step,
        loss=float(metrics.loss),
        tokens_per_second=run.config.tokens_per_step / seconds,
        step_seconds=seconds,
        grad_norm=float(metrics.grad_norm),
        learning_rate=float(metrics.learning_rate),
    )
    if metrics.loss_scale is not None:
        row |= dict(loss_scale=float(metrics.loss_scale), skipped_steps=int(metrics.skipped_steps))
    run.metrics.write(**row)
    run.progress.update(**row)


def _check_finite(run: _Run, fetched: list[tuple[int, StepMetrics]]) -> None:
    """Reports steps whose loss or gradient is not finite; the step itself has already skipped their update.

    Raises:
      TrainingStopped: at such a step, unless loss scaling retries it or train.nonfinite is "skip".
    """
    for step, metrics in fetched:
        if metrics.is_finite:
            continue
        if is_retried(metrics.loss_scale, run.config.precision):
            run.progress.log(f"step {step} overflows at loss scale {metrics.loss_scale:g}: its update is skipped")
            continue
        problem = f"step {step} has loss {metrics.loss} and gradient norm {metrics.grad_norm}"
        if run.config.train.nonfinite == "skip":
            run.progress.log(f"{problem}: its update is skipped")
            continue
        run.checkpoints.close()
        last_good = max(run.checkpoints.steps(), default=None)
        where = "there is no checkpoint yet" if last_good is None else f"the last good checkpoint is step {last_good}"
        raise TrainingStopped(
            f"{problem}, and its update was skipped; {where} in {run.workdir}; lower optimizer.learning_rate,"
            " or continue past such steps with --config.train.nonfinite=skip"
        )


def _report(run: _Run, end: _Position, evaluation: Evaluation | None) -> Evaluation:
    """Writes the plots and prints the summary; evaluates first where no step of this run did."""
    evaluation = evaluation or run.evaluator(end.state.params)
    with run.progress.spinner("evaluating with limited context"):
        evaluation = run.evaluator.with_context_gain(end.state.params, evaluation)
    if jax.process_index() == 0:
        run.progress.log(write_report(run.workdir, run.config, run.corpus, evaluation, end.step))
    return evaluation
