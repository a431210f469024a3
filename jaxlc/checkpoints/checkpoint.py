"""Checkpoints, written by Orbax. A kill at any time leaves the committed checkpoints valid.

DIRECTORY/STEP/             a committed checkpoint; Orbax writes to a temporary name and renames it when it is complete
    state/                  the arrays, readable on any mesh and by any number of processes
    meta/                   JSON: the step, the next sequence ("next_row"), the corpus fingerprint, the config
    checksums/              JSON: one checksum per array, to detect corruption
DIRECTORY/STEP.unreadable/  a checkpoint that failed validation; it is never read again
"""

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxlc.checkpoints.checkpoint_files import (
    BASE,
    DIGEST,
    UNREADABLE,
    committed_steps,
    digest_of,
    on_every_process,
    read_checksums_and_shapes,
    read_valid_meta,
    unreadable,
)
from jaxlc.checkpoints.checksums import nonfinite_param, shapes_of, summaries_of
from jaxlc.checkpoints.retention import BestLosses, policy_of
from jaxlc.config import ModelConfig
from jaxlc.config.models.model_schema import LATER_SETTINGS
from jaxlc.config.values import defaults_of, flattened
from jaxlc.core.errors import UserError
from jaxlc.runtime import watchdog
from jaxlc.step.state import is_on_host


def restore_params(
    directory: Path,
    step: int,
    abstract_params,
    *,
    vocab_size: int,
    only_these: bool = False,
    finite_params: bool = True,
):
    """The parameters in the checkpoint of `step`, with the shardings of `abstract_params`; reads nothing else.

    Args:
      only_these: `abstract_params` is a part of the tree of all parameters.
      finite_params: see `Checkpoints`.
    Raises:
      UserError: the checkpoint cannot be read, or its parameters have other shapes, or NaN or infinite values.
    """
    path, target = directory / str(step), {"params": abstract_params}
    described, problem = on_every_process(lambda: read_checksums_and_shapes(path))
    if problem:
        raise unreadable(directory, step, problem)
    checksums, stored_shapes = described
    target_shapes = shapes_of(target)
    stored_shapes = {
        name: shape
        for name, shape in stored_shapes.items()
        if name.startswith("params/") and (name in target_shapes or not only_these)
    }
    if stored_shapes.keys() != target_shapes.keys():
        raise UserError(
            f"checkpoint {path} has other parameters than this model: pass model= as in the run, or none if it had none"
        )
    padded = _check_same_shapes(path, stored_shapes, target_shapes, vocab_size)
    arguments = ocp.args.PyTreeRestore(
        target,
        restore_args=jax.tree.map(
            lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=not padded),
            target,
        ),
        partial_restore=True,
    )
    restored, problem = _read_arrays(path, ocp.PyTreeCheckpointHandler(), arguments, checksums, padded, finite_params)
    if problem:
        raise unreadable(directory, step, problem)
    return restored["params"]


class RestoreTarget(NamedTuple):
    """What a checkpoint is restored to."""

    abstract_state: Any  # pytree of jax.ShapeDtypeStruct with the target shardings, on any mesh
    # Required value of `meta["config"]["model"]`; `preset` and `init_from` are only names and may differ.
    model: dict
    trained: dict = {}  # required values of the settings that select the trained parameters, by their paths
    without_frozen: Any = None  # as abstract_state, for checkpoints without frozen parameters, whose meta has BASE


class Checkpoints:
    """The checkpoints of one run. Every process must call every method."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        warn: Callable[[str], None],
        keep_steps: Sequence[int] = (),
        keep_every: int = 0,
        keep_best: int = 0,
        finite_params: bool = True,
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
        """
        self._directory, self._warn, self._finite_params = Path(directory).absolute(), warn, finite_params
        self._best = BestLosses(keep_best, self._directory)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy_of(keep, keep_steps, keep_every, self._best),
            cleanup_tmp_directories=True,  # incomplete checkpoints of killed runs
            lightweight_initialize=True,  # does not read old checkpoints, which may be damaged
            async_options=ocp.AsyncOptions(barrier_sync_fn=_barrier_of_savers()),
        )
        # Without pinned staging: Orbax would copy every array to JAX's pool of pinned host memory first, which the step
        # needs and which keeps its size. `StandardSave` writes the same files, but lacks this option.
        handlers = dict(
            state=ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=False),
            meta=ocp.JsonCheckpointHandler(),
            checksums=ocp.JsonCheckpointHandler(),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, in ascending order, without one that is still being written."""
        return committed_steps(self._directory)

    def save(self, step: int, state, meta: dict) -> None:
        """Copies the state from the devices and returns; the checkpoint is written in the background.

        If some arrays are in host memory, it returns when the checkpoint is committed. A saved step is not saved again.

        Args:
          state: a pytree of jax.Arrays, typed PRNG keys included. Its buffers may be donated afterwards.
          meta: JSON values, among them `meta["config"]["model"]`, which `restore_latest` compares.
        Raises:
          UserError: the parameters have NaN or infinite values.
        """
        if step in self._manager.all_steps():
            return
        self.wait()  # for the checkpoint before
        summaries = summaries_of(state)
        if self._finite_params and (problem := nonfinite_param(summaries)):
            self.wait()
            kept = ", ".join(map(str, self.steps())) or "none"
            raise UserError(
                f"{problem} after step {step}, so this step is not saved; checkpoints in {self._directory}: {kept};"
                " lower optimizer.learning_rate"
            )
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            meta=ocp.args.JsonSave(meta | {DIGEST: digest_of(meta)}),
            checksums=ocp.args.JsonSave({name: summary.checksum for name, summary in summaries.items()}),
        )
        self._best.add(step, meta)
        self._manager.save(step, args=arguments, force=True)  # force: the caller decides when to save
        if is_on_host(state):  # Orbax may read these buffers later, and the caller donates them
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is committed; raises the errors of the background thread."""
        with watchdog.phase("checkpoint files", repeats=False):
            self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def restore_latest(self, target_of: Callable[[int], RestoreTarget]):
        """Returns (state, meta) of the latest valid checkpoint, or None if there are no checkpoints.

        Later checkpoints that are damaged are renamed to STEP.unreadable, so that their steps can be saved again.

        Args:
          target_of: returns the target of the checkpoint of a step.

        Raises:
          UserError: the checkpoint has a different model or other trained parameters, or there are checkpoints and
            none can be read.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            restored, problem = self._restore(step, *target_of(step))
            if problem is None:
                self._set_aside(damaged, step)
                return restored
            damaged[step] = problem
        if not damaged:
            return None
        newest, problem = next(iter(damaged.items()))
        raise UserError(
            f"none of the checkpoints in {self._directory} can be read (step {newest}: {problem}):"
            " remove that directory to start from step 0, or use a different --workdir"
        )

    def _restore(self, step: int, abstract_state, model: dict, trained: dict, without_frozen):
        """Returns ((state, meta), None), or (None, the problem of the checkpoint); the same on every process.

        It uses Orbax's handler, not its manager: the manager's restore has a barrier, at which the other processes
        would wait for a process that failed to read its part.
        """
        directory = self._directory / str(step)
        meta, problem = on_every_process(lambda: read_valid_meta(directory))
        if problem:
            return None, problem
        shape = {f"model.{name}": value for name, value in model.items() if name not in ("preset", "init_from")}
        defaults = defaults_of(ModelConfig)
        earlier = {f"model.{name}": defaults[name] for name in LATER_SETTINGS}
        kinds = {"model.kinds": meta["config"]["model"].get("kinds", {})}  # not flattened
        _check_same_settings(directory, earlier | flattened(meta["config"]) | kinds, shape | trained)
        if BASE in meta:
            abstract_state = without_frozen
        described, problem = on_every_process(lambda: read_checksums_and_shapes(directory))
        if problem:
            return None, problem
        checksums, stored_shapes = described
        padded = _check_same_shapes(directory, stored_shapes, shapes_of(abstract_state), model["vocab_size"])
        arguments = ocp.args.StandardRestore(abstract_state, strict=not padded)  # not strict: may truncate and pad
        handler = ocp.StandardCheckpointHandler()
        state, problem = _read_arrays(directory, handler, arguments, checksums, padded, self._finite_params)
        return (None, problem) if problem else ((state, meta), None)

    def _set_aside(self, damaged: dict[int, str], restored_step: int) -> None:
        for step, problem in damaged.items():
            path = self._directory / str(step)
            aside = path.with_name(f"{step}{UNREADABLE}")
            if jax.process_index() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            self._warn(
                f"checkpoint {path} cannot be read ({problem}): renamed to {aside.name};"
                f" training resumes from the checkpoint of step {restored_step}"
            )
        multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._manager.reload()


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


def _read_arrays(
    directory: Path, handler: Any, arguments: Any, checksums: dict[str, int], padded: set[str], finite_params: bool
):
    """Returns (arrays, None), or (None, the problem); the same on every process."""
    arrays, problem = on_every_process(lambda: handler.restore(epath.Path(directory) / "state", args=arguments))
    if problem:
        return None, problem
    summaries = summaries_of(arrays)
    for name, summary in summaries.items():
        if name not in padded and summary.checksum != checksums[name]:
            return None, f"array {name} has the wrong checksum"
    problem = nonfinite_param(summaries) if finite_params else None
    return (None, problem) if problem else (arrays, None)


def _check_same_settings(directory: Path, stored: dict, required: dict) -> None:
    for path, value in required.items():
        if stored.get(path) != value:
            raise UserError(
                f"checkpoint {directory} has config.{path}={stored.get(path)}, and this config has {value}; use a"
                " different --workdir"
            )


def _check_same_shapes(directory: Path, stored: dict, current: dict, vocab_size: int) -> set[str]:
    """Returns the names of the arrays that differ only in vocabulary padding, which depends on the mesh.

    The values of the padding have no effect, so such an array may be truncated, or padded with zeros.
    """
    padded = set()
    for name in sorted(stored.keys() | current.keys()):
        old, new = stored.get(name), current.get(name)
        if old == new:
            continue
        is_same_rank = old is not None and new is not None and len(old) == len(new)
        if not is_same_rank or any(a != b and min(a, b) < vocab_size for a, b in zip(old, new)):
            raise UserError(
                f"checkpoint {directory} has a different model, optimizer or precision: array {name} has shape {old}"
                f" there and {new} in this config; use a different --workdir"
            )
        padded.add(name)
    return padded
