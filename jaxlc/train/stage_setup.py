"""The stages of a run, prepared: each with its training step and data, and where it starts.

A stage starts from the checkpoint at the end of the stage before, also within one process. So a run
that is killed at a stage boundary resumes exactly like an uninterrupted one, and the arrays get the
shardings of the new stage's mesh.

A run checks its settings, workdir and data here, before it writes or compiles anything. `training_batches` yields the
batches of a stage from the sequences of its data source; `Reference` adds the log-probabilities of a reference model.
"""

import contextlib
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxlc.checkpoints.files import (
    BASE,
    CHECKPOINTS_DIRECTORY,
    EVAL_LOSS,
    HELDOUT_REWARD,
    SCORES,
    checksums_of,
    committed_steps,
    read_meta,
)
from jaxlc.checkpoints.pretrained import (
    check_pretrained,
    keep_description,
    load_pretrained,
    with_base,
    without_frozen,
)
from jaxlc.checkpoints.restore import RestoreTarget, check_latest
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import Stage, to_dict, unchecked
from jaxlc.config.checks.stage_checks import parse_min_scores
from jaxlc.config.models.pretrained import context_warning
from jaxlc.config.values import flattened
from jaxlc.core import UserError, gib
from jaxlc.core.files import fingerprint_of
from jaxlc.data.sequences.loader import DataSource, batches
from jaxlc.data.sequences.packing import BalancedSequences
from jaxlc.data.sequences.user_batches import EndOfBatches, OwnBatches
from jaxlc.data.tokens.tokenizers import AUTO
from jaxlc.evals.evaluate_run import TrainingScorer
from jaxlc.generation.generate_text import Sampler
from jaxlc.generation.rollouts import PolicyRollouts, RolloutMaker, ServerRollouts
from jaxlc.models.lora import trained_settings
from jaxlc.posttrain.rollouts import Rollouts, RolloutSequences
from jaxlc.posttrain.traces import with_reference
from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import (
    problem_of_any_process,
    raise_together,
    text_of_process_0,
    wait_for_processes,
)
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.state import TrainState, bytes_per_device, lacks_host_memory
from jaxlc.step.step import TrainStep
from jaxlc.train.callbacks import Callbacks, Position, TrainingStopped, is_period
from jaxlc.train.evaluation import Evaluator
from jaxlc.train.reports.metrics import METRICS_FILE, Timings, read_rows
from jaxlc.train.reports.progress import Progress
from jaxlc.train.reports.run_report import data_lines, resume_lines
from jaxlc.train.stragglers import Stragglers

T = TypeVar("T")
_POLL_SECONDS = 0.5
REFERENCE = "reference"  # key of the meta of a checkpoint: `Reference.identity`
ROLLOUTS = "rollouts"  # key of the meta of a checkpoint: the digests of files of rollouts, by step


def training_batches(
    source: DataSource,
    step: TrainStep,
    next_sequence: int,
    num_steps: int,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[dict[str, jax.Array], bool]]:
    """Yields the arrays of `num_steps` optimizer steps from `next_sequence` on, and whether it is the last one.

    Args:
      stop: several processes that wait for rollouts call it together; the iterator ends when it is not None.
    """
    train, sequences = step.config.train, source.train
    order = step.sequence_order
    if source.is_balanced and step.config.attention.document_mask:
        sequences = BalancedSequences(source.train, step.config, next_sequence)
    stream = batches(
        lambda i: order.arranged(sequences[i]),
        first_sequence=next_sequence,
        global_batch_size=train.global_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        seq_len=step.config.data.seq_len,
        sharding=NamedSharding(step.mesh, BATCH_SPEC),
        prefetch_steps=step.config.data.prefetch_steps,
    )
    with contextlib.closing(stream), contextlib.ExitStack() as stack:
        # before the stream is closed, whose threads may wait for a file
        stack.callback(source.stop_waiting)
        stack.callback(source.close)
        items: Iterator = _until_end(stream)
        if isinstance(source, OwnBatches):
            yield from _marking_last(itertools.islice(items, num_steps))
            return
        # endless, unless `stop_waiting` was called
        if isinstance(source, Rollouts) and jax.process_count() > 1:
            first_step = next_sequence // train.global_batch_size + 1
            items = together(items, source.train, first_step, stop)
        yield from ((arrays, count == num_steps) for count, arrays in enumerate(items, start=1))


def _until_end(stream: Iterator) -> Iterator:
    with contextlib.suppress(EndOfBatches):
        yield from stream


def _marking_last(stream: Iterator) -> Iterator:
    """Yields (item, whether it is the last one); reads one item ahead."""
    current = next(stream, None)
    while current is not None:
        following = next(stream, None)
        yield current, following is None
        current = following


def together(
    items: Iterator[T], sequences: RolloutSequences, first_step: int, stop: Callable[[], object]
) -> Iterator[T]:
    """Yields the items, one per step; before each, all processes wait until all of them find the
    file of the step.

    They wait in the main thread, since the devices compare notes twice a second, and call `stop`
    together: a signal to one process, of which only JAX's preemption service knows, ends the
    waiting of all at the same time.
    """
    for step in itertools.count(first_step):
        while True:
            # A process that is late raises the error when it reads the file, as a single process
            # does.
            raise_together(sequences.failure)
            is_over = sequences.path(step).is_file() or sequences.is_late(step)
            if multihost_utils.process_allgather(np.array(is_over)).all():
                break
            if stop() is not None:
                sequences.close()  # the threads of `items` wait for the file, too
                return
            time.sleep(_POLL_SECONDS)
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


def reference_lines(step: TrainStep) -> list[str]:
    """The weights of the reference model and their memory, for the start report; they are checked.

    Raises:
      UserError: they cannot be read, or differ from the config.
    """
    if step.reference is None:
        return []
    check_pretrained(step.reference)
    size = gib(bytes_per_device(step.reference.abstract_state.params))
    problem = lacks_host_memory(step.mesh)
    where = "in pinned host memory" if problem is None else f"on the device: {problem}"
    return [f"reference  {step.reference.config.model.init_from}, {size} GiB per device {where}"]


class Reference:
    """Adds the log-probabilities of config.posttrain.reference='model' to batches; without it, they
    stay as they are.

    The weights are in pinned host memory, and each layer is copied to the device while the layer
    before it computes (`models.offloaded_layers`). A batch gets its log-probabilities before its
    step, which then reads them as recorded.
    """

    def __init__(self, step: TrainStep, progress: Progress, stored: dict[str, str]):
        """
        Args:
          stored: `identity` in the checkpoint that the run resumes from.
        Raises:
          UserError: the weights have changed since that checkpoint.
        """
        self._params = self._log_probs = None
        self.identity: dict[str, str] = {}  # name of the model -> fingerprint of its weights
        if (reference := step.reference) is None:
            return
        with watchdog.phase("compilation", repeats=False), progress.compiling("the reference"):
            self._log_probs = reference.compile_lowered(reference.lower_log_probs())
        with progress.progress_bar(f"reading {reference.config.model.init_from}") as update:
            self._params, line = load_pretrained(reference, update)
        name = reference.config.model.init_from
        self.identity = {name: fingerprint_of(sorted(checksums_of(self._params).items()))}
        if stored.keys() == self.identity.keys() and stored != self.identity:
            raise UserError(
                f"the weights of the reference model {name} have changed since the checkpoint that the run resumes"
                " from: put them back, or set config.posttrain.reference_model to a copy of them"
            )
        progress.log(f"reference: {line.split(maxsplit=1)[1]}")
        wait_for_processes("reference read")

    def __call__(self, batch: Batch) -> Batch:
        if self._log_probs is None:
            return batch
        # the reference chooses its own experts
        log_probs = self._log_probs(self._params, batch._replace(experts=None))
        return batch._replace(reference_log_probs=log_probs)


@dataclass(frozen=True, kw_only=True)
class PreparedStage(Stage):
    """A stage with its training step and its data. Nothing is allocated or compiled yet."""

    step: TrainStep
    source: DataSource

    @cached_property
    def evaluator(self) -> Evaluator | None:
        """None: there are no held-out sequences, or train.eval_sequences is 0."""
        heldout = self.source.heldout
        if heldout is None or not self.config.train.eval_sequences:
            return None
        return Evaluator(self.step, heldout, self.config.train.eval_sequences)

    @cached_property
    def scorer(self) -> TrainingScorer | None:
        """None: there are no config.evals.tasks."""
        if not self.config.evals.tasks:
            return None
        return TrainingScorer(self.step, self.source.tokenizer)

    @cached_property
    def rollout_maker(self) -> RolloutMaker | None:
        """None: another program makes the rollouts, or there are none."""
        if not isinstance(self.source, Rollouts) or not self.source.prompts:
            return None
        is_server = self.config.rollouts.source == "server"
        return (ServerRollouts if is_server else PolicyRollouts)(self.step, self.source)

    @cached_property
    def sampler(self) -> Sampler | None:
        """None: there are no train.sample_prompts."""
        if not self.config.train.sample_every_steps:
            return None
        return Sampler(self.step, self.source.tokenizer)

    def evaluations_due(self, step: int) -> list[str]:
        """The names of the evaluations that follow the checkpoint of `step`."""
        every = {}
        if self.evaluator is not None:
            every[EVAL_LOSS] = self.config.train.eval_every_steps
        if self.scorer is not None:
            every[SCORES] = self.config.evals.every_steps
        if self.config.rollouts.eval_prompts:
            every[HELDOUT_REWARD] = self.config.train.eval_every_steps
        return [name for name in every if step == self.end_step or is_period(step, every[name])]

    def missing_evaluations(self, step: int, checkpoints: Checkpoints) -> list[str]:
        """The evaluations of the checkpoint of `step` that are due and not known, such as after a
        kill.
        """
        return [
            name for name in self.evaluations_due(step) if name not in checkpoints.evaluation(step)
        ]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where a run reports and saves, in all stages."""

    workdir: Path
    progress: Progress
    checkpoints: Checkpoints
    callbacks: Callbacks
    stragglers: Stragglers
    timings: Timings = field(default_factory=Timings)


def stage_after(stages: Sequence[PreparedStage], step: int) -> PreparedStage:
    """The stage that trains after `step`; the last one if all steps are done."""
    return next((stage for stage in stages if step < stage.end_step), stages[-1])


def stage_until(stages: Sequence[PreparedStage], step: int) -> PreparedStage:
    """The stage of `step`, which wrote its checkpoint; the first one for step 0."""
    return stage_after(stages, step - 1)


def restore_target(stages: Sequence[PreparedStage], step: int) -> RestoreTarget:
    """What the checkpoint of `step` contains, and the shardings with which training continues."""
    written_by = stage_until(stages, step).config
    continued_by = stage_after(stages, step).step
    return RestoreTarget(
        continued_by.abstract_state,
        to_dict(written_by)["model"],
        trained_settings(written_by),
        {
            "optimizer.name": written_by.optimizer.name,
            "precision.compute": written_by.precision.compute,
        },
        without_frozen(continued_by, continued_by.abstract_state),
    )


def resume_data(stages: Sequence[PreparedStage], step: int, meta: dict) -> None:
    """Prepares the data of the stage that trains after `step`.

    Args:
      meta: of the checkpoint of `step`; empty if there is none, before the first step.
    Raises:
      UserError: the stages have changed since the checkpoint, or as `DataSource.resume`.
    """
    stage = stage_after(stages, step)
    if meta:
        now = stage_until(stages, step)
        stored = meta["stage"]
        if (now.name, now.first_step) != (stored["name"], stored["first_step"]):
            before, after = (
                f"stage {name}, which starts after step {first}" if name else "a run without stages"
                for name, first in (
                    (stored["name"], stored["first_step"]),
                    (now.name, now.first_step),
                )
            )
            raise UserError(
                f"the checkpoint of step {step} belongs to {before}, and in this config to {after}: keep the names and"
                " lengths of the stages that are done, or use a different --workdir"
            )
    if stage.first_step < step < stage.end_step:
        stage.source.resume(meta, meta["next_row"])
    elif step < stage.end_step:
        stage.source.resume({}, 0)


def _check_gate(
    stages: Sequence[PreparedStage], stage: PreparedStage, evaluation: dict, checkpoints: Path
) -> None:
    """Checks the gates of the stage before `stage`.

    Args:
      evaluation: of the checkpoint at the end of the stage before.
    Raises:
      TrainingStopped: its held-out loss is above the limit, or a score below; the message names the checkpoint.
    """
    before = stage_until(stages, stage.first_step)
    step = stage.first_step
    stopped = f"stage {stage.name} was not started; the checkpoint is {checkpoints / str(step)}"
    advice = f"train stage {before.name} longer, or continue with --config.stages.{before.name}"
    limit = before.max_eval_loss
    loss = evaluation.get(EVAL_LOSS)
    if limit and (loss is None or loss > limit):
        enough = limit if loss is None else math.ceil(100 * loss) / 100
        raise TrainingStopped(
            f"stage {before.name} ended with held-out loss {'unknown' if loss is None else format(loss, '.4f')}, and"
            f" its limit is max_eval_loss={limit:g}: {stopped}; {advice}.max_eval_loss={enough:g}"
        )
    scores = evaluation.get(SCORES, {})
    for name, least in parse_min_scores(before.min_scores, "min_scores").items():
        if scores.get(name) is None or scores[name] < least:
            score = "unknown" if scores.get(name) is None else format(scores[name], ".4g")
            raise TrainingStopped(
                f"stage {before.name} ended with the score {name} {score}, and its limit is {least:g} in"
                f" min_scores={','.join(before.min_scores)}: {stopped}; {advice}.min_scores="
            )


def _first_state(stage: PreparedStage, state: TrainState) -> TrainState:
    """The state at the start of a stage, from the state at the end of the stage before."""
    if stage.optimizer_state == "carry":
        return state
    for moments in jax.tree.leaves(state.opt_state):
        moments.delete()  # before the new ones are allocated
    return stage.step.init(state.params)._replace(
        step=state.step, rng=state.rng, scaling=state.scaling
    )


def _restored(stages: Sequence[PreparedStage], outputs: Outputs) -> tuple[TrainState, dict] | None:
    """The state, with the frozen parameters, and the meta of the latest valid checkpoint."""
    with outputs.progress.progress_bar("restoring the latest checkpoint"):
        restored = outputs.checkpoints.restore_latest(functools.partial(restore_target, stages))
    if restored is None or BASE not in restored[1]:
        return restored
    state, meta = restored
    step = int(restored[0].step)
    path = outputs.workdir / CHECKPOINTS_DIRECTORY / str(step)
    return state._replace(
        params=with_base(stage_after(stages, step).step, state.params, meta[BASE], path)
    ), meta


def first_position(stages: Sequence[PreparedStage], outputs: Outputs) -> Position:
    """The position of the latest valid checkpoint, or of step 0, with the weights of
    model.init_from if it is set.

    Raises:
      TrainingStopped: the gate of the stage before is closed.
    """
    workdir = outputs.workdir
    progress = outputs.progress
    restored = _restored(stages, outputs)
    if restored is None:
        return Position(state=_initial_state(stages[0], workdir, progress), step=0, next_sequence=0)
    state, meta = restored
    step = int(state.step)
    directory = workdir / CHECKPOINTS_DIRECTORY
    resume_data(stages, step, meta)
    stage = stage_after(stages, step)
    num_tokens = meta.get("num_tokens", num_tokens_until(stages, step))
    position = functools.partial(
        Position,
        step=step,
        num_tokens=num_tokens,
        rows=meta.get("rows", ()),
        loads=meta.get("loads", ()),
    )
    if 0 < step == stage.first_step:
        if (before := stage_until(stages, step)).missing_evaluations(step, outputs.checkpoints):
            progress.log(
                f"the checkpoint of step {step}, the end of stage {before.name}, is evaluated first"
            )
            del state, restored  # frees their memory
            restored = _restored([before], outputs)  # on the mesh of the stage before
            assert restored is not None
            return position(state=restored[0], next_sequence=meta["next_row"])
        _check_gate(stages, stage, outputs.checkpoints.evaluation(step), directory)
        progress.log(f"stage {stage.name} starts from the checkpoint of step {step}")
        return position(state=_first_state(stage, state), next_sequence=0)
    for line in resume_lines(
        stage.config, workdir, stage.source.fingerprint, step, meta, stage.name
    ):
        progress.log(line)
    if stage.config.rollouts.source:
        stage.source.train.check_digests(meta.get(ROLLOUTS, {}))
    # Rollouts are in files by step, also if the global batch size has changed.
    next_sequence = (
        step * stage.config.train.global_batch_size
        if stage.config.rollouts.source
        else meta["next_row"]
    )
    reference = meta.get(REFERENCE, {})
    return position(state=state, next_sequence=next_sequence, reference=reference)


def with_stored_start(stages: Sequence[Stage], workdir: Path) -> tuple[Stage, ...]:
    """The stages, with the meaning of posttrain.reference=auto, and with data.start_token of the
    checkpoints in `workdir`: `auto` means the same until a run ends.

    Raises:
      UserError: a setting differs from that of the checkpoints.
    """
    stages = tuple(replace(stage, config=with_reference(stage.config)) for stage in stages)
    directory = workdir / CHECKPOINTS_DIRECTORY
    asked = stages[0].config.data.start_token
    for step in reversed(committed_steps(directory)):
        with contextlib.suppress(UserError):  # another checkpoint, which cannot be read
            stored = read_meta(directory, step)["config"]["data"]["start_token"]
            break
    else:
        return stages
    if asked not in (AUTO, stored):
        raise UserError(
            f"config.data.start_token={asked!r} contradicts {stored!r} of the checkpoints in {workdir}: remove that"
            " setting, or use a different --workdir"
        )
    configs = (unchecked(x.config, {"data.start_token": stored}) for x in stages)
    return tuple(replace(stage, config=config) for stage, config in zip(stages, configs))


def _initial_state(stage: PreparedStage, workdir: Path, progress: Progress) -> TrainState:
    """The state of step 0."""
    params = None
    init_from = stage.config.model.init_from
    if init_from:
        with progress.progress_bar(f"reading {init_from}") as update:
            params, line = load_pretrained(stage.step, update)
        progress.log(line)
        if jax.process_index() == 0 and (line := keep_description(stage.config.model, workdir)):
            progress.log(line)
    with progress.progress_bar("initializing the training state"):
        return stage.step.init(params)


def num_tokens_until(stages: Sequence[PreparedStage], step: int) -> int:
    """Tokens of the first `step` optimizer steps, over all devices, padding included.

    It is for checkpoints of earlier versions, which do not have this number. An earlier run may have trained beyond the
    last stage: these steps count as steps of that stage.
    """
    ends = [*(stage.end_step for stage in stages[:-1]), step]
    return sum(
        max(0, min(step, end) - stage.first_step) * stage.config.tokens_per_step
        for stage, end in zip(stages, ends)
    )


def start_lines(stages: Sequence[PreparedStage], step_lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines that a run prints before training: each stage with its step and data, then the
    shardings.

    Args:
      step_lines: of each stage; see `run_report.step_lines`.
    """
    lines: list[str] = []
    for stage, lines_of_step in zip(stages, step_lines):
        if stage.name:
            reset = ", optimizer state reset" if stage.optimizer_state == "reset" else ""
            lines.append(
                f"STAGE {stage.name}: steps {stage.first_step + 1:,} to {stage.end_step:,}{reset}"
            )
        lines += [*lines_of_step, *data_lines(stage.config, stage.source, stage.num_steps)]
        if stage.rollout_maker is not None:
            lines += stage.rollout_maker.lines
        if stage.sampler is not None:
            lines += stage.sampler.lines
        if stage.step.model is None:
            warning = context_warning(
                stage.config.model, stage.config.data.seq_len, stage=stage.name
            )
            lines += [f"warning: {warning}"] if warning else []
        lines.append("")
    return [*lines, str(stages[0].step.sharding_table)]


_MAX_NAMES = 4  # settings in an error
# They may differ between processes.
_OWN_SETTINGS = (
    "runtime.process_id", "runtime.coordinator_address", "runtime.compilation_cache_dir", "data.cache_dir",
    "train.local_checkpoints",
)  # fmt: skip


def check_equal_settings(stages: Sequence[Stage]) -> None:
    """Checks that all processes have the settings of process 0.

    Raises:
      UserError: one has not, on every process; it names the process and the settings.
    """
    own = {
        f"{stage.name or 'config'}.{path}": str(value)
        for stage in stages
        for path, value in _settings(stage)
    }
    first = json.loads(text_of_process_0("settings", json.dumps(own)))
    names = [name for name in own | first if own.get(name) != first.get(name)]
    differences = (
        f"{name}={own.get(name)}, where process 0 has {first.get(name)}"
        for name in names[:_MAX_NAMES]
    )
    problem = f"process {jax.process_index()} has {'; '.join(differences)}" if names else ""
    if problem := problem_of_any_process("settings", problem):
        raise UserError(f"{problem}: start all processes with the same settings")


def _settings(stage: Stage) -> list[tuple[str, object]]:
    return [
        item for item in flattened(to_dict(stage.config)).items() if item[0] not in _OWN_SETTINGS
    ]


def check_same_state(stages: Sequence[Stage], steps: Sequence[TrainStep]) -> None:
    """Checks that the training states of all stages have the same arrays.

    Raises:
      UserError: they do not.
    """
    expected = jax.tree.structure(steps[0].abstract_state)
    for stage, step in zip(stages, steps):
        if jax.tree.structure(step.abstract_state) != expected:
            raise UserError(
                f"stage {stage.name} has a different training state than stage {stages[0].name}: its optimizer settings"
                " decide which arrays the state has; use equal ones"
            )


def check_weights(step: TrainStep, workdir: Path) -> None:
    """Checks the files of config.model.init_from, before data is read, if a new run in `workdir`
    will read them.

    Args:
      step: of the first stage.
    Raises:
      UserError: as `check_pretrained`.
    """
    if step.config.model.init_from and not committed_steps(workdir / CHECKPOINTS_DIRECTORY):
        check_pretrained(step)


def check_stages(stages: Sequence[PreparedStage], workdir: Path) -> None:
    """Checks that the latest checkpoint and the metrics in `workdir` are those of these stages, and that their
    parameters can be evaluated.

    Raises:
      UserError: the checkpoint is another model's, metrics.jsonl is damaged, no held-out token has a loss, or an
        evaluation of config.evals has no examples.
    """
    meta = check_latest(workdir / CHECKPOINTS_DIRECTORY, functools.partial(restore_target, stages))
    resume_data(stages, meta["step"] if meta else 0, meta or {})
    read_rows(workdir / METRICS_FILE)
    for stage in stages:
        if (evaluator := stage.evaluator) is not None and not evaluator.has_targets():
            raise UserError(
                f"no token of the {evaluator.num_sequences} held-out sequences has a loss: use other held-out data"
                " (data.eval_sources, data.eval_fraction), a longer data.seq_len, or more train.eval_sequences"
            )
        if stage.scorer is not None:
            stage.scorer.check()
