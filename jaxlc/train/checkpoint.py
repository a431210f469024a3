"""Checkpoints that survive a kill at any moment: Orbax behind one small class.

DIRECTORY/STEP/             one committed checkpoint: Orbax writes under another name and renames when all is there
    state/                  the arrays; any mesh and any number of processes can read them
    meta/                   JSON: what else is needed to go on (next row, corpus, config, step)
    checksums/              JSON: one number an array, against silent damage
DIRECTORY/STEP.unreadable/  was found damaged; nothing reads it any more
"""

import contextlib
import gc
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxlc.core.errors import UserError
from jaxlc.train.metrics import METRICS_FILE
from jaxlc.train.state import DEVICE, is_on_host, put

CHECKPOINTS_DIRECTORY = "checkpoints"
_DIGEST = "sha256"  # key in the stored meta: of the rest of it


def prepare_workdir(workdir: str | Path) -> Path:
    """Creates `workdir` if need be, makes sure that this process can write there, and returns its absolute path.

    Raises:
      UserError: it cannot; better now than at the first checkpoint.
    """
    path = Path(workdir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / CHECKPOINTS_DIRECTORY).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path), (path / METRICS_FILE).open("a"):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror}): choose another --workdir") from error
    return path


def committed_steps(directory: Path) -> list[int]:
    """The steps of the committed checkpoints in `directory`, in ascending order; empty if it does not exist."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(path.name) for path in paths if path.name.isdigit())


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` are kept. Every process calls every method."""

    def __init__(self, directory: str | Path, *, keep: int, warn: Callable[[str], None]):
        """
        Args:
          warn: is given one sentence for each damaged checkpoint that `restore_latest` passes over.
        """
        assert keep >= 1
        self._directory, self._warn = Path(directory).absolute(), warn
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            cleanup_tmp_directories=True,  # what a killed run left half-written
            lightweight_initialize=True,  # reads no old checkpoint, which might be damaged
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, in ascending order, without one that is still being written."""
        return committed_steps(self._directory)

    def save(self, step: int, state, meta: dict) -> None:
        """Copies the state off the devices and returns; the rest happens in the background. Saves no step twice.

        With arrays in host memory it returns when the checkpoint is committed.

        Args:
          state: a pytree of jax.Arrays, typed PRNG keys among them. Its buffers may be donated right after.
          meta: JSON values; `meta["config"]["model"]` must be there, `restore_latest` compares it.
        """
        if step in self._manager.all_steps():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave(meta | {_DIGEST: _digest(meta)}),
            checksums=ocp.args.JsonSave(_checksums(state)),
        )
        self._manager.save(step, args=arguments, force=True)  # force: when to save is the caller's decision
        if is_on_host(state):  # Orbax may read it where it is, and the caller gives the buffers away
            self.wait()

    def wait(self) -> None:
        """Returns when the last checkpoint is committed; raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()  # waits, too

    def restore_latest(self, abstract_state, *, model: dict):
        """(state, meta) of the newest checkpoint that reads back whole, or None where there is none at all.

        Newer ones that are damaged are renamed to STEP.unreadable, so that their steps can be saved again.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings, on whatever mesh the state shall live.
          model: what `meta["config"]["model"]` must be; `preset` is only a name and may differ.

        Raises:
          UserError: the checkpoint is of another model, or there are checkpoints and none can be read.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            restored, problem = self._restore(step, abstract_state, model)
            if problem is None:
                self._set_aside(damaged, step)
                return restored
            damaged[step] = problem
        if not damaged:
            return None
        newest, problem = next(iter(damaged.items()))
        raise UserError(
            f"none of the checkpoints in {self._directory} can be read (step {newest}: {problem}):"
            " remove that directory to start from step 0, or choose another --workdir"
        )

    def _restore(self, step: int, abstract_state, model: dict):
        """((state, meta), None), or (None, what is wrong with the checkpoint); the same on every process.

        Reads through Orbax's handler and not its manager, whose restore has a barrier: a process that cannot read
        its part would leave the others waiting there.
        """
        directory = self._directory / str(step)
        meta, problem = _on_every_process(lambda: _read_meta(directory))
        if problem:
            return None, problem
        _check_same_model(directory, meta["config"]["model"], model)
        described, problem = _on_every_process(lambda: _read_checksums_and_shapes(directory))
        if problem:
            return None, problem
        checksums, stored_shapes = described
        padded = _check_same_shapes(directory, stored_shapes, _shapes(abstract_state), model["vocab_size"])
        arguments = ocp.args.StandardRestore(abstract_state, strict=not padded)  # not strict: may cut and pad
        state, problem = _on_every_process(
            lambda: ocp.StandardCheckpointHandler().restore(epath.Path(directory) / "state", args=arguments)
        )
        if problem:
            return None, problem
        for name, checksum in _checksums(state).items():
            if name not in padded and checksum != checksums[name]:
                return None, f"array {name} is not what was saved"
        return (state, meta), None

    def _set_aside(self, damaged: dict[int, str], restored_step: int) -> None:
        for step, problem in damaged.items():
            path = self._directory / str(step)
            aside = path.with_name(f"{step}.unreadable")
            if jax.process_index() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            self._warn(
                f"checkpoint {path} cannot be read ({problem}): it is renamed to {aside.name},"
                f" and training goes on from the one of step {restored_step}"
            )
        multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._manager.reload()


def _on_every_process(read: Callable):
    """(read(), None), or (None, what went wrong) on all processes if it went wrong on any: they go on together."""
    result, problem = None, None
    try:
        with _quiet_failures():
            result = read()
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # out of memory is not the checkpoint's fault
    except Exception as error:  # Orbax and TensorStore raise a bare Exception, ValueError and others for damaged files
        problem = _first_words(error)
    failed = multihost_utils.process_allgather(np.array(problem is not None)).reshape(-1)
    if failed.any() and problem is None:
        problem = f"process {failed.argmax()} could not read its part"
    return (None, problem) if problem else (result, None)


def _first_words(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line if len(line) <= 100 else line[:100] + ' ...'}"


@contextlib.contextmanager
def _quiet_failures() -> Iterator[None]:
    """Orbax abandons the other reads when one fails, and Python would print a traceback for each of them."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    # Nobody else's thread collects meanwhile: one that did while JAX's own callback ran has crashed (jax 0.12.0.1).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # what was abandoned is reported when it is collected
        sys.unraisablehook = hook
        if was_enabled:
            gc.enable()


def _read_meta(directory: Path) -> dict:
    meta = json.loads((directory / "meta" / "metadata").read_text())
    if meta.pop(_DIGEST, None) != _digest(meta):
        raise ValueError("meta is not what was saved")
    return meta


def _digest(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _read_checksums_and_shapes(directory: Path) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    checksums = json.loads((directory / "checksums" / "metadata").read_text())
    shapes = _shapes(ocp.StandardCheckpointHandler().metadata(epath.Path(directory) / "state").tree)
    assert checksums.keys() == shapes.keys()
    return checksums, shapes


def _check_same_model(directory: Path, stored: dict, wanted: dict) -> None:
    for name in sorted((stored.keys() | wanted.keys()) - {"preset"}):
        if stored.get(name) != wanted.get(name):
            raise UserError(
                f"checkpoint {directory} is of another model: {name} is {stored.get(name)} there and"
                f" {wanted.get(name)} in this config: choose another --workdir"
            )


def _check_same_shapes(directory: Path, stored: dict, wanted: dict, vocab_size: int) -> set[str]:
    """The names of the arrays that differ in vocabulary padding alone, which depends on the mesh.

    The padding's values have no effect, so such an array may be cut, or filled with zeros.
    """
    padded = set()
    for name in sorted(stored.keys() | wanted.keys()):
        there, here = stored.get(name), wanted.get(name)
        if there == here:
            continue
        is_same_rank = there is not None and here is not None and len(there) == len(here)
        if not is_same_rank or any(a != b and min(a, b) < vocab_size for a, b in zip(there, here)):
            raise UserError(
                f"checkpoint {directory} is of another model, optimizer or precision: array {name} has shape {there}"
                f" there and {here} in this config: choose another --workdir"
            )
        padded.add(name)
    return padded


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    """The arrays' shapes as stored: a PRNG key is stored as its words."""
    words = {name: jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for name, x in _named_leaves(tree)}
    return {name: tuple(x.shape) for name, x in words.items()}


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named_leaves(tree) -> list[tuple[str, jax.Array]]:
    """(name, leaf) pairs; the name is the path, the same for a tree and for Orbax's picture of it in dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _checksums(state) -> dict[str, int]:
    """One number an array, from its bits: TensorStore notices a file that is too short, but not wrong bytes in it.

    Arrays from host memory come to the device for it, one at a time.
    """
    names, leaves = [name for name, _ in _named_leaves(state)], jax.tree.leaves(state)
    groups = [[leaf] for leaf in leaves] if is_on_host(state) else [leaves]
    sums = np.concatenate([np.asarray(_sums_of_bits(group)) for group in groups])
    return dict(zip(names, sums.tolist()))


@jax.jit
def _sums_of_bits(arrays: list[jax.Array]) -> jax.Array:
    """uint32 [number of arrays]: bits read as unsigned integers, added modulo 2^32, in which the order of summation,
    and so the sharding, makes no difference."""
    return jnp.stack([_bits(put(x, DEVICE)).astype(jnp.uint32).sum(dtype=jnp.uint32) for x in arrays])


def _bits(x: jax.Array) -> jax.Array:
    if _is_key(x):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
