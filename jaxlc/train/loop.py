"""The training run, top to bottom: config, devices, data, state, compilation, the loop over steps, the report."""

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from ml_collections import ConfigDict

from jaxlc import runtime
from jaxlc.config import Config, check_evaluation, check_num_devices, load, to_dict
from jaxlc.config.pretrained import copy_description
from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.runtime.memory_pools import explained, pinned_host_bytes
from jaxlc.sharding.mesh import make_mesh
from jaxlc.train.batch import Batch
from jaxlc.train.callbacks import Callback, Callbacks, RunInfo
from jaxlc.train.checkpoint import CHECKPOINTS_DIRECTORY, Checkpoints, prepare_workdir
from jaxlc.train.custom_model import Model
from jaxlc.train.evaluation import Evaluation, Evaluator
from jaxlc.train.final_report import write_report
from jaxlc.train.loss import TokenLoss
from jaxlc.train.metrics import METRICS_FILE, MetricsLog, open_metrics, read_rows
from jaxlc.train.pending_metrics import PendingMetrics
from jaxlc.train.preemption import PreemptionGuard
from jaxlc.train.pretrained_params import load_pretrained
from jaxlc.train.progress import Progress
from jaxlc.train.run_data import Batches, RunData, open_data
from jaxlc.train.run_result import Result
from jaxlc.train.start_report import resume_lines, sharding_lines, step_lines
from jaxlc.train.state import TrainState
from jaxlc.train.step import TrainStep, build_step
from jaxlc.train.step_profiler import StepProfiler
from jaxlc.train.step_reports import StepReports
from jaxlc.train.verify_compiled import verify_compiled_step


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What set-up returns and the loop uses; none of it changes from step to step."""

    config: Config
    workdir: Path
    progress: Progress
    step: TrainStep
    data: RunData
    evaluator: Evaluator | None  # None: there are no held-out sequences
    checkpoints: Checkpoints
    metrics: MetricsLog
    callbacks: Callbacks


@dataclass(frozen=True, kw_only=True)
class _Position:
    """Where training is: what a checkpoint holds."""

    state: TrainState
    step: int  # optimizer steps done
    next_sequence: int  # index of the first training sequence that no step has used


def run(
    config: ConfigDict | Config,
    workdir: str | Path,
    *,
    config_path: str = "",
    model: Model | None = None,
    loss: TokenLoss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    batches: Batches | None = None,
    eval_batches: Batches | None = None,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Trains `config` in `workdir`; see `jaxlc.train.run`.

    Args:
      config_path: where the config comes from, NAME[:VARIANT]; used in error messages.
    """
    # Config and devices.
    config = load(config)
    runtime.start(config.runtime, pinned_host_bytes=pinned_host_bytes(config))
    check_num_devices(config, jax.device_count(), "the number of available devices is", config_path)
    if batches is None:
        check_evaluation(config)
    workdir, callbacks = prepare_workdir(workdir), Callbacks(callbacks)
    with explained(config.runtime), _make_progress(config, is_own_model=model is not None) as progress:
        # Training step: shapes and shardings. Nothing is allocated or compiled yet.
        step = build_step(config, make_mesh(config.mesh), model=model, loss=loss, optimizer=optimizer)
        description = step_lines(config, step)

        # Data. Errors in it come before anything is printed.
        data = open_data(config, progress, batches, eval_batches)
        progress.log("\n".join([*description, *data.lines, "", *sharding_lines(step)]))

        # Compilation, before the state takes memory: XLA's autotuner runs on the devices, and an error comes early.
        directory, keep = workdir / CHECKPOINTS_DIRECTORY, config.train.keep_checkpoints
        checkpoints = Checkpoints(directory, keep=keep, warn=progress.log)
        is_done = max(checkpoints.steps(), default=0) >= config.train.steps
        run_step = None if is_done else _compile(step, progress)

        # State: restored from the latest valid checkpoint, or initialized.
        start = _first_position(config, workdir, step, data, checkpoints, progress)
        run = _Run(
            config=config,
            workdir=workdir,
            progress=progress,
            step=step,
            data=data,
            evaluator=_make_evaluator(step, data),
            checkpoints=checkpoints,
            metrics=open_metrics(workdir, resume_step=start.step or None, is_primary=jax.process_index() == 0),
            callbacks=callbacks,
        )

        # Training, and the report after the last step.
        result = _train_and_finish(run, start, run_step)
        if result.exit_status:
            progress.log(f"stopped after step {result.step}, saved a checkpoint; run the same command again to resume")
    callbacks("on_end", result)
    return result


def _train_and_finish(run: _Run, start: _Position, run_step: jax.stages.Compiled | None) -> Result:
    """The steps after `start` and the report; `run_step` may be None if there is a checkpoint of the last step."""
    end, evaluation, exit_status = start, None, 0
    if start.step < run.config.train.steps:
        end, evaluation, exit_status = _train(run, start, run_step or _compile(run.step, run.progress))
    return _finish(run, end, evaluation, exit_status)


def _train(run: _Run, start: _Position, run_step: jax.stages.Compiled) -> tuple[_Position, Evaluation | None, int]:
    """Runs the steps after `start`; returns where training ended, the last evaluation, and the exit status."""
    config, state, next_sequence = run.config.train, start.state, start.next_sequence
    run.callbacks("on_start", RunInfo(run.config, run.step.mesh, run.workdir, start.step))

    # The loop over steps. Metrics are fetched after the next step is dispatched, so that the devices always have work.
    # Callbacks get them before, so that StopTraining ends the run at the step that raised it.
    evaluation = None
    if start.step == 0 and config.eval_every_steps:
        evaluation = _evaluate(run, start)
    reports = StepReports(
        config=run.config,
        workdir=run.workdir,
        progress=run.progress,
        metrics_log=run.metrics,
        callbacks=run.callbacks,
        checkpoints=run.checkpoints,
        pending=PendingMetrics(start.step),
    )
    with (
        PreemptionGuard() as guard,
        contextlib.closing(run.data.batches(run.step, next_sequence)) as stream,
        StepProfiler(run.config, run.workdir, run_step, run.progress.log) as profiled_step,
    ):
        for step, (arrays, is_last) in enumerate(stream, start.step + 1):
            state, metrics = profiled_step(step, state, Batch(**arrays))
            next_sequence += config.global_batch_size
            position = _Position(state=state, step=step, next_sequence=next_sequence)
            reports.pending.add(step, metrics)
            stops = guard.requested(step)
            reports.report(step if run.callbacks else step - 1, is_last=is_last)
            is_last = is_last or run.callbacks.stop_requested
            evaluates = is_last or _is_due(step, config.eval_every_steps)
            saves = is_last or stops or _is_due(step, config.checkpoint_every_steps)
            if evaluates or saves:
                reports.report(step, is_last=is_last, fetches=True)
                if run.callbacks.stop_requested and not is_last:
                    is_last = evaluates = saves = True
                    reports.report(step, is_last=True)
            if evaluates:
                evaluation = _evaluate(run, position)
            if saves:  # after this step's metrics are written: see metrics.py
                _save(run, position)
            if evaluates or saves:
                reports.pending.restart_clock(step)
            if is_last or stops:
                return position, evaluation, 0 if is_last else guard.exit_status
    raise UserError(
        f"batches ended before step {start.step + 1}: pass an iterable that starts with the batch of step 1"
    )


# Set-up: each function returns what it made.


def _make_progress(config: Config, *, is_own_model: bool) -> Progress:
    device = hardware.find(jax.devices()[0].device_kind)
    return Progress(
        config.train.steps,
        flops_per_step=None if is_own_model else config.flops_per_step,
        peak_flops_per_second=device and device.bf16_flops_per_second * jax.device_count(),
        is_primary=jax.process_index() == 0,
    )


def _compile(step: TrainStep, progress: Progress) -> jax.stages.Compiled:
    """The compiled step; its transport and its use of host memory are checked."""
    with progress.compiling("the training step"):
        compiled = step.compile()
    for line in verify_compiled_step(step, compiled):
        progress.log(line)
    return compiled


def _make_evaluator(step: TrainStep, data: RunData) -> Evaluator | None:
    if data.heldout is None:
        return None
    return Evaluator(step, data.heldout, step.config.train.eval_sequences)


def _first_position(
    config: Config, workdir: Path, step: TrainStep, data: RunData, checkpoints: Checkpoints, progress: Progress
) -> _Position:
    """The position of the latest valid checkpoint, or of step 0, with the weights of model.init_from if it is set."""
    restored = checkpoints.restore_latest(step.abstract_state, model=to_dict(config)["model"])
    if restored is None:
        params = None
        if config.model.init_from:
            with progress.progress_bar(f"reading {config.model.init_from}") as update:
                params, line = load_pretrained(step, update)
            progress.log(line)
            if jax.process_index() == 0:
                copy_description(config.model.init_from, workdir)
        return _Position(state=step.init(params), step=0, next_sequence=0)
    state, meta = restored
    position = _Position(state=state, step=int(state.step), next_sequence=meta["next_row"])
    for line in resume_lines(config, workdir, data.fingerprint, position.step, meta):
        progress.log(line)
    return position


# Parts of the loop.


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(run: _Run, position: _Position) -> Evaluation | None:
    if run.evaluator is None:
        return None
    with run.progress.spinner("evaluating"):
        evaluation = run.evaluator(position.state.params)
    run.metrics.write(step=position.step, eval_loss=evaluation.loss)
    run.callbacks("on_evaluation", position.step, evaluation)
    return evaluation


def _evaluate_again(run: _Run, position: _Position) -> Evaluation:
    """`Result.evaluate`: after the run, when metrics.jsonl is closed."""
    if run.evaluator is None:
        raise UserError("the run has no held-out sequences: pass eval_batches to jaxlc.train.run")
    return run.evaluator.with_context_gain(position.state.params, run.evaluator(position.state.params))


def _save(run: _Run, position: _Position) -> None:
    meta = dict(
        step=position.step,
        next_row=position.next_sequence,  # the stored name is part of the checkpoint format
        corpus=run.data.fingerprint,
        config=to_dict(run.config),
    )
    run.checkpoints.save(position.step, position.state, meta)
    run.callbacks("on_checkpoint", position.step, run.workdir / CHECKPOINTS_DIRECTORY / str(position.step))


def _finish(run: _Run, end: _Position, evaluation: Evaluation | None, exit_status: int) -> Result:
    """Writes the plots and prints the summary, unless a signal stopped the run; waits for the checkpoints."""
    baselines: dict[str, float] = {}
    if exit_status == 0:
        if run.evaluator is not None:
            evaluation = evaluation or run.evaluator(end.state.params)  # no step of this run did
            with run.progress.spinner("evaluating with limited context"):
                evaluation = run.evaluator.with_context_gain(end.state.params, evaluation)
        if jax.process_index() == 0:
            baselines = run.data.baselines(run.config)
            run.progress.log(write_report(run.workdir, run.config, end.step, evaluation, baselines))
    run.checkpoints.close()
    run.metrics.close()
    metrics = run.workdir / METRICS_FILE
    return Result(
        step=end.step,
        exit_status=exit_status,
        params=end.state.params,
        tokenizer=run.data.tokenizer,
        workdir=run.workdir,
        rows=read_rows(metrics) if metrics.exists() else [],
        train_step=run.step,
        evaluate=functools.partial(_evaluate_again, run, end),
        evaluation=evaluation if exit_status == 0 else None,
        baselines=baselines,
    )
