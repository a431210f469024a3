"""The files of checkpoints: which are committed, their metadata, and names, shapes, dtypes and
checksums of their arrays.

`jaxlc.checkpoints.save` describes the directories.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxlc.config import Config
from jaxlc.core.errors import UserError
from jaxlc.core.files import fingerprint_of, read_json_file
from jaxlc.runtime.watchdog import Program, wait_for_processes
from jaxlc.step.state import DEVICE, is_on_host, to_memory_kind


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays as stored: a PRNG key is stored as its words."""
    words = {
        name: jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        for name, x in named_leaves(tree)
    }
    return {name: tuple(x.shape) for name, x in words.items()}


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
    names, leaves = [name for name, _ in named_leaves(state)], jax.tree.leaves(state)
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
    if _is_key(x):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")


CHECKPOINTS_DIRECTORY = "checkpoints"
# In the names of directories that are no checkpoints: incomplete ones of Orbax, and ones that a run
# could not read.
TEMPORARY, UNREADABLE = ".orbax-checkpoint-tmp", ".unreadable"
_next_hook = sys.__unraisablehook__  # in a command, the hook of `jaxlc.core.interrupts`
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


def stored_dtypes(checkpoint: Path) -> dict[str, np.dtype]:
    """Name -> dtype of the arrays of a checkpoint directory; names as "params/embedding"."""
    tree = ocp.StandardCheckpointHandler().metadata(epath.Path(checkpoint) / "state").tree
    return {name: np.dtype(array.dtype) for name, array in named_leaves(tree)}


def unreadable(directory: Path, step: int, problem: str) -> UserError:
    """The error for a checkpoint that cannot be read; it lists the other checkpoints of the
    directory.
    """
    others = [other for other in committed_steps(directory) if other != step]
    return UserError(
        f"the checkpoint of step {step} in {directory} cannot be read ({problem});"
        f" other checkpoints: {', '.join(map(str, others)) or 'none'}"
    )


def on_every_process(read: Callable):
    """Returns (read(), None), or (None, the problem) on all processes if it failed on any of them."""
    result, problem = None, None
    with quiet_failures():
        try:
            result = read()
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # such as out of memory: the checkpoint is not damaged
        except Exception as error:  # Orbax and TensorStore raise Exception, ValueError and others for damaged files
            problem = first_words(error)
        # only then, because it takes a second in a process with many objects
        if problem is not None:
            collect_abandoned_reads()
    wait_for_processes("checkpoint read")  # the times to read parts of it differ
    failed = multihost_utils.process_allgather(np.array(problem is not None)).reshape(-1)
    if failed.any() and problem is None:
        problem = f"process {failed.argmax()} could not read its part"
    return (None, problem) if problem else (result, None)


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
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
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
        _next_hook, sys.unraisablehook = sys.unraisablehook, _report_unraisable


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _report_unraisable(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        _next_hook(unraisable)


def collect_abandoned_reads(seconds: float = 10.0) -> None:
    """Collects the reads that Orbax abandoned; it waits for TensorStore, which keeps each of them
    until it has ended.

    Such a read is an asyncio task that is not done although its event loop is closed. After
    `seconds` the rest is left to later collections.
    """
    deadline = time.monotonic() + seconds
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
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def read_checksums_and_shapes(directory: Path) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Name -> checksum, and name -> shape, of all arrays of one checkpoint."""
    checksums = read_json_file(directory / "checksums" / "metadata")
    shapes = shapes_of(
        ocp.StandardCheckpointHandler().metadata(epath.Path(directory) / "state").tree
    )
    assert checksums.keys() == shapes.keys()
    return checksums, shapes
