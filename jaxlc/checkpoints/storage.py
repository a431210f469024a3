"""One directory of checkpoints: writes and reads them with Orbax.

`jaxlc.checkpoints.checkpoint` describes the files.
"""

import logging
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxlc.checkpoints.checkpoint_files import (
    DIGEST,
    committed_steps,
    digest_of,
)
from jaxlc.checkpoints.checksums import Summary, keys_as_words, words_as_keys
from jaxlc.checkpoints.reading import RestoreTarget, read_arrays, read_description
from jaxlc.checkpoints.stored_checkpoints import remove

_UNNEEDED_WARNING = "Global object size logging disabled"
_PLACE = "place"  # key of the meta of a local checkpoint: the mesh and the number of processes that have written it


class Storage:
    """A directory that all processes share, or one of each process. Every process must call every method.

    In a directory of each process, which may be on a disk of its machine, it writes all parts of arrays that it has. So
    such a checkpoint is complete if each process has its directory of that step, and only the same mesh can read it.
    """

    def __init__(self, directory: Path, policy: Any, *, is_local: bool, finite_params: bool):
        """
        Args:
          directory: the shared one, or that of this process.
          policy: which checkpoints are kept, a preservation policy of Orbax.
          is_local: each process has a directory of its own.
          finite_params: see `jaxlc.checkpoints.checkpoint.Checkpoints`.
        """
        self.directory, self._is_local, self._finite_params = directory, is_local, finite_params
        self._policy = policy
        processes = ocp.options.MultiprocessingOptions()
        if is_local:
            logging.getLogger("absl").addFilter(_is_needed)  # has no effect the second time
            processes = ocp.options.MultiprocessingOptions(primary_host=None, barrier_sync_key_prefix="local")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            cleanup_tmp_directories=True,  # incomplete checkpoints of killed runs
            lightweight_initialize=True,  # does not read old checkpoints, which may be damaged
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=_barrier_of_savers(),
                # Orbax's signal that a directory exists does not say in which process.
                create_directories_asynchronously=not is_local,
            ),
            multiprocessing_options=processes,
        )
        handlers = dict(
            state=self._array_handler(),
            meta=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
            checksums=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        )
        self._manager = ocp.CheckpointManager(directory, options=options, item_handlers=handlers)

    def _array_handler(self) -> ocp.PyTreeCheckpointHandler:
        # Without pinned staging: Orbax would copy every array to JAX's pool of pinned host memory first, which the step
        # needs and which keeps its size. `StandardSave` writes the same files, but lacks this option.
        if not self._is_local:
            return ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
        arrays = ocp.type_handlers.ArrayHandler(primary_host=None, replica_id=None, use_replica_parallel=False)
        return ocp.PyTreeCheckpointHandler(
            multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None),
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
            enable_pinned_host_transfer=False,
        )

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in ascending order, without one that is still being written."""
        steps = committed_steps(self.directory)
        return _common(steps) if self._is_local else steps

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step was saved, or is being saved."""
        return step in self._manager.all_steps()

    def save(self, step: int, state, meta: dict, summaries: dict[str, Summary]) -> None:
        """Copies the state from the devices and returns; the checkpoint is written in the background.

        Args:
          summaries: of the arrays of `state`.
        """
        if self._is_local:
            state, meta = keys_as_words(state), meta | {_PLACE: _place_of(state)}
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            meta=ocp.args.JsonSave(meta | {DIGEST: digest_of(meta)}),
            checksums=ocp.args.JsonSave({name: summary.checksum for name, summary in summaries.items()}),
        )
        self._manager.save(step, args=arguments, force=True)  # force: the caller decides when to save

    def restore(self, step: int, target: RestoreTarget):
        """Returns ((state, meta), None), or (None, the problem of the checkpoint); the same on every process.

        It uses Orbax's handler, not its manager: the manager's restore has a barrier, at which the other processes
        would wait for a process that failed to read its part.

        Raises:
          UserError: the checkpoint has a different model or other trained parameters.
        """
        directory = self.directory / str(step)
        described, problem = read_description(directory, target)
        if problem:
            return None, problem
        meta, abstract_state, checksums, padded = described
        if self._is_local and meta.pop(_PLACE, None) != _place_of(abstract_state):
            return None, "another mesh, or another number of processes, has written it"
        stored = keys_as_words(abstract_state) if self._is_local else abstract_state
        arguments = ocp.args.PyTreeRestore(stored, restore_args=_restore_args(stored, strict=not padded))
        handler = self._array_handler()
        state, problem = read_arrays(directory, handler, arguments, checksums, padded, self._finite_params)
        if problem:
            return None, problem
        return (words_as_keys(state, abstract_state) if self._is_local else state, meta), None

    def delete_superfluous(self) -> None:
        """Process 0 deletes the complete checkpoints of a shared directory that the policy no longer preserves."""
        infos = [SimpleNamespace(step=step) for step in self._manager.all_steps()]
        kept = self._policy.should_preserve(infos, context=None)
        for info, is_kept in zip(infos, kept):
            if not is_kept and jax.process_index() == 0:
                remove(self.directory / str(info.step))

    def delete_except(self, steps: Sequence[int]) -> None:
        """Deletes the checkpoints of other steps in the directory of this process."""
        for step in set(committed_steps(self.directory)) - set(steps):
            shutil.rmtree(self.directory / str(step), ignore_errors=True)
        self.reload()

    def reload(self) -> None:
        """To be called after the directory has changed."""
        self._manager.reload()

    def wait(self) -> None:
        """Waits until the last checkpoint is committed; raises the errors of the background thread."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _is_needed(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_UNNEEDED_WARNING)


def _common(steps: Sequence[int]) -> list[int]:
    """The steps that all processes pass, in ascending order."""
    if jax.process_count() == 1:
        return sorted(steps)
    longest = int(np.max(multihost_utils.process_allgather(np.array(len(steps)))))
    if not longest:
        return []
    padded = np.full(longest, -1)
    padded[: len(steps)] = steps
    rows = multihost_utils.process_allgather(padded)
    return sorted(set.intersection(*(set(row.tolist()) for row in rows)) - {-1})


def _place_of(state) -> dict[str, Any]:
    """JSON values: the mesh of the arrays, or of their shapes, and the number of processes."""
    meshes = (getattr(leaf.sharding, "mesh", None) for leaf in jax.tree.leaves(state))
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return dict(processes=jax.process_count(), mesh={} if mesh is None else dict(mesh.shape))


def _restore_args(abstract_state, *, strict: bool):
    """Orbax's arguments for the shardings of `abstract_state`. Not strict: it may truncate and pad."""
    arguments = ocp.checkpoint_utils.construct_restore_args(abstract_state)
    for argument in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, ocp.RestoreArgs)):
        argument.strict = strict
    return arguments


def _barrier_of_savers() -> Callable[..., None]:
    """Orbax's barrier, except that a background thread whose save has failed does not wait at it.

    The other processes wait for its part of the checkpoint, so nobody would see the error before the barrier's timeout
    of 20 minutes: not even this process, which waits for the thread.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        error = sys.exc_info()[1]
        if error is not None and threading.current_thread() is not threading.main_thread():
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return barrier
