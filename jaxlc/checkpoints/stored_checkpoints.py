"""The checkpoints in a directory, as `jaxlc checkpoint` lists, verifies and deletes them, and their
evaluations. No accelerator is needed.

A checkpoint is written before its parameters are evaluated, since an evaluation may fail. So
held-out losses and scores are in a file of their own, DIRECTORY/evaluations.json: {STEP:
{"eval_loss": LOSS, "scores": {NAME: SCORE}}}. They say which checkpoints are the best. Those are
kept, the latest, every n-th, and those at stage boundaries.

`jaxlc.checkpoints.save` describes the directories.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxlc.checkpoints.files import (
    TEMPORARY,
    UNREADABLE,
    collect_abandoned_reads,
    committed_steps,
    first_words,
    named_leaves,
    nonfinite_param,
    quiet_failures,
    read_checksums_and_shapes,
    read_valid_meta,
    stored_summary,
)
from jaxlc.core.errors import UserError
from jaxlc.core.files import LockHeld, locked, read_json_file, replacing
from jaxlc.runtime.watchdog import text_of_process_0

EVALUATIONS_FILE = "evaluations.json"  # in the directory of the checkpoints
EVAL_LOSS, SCORES, HELDOUT_REWARD = "eval_loss", "scores", "heldout_reward"
# key of the stored meta: the names of the evaluations that follow the checkpoint
EVALUATED = "evaluated"


def read_evaluations(directory: Path) -> dict[int, dict[str, Any]]:
    """The evaluations of the checkpoints in `directory` by their steps.

    Raises:
      ValueError: the file is damaged.
      OSError: the file cannot be read.
    """
    path = directory / EVALUATIONS_FILE
    stored = read_json_file(path) if path.exists() else {}
    if not isinstance(stored, dict) or not all(
        isinstance(values, dict) for values in stored.values()
    ):
        raise ValueError(f"{path} has another form")
    return {int(step): values for step, values in stored.items()}


class Evaluations:
    """What is known of the parameters of each checkpoint; equal on all processes, and process 0
    writes the file.

    It is also a policy of Orbax, which preserves the checkpoints with the lowest held-out losses of
    each stage, and those that wait for their evaluation.
    """

    def __init__(self, directory: Path, num_best: int, warn: Callable[[str], None]):
        """
        Args:
          directory: of the checkpoints.
          num_best: in each stage; losses of different stages are of different sequences.
          warn: called with one line if the file is damaged.
        """
        self._directory, self._num_best = directory, num_best
        self._stages: dict[int, str] = {}
        self._expected: dict[int, set[str]] = {}  # names of the values that follow a checkpoint
        text = text_of_process_0("evaluations", self._text(warn))
        self._values = {int(step): values for step, values in json.loads(text).items()}
        for step in committed_steps(directory) if num_best else []:
            try:
                self.add_checkpoint(step, read_valid_meta(directory / str(step)))
            except (OSError, ValueError):  # damaged
                continue

    def _text(self, warn: Callable[[str], None]) -> str:
        if jax.process_index() == 0:
            try:
                return json.dumps(read_evaluations(self._directory))
            except (OSError, ValueError) as error:
                warn(f"warning: the evaluations of the checkpoints are not known: {error}")
        return "{}"

    def of(self, step: int) -> dict[str, Any]:
        """The known values of a checkpoint; a loss is None if it was not finite."""
        return self._values.get(step, {})

    def add_checkpoint(self, step: int, meta: dict) -> None:
        """Adds a checkpoint that was saved with this meta."""
        self._stages[step] = meta.get("stage", {}).get("name", "")
        self._expected[step] = set(meta.get(EVALUATED, ()))

    def add(self, step: int, **values: Any) -> None:
        """Adds values of a checkpoint and replaces the file.

        Raises:
          OSError: the file cannot be written.
        """
        self._values[step] = self.of(step) | values
        self._write()

    def forget_after(self, step: int) -> None:
        """Removes the values of later steps, which are trained again."""
        later = [other for other in self._values if other > step]
        for other in later:
            del self._values[other]
        if later:
            self._write()

    def _write(self) -> None:
        if jax.process_index() == 0:
            with replacing(self._directory / EVALUATIONS_FILE) as out:
                out.write(json.dumps(self._values).encode())

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Called by Orbax with the steps of all checkpoints."""
        kept, losses = set[int](), dict[str, list[tuple[float, int]]]()
        for step in (checkpoint.step for checkpoint in checkpoints) if self._num_best else ():
            values = self.of(step)
            if (loss := values.get(EVAL_LOSS)) is not None:
                losses.setdefault(self._stages.get(step, ""), []).append((loss, step))
            if self._expected.get(step, set()) - values.keys():
                kept.add(step)
        for in_stage in losses.values():
            kept |= {step for _, step in sorted(in_stage)[: self._num_best]}
        return [checkpoint.step in kept for checkpoint in checkpoints]


def policy_of(
    keep: int, keep_steps: Sequence[int], keep_every: int, evaluations: Evaluations
) -> Any:
    """The policy with the arguments of `Checkpoints`."""
    policies = ocp.checkpoint_managers
    kept: list[Any] = [policies.LatestN(keep), policies.CustomSteps(list(keep_steps)), evaluations]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    return policies.AnyPreservationPolicy(kept)


LOCK_FILE = "run.lock"  # in the workdir, while a run trains in it


class StoredCheckpoint(NamedTuple):
    """What the files of a committed checkpoint say, without its arrays."""

    step: int
    stage: str
    num_bytes: int
    written: str  # local time
    eval_loss: float | None  # None: its parameters were not evaluated
    problem: str  # "": its metadata are valid


def stored_checkpoints(directory: Path) -> list[StoredCheckpoint]:
    """The committed checkpoints in ascending order of their steps."""
    try:
        evaluations = read_evaluations(directory)
    except (OSError, ValueError):  # damaged: a run that resumes says so
        evaluations = {}
    return [
        _stored(directory / str(step), step, evaluations) for step in committed_steps(directory)
    ]


def _stored(path: Path, step: int, evaluations: dict[int, dict[str, Any]]) -> StoredCheckpoint:
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    meta: dict[str, Any] = {}
    try:
        meta = read_valid_meta(path)
        problem = ""
        read_checksums_and_shapes(path)
    except MemoryError:
        raise
    except Exception as error:  # as in `_problem_of`
        problem = first_words(error)
    stage = meta.get("stage", {}).get("name", "")
    eval_loss = evaluations.get(step, {}).get(EVAL_LOSS)
    return StoredCheckpoint(step, stage, num_bytes, written, eval_loss, problem)


def leftovers(directory: Path) -> list[Path]:
    """Incomplete checkpoints of killed runs, and checkpoints that a run could not read."""
    patterns = (f"*{TEMPORARY}*", f"*{UNREADABLE}")
    return sorted({path for pattern in patterns for path in directory.glob(pattern)})


def problem_of(path: Path) -> str | None:
    """Reads all files of a checkpoint; returns why it is damaged, None if it is valid.

    Arrays are read into host memory, one at a time.
    """
    with quiet_failures():
        problem = _problem_of(path)
        if problem is not None:
            collect_abandoned_reads()
    return problem


def _problem_of(path: Path) -> str | None:
    try:
        read_valid_meta(path)
        checksums, shapes = read_checksums_and_shapes(path)
        summaries = {}
        for name, array in arrays_of(path):
            if array.shape != shapes[name]:
                return f"array {name} has shape {array.shape}, and {shapes[name]} in its metadata"
            summaries[name] = stored_summary(array)
            if summaries[name].checksum != checksums[name]:
                return f"array {name} has the wrong checksum"
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # Orbax and TensorStore raise Exception, ValueError and others for damaged files
        return first_words(error)
    return nonfinite_param(summaries)


def arrays_of(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The names and values of all arrays, one at a time."""
    handler, state = ocp.PyTreeCheckpointHandler(), checkpoint / "state"
    tree = handler.metadata(epath.Path(state)).tree
    treedef = jax.tree.structure(tree)
    for number, (name, _) in enumerate(named_leaves(tree)):
        selected = [ocp.PLACEHOLDER] * treedef.num_leaves
        selected[number] = 0
        restore_args = jax.tree.unflatten(
            treedef, [ocp.RestoreArgs(restore_type=np.ndarray) for _ in range(treedef.num_leaves)]
        )
        arguments = ocp.args.PyTreeRestore(
            jax.tree.unflatten(treedef, selected), restore_args=restore_args
        )
        restored = handler.restore(epath.Path(state), args=arguments)
        yield name, np.asarray(jax.tree.leaves(restored)[number])


@contextlib.contextmanager
def no_run_in(workdir: Path) -> Iterator[None]:
    """Holds the lock of the workdir, so that no run trains in it.

    Raises:
      UserError: a run does.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(workdir / LOCK_FILE, lambda holder: None, timeout_seconds=0))
        except LockHeld as error:
            raise UserError(f"{error} trains in {workdir}: stop it first") from None
        yield


def remove(path: Path) -> None:
    """Deletes a checkpoint, or what is left of one. It first gets a temporary name: a kill leaves
    no damaged one.
    """
    temporary = path
    if path.name.isdigit():
        temporary = path.rename(path.with_name(f"{path.name}{TEMPORARY}-removed"))
    shutil.rmtree(temporary)
