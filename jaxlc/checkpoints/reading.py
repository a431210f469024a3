"""Reads the arrays of a checkpoint, on any mesh, and compares them with their checksums."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxlc.checkpoints.checkpoint_files import on_every_process, read_checksums_and_shapes, unreadable
from jaxlc.checkpoints.checksums import nonfinite_param, shapes_of, summaries_of
from jaxlc.core.errors import UserError


class RestoreTarget(NamedTuple):
    """What a checkpoint is restored to."""

    abstract_state: Any  # pytree of jax.ShapeDtypeStruct with the target shardings, on any mesh
    # Required value of `meta["config"]["model"]`; `preset` and `init_from` are only names and may differ.
    model: dict
    trained: dict = {}  # required values of the settings that select the trained parameters, by their paths
    without_frozen: Any = None  # as abstract_state, for checkpoints without frozen parameters, whose meta has BASE


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
      finite_params: see `jaxlc.checkpoints.checkpoint.Checkpoints`.
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
    padded = check_same_shapes(path, stored_shapes, target_shapes, vocab_size)
    arguments = ocp.args.PyTreeRestore(
        target,
        restore_args=jax.tree.map(
            lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=not padded),
            target,
        ),
        partial_restore=True,
    )
    restored, problem = read_arrays(path, ocp.PyTreeCheckpointHandler(), arguments, checksums, padded, finite_params)
    if problem:
        raise unreadable(directory, step, problem)
    return restored["params"]


def read_arrays(
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


def check_same_settings(directory: Path, stored: dict, required: dict) -> None:
    for path, value in required.items():
        if stored.get(path) != value:
            raise UserError(
                f"checkpoint {directory} has config.{path}={stored.get(path)}, and this config has {value}; use a"
                " different --workdir"
            )


def check_same_shapes(directory: Path, stored: dict, current: dict, vocab_size: int) -> set[str]:
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
