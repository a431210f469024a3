"""The checkpoints in a directory, as `jaxlc checkpoint` lists, verifies and deletes them. No accelerator is needed.

`jaxlc.checkpoints.checkpoint` describes the directories.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxlc.checkpoints.checkpoint_files import (
    TEMPORARY,
    UNREADABLE,
    collect_abandoned_reads,
    committed_steps,
    first_words,
    quiet_failures,
    read_checksums_and_shapes,
    read_valid_meta,
)
from jaxlc.checkpoints.checksums import named_leaves, nonfinite_param, stored_summary
from jaxlc.checkpoints.retention import EVAL_LOSS, read_evaluations, stored_evaluation
from jaxlc.core.errors import UserError
from jaxlc.core.lock import LockHeld, locked

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
    return [_stored(directory / str(step), step, evaluations) for step in committed_steps(directory)]


def _stored(path: Path, step: int, evaluations: dict[int, dict[str, Any]]) -> StoredCheckpoint:
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    meta: dict[str, Any] = {}
    try:
        meta, problem = read_valid_meta(path), ""
        read_checksums_and_shapes(path)
    except MemoryError:
        raise
    except Exception as error:  # as in `_problem_of`
        problem = first_words(error)
    stage, evaluation = meta.get("stage", {}).get("name", ""), stored_evaluation(meta) | evaluations.get(step, {})
    return StoredCheckpoint(step, stage, num_bytes, written, evaluation.get(EVAL_LOSS), problem)


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
    except Exception as error:  # Orbax and TensorStore raise Exception, ValueError and others for damaged files
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
        arguments = ocp.args.PyTreeRestore(jax.tree.unflatten(treedef, selected), restore_args=restore_args)
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
    """Deletes a checkpoint, or what is left of one. It first gets a temporary name: a kill leaves no damaged one."""
    temporary = path
    if path.name.isdigit():
        temporary = path.rename(path.with_name(f"{path.name}{TEMPORARY}-removed"))
    shutil.rmtree(temporary)
