"""The training run, top to bottom: config, devices, data, state, compilation, the loop over steps,
the report.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import Config, Stage, check_evaluation, check_num_devices, load_stages
from jaxlc.core import UserError, checked, errors, gib, hardware
from jaxlc.core.files import local_path, make_writable
from jaxlc.data import data_sources
from jaxlc.data.sequences.loader import Batches
from jaxlc.posttrain.losses import PolicyLoss
from jaxlc.runtime import watchdog
from jaxlc.runtime.memory import explained
from jaxlc.runtime.start import start_training
from jaxlc.runtime.watchdog import wait_for_processes
from jaxlc.sharding.mesh import make_mesh, shard_map
from jaxlc.step.batch import Batch
from jaxlc.step.custom_model import Model
from jaxlc.step.loss import TokenLoss
from jaxlc.step.memory import pinned_bytes
from jaxlc.step.step import TrainStep, build_step, check_kernels
from jaxlc.step.verify_compiled import verify_compiled_step
from jaxlc.train.callbacks import (
    Callback,
    Callbacks,
    Position,
    PreemptionGuard,
    RunInfo,
    Stop,
    run_due,
)
from jaxlc.train.reports.manifest import (
    differing_kernel,
    keep_config,
    keep_plan,
    plan_summary,
    read_manifest,
    run_id_everywhere,
    stored_settings,
)
from jaxlc.train.reports.metrics import MetricsLog, WandbWriter, open_metrics
from jaxlc.train.reports.progress import LOG_FILE, Progress
from jaxlc.train.reports.run_report import step_lines
from jaxlc.train.reports.step_reports import (
    StepReports,
    remove_later_outputs,
    write_lost_files,
)
from jaxlc.train.result import Result
from jaxlc.train.stage import StageRun, open_workdir
from jaxlc.train.stage_setup import (
    Outputs,
    PreparedStage,
    Reference,
    check_equal_settings,
    check_same_state,
    check_stages,
    check_weights,
    first_position,
    reference_lines,
    stage_after,
    stage_until,
    start_lines,
    training_batches,
    with_stored_start,
)
from jaxlc.train.step_profiler import StepProfiler
from jaxlc.train.stragglers import Stragglers

_LEAST_BYTES = 1 << 30  # less takes no time worth a line
_PART_BYTES = 64 << 20


def allocate_host_memory(compiled: jax.stages.Compiled, mesh: Mesh, progress: Progress) -> None:
    """Allocates what the temporary buffers of `compiled` take in pinned host memory; the pool of
    JAX keeps it.

    Pinning takes 0.5 to 0.7 s per GiB (measured on one H100 with 16 CPU cores), which the first
    step would take longer. A program from the compilation cache may lack its sizes; then its first
    step allocates.
    """
    num_bytes = compiled.memory_analysis().host_temp_size_in_bytes
    if mesh.devices.flat[0].platform != "gpu" or num_bytes < _LEAST_BYTES:
        return
    start_seconds = time.perf_counter()
    progress.log(f"allocating {gib(num_bytes)} GiB of pinned host memory per GPU ...")
    with (
        watchdog.phase("host memory", repeats=False),
        progress.progress_bar("allocating pinned host memory"),
    ):
        jax.block_until_ready(jitted_allocation(mesh, num_bytes)())
    progress.log(f"allocated pinned host memory in {time.perf_counter() - start_seconds:.1f} s")


def jitted_allocation(mesh: Mesh, num_bytes: int) -> Callable[[], jax.Array]:
    """A program that allocates and writes at least `num_bytes` of pinned host memory per device,
    and frees them.

    It is one temporary buffer, as in a step: the pool cannot join regions. Its parts are written
    one by one, as offloaded activations are, so that the device needs a buffer for one part only.
    """
    num_parts = -(-num_bytes // _PART_BYTES)

    def write_part(carry: None, number: jax.Array) -> tuple[None, jax.Array]:
        part = jnp.full(_PART_BYTES, number, jnp.uint8)
        return carry, jax.device_put(part, jax.memory.Space.Host)

    def write() -> jax.Array:
        _, parts = lax.scan(write_part, None, jnp.arange(num_parts).astype(jnp.uint8))
        return jax.device_put(parts[-1, -1], jax.memory.Space.Device)

    return jax.jit(shard_map(write, mesh, (), PartitionSpec()))


@checked
def run(
    config: ConfigDict | Config | tuple[Stage, ...],
    workdir: str | Path = "runs/notebook",
    *,
    config_path: str = "",
    model: Model | None = None,
    loss: TokenLoss | None = None,
    policy_loss: PolicyLoss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    batches: Batches | None = None,
    eval_batches: Batches | None = None,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Trains `config` in `workdir`, or resumes from the latest valid checkpoint there, and returns the trained model.

    The first SIGTERM, SIGHUP or Ctrl-C during the loop saves a checkpoint after the current step and returns; a second
    signal raises KeyboardInterrupt at once.

    Args:
      config: settings, from `jaxlc.config.read_config` or `defaults`; or the stages of `jaxlc.config.load_stages`.
      workdir: directory of metrics, plots and checkpoints.
      config_path: where the config comes from, NAME[:VARIANT], for error messages.
      model: a model to train instead of the decoder of config.model, of which only vocab_size is used then; see
        `jaxlc.train.Model`.
      loss: the loss of each token instead of cross entropy: `(logits float32 [tokens, vocab_size], targets int32
        [tokens]) -> losses float32 [tokens]`, differentiable. It is called for chunks of tokens.
      policy_loss: a loss of answers instead of the formula of config.posttrain.loss: `(log_probs, batch) -> sum of the
        losses`, float32, differentiable. log_probs is the log-probability of each target, float32 [sequences,
        tokens]; with attention.shared_prefixes > 1, of each row of the loss. Arrays of batch, such as advantages and
        loss_weights, have that shape. The sum is divided as posttrain.loss does.
      optimizer: an optax optimizer that replaces config.optimizer, gradient clipping and schedule included.
      batches: one dictionary per step instead of the corpus of config.data: "tokens", integers [global_batch_size,
        seq_len] in natural order, and optionally "segment_ids" (1, 2, ... by document, 0 is padding), "positions",
        "targets" and "loss_weights" of that shape. By default a sequence is one document and the target is the next
        token. A run that resumes skips the batches of the steps already done, so pass the same iterable from its start.
        Training ends with the iterable, or after train.steps. With several processes, each passes the same batches.
      eval_batches: held-out batches of any number of sequences, for runs with `batches`. None: no evaluation.
      callbacks: objects with the methods of `jaxlc.train.Callback`.
    Raises:
      UserError: invalid user input (config, paths, environment), in almost all cases before anything is compiled;
        another run trains in `workdir`, its disk is full, or parameters are not finite when a checkpoint is due.
      TrainingStopped: a loss or gradient is not finite, unless train.nonfinite is "skip"; or a stage ends with a
        held-out loss above its max_eval_loss, or a score below its min_scores.
    """
    # Config and devices: every stage is checked before the first one starts.
    stages = load_stages(config)
    first = stages[0].config
    _start(stages, config_path, has_batches=batches is not None)
    callbacks = Callbacks(callbacks)
    with (
        explained(first.runtime),
        _make_progress() as progress,
        open_workdir(workdir, progress.log) as path,
    ):
        stages = with_stored_start(stages, path)
        # Training steps, with shapes and shardings. Nothing is allocated or compiled yet.
        build = functools.partial(
            build_step, model=model, loss=loss, policy_loss=policy_loss, optimizer=optimizer
        )
        steps = [build(stage.config, make_mesh(stage.config.mesh)) for stage in stages]
        check_same_state(stages, steps)
        check_weights(steps[0], path)
        lines = [[*step_lines(step), *reference_lines(step)] for step in steps]

        # Data. Errors in it come before anything is printed.
        prepared = []
        for index, (stage, step) in enumerate(zip(stages, steps)):
            source = data_sources.open(
                stage.config,
                batches=batches,
                eval_batches=eval_batches,
                workdir=path,
                absolute_positions=model is not None,
                progress=progress.progress_bar,
                log=progress.log,
            )
            for warning in source.warnings:
                progress.log(f"warning: {warning}")
            if stage.config.train.epochs:
                stage = data_sources.with_epochs(stage, source)
                step = build(stage.config, step.mesh)
                lines[index] = [*step_lines(step), *reference_lines(step)]
            prepared.append(PreparedStage(**vars(stage), step=step, source=source))
        check_stages(prepared, path)
        progress.log("\n".join(start_lines(prepared, lines)))
        outputs = _open_outputs(prepared, path, progress, callbacks)
        watched = watchdog.watching(first.runtime, path)
        with watched, contextlib.closing(outputs.stragglers), outputs.checkpoints.settled():
            result = _run_stages(prepared, outputs)
        if result.exit_status:
            progress.log(
                f"stopped after step {result.step}, saved a checkpoint; run the same command again to resume"
            )
    callbacks("on_end", result)
    return result


def _start(stages: Sequence[Stage], config_path: str, *, has_batches: bool) -> None:
    """Starts JAX, and checks the stages.

    Raises:
      UserError: JAX cannot start, or a stage does not fit the devices or the data.
    """
    pinned_host_bytes = max(pinned_bytes(stage.config).pooled for stage in stages)
    start_training(stages[0].config.runtime, pinned_host_bytes)
    check_equal_settings(stages)
    for stage in stages:
        check_num_devices(
            stage.config, jax.device_count(), "the number of available devices is", config_path
        )
        if not has_batches:
            check_evaluation(stage.config)
    if stages[0].config.train.wandb_project:
        errors.require("wandb", "config.train.wandb_project")
    if any(
        x.config.rollouts.source and (x.first_step or x.num_steps != x.config.train.steps)
        for x in stages
    ):
        raise UserError(
            "unsupported: config.rollouts with config.stages; run the stages one after the other"
        )
    if len(stages) > 1 and has_batches:
        raise UserError(
            "unsupported: batches with config.stages; run the stages one after the other, or use data.sources"
        )


def _open_outputs(
    stages: Sequence[PreparedStage], workdir: Path, progress: Progress, callbacks: Callbacks
) -> Outputs:
    """Opens what a run writes to its workdir, and the directories of checkpoints.

    Raises:
      UserError: metrics.jsonl of an earlier start cannot be read, or a directory is not writable.
    """
    first = stages[0].config
    progress.log_to(workdir / LOG_FILE)
    if jax.process_index() == 0 and (line := keep_config(workdir, stages)) is not None:
        progress.log(line)
    local = None
    if first.train.local_checkpoints:
        local = local_path(first.train.local_checkpoints) / run_id_everywhere(workdir)
        make_writable(local, "use a different --config.train.local_checkpoints")
    checkpoints = Checkpoints(
        workdir / CHECKPOINTS_DIRECTORY,
        keep=first.train.keep_checkpoints,
        keep_steps=[stage.end_step for stage in stages[:-1]],
        keep_every=first.train.keep_every_steps,
        keep_best=first.train.keep_best_checkpoints,
        warn=progress.log,
        finite_params=stages[0].step.model is None,
        local_directory=local,
    )
    stragglers = Stragglers(first.runtime, workdir, progress.log)
    return Outputs(
        workdir=workdir,
        progress=progress,
        checkpoints=checkpoints,
        callbacks=callbacks,
        stragglers=stragglers,
    )


def _run_stages(stages: Sequence[PreparedStage], outputs: Outputs) -> Result:
    """Trains the stages that are not done, each from the checkpoint of the stage before, and writes
    the report.
    """
    steps = {stage.name: stage.step for stage in stages}
    compiled = functools.lru_cache(maxsize=1)(lambda name: _compile(name, steps[name], outputs))

    def next_position() -> Position:
        """The position of the latest valid checkpoint, or of step 0."""
        # Compilation, before the state is allocated: XLA's autotuner runs on the devices, and
        # errors surface early.
        latest_step = max(outputs.checkpoints.steps(), default=0)
        if latest_step < stages[-1].end_step:
            compiled(stage_after(stages, latest_step).name)
        position = first_position(stages, outputs)
        wait_for_processes("state ready")  # the times to read weights differ, too
        return position

    position = next_position()
    stop = Stop.DONE
    guard = PreemptionGuard()
    metrics = _open_metrics(stages, outputs, position)
    for stage in stages:
        run = StageRun(**vars(outputs), stage=stage, metrics=metrics.for_stage(stage.name))
        if position.step < stage.end_step:
            allocate_host_memory(compiled(stage.name), stage.step.mesh, outputs.progress)
            position, stop = _train(run, position, compiled(stage.name), guard)
        elif position.step == stage.end_step and stage.missing_evaluations(
            position.step, run.checkpoints
        ):
            position = run.score(run.reward(run.evaluate(position)))
        elif stage is not stages[-1]:
            continue
        if stop is not Stop.DONE or run.callbacks.stop_requested or stage is stages[-1]:
            break
        run.checkpoints.wait()
        del position  # frees the memory of the state
        position = next_position()
    with guard:  # the last checkpoint may still be written
        return run.finish(position, stop)


def _open_metrics(
    stages: Sequence[PreparedStage], outputs: Outputs, position: Position
) -> MetricsLog:
    """The metrics, as they were after the step of `position`."""
    is_primary = jax.process_index() == 0
    writers = []
    workdir = outputs.workdir
    config = stages[0].config
    stage = stage_until(stages, position.step)
    if is_primary:
        write_lost_files(stage, workdir, position)
        remove_later_outputs(config, workdir, position.step)
    if is_primary and config.train.wandb_project:
        run_id = read_manifest(workdir)["run_id"]
        settings = stored_settings(workdir)
        writers.append(
            WandbWriter(config.train.wandb_project, run_id, workdir, settings, outputs.progress.log)
        )
    return open_metrics(
        workdir,
        resume_step=position.step or None,
        is_primary=is_primary,
        writers=writers,
        warn=outputs.progress.log,
        stage=stage.name,
        rows=position.rows,
        repeated=stage.missing_evaluations(position.step, outputs.checkpoints),
    )


def _train(
    run: StageRun, start: Position, run_step: jax.stages.Compiled, guard: PreemptionGuard
) -> tuple[Position, Stop]:
    """Runs the steps of a stage after `start`; returns where training stopped, and why."""
    stage = run.stage
    flops_per_step = None if stage.step.model is not None else stage.config.flops_per_step
    run.progress.start_stage(stage.name, stage.end_step, flops_per_step)
    run.callbacks("on_start", RunInfo(stage.config, stage.step.mesh, run.workdir, start.step))
    saves = run.saves
    num_steps = stage.end_step - start.step
    due = run.actions if start.step == 0 else [x for x in run.actions if x.at_resume]
    position = run_due(due, start)
    if start.step and run.callbacks.stop_requested:
        others = [x for x in due if not x.is_due(start.step, None)]
        return run_due(others, position, Stop.DONE), Stop.DONE
    reports = StepReports(run, start.step)
    with_reference = Reference(stage.step, run.progress, start.reference)
    # another program may take any time to make them
    has_deadline = stage.config.rollouts.source not in ("files", "server")
    with (
        contextlib.closing(reports.pending),
        guard.calling(stage.source.stop_waiting),
        watchdog.steps(start.step),
        contextlib.closing(
            training_batches(stage.source, stage.step, start.next_sequence, num_steps, guard.stop)
        ) as stream,
        StepProfiler(stage.config, run.workdir, run_step, run.progress.log) as profiled_step,
    ):
        batches = watchdog.phases(watchdog.DATA, stream, repeats=has_deadline)
        for step, (arrays, is_last) in enumerate(batches, start.step + 1):
            watchdog.dispatched(step)
            profiled_step.start(step, position.state)
            reports.pending.dispatching()
            state, metrics = profiled_step(step, position.state, with_reference(Batch(**arrays)))
            position = Position(
                state=state,
                step=step,
                next_sequence=position.next_sequence + stage.config.train.global_batch_size,
                num_tokens=position.num_tokens + stage.config.tokens_per_step,
                reference=with_reference.identity,
            )
            reports.pending.add(step, metrics)
            stop = guard.stop()
            if is_last:
                stop = Stop.DONE
                if step < stage.end_step:
                    run.progress.log(
                        f"batches ended after step {step} of config.train.steps={stage.end_step}"
                    )

            # Metrics are fetched after the next step is dispatched, so that the devices always have work. Actions and
            # callbacks wait for them: a state is saved if its metrics are finite, and StopTraining stops at that step.
            # It is saved before anything that may fail: reports, callbacks, evaluations.
            waits = profiled_step.is_last(step) or any(
                x.is_due(step, stop) for x in (*saves, *run.actions)
            )
            reports.fetch(step if waits or run.callbacks else step - 1, waits=waits)
            if stop is Stop.DONE:
                reports.fetch_last(step)
            position = run_due(saves, reports.added_to(position), stop)
            profiled_step.stop(step, position.state)
            reports.write()
            position, stop = _run_actions(run, reports, position, stop)
            if stop is not None:
                return position, stop
        if (stop := guard.stop()) is not None:  # while the run waited for rollouts
            return run_due(saves, position, stop), stop
    raise UserError(
        f"batches ended before step {start.step + 1}: pass an iterable that starts with the batch of step 1"
    )


def _run_actions(
    run: StageRun, reports: StepReports, position: Position, stop: Stop | None
) -> tuple[Position, Stop | None]:
    """Runs the actions that are due after a step; returns why the run ends there, if it does.

    A callback, or an evaluation among the actions, may end it. The step is saved then, and all
    actions of a last step run.
    """
    actions = run.actions
    if run.callbacks.stop_requested and stop is not Stop.DONE:
        position = _save_last(run, reports, position)
        stop = Stop.DONE
    position = run_due(actions, position, stop)
    if run.callbacks.stop_requested and stop is None:
        position = _save_last(run, reports, position)
        stop = Stop.DONE
        others = [x for x in actions if not x.is_due(position.step, None)]
        position = run_due(others, position, stop)
    return position, stop


def _save_last(run: StageRun, reports: StepReports, position: Position) -> Position:
    """Saves and reports a step that has become the last one of the run."""
    reports.fetch_last(position.step)
    position = run_due(run.saves, reports.added_to(position), Stop.DONE)
    reports.write()
    return position


def _make_progress() -> Progress:
    device = hardware.find(jax.devices()[0].device_kind)
    peak = device and device.bf16_flops_per_second * jax.device_count()
    return Progress(peak_flops_per_second=peak, is_primary=jax.process_index() == 0)


def _compile(stage: str, step: TrainStep, outputs: Outputs) -> jax.stages.Compiled:
    """The compiled step; its kernels, its transport and its use of host memory are checked. What
    the compiled program needs is kept in the manifest."""
    progress = outputs.progress
    for line in check_kernels(step):
        progress.log(line)
    with watchdog.phase("compilation", repeats=False), progress.compiling("the training step"):
        compiled = step.compile()
    for line in verify_compiled_step(step, compiled):
        progress.log(line)
    if jax.process_index() == 0:
        keep_plan(outputs.workdir, stage, plan_summary(step, compiled))
        if line := differing_kernel(outputs.workdir, stage, step):
            progress.log(f"warning: {line}")
    wait_for_processes("step compiled")
    return compiled
