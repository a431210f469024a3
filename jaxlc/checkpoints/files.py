"""The files of checkpoints: which are committed, their metadata, and names, shapes, dtypes and
checksums of their arrays.

`jaxlc.checkpoints.save` describes the directories.

A checkpoint is written before its parameters are evaluated, since an evaluation may fail. So held-out losses and scores
are in a file of their own, DIRECTORY/evaluations.json: {STEP: {"eval_loss": LOSS, "scores": {NAME: SCORE}}}. They say
which checkpoints are the best. Those are kept, the latest, every n-th, and those at stage boundaries.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxlc.config import Config
from jaxlc.core import Log, UserError
from jaxlc.core.files import fingerprint_of, locked_at_once, read_json_file, replacing, sha256_of
from jaxlc.runtime.watchdog import Program, on_process_0, problem_of_any_process
from jaxlc.step.state import DEVICE, is_on_host, to_memory_kind


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays as stored: a PRNG key is stored as its words."""
    return {name: tuple(x.shape) for name, x in named_leaves(keys_as_words(tree))}


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def keys_as_words(tree):
    """The tree with the words of PRNG keys in their place; of arrays or their shapes."""

    def words_of(x):
        if not _is_key(x):
            return x
        if isinstance(x, jax.Array):
            return jax.random.key_data(x)
        words = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=x.sharding)

    return jax.tree.map(words_of, tree)


def words_as_keys(tree, like):
    """The tree that `keys_as_words` has changed, with the PRNG keys of `like`."""

    def key_of(words, x):
        if not _is_key(x):
            return words
        key = jax.random.wrap_key_data(words)
        assert key.dtype == x.dtype  # both are keys of JAX's default implementation
        return key

    return jax.tree.map(key_of, tree, like)


def named_leaves(tree) -> list[tuple[str, jax.Array]]:
    """(name, leaf) pairs; the name is the path, equal for a tree and for Orbax's copy of it as
    nested dicts.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


class Summary(NamedTuple):
    """What one pass over an array computes."""

    checksum: int  # TensorStore detects truncated files, but not wrong bytes
    is_finite: bool  # no value is NaN or infinite


def summaries_of(state) -> dict[str, Summary]:
    """Name -> summary of each array.

    Arrays in host memory are copied to the device for this, one at a time.
    """
    names = [name for name, _ in named_leaves(state)]
    leaves = jax.tree.leaves(keys_as_words(state))
    groups = [[leaf] for leaf in leaves] if is_on_host(state) else [leaves]
    words = np.concatenate([np.asarray(_words(group)) for group in groups])
    return {
        name: Summary(checksum, bool(is_finite))
        for name, (checksum, is_finite) in zip(names, words.tolist())
    }


def stored_summary(array: np.ndarray) -> Summary:
    """The summary of an array of a checkpoint, a PRNG key as its words. Needs host memory for one
    copy of it.
    """
    is_floating = jnp.issubdtype(array.dtype, jnp.floating)
    is_finite = not is_floating or bool(np.isfinite(array).all())
    bits = (
        array if array.dtype == np.bool_ else array.view(f"uint{8 * min(array.dtype.itemsize, 4)}")
    )
    return Summary(int(bits.sum(dtype=np.uint64) % 2**32), is_finite)


def checksums_of(state) -> dict[str, int]:
    """Name -> checksum of each array."""
    return {name: summary.checksum for name, summary in summaries_of(state).items()}


def model_fingerprint(config: Config, params) -> str:
    """Equal for equal parameters and settings of a model, on any mesh and from any directory. It
    reads no file.
    """
    settings = dataclasses.replace(config.model, init_from="", preset="")
    return fingerprint_of((sorted(checksums_of(params).items()), settings, config.lora))


def nonfinite_param(summaries: dict[str, Summary]) -> str | None:
    """The problem of the first parameter that is not finite; None: all are finite."""
    names = (
        name
        for name, summary in summaries.items()
        if name.startswith("params/") and not summary.is_finite
    )
    return next((f"array {name} has NaN or infinite values" for name in names), None)


@functools.partial(Program, "checksums")
@jax.jit
def _words(arrays: list[jax.Array]) -> jax.Array:
    """Checksum, and 1 if it is finite, of each array: uint32 [arrays, 2].

    The checksum is the sum of the bits as unsigned integers modulo 2^32. It does not depend on the
    order of summation, hence not on the sharding.
    """

    def words(x: jax.Array) -> jax.Array:
        checksum = _bits(x).astype(jnp.uint32).sum(dtype=jnp.uint32)
        is_finite = jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else True
        return jnp.stack([checksum, jnp.uint32(is_finite)])

    return jnp.stack([words(to_memory_kind(x, DEVICE)) for x in arrays])


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")


CHECKPOINTS_DIRECTORY = "checkpoints"
# In the names of directories that are no checkpoints: incomplete ones of Orbax, and ones that a run
# could not read.
TEMPORARY = ".orbax-checkpoint-tmp"
UNREADABLE = ".unreadable"
_next_hook = sys.__unraisablehook__  # in a command, the hook of `jaxlc.interrupts`
DIGEST = "sha256"  # key of the stored meta: the digest of its other entries
# key of the stored meta: identifies the frozen parameters, which the checkpoint does not contain
BASE = "base"


def committed_steps(directory: Path) -> list[int]:
    """The steps of the committed checkpoints in `directory`, in ascending order; empty if it does
    not exist.
    """
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(path.name) for path in paths if path.name.isdigit())


def existing_step(directory: Path, step: int | None) -> int:
    """`step`, or the latest one if it is None.

    Raises:
      UserError: `directory` has no committed checkpoint of that step, or none at all.
    """
    steps = committed_steps(directory)
    if not directory.parent.exists():
        raise UserError(f"{directory.parent} does not exist: pass the workdir of a run")
    if not steps:
        raise UserError(
            f"no checkpoint in {directory}: pass the workdir of a run, which has a directory checkpoints/"
        )
    if step is not None and step not in steps:
        raise UserError(
            f"no checkpoint of step {step} in {directory}; existing steps: {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def read_meta(directory: Path, step: int) -> dict:
    """The meta of the checkpoint of `step`; its config is as `jaxlc.config.to_dict` returns it.

    Raises:
      UserError: the checkpoint cannot be read.
    """
    try:
        return read_valid_meta(directory / str(step))
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(directory, step, first_words(error)) from error


def unreadable(directory: Path, step: int, problem: str) -> UserError:
    """The error for a checkpoint that cannot be read; it lists the other checkpoints of the
    directory.
    """
    others = [other for other in committed_steps(directory) if other != step]
    return UserError(
        f"the checkpoint of step {step} in {directory} cannot be read ({problem});"
        f" other checkpoints: {', '.join(map(str, others)) or 'none'}"
    )


class Damaged(Exception):
    """A checkpoint cannot be read or used; the message says why."""


def on_every_process(read: Callable):
    """Returns read().

    Raises:
      Damaged: on all processes, if it failed on any of them.
    """
    result = None
    problem = ""
    with quiet_failures():
        try:
            result = read()
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # such as out of memory: the checkpoint is not damaged
        except Exception as error:  # Orbax and TensorStore raise Exception, ValueError and others for damaged files
            problem = first_words(error)
        # only then, because it takes a second in a process with many objects
        if problem:
            collect_abandoned_reads()
    # no collective, whose timeout is short: the times to read parts of it differ
    if problem := problem_of_any_process("checkpoint read", problem):
        raise Damaged(problem)
    return result


def stored_dtypes(checkpoint: Path) -> dict[str, np.dtype]:
    """Name -> dtype of the arrays of a checkpoint directory; names as "params/embedding".

    Raises:
      UserError: it cannot be read, such as if a run deletes it.
    """
    handler = ocp.StandardCheckpointHandler()
    try:
        tree = on_every_process(lambda: handler.metadata(epath.Path(checkpoint) / "state").tree)
    except Damaged as error:
        raise unreadable(checkpoint.parent, int(checkpoint.name), str(error)) from error
    return {name: np.dtype(array.dtype) for name, array in named_leaves(tree)}


def first_words(error: Exception) -> str:
    """The type of an error, and the start of its text."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line if len(line) <= 100 else line[:100] + ' ...'}"


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Suppresses the tracebacks of reads that Orbax abandons when another read fails.

    Python reports an abandoned read through `sys.unraisablehook`, when TensorStore ends it and when
    it is garbage collected. So the hook is replaced until these reads are collected. Automatic
    collection is off meanwhile, because it could run in any thread: in one that was inside a JAX
    callback it crashed the process (JAX 0.12.0.1).
    """
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if was_enabled:
            gc.enable()


def quiet_saves() -> None:
    """Suppresses the tracebacks of Orbax's threads about a save that fails, until the process ends.

    `Checkpoints` raises the error itself. The threads log it as well, and asyncio does so when it
    collects tasks. Writes that end later find a closed event loop, which TensorStore reports to
    `sys.unraisablehook`.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_has_no_traceback)  # has no effect the second time
    global _next_hook
    if sys.unraisablehook is not _report_unraisable:
        _next_hook = sys.unraisablehook
        sys.unraisablehook = _report_unraisable


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _report_unraisable(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        _next_hook(unraisable)


def collect_abandoned_reads() -> None:
    """Collects the reads that Orbax abandoned; it waits for TensorStore, which keeps each of them
    until it has ended.

    Such a read is an asyncio task that is not done although its event loop is closed. After 10 s
    the rest is left to later collections.
    """
    deadline = time.monotonic() + 10.0
    gc.collect()
    while _has_abandoned_tasks() and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()


def _has_abandoned_tasks() -> bool:
    # `type`, because isinstance would evaluate the lazy proxies that some modules keep
    tasks = (candidate for candidate in gc.get_objects() if type(candidate) is asyncio.Task)
    return any(not task.done() and task.get_loop().is_closed() for task in tasks)


def read_valid_meta(directory: Path) -> dict:
    """The meta of one checkpoint.

    Raises:
      ValueError: it is not JSON, or has the wrong digest.
      OSError: the file cannot be read.
    """
    meta = read_json_file(directory / "meta" / "metadata")
    if not isinstance(meta, dict):
        raise ValueError("meta is no JSON object")
    if meta.pop(DIGEST, None) != digest_of(meta):
        raise ValueError("meta has the wrong checksum")
    return meta


def digest_of(meta: dict) -> str:
    """The SHA-256 digest of a meta without the entry `DIGEST`."""
    return sha256_of(json.dumps(meta, sort_keys=True))


def read_checksums_and_shapes(directory: Path) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Name -> checksum, and name -> shape, of all arrays of one checkpoint."""
    checksums = read_json_file(directory / "checksums" / "metadata")
    shapes = shapes_of(
        ocp.StandardCheckpointHandler().metadata(epath.Path(directory) / "state").tree
    )
    assert checksums.keys() == shapes.keys()
    return checksums, shapes


EVALUATIONS_FILE = "evaluations.json"  # in the directory of the checkpoints
EVAL_LOSS = "eval_loss"
SCORES = "scores"
HELDOUT_REWARD = "heldout_reward"
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

    def __init__(self, directory: Path, num_best: int, warn: Log):
        """
        Args:
          directory: of the checkpoints.
          num_best: in each stage; losses of different stages are of different sequences.
          warn: called with one line if the file is damaged.
        """
        self._directory = directory
        self._num_best = num_best
        self._stages: dict[int, str] = {}
        self._expected: dict[int, set[str]] = {}  # names of the values that follow a checkpoint
        self._values = on_process_0(lambda: self._stored(warn))
        for step in committed_steps(directory) if num_best else []:
            try:
                self.add_checkpoint(step, read_valid_meta(directory / str(step)))
            except (OSError, ValueError):  # damaged
                continue

    def _stored(self, warn: Log) -> dict[int, dict[str, Any]]:
        try:
            return read_evaluations(self._directory)
        except (OSError, ValueError) as error:
            warn(f"warning: the evaluations of the checkpoints are not known: {error}")
            return {}

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
        kept = set[int]()
        losses = dict[str, list[tuple[float, int]]]()
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
    handler = ocp.PyTreeCheckpointHandler()
    state = checkpoint / "state"
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


def no_run_in(workdir: Path) -> contextlib.AbstractContextManager[None]:
    """Holds the lock of the workdir, so that no run trains in it.

    Raises:
      UserError: a run does.
    """
    problem = f" trains in {workdir}: stop it first"
    return locked_at_once(workdir / LOCK_FILE, problem)


def remove(path: Path) -> None:
    """Deletes a checkpoint, or what is left of one. It first gets a temporary name: a kill leaves
    no damaged one.
    """
    temporary = path
    if path.name.isdigit():
        temporary = path.rename(path.with_name(f"{path.name}{TEMPORARY}-removed"))
    shutil.rmtree(temporary)
