"""Checkpoints, written by Orbax: one directory of them, or a local one for each process. A kill at
any time leaves the committed checkpoints valid.

DIRECTORY/STEP/             a committed checkpoint; Orbax writes to a temporary name and renames it when it is complete
    state/                  the arrays, readable on any mesh and by any number of processes
    meta/                   JSON: the step, the next sequence ("next_row"), the corpus fingerprint, the config
    checksums/              JSON: one checksum per array, to detect corruption
DIRECTORY/STEP.unreadable/  a checkpoint that failed validation; it is never read again
DIRECTORY/evaluations.json  the held-out loss and the scores of checkpoints, which are known after they are saved
LOCAL/process-N/STEP/       a local checkpoint: the same, with the parts of the arrays that process N has
"""

import contextlib
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxlc.checkpoints.files import (
    DIGEST,
    EVALUATIONS_FILE,
    UNREADABLE,
    Damaged,
    Evaluations,
    Summary,
    committed_steps,
    digest_of,
    first_words,
    keys_as_words,
    nonfinite_param,
    policy_of,
    remove,
    summaries_of,
    words_as_keys,
)
from jaxlc.checkpoints.restore import RestoreTarget, read_arrays, read_description
from jaxlc.core import Log, UserError
from jaxlc.core.errors import WriteError
from jaxlc.core.files import full_disk_explained, full_disk_reason, write_errors_explained
from jaxlc.interrupts import call_within
from jaxlc.runtime import watchdog
from jaxlc.step.state import is_on_host

_UNNEEDED_WARNING = "Global object size logging disabled"
# A write has no deadline of its own: Orbax's, 20 minutes by the time of day, is short for a large state
# on a slow file system, and a clock may be set while it is written.
_WRITE_SECONDS = 24 * 3600
# key of the meta of a local checkpoint: the mesh and the number of processes that have written it
_PLACE = "place"


class Storage:
    """A directory that all processes share, or one of each process. Every process must call every
    method.

    In a directory of each process, which may be on a disk of its machine, it writes all parts of
    arrays that it has. So such a checkpoint is complete if each process has its directory of that
    step, and only the same mesh can read it.
    """

    def __init__(self, directory: Path, policy: Any, *, is_local: bool, finite_params: bool):
        """
        Args:
          directory: the shared one, or the local one of this process.
          policy: which checkpoints are kept, a preservation policy of Orbax.
          is_local: each process has a directory of its own.
          finite_params: see `jaxlc.checkpoints.save.Checkpoints`.
        """
        self.directory = directory
        self._is_local = is_local
        self._finite_params = finite_params
        self._policy = policy
        processes = ocp.options.MultiprocessingOptions()
        if is_local:
            logging.getLogger("absl").addFilter(_is_needed)  # has no effect the second time
            processes = ocp.options.MultiprocessingOptions(
                primary_host=None, barrier_sync_key_prefix="local"
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            cleanup_tmp_directories=True,  # incomplete checkpoints of killed runs
            lightweight_initialize=True,  # does not read old checkpoints, which may be damaged
            async_options=ocp.AsyncOptions(
                timeout_secs=_WRITE_SECONDS,
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
        arrays = ocp.type_handlers.ArrayHandler(
            primary_host=None, replica_id=None, use_replica_parallel=False
        )
        return ocp.PyTreeCheckpointHandler(
            multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None),
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (jax.Array, arrays)
            ),
            enable_pinned_host_transfer=False,
        )

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in ascending order, without one that is still
        being written.
        """
        steps = committed_steps(self.directory)
        return _common(steps) if self._is_local else steps

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step was saved, or is being saved."""
        return step in self._manager.all_steps()

    def save(self, step: int, state, meta: dict, summaries: dict[str, Summary]) -> None:
        """Copies the state from the devices and returns; the checkpoint is written in the
        background.

        Args:
          summaries: of the arrays of `state`.
        """
        if self._is_local:
            state, meta = keys_as_words(state), meta | {_PLACE: _place_of(state)}
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            meta=ocp.args.JsonSave(meta | {DIGEST: digest_of(meta)}),
            checksums=ocp.args.JsonSave(
                {name: summary.checksum for name, summary in summaries.items()}
            ),
        )
        # force: the caller decides when to save
        self._manager.save(step, args=arguments, force=True)

    def restore(self, step: int, target: RestoreTarget):
        """Returns (state, meta); the same on every process.

        It uses Orbax's handler, not its manager: the manager's restore has a barrier, at which the
        other processes would wait for a process that failed to read its part.

        Raises:
          Damaged: the checkpoint cannot be used.
          UserError: the checkpoint has a different model or other trained parameters.
        """
        directory = self.directory / str(step)
        meta, abstract_state, checksums, padded = read_description(directory, target)
        if self._is_local and meta.pop(_PLACE, None) != _place_of(abstract_state):
            raise Damaged("another mesh, or another number of processes, has written it")
        stored = keys_as_words(abstract_state) if self._is_local else abstract_state
        restore_args = ocp.checkpoint_utils.construct_restore_args(stored)
        is_leaf = lambda x: isinstance(x, ocp.RestoreArgs)  # noqa: E731
        for argument in jax.tree.leaves(restore_args, is_leaf=is_leaf):
            argument.strict = not padded  # otherwise it may truncate and pad
        arguments = ocp.args.PyTreeRestore(stored, restore_args=restore_args)
        handler = self._array_handler()
        state = read_arrays(directory, handler, arguments, checksums, padded, self._finite_params)
        return words_as_keys(state, abstract_state) if self._is_local else state, meta

    def delete_superfluous(self) -> None:
        """Process 0 deletes the complete checkpoints of a shared directory that the policy no
        longer preserves.
        """
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


def _barrier_of_savers() -> Callable[..., None]:
    """Orbax's barrier, except that a background thread whose save has failed does not wait at it.

    The other processes wait for its part of the checkpoint, so nobody would see the error before
    the barrier's timeout: not even this process, which waits for the thread.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        error = sys.exc_info()[1]
        if error is not None and threading.current_thread() is not threading.main_thread():
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return barrier


_SETTLE_SECONDS = 300.0  # below the watchdog's limit, at which other processes would end this one
_NUM_LOCAL = 2  # the last one may not be complete in each process


class Checkpoints:
    """The checkpoints of one run. Every process must call every method."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        warn: Log,
        keep_steps: Sequence[int] = (),
        keep_every: int = 0,
        keep_best: int = 0,
        finite_params: bool = True,
        local_directory: Path | None = None,
    ):
        """
        Args:
          keep: number of latest checkpoints that are kept.
          keep_steps: steps whose checkpoints are kept as well.
          keep_every: checkpoints of multiples of this step are kept as well; 0: none.
          keep_best: number of checkpoints of each stage that are kept as well, those with the lowest held-out losses.
          warn: called with one line for each damaged checkpoint that `restore_latest` skips.
          finite_params: a checkpoint with NaN or infinite parameters is not saved, and counts as damaged. False for
            custom models, whose parameters may be infinite.
          local_directory: of local checkpoints, which may be on a disk of each machine.
        """
        self._directory = Path(directory).absolute()
        self._warn = warn
        self._finite_params = finite_params
        self._evaluations = Evaluations(self._directory, keep_best, warn)
        policy = policy_of(keep, keep_steps, keep_every, self._evaluations)
        self._shared = Storage(self._directory, policy, is_local=False, finite_params=finite_params)
        self._local = None
        if local_directory is not None:
            path = local_directory.absolute() / f"process-{jax.process_index()}"
            latest = ocp.checkpoint_managers.LatestN(_NUM_LOCAL)
            self._local = Storage(path, latest, is_local=True, finite_params=finite_params)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in ascending order, without one that is still
        being written.
        """
        return sorted({*self._shared.steps(), *self._local_steps()})

    def _local_steps(self) -> list[int]:
        return [] if self._local is None else self._local.steps()

    def save(self, step: int, state, meta: dict, *, is_local: bool = False) -> bool:
        """Copies the state from the devices and returns; the checkpoint is written in the background.

        If some arrays are in host memory, it returns when the checkpoint is committed. A saved step is not saved again.
        Before, it waits for the checkpoint before.

        Args:
          state: a pytree of jax.Arrays, typed PRNG keys included. Its buffers may be donated afterwards.
          meta: JSON values, among them `meta["config"]["model"]`, which `restore_latest` compares.
          is_local: saves a local checkpoint.
        Returns:
          Whether the step was not saved before.
        Raises:
          UserError: the parameters have NaN or infinite values.
        """
        storage = self._local if is_local else self._shared
        assert storage is not None
        if self._shared.has(step) or storage.has(step):
            return False
        self.wait()
        summaries = summaries_of(state)
        if self._finite_params and (problem := nonfinite_param(summaries)):
            kept = ", ".join(map(str, self.steps())) or "none"
            raise UserError(
                f"{problem} after step {step}, so this step is not saved; checkpoints in {self._directory}: {kept};"
                " lower optimizer.learning_rate"
            )
        self._evaluations.add_checkpoint(step, meta)
        with self._explained(storage):
            storage.save(step, state, meta, summaries)
        if is_on_host(state):  # Orbax may read these buffers later, and the caller donates them
            self.wait()
        return True

    def evaluation(self, step: int) -> dict[str, Any]:
        """What is known of the checkpoint of `step`: "eval_loss", None if it was not finite, and
        "scores" by name.
        """
        return self._evaluations.of(step)

    def add_evaluation(self, step: int, **values: Any) -> None:
        """Stores what an evaluation of the parameters of `step` has found, if the step is saved.

        Raises:
          UserError: the file cannot be written.
          OSError: the disk is full.
        """
        if not any(storage.has(step) for storage in self._storages()):
            return
        try:
            self._evaluations.add(step, **values)
        except OSError as error:
            if full_disk_reason(error):  # the run names the checkpoint that is complete
                raise
            advice = f"run the same command again to evaluate step {step} and to continue"
            with write_errors_explained(self._directory / EVALUATIONS_FILE, advice):
                raise

    def wait(self) -> None:
        """Waits until the last checkpoint is committed; raises the errors of the background thread."""
        with watchdog.phase("checkpoint files", repeats=False):
            for storage in self._storages():
                with self._explained(storage):
                    storage.wait()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """After an exception in the block, waits for the checkpoint that is still being written,
        for a limited time.

        Not after Ctrl-C.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            with watchdog.phase("checkpoint files", repeats=False):
                problem = call_within(_SETTLE_SECONDS, self._problem)
            if problem is None:
                problem = f"it was not complete after {_SETTLE_SECONDS:.0f} s"
            if problem and not isinstance(error, WriteError):
                self._warn(f"warning: the last checkpoint was not saved: {problem}")
            raise

    def _problem(self) -> str:
        """Waits for the last checkpoint; returns why it was not written, "" if it was."""
        try:
            for storage in self._storages():
                storage.wait()
        except Exception as error:  # Orbax and TensorStore raise Exception, ValueError and others
            return first_words(error)
        return ""

    def close(self, *, is_done: bool = False) -> None:
        """Waits until the last checkpoint is committed.

        Args:
          is_done: the run is complete, so its local checkpoints are deleted, and those that its last evaluation has
            made superfluous.
        """
        self.wait()
        if is_done:
            self._delete_local(valid=())
            self._shared.delete_superfluous()
        for storage in self._storages():
            storage.close()

    def _storages(self) -> list[Storage]:
        return [self._shared, *([] if self._local is None else [self._local])]

    @contextlib.contextmanager
    def _explained(self, storage: Storage) -> Iterator[None]:
        """Errors of files become a WriteError; the run explains a full disk of the shared directory
        itself.

        Raises:
          WriteError: a file cannot be written.
        """
        advice = "free space there, or use --config.train.local_checkpoints=, then run the same command again to resume"
        with contextlib.ExitStack() as stack:
            if storage is not self._shared:
                stack.enter_context(full_disk_explained(storage.directory, lambda: advice))
            try:
                yield
            except (UserError, jax.errors.JaxRuntimeError):
                raise
            except (
                Exception
            ) as error:  # Orbax and TensorStore raise Exception, ValueError and others
                if full_disk_reason(error):
                    raise
                reason = (
                    error.strerror
                    if isinstance(error, OSError) and error.strerror
                    else first_words(error)
                )
                kept = ", ".join(map(str, committed_steps(storage.directory))) or "none"
                raise WriteError(
                    f"cannot write a checkpoint to {storage.directory} ({reason}); complete checkpoints there: {kept};"
                    " repair the directory, then run the same command again"
                ) from error

    def restore_latest(self, target_of: Callable[[int], RestoreTarget]):
        """Returns (state, meta) of the latest valid checkpoint, or None if there are no checkpoints.

        Later checkpoints that are damaged are renamed to STEP.unreadable, so that their steps can be saved again. Local
        checkpoints are used if they are later than the others, and deleted if they cannot be used.

        Args:
          target_of: returns the target of the checkpoint of a step.

        Raises:
          UserError: the checkpoint has a different model or other trained parameters, or there are checkpoints and
            none can be read.
        """
        local = self._local_steps()
        shared = self._shared.steps()
        damaged: dict[int, str] = {}
        for step in sorted({*local, *shared}, reverse=True):
            is_local = step not in shared
            storage = self._local if is_local else self._shared
            assert storage is not None
            try:
                restored = storage.restore(step, target_of(step))
            except Damaged as error:
                if is_local:
                    self._warn(f"the local checkpoint of step {step} is not used: {error}")
                else:
                    damaged[step] = str(error)
                continue
            for damaged_step, why in damaged.items():
                path = self._directory / str(damaged_step)
                aside = path.with_name(f"{damaged_step}{UNREADABLE}")
                if jax.process_index() == 0:
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
                self._warn(
                    f"checkpoint {path} cannot be read ({why}): renamed to {aside.name};"
                    f" training resumes from the checkpoint of step {step}"
                )
            multihost_utils.sync_global_devices("damaged checkpoints set aside")
            self._shared.reload()
            self._delete_local(valid=[other for other in local if other <= step])
            self._evaluations.forget_after(step)
            self._evaluations.add_checkpoint(step, restored[1])
            return restored
        if damaged:
            newest, problem = next(iter(damaged.items()))
            raise UserError(
                f"none of the checkpoints in {self._directory} can be read (step {newest}: {problem}):"
                " remove that directory to start from step 0, or use a different --workdir"
            )
        self._delete_local(valid=())
        self._evaluations.forget_after(-1)
        return None

    def _delete_local(self, valid: Sequence[int]) -> None:
        """Deletes the local checkpoints of other steps, such as those that some processes do not
        have.
        """
        if self._local is not None:
            self._local.delete_except(valid)
