"""The training run, top to bottom: config, devices, data, state, compilation, the loop over steps, the report."""

import contextlib
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from ml_collections import ConfigDict

from jaxlc import runtime
from jaxlc.config import Config, Stage, check_evaluation, check_num_devices, load_stages, to_dict
from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.runtime.memory_pools import explained, pinned_host_bytes
from jaxlc.sharding.mesh import make_mesh
from jaxlc.train.base_model import base_meta, checkpoint_part
from jaxlc.train.batch import Batch
from jaxlc.train.callbacks import Callback, Callbacks, RunInfo
from jaxlc.train.checkpoint import Checkpoints, prepare_workdir
from jaxlc.train.checkpoint_files import CHECKPOINTS_DIRECTORY
from jaxlc.train.custom_model import Model
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.final_report import write_report
from jaxlc.train.loss import TokenLoss
from jaxlc.train.metrics import METRICS_FILE, MetricsLog, open_metrics, read_rows
from jaxlc.train.pending_metrics import PendingMetrics
from jaxlc.train.preemption import PreemptionGuard
from jaxlc.train.prepared_stages import (
    Position,
    PreparedStage,
    check_same_state,
    first_position,
    num_tokens_until,
    stage_after,
    start_lines,
)
from jaxlc.train.progress import Progress
from jaxlc.train.run_data import Batches, open_data
from jaxlc.train.run_result import Result
from jaxlc.train.start_report import step_lines
from jaxlc.train.step import TrainStep, build_step
from jaxlc.train.step_profiler import StepProfiler
from jaxlc.train.step_reports import StepReports
from jaxlc.train.verify_compiled import check_kernels, verify_compiled_step


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What set-up returns and the loop uses; none of it changes from step to step."""

    stage: PreparedStage
    workdir: Path
    progress: Progress
    checkpoints: Checkpoints
    metrics: MetricsLog
    callbacks: Callbacks

    @property
    def config(self) -> Config:
        return self.stage.stage.config


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
    with explained(first.runtime), _make_progress(first, is_own_model=model is not None) as progress:
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
        run = _Run(
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
            return _finish(run, stages, end, evaluation, exit_status)
        checkpoints.wait()
        del start, end  # frees the memory of the state


def _train(run: _Run, start: Position, run_step: jax.stages.Compiled) -> tuple[Position, Evaluation | None, int]:
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
        evaluation = _evaluate(run, start)
    if start.step == 0 and run.config.evals.every_steps:
        _score(run, start)
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
                evaluation = _evaluate(run, position)
            of_tasks = _score(run, position) if scores else {}
            if saves:  # after this step's metrics are written: see metrics.py
                _save(run, position, evaluation if evaluates else None, of_tasks)
            if evaluates or scores or saves:
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
    """The compiled step; its attention kernel, its transport and its use of host memory are checked."""
    if (line := check_kernels(step)) is not None:
        progress.log(line)
    with progress.compiling("the training step"):
        compiled = step.compile()
    for line in verify_compiled_step(step, compiled):
        progress.log(line)
    return compiled


# Parts of the loop.


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(run: _Run, position: Position) -> Evaluation | None:
    if run.stage.evaluator is None:
        return None
    with run.progress.spinner("evaluating"):
        evaluation = run.stage.evaluator(position.state.params)
    run.metrics.write(step=position.step, eval_loss=evaluation.loss)
    run.callbacks("on_evaluation", position.step, evaluation)
    return evaluation


def _score(run: _Run, position: Position) -> dict[str, float]:
    """The scores of config.evals by name, which are also written to metrics.jsonl; empty without config.evals.tasks."""
    if run.stage.scorer is None:
        return {}
    with run.progress.spinner("evaluating tasks"):
        scores = run.stage.scorer(position.state.params, position.step, run.workdir, run.progress.log)
    for score in scores:
        name = f"scores/{score.name}"
        others = {f"{name}/{key}": value for key, value in score._asdict().items() if key not in ("name", "score")}
        run.metrics.write(step=position.step, **{name: score.score}, **others)
    return {score.name: score.score for score in scores}


def _evaluate_again(run: _Run, position: Position) -> Evaluation:
    """`Result.evaluate`: after the run, when metrics.jsonl is closed."""
    evaluator = run.stage.evaluator
    if evaluator is None:
        raise UserError("the run has no held-out sequences: pass eval_batches to jaxlc.train.run")
    return evaluator.with_context_gain(position.state.params, evaluator(position.state.params))


def _save(run: _Run, position: Position, evaluation: Evaluation | None, scores: dict[str, float]) -> None:
    stage = run.stage.stage
    meta = dict(
        step=position.step,
        next_row=position.next_sequence,  # the stored name is part of the checkpoint format
        corpus=run.stage.data.fingerprint,
        config=to_dict(run.config),
        stage=dict(name=stage.name, first_step=stage.first_step),
        eval_loss=evaluation.loss if evaluation is not None and math.isfinite(evaluation.loss) else None,
        scores={name: score for name, score in scores.items() if math.isfinite(score)},
        **base_meta(run.stage.step, position.state.params),
    )
    run.checkpoints.save(position.step, checkpoint_part(run.stage.step, position.state), meta)
    run.callbacks("on_checkpoint", position.step, run.workdir / CHECKPOINTS_DIRECTORY / str(position.step))


def _finish(
    run: _Run, stages: Sequence[PreparedStage], end: Position, evaluation: Evaluation | None, exit_status: int
) -> Result:
    """Writes the plots and prints the summary, unless a signal stopped the run; waits for the checkpoints."""
    baselines: dict[str, float] = {}
    evaluator, data = run.stage.evaluator, run.stage.data
    if exit_status == 0:
        if evaluator is not None:
            evaluation = evaluation or evaluator(end.state.params)  # no step of this run did
            with run.progress.spinner("evaluating with limited context"):
                evaluation = evaluator.with_context_gain(end.state.params, evaluation)
        if jax.process_index() == 0:
            baselines = data.baselines(run.config)
            num_tokens = num_tokens_until(stages, end.step)
            run.progress.log(write_report(run.workdir, end.step, num_tokens, evaluation, baselines, data.waiting.share))
    run.checkpoints.close()
    run.metrics.close()
    metrics = run.workdir / METRICS_FILE
    return Result(
        step=end.step,
        exit_status=exit_status,
        params=end.state.params,
        tokenizer=data.tokenizer,
        workdir=run.workdir,
        rows=read_rows(metrics) if metrics.exists() else [],
        train_step=run.stage.step,
        evaluate=functools.partial(_evaluate_again, run, end),
        evaluation=evaluation if exit_status == 0 else None,
        baselines=baselines,
    )
