"""The training run, top to bottom: config, devices, data, state, compilation, the loop over steps, the report."""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import optax
from ml_collections import ConfigDict

from jaxlc import runtime
from jaxlc.checkpoints.checkpoint import Checkpoints
from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY
from jaxlc.config import Config, Stage, check_evaluation, check_num_devices, load_stages
from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.runtime.memory_pools import explained, pinned_host_bytes
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.batch import Batch
from jaxlc.step.custom_model import Model
from jaxlc.step.loss import TokenLoss
from jaxlc.step.step import TrainStep, build_step
from jaxlc.step.verify_compiled import check_kernels, verify_compiled_step
from jaxlc.train.callbacks import Callback, Callbacks, RunInfo
from jaxlc.train.evaluation.held_out import Evaluation
from jaxlc.train.preemption import PreemptionGuard
from jaxlc.train.prepared_stages import (
    Position,
    PreparedStage,
    check_same_state,
    first_position,
    stage_after,
    start_lines,
)
from jaxlc.train.reports.metrics import open_metrics
from jaxlc.train.reports.pending_metrics import PendingMetrics
from jaxlc.train.reports.progress import Progress
from jaxlc.train.reports.start_report import step_lines
from jaxlc.train.reports.step_reports import StepReports
from jaxlc.train.result.run_result import Result
from jaxlc.train.run_data import Batches, open_data
from jaxlc.train.stage_run import StageRun
from jaxlc.train.step_profiler import StepProfiler
from jaxlc.train.workdir import prepare_workdir


def run(
    config: ConfigDict | Config | tuple[Stage, ...],
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
      config: settings, or the stages that `load_stages` returned.
      config_path: where the config comes from, NAME[:VARIANT]; used in error messages.
    """
    # Config and devices: every stage is checked before the first one starts.
    stages = load_stages(config)
    first = stages[0].config
    runtime.start(first.runtime, pinned_host_bytes=max(pinned_host_bytes(stage.config) for stage in stages))
    for stage in stages:
        check_num_devices(stage.config, jax.device_count(), "the number of available devices is", config_path)
        if batches is None:
            check_evaluation(stage.config)
    if len(stages) > 1 and batches is not None:
        raise UserError(
            "unsupported: batches with config.stages; run the stages one after the other, or use data.sources"
        )
    workdir, callbacks = prepare_workdir(workdir), Callbacks(callbacks)
    with explained(first.runtime), _make_progress(first, has_custom_model=model is not None) as progress:
        # Training steps, with shapes and shardings. Nothing is allocated or compiled yet.
        build = functools.partial(build_step, model=model, loss=loss, optimizer=optimizer)
        steps = [build(stage.config, make_mesh(stage.config.mesh)) for stage in stages]
        check_same_state(stages, steps)
        lines = [step_lines(stage.config, step) for stage, step in zip(stages, steps)]

        # Data. Errors in it come before anything is printed.
        data = [open_data(stage, progress, batches, eval_batches) for stage in stages]
        prepared = [PreparedStage(*parts) for parts in zip(stages, steps, data)]
        progress.log("\n".join(start_lines(prepared, lines)))

        directory = workdir / CHECKPOINTS_DIRECTORY
        stage_ends = [stage.end_step for stage in stages[:-1]]
        checkpoints = Checkpoints(
            directory, keep=first.train.keep_checkpoints, keep_steps=stage_ends, warn=progress.log
        )
        result = _run_stages(prepared, workdir, progress, checkpoints, callbacks)
        if result.exit_status:
            progress.log(f"stopped after step {result.step}, saved a checkpoint; run the same command again to resume")
    callbacks("on_end", result)
    return result


def _run_stages(
    stages: Sequence[PreparedStage], workdir: Path, progress: Progress, checkpoints: Checkpoints, callbacks: Callbacks
) -> Result:
    """Trains the stages that are not done, each from the checkpoint of the stage before, and writes the report."""
    metrics = None
    while True:
        # Compilation, before the state takes memory: XLA's autotuner runs on the devices, and an error comes early.
        latest_step = max(checkpoints.steps(), default=0)
        stage = compiled_stage = stage_after(stages, latest_step)
        run_step = _compile(stage.step, progress) if latest_step < stage.stage.end_step else None

        # State: restored from the latest valid checkpoint, or initialized.
        start, stage = first_position(stages, workdir, checkpoints, progress)
        if stage is not compiled_stage:  # the checkpoints of its later steps are damaged
            run_step = None
        if metrics is None:
            is_primary = jax.process_index() == 0
            metrics = open_metrics(workdir, resume_step=start.step or None, is_primary=is_primary)
        run = StageRun(
            stage=stage,
            workdir=workdir,
            progress=progress,
            checkpoints=checkpoints,
            metrics=metrics.of_stage(stage.stage.name),
            callbacks=callbacks,
        )

        # Training, and the report after the last step.
        end, evaluation, exit_status = start, None, 0
        if start.step < stage.stage.end_step:
            end, evaluation, exit_status = _train(run, start, run_step or _compile(stage.step, progress))
        is_end_of_stage = end.step == stage.stage.end_step and not exit_status and not callbacks.stop_requested
        if not is_end_of_stage or stage is stages[-1]:
            return run.finish(stages, end, evaluation, exit_status)
        checkpoints.wait()
        del start, end  # frees the memory of the state


def _train(run: StageRun, start: Position, run_step: jax.stages.Compiled) -> tuple[Position, Evaluation | None, int]:
    """Runs the steps after `start`; returns where training ended, the last evaluation, and the exit status."""
    config, state, next_sequence = run.config.train, start.state, start.next_sequence
    stage, num_steps = run.stage, config.steps - start.step
    flops_per_step = None if stage.step.model is not None else run.config.flops_per_step
    run.progress.start_stage(stage.stage.name, config.steps, flops_per_step)
    run.callbacks("on_start", RunInfo(run.config, stage.step.mesh, run.workdir, start.step))

    # The loop over steps. Metrics are fetched after the next step is dispatched, so that the devices always have work.
    # Callbacks get them before, so that StopTraining ends the run at the step that raised it.
    evaluation = None
    if start.step == 0 and config.eval_every_steps:
        evaluation = run.evaluate(start)
    if start.step == 0 and run.config.evals.every_steps:
        run.score(start)
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
        contextlib.closing(stage.data.batches(stage.step, next_sequence, num_steps)) as stream,
        StepProfiler(run.config, run.workdir, run_step, run.progress.log) as profiled_step,
    ):
        for step, (arrays, is_last) in enumerate(stream, start.step + 1):
            state, metrics = profiled_step(step, state, Batch(**arrays))
            next_sequence += config.global_batch_size
            position = Position(state=state, step=step, next_sequence=next_sequence)
            reports.pending.add(step, metrics)
            stops = guard.requested(step)
            reports.report(step if run.callbacks else step - 1, is_last=is_last)
            is_last = is_last or run.callbacks.stop_requested
            evaluates = is_last or _is_due(step, config.eval_every_steps)
            scores = is_last or _is_due(step, run.config.evals.every_steps)
            saves = is_last or stops or _is_due(step, config.checkpoint_every_steps)
            if evaluates or scores or saves:
                reports.report(step, is_last=is_last, fetches=True)
                if run.callbacks.stop_requested and not is_last:
                    is_last = evaluates = scores = saves = True
                    reports.report(step, is_last=True)
            if evaluates:
                evaluation = run.evaluate(position)
            of_tasks = run.score(position) if scores else {}
            if saves:  # after this step's metrics are written: see metrics.py
                run.save(position, evaluation if evaluates else None, of_tasks)
            if evaluates or scores or saves:
                reports.pending.restart_clock(step)
            if is_last or stops:
                return position, evaluation, 0 if is_last else guard.exit_status
    raise UserError(
        f"batches ended before step {start.step + 1}: pass an iterable that starts with the batch of step 1"
    )


def _make_progress(config: Config, *, has_custom_model: bool) -> Progress:
    device = hardware.find(jax.devices()[0].device_kind)
    return Progress(
        config.train.steps,
        flops_per_step=None if has_custom_model else config.flops_per_step,
        peak_flops_per_second=device and device.bf16_flops_per_second * jax.device_count(),
        is_primary=jax.process_index() == 0,
    )


def _compile(step: TrainStep, progress: Progress) -> jax.stages.Compiled:
    """The compiled step; its attention kernel, its transport and its use of host memory are checked."""
    if (line := check_kernels(step)) is not None:
        progress.log(line)
    with progress.compiling("the training step"):
        compiled = step.compile()
    for line in verify_compiled_step(step, compiled):
        progress.log(line)
    return compiled


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
