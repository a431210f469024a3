"""A stage while it is trained: evaluates and saves its state, and writes the report at the end of
the run. Only one run at a time writes to a workdir.
"""

import contextlib
import errno
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxlc.checkpoints.files import (
    CHECKPOINTS_DIRECTORY,
    EVAL_LOSS,
    EVALUATED,
    HELDOUT_REWARD,
    LOCK_FILE,
    SCORES,
    TEMPORARY,
    committed_steps,
    quiet_saves,
)
from jaxlc.checkpoints.pretrained import base_meta, checkpoint_part
from jaxlc.config import to_dict
from jaxlc.core import Log, UserError, reason_of
from jaxlc.core.errors import WriteError
from jaxlc.core.files import (
    full_disk_explained,
    local_path,
    locked,
    make_writable,
    write_errors_explained,
)
from jaxlc.generation.generate_text import SAMPLES
from jaxlc.posttrain.rollouts import export_for_rollouts, write_rollouts
from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import on_process_0, problem_of_any_process, wait_for_processes
from jaxlc.train.callbacks import Action, Position, Stop, TrainingStopped
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.reports.metrics import METRICS_FILE, MetricsLog, finite, read_rows
from jaxlc.train.reports.run_report import write_report
from jaxlc.train.result import Result
from jaxlc.train.stage_setup import REFERENCE, ROLLOUTS, Outputs, PreparedStage


@dataclass(frozen=True, kw_only=True)
class StageRun(Outputs):
    """A prepared stage and the outputs of the run; none of them changes from step to step."""

    stage: PreparedStage
    metrics: MetricsLog

    @property
    def saves(self) -> tuple[Action, ...]:
        """They run before everything else that follows a step, since that may fail."""
        train = self.stage.config.train
        save = Action(train.checkpoint_every_steps, self.save, at_signal=True)
        if not train.local_checkpoints:
            return (save,)
        return save, Action(train.local_checkpoint_every_steps, self.save_locally)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The others, in their order."""
        config = self.stage.config
        evals = config.train.eval_every_steps
        exports = config.rollouts.export_every_steps
        measures = config.runtime.straggler_every_steps
        samples = config.train.sample_every_steps
        actions = [
            (True, Action(evals, self.evaluate, at_start=True, at_resume=True)),
            (True, Action(evals, self.reward, at_start=True, at_resume=True)),
            (True, Action(config.evals.every_steps, self.score, at_start=True, at_resume=True)),
            (samples, Action(samples, self.sample, at_resume=True)),
            (measures, Action(measures, self.compare_processes)),
            (exports, Action(exports, self.export, at_resume=True)),
            (config.rollouts.source, Action(1, self.make_rollouts, at_start=True, at_resume=True)),
        ]
        return tuple(action for is_used, action in actions if is_used)

    def compare_processes(self, position: Position) -> Position:
        """Measures the devices, and reports processes that are slow; every process calls it at the
        same step.
        """
        self.timings.add(**self.stragglers.measure(position.step))
        return position

    def export(self, position: Position) -> Position:
        """Exports the checkpoint of the step for the program that makes the rollouts, and calls its
        command.
        """
        self.checkpoints.wait()
        with watchdog.phase("export", repeats=False), self.progress.progress_bar("exporting"):
            on_process_0(
                lambda: export_for_rollouts(self.workdir, position.step, self.stage.config)
            )
        return position

    def make_rollouts(self, position: Position) -> Position:
        """Makes the rollouts of the next step, if the policy makes them; otherwise training waits
        for their file.
        """
        maker = self.stage.rollout_maker
        sequences = self.stage.source.train
        step = position.step + 1
        if self.callbacks.stop_requested:
            return position
        if maker is not None and step <= self.stage.end_step:
            with watchdog.phase("generation"), self.progress.progress_bar("making rollouts"):
                maker(position.state.params, step, sequences.path(step))
        sequences.need(step)
        return position

    def evaluate(self, position: Position) -> Position:
        """Computes the held-out loss and writes it to metrics.jsonl, if there are held-out
        sequences and it is not known."""
        if self.stage.evaluator is None:
            return position
        if EVAL_LOSS in self.checkpoints.evaluation(position.step):
            self._stop_early(position.step)  # a run that has stopped early and is started again
            return position
        with watchdog.phase("evaluation"), self.progress.progress_bar("evaluating") as update:
            evaluation = self.stage.evaluator(position.state.params, update)
        self.metrics.write(step=position.step, eval_loss=evaluation.loss)
        self.checkpoints.add_evaluation(position.step, **{EVAL_LOSS: finite(evaluation.loss)})
        self.callbacks("on_evaluation", position.step, evaluation)
        self._stop_early(position.step, finite(evaluation.loss))
        return replace(position, evaluation=evaluation)

    @functools.cached_property
    def _eval_losses(self) -> dict[int, float]:
        """Held-out losses of the stage by step. metrics.jsonl grows, so it is read once; `_stop_early`
        adds the later ones.
        """
        rows = read_rows(self.workdir / METRICS_FILE)
        return {
            row["step"]: row[EVAL_LOSS]
            for row in rows
            if row["step"] > self.stage.first_step and row.get(EVAL_LOSS) is not None
        }

    def _stop_early(self, step: int, loss: float | None = None) -> None:
        """Asks for the end of the run if the last train.early_stop_evals evaluations of the stage
        have no lower held-out loss than one before them.

        Args:
          loss: of `step`, if it was just evaluated and is finite.
        """
        patience = self.stage.config.train.early_stop_evals
        if not patience or self.callbacks.stop_requested:
            return

        def is_over() -> bool:
            losses = self._eval_losses
            if loss is not None and step > self.stage.first_step:
                losses[step] = loss
            best = min(losses, key=losses.__getitem__, default=step)
            return sum(other > best for other in losses) >= patience

        if on_process_0(is_over):
            self.progress.log(
                f"stopping: {patience} evaluations without a new lowest held-out loss (train.early_stop_evals);"
                " to train on, increase it, or set it to 0"
            )
            self.callbacks.stop_requested = True

    def sample(self, position: Position) -> Position:
        """Generates texts for train.sample_prompts, prints them and writes them to
        WORKDIR/samples, unless they exist. A failure on any process ends sampling on all of them,
        and training goes on.
        """
        sampler = self.stage.sampler
        step = position.step
        path = self.workdir / SAMPLES / f"{step}.jsonl"
        if on_process_0(path.is_file) or sampler.problem:
            return position
        texts = dict[str, str]()
        problem = ""
        with watchdog.phase(SAMPLES), self.progress.progress_bar("generating samples"):
            try:
                texts = sampler(position.state.params, self.workdir)
                if jax.process_index() == 0:
                    records = [dict(prompt=prompt, text=texts[prompt]) for prompt in texts]
                    write_rollouts(records, path)
            except Exception as error:
                problem = (
                    f"{type(error).__name__} on process {jax.process_index()}: {reason_of(error)}"
                )
        sampler.problem = problem_of_any_process(SAMPLES, problem)
        if sampler.problem:
            self.progress.log(f"warning: no samples from step {step} on ({sampler.problem})")
            return position
        for prompt, text in texts.items():
            self.progress.log(f"sample of step {step}: {prompt}⟦{text}⟧")
        self.metrics.write_elsewhere(step, {SAMPLES: texts})
        return position

    def reward(self, position: Position) -> Position:
        """Writes means over the answers to rollouts.eval_prompts to metrics.jsonl, if there are any
        and they are not known."""
        step = position.step
        stage = self.stage
        prompts = self.stage.config.rollouts.eval_prompts
        if HELDOUT_REWARD in self.checkpoints.evaluation(step) or not prompts:
            return position
        path = stage.source.train.path(step)
        path = path.with_suffix(f".heldout{path.suffix}")
        with watchdog.phase("generation"), self.progress.progress_bar("evaluating rewards"):
            means = stage.rollout_maker.heldout(position.state.params, step, path)
        self.metrics.write(step=step, **{f"{HELDOUT_REWARD}/{x}": means[x] for x in means})
        self.checkpoints.add_evaluation(step, **{HELDOUT_REWARD: means["mean"]})
        return position

    def score(self, position: Position) -> Position:
        """Computes the scores of config.evals and writes them to metrics.jsonl, if there are tasks
        and they are not known."""
        if self.stage.scorer is None or SCORES in self.checkpoints.evaluation(position.step):
            return position
        with watchdog.phase("scores"), self.progress.progress_bar("evaluating tasks"):
            scores = self.stage.scorer(
                position.state.params, position.step, self.workdir, self.progress.log
            )
        for score in scores:
            name = f"scores/{score.name}"
            others = {
                f"{name}/{key}": value
                for key, value in score._asdict().items()
                if key not in ("name", "score")
            }
            self.metrics.write(step=position.step, **{name: score.score}, **others)
        self.checkpoints.add_evaluation(
            position.step, **{SCORES: {x.name: finite(x.score) for x in scores}}
        )
        return position

    def save(self, position: Position) -> Position:
        """Saves a checkpoint, which is written in the background.

        Raises:
          TrainingStopped: the directory of checkpoints has disappeared; a save would wait for the other processes.
        """
        if not (directory := self.workdir / CHECKPOINTS_DIRECTORY).is_dir():
            raise TrainingStopped(
                f"the directory {directory} has disappeared, so step {position.step} is not saved; put it back, then"
                " run the same command again to resume"
            )
        if self._save(position, self.stage.config.train.checkpoint_every_steps):
            self.callbacks("on_checkpoint", position.step, directory / str(position.step))
        return position

    def save_locally(self, position: Position) -> Position:
        """Saves a local checkpoint, unless the step has one in the workdir."""
        every = self.stage.config.train.local_checkpoint_every_steps
        self._save(position, every, is_local=True)
        return position

    def _save(self, position: Position, every: int, is_local: bool = False) -> bool:
        """Saves a checkpoint of those of every `every` steps; False: the step has one."""
        with watchdog.phase("checkpoint"), self.timings.saving():
            part = checkpoint_part(self.stage.step, position.state)
            meta = self._meta(position, every)
            return self.checkpoints.save(position.step, part, meta, is_local=is_local)

    def _meta(self, position: Position, every: int) -> dict[str, Any]:
        """The meta of a checkpoint, which is saved every `every` steps."""
        stage = self.stage
        return dict(
            step=position.step,
            next_row=position.next_sequence,  # the stored name is part of the checkpoint format
            num_tokens=position.num_tokens,
            corpus=stage.source.fingerprint,
            config=to_dict(stage.config),
            stage=dict(name=stage.name, first_step=stage.first_step),
            rows=[{name: finite(value) for name, value in row.items()} for row in position.rows],
            loads=position.loads,
            **{REFERENCE: position.reference, EVALUATED: stage.evaluations_due(position.step)},
            **base_meta(stage.step, position.state.params),
            **self._rollouts_meta(position.step, every),
            **stage.source.position(position.next_sequence),
        )

    def _rollouts_meta(self, step: int, every: int) -> dict[str, dict[str, str]]:
        """The digests of the files of rollouts that the steps since the periodic checkpoint before
        used.
        """
        if not self.stage.config.rollouts.source:
            return {}
        before = (step - 1) // every * every if every else 0
        return {ROLLOUTS: self.stage.source.train.digests(range(before + 1, step + 1))}

    def finish(self, end: Position, stop: Stop) -> Result:
        """Writes the plots and prints the summary, unless a signal stopped the run; waits for the
        checkpoints.
        """
        evaluation = end.evaluation
        evaluator = self.stage.evaluator
        if stop is Stop.DONE:
            if evaluator is not None:
                if evaluation is None:
                    with self.progress.progress_bar("evaluating") as update:
                        evaluation = evaluator(end.state.params, update)
                with self.progress.progress_bar("evaluating with limited context") as update:
                    evaluation = evaluator.with_context_gain(end.state.params, evaluation, update)
            if jax.process_index() == 0:
                times = self.progress.waiting_share, self.progress.seconds_to_first_step
                self.progress.log(
                    write_report(self.workdir, end.step, end.num_tokens, evaluation, *times)
                )
        self.checkpoints.close(is_done=stop is Stop.DONE)
        self.metrics.close()
        return Result(
            step=end.step,
            exit_status=stop.value,
            params=end.state.params,
            tokenizer=self.stage.source.tokenizer,
            workdir=self.workdir,
            rows=read_rows(self.workdir / METRICS_FILE),
            train_step=self.stage.step,
            evaluate=functools.partial(self._evaluate_again, end),
            evaluation=evaluation if stop is Stop.DONE else None,
        )

    def _evaluate_again(self, position: Position) -> Evaluation:
        """`Result.evaluate`: after the run, when metrics.jsonl is closed."""
        evaluator = self.stage.evaluator
        if evaluator is None:
            raise UserError(
                "the run has no held-out sequences: pass eval_batches to jaxlc.train.run"
            )
        return evaluator.with_context_gain(position.state.params, evaluator(position.state.params))


# A run that was asked to stop may still save its last checkpoint, and an NFS server keeps the locks of a machine that
# has lost its power for 90 s.
LOCK_SECONDS = 100.0
_BARRIER_SECONDS = 300  # by which a process may reach a barrier later than the others


@contextlib.contextmanager
def open_workdir(workdir: str | Path, log: Log) -> Iterator[Path]:
    """Prepares `workdir` for a run, and locks it until the end of the block; returns its absolute path.

    Process 0 holds the lock, and the other processes wait for it, so that none of them touches the checkpoints of
    another run.

    Args:
      log: prints a line.
    Raises:
      UserError: the workdir is not writable, another run trains in it, or its disk becomes full in the block.
    """
    path = prepare_workdir(workdir)
    with contextlib.ExitStack() as stack:
        quiet_saves()
        stack.enter_context(_lost_files_explained(path))
        stack.enter_context(full_disk_explained(path, lambda: _kept(path)))
        if jax.process_index() == 0:
            stack.callback(_remove_empty, path)
            lock = locked(
                path / LOCK_FILE,
                lambda holder: log(
                    f"waiting up to {LOCK_SECONDS:.0f} s for {holder}, which trains in {path}"
                ),
                timeout_seconds=LOCK_SECONDS,
                on_unsupported=lambda: log(
                    f"warning: the file system of {path} has no locks: do not start a second run in this workdir"
                ),
                problem=f" trains in {path}: wait for its end or stop it, or use a different --workdir",
            )
            stack.enter_context(lock)
            # while it is locked
            stack.callback(_remove_empty, path / CHECKPOINTS_DIRECTORY, path / METRICS_FILE)
        wait_for_processes("workdir locked", int(LOCK_SECONDS) + _BARRIER_SECONDS)
        yield path


def _remove_empty(*paths: Path) -> None:
    """Removes what `prepare_workdir` has made for a start that was refused: empty files and
    directories.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # such as a directory that is not empty
            if path.is_dir():
                path.rmdir()
            elif not path.stat().st_size:
                path.unlink()


def prepare_workdir(workdir: str | Path) -> Path:
    """Creates `workdir` if it does not exist, checks that it is writable, and returns its absolute
    path.

    Raises:
      UserError: it is not writable, or a file in it is a symbolic link.
    """
    path = local_path(workdir).absolute()
    advice = "use a different --workdir"
    make_writable(path, advice)
    links = sorted(
        entry.name for entry in path.iterdir() if entry.is_symlink() and not entry.is_dir()
    )
    # of a workdir that somebody else has written: the run would write to a file elsewhere
    if links:
        raise UserError(
            f"{path / links[0]} is a symbolic link, so a run would write elsewhere: remove it, or {advice}"
        )
    with write_errors_explained(path, advice):
        (path / CHECKPOINTS_DIRECTORY).mkdir(exist_ok=True)
        (path / METRICS_FILE).open("a").close()
    return path


@contextlib.contextmanager
def _lost_files_explained(path: Path) -> Iterator[None]:
    """Raises an OSError about a file of the workdir as a WriteError: it was renamed or removed during
    the run, or its file system is read-only.
    """
    try:
        yield
    except OSError as error:
        name = str(error.filename or (path if error.errno == errno.EROFS else ""))
        if not Path(name).is_relative_to(path):
            raise
        raise WriteError(
            f"cannot use {name} ({reason_of(error)}): {_kept(path, f'repair {path}')}"
        ) from error


def _kept(path: Path, advice: str = "free space") -> str:
    """What is kept after an error of writing; deletes the checkpoints that are incomplete."""
    checkpoints = path / CHECKPOINTS_DIRECTORY
    for incomplete in checkpoints.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(incomplete, ignore_errors=True)
    steps = committed_steps(checkpoints)
    saved = (
        f"the checkpoint of step {steps[-1]} is complete" if steps else "there is no checkpoint yet"
    )
    return f"{saved}; {advice}, then run the same command again{' to resume' if steps else ''}"
