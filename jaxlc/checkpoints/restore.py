"""Reads the arrays of a checkpoint, on any mesh or to host memory a part at a time, and compares
them with their checksums.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import SingleDeviceSharding

from jaxlc.checkpoints.files import (
    BASE,
    CHECKPOINTS_DIRECTORY,
    Damaged,
    committed_steps,
    nonfinite_param,
    on_every_process,
    read_checksums_and_shapes,
    read_valid_meta,
    shapes_of,
    stored_dtypes,
    summaries_of,
    unreadable,
)
from jaxlc.config import Config
from jaxlc.config.flops import quantized_matrices
from jaxlc.config.other_names import renamed
from jaxlc.config.values import flattened
from jaxlc.core import UserError
from jaxlc.hf.load import paths_of
from jaxlc.models import decoder
from jaxlc.models.quantized import FORMATS, Quantized


class RestoreTarget(NamedTuple):
    """What a checkpoint is restored to."""

    abstract_state: Any  # pytree of jax.ShapeDtypeStruct with the target shardings, on any mesh
    # Required value of `meta["config"]["model"]`; `preset` and `init_from` are only names and may
    # differ.
    model: dict
    # required values of the settings that select the trained parameters, by their paths
    trained: dict = {}
    # Settings that decide which arrays the state has, by their paths. They may differ where the arrays do not.
    array_settings: dict = {}
    # as abstract_state, for checkpoints without frozen parameters, whose meta has BASE
    without_frozen: Any = None


class Description(NamedTuple):
    """What the files of a checkpoint say without its arrays."""

    meta: dict
    abstract_state: Any  # the part of the target that the checkpoint contains
    checksums: dict[str, int]
    padded: set[str]  # arrays that differ from the target in vocabulary padding


def read_description(directory: Path, target: RestoreTarget) -> Description:
    """The same on every process.

    Raises:
      Damaged: the checkpoint cannot be read.
      UserError: the checkpoint has a different model or other trained parameters.
    """
    model = target.model
    abstract_state = target.abstract_state
    meta = on_every_process(lambda: read_valid_meta(directory))
    stored = meta["config"] | {"model": renamed("model", meta["config"]["model"])}
    shape = _by_path(model)
    names = ("model.preset", "model.init_from")
    required = {path: value for path, value in shape.items() if path not in names} | target.trained
    settings = flattened(stored) | _by_path(stored["model"])
    _check_same_settings(directory, settings, required)
    if BASE in meta:
        abstract_state = target.without_frozen
    checksums, stored_shapes = on_every_process(lambda: read_checksums_and_shapes(directory))
    shapes = shapes_of(abstract_state)
    try:
        padded = check_same_shapes(directory, stored_shapes, shapes, model["vocab_size"])
    except UserError:  # the name of a setting is clearer than the name of an array
        known = {path: value for path, value in target.array_settings.items() if path in settings}
        _check_same_settings(directory, settings, known)
        raise
    return Description(meta, abstract_state, checksums, padded)


def _by_path(model: dict) -> dict:
    """The stored settings of a model by their paths; those of kinds in one dictionary."""
    others = {name: value for name, value in model.items() if name != "kinds"}
    return flattened({"model": others}) | {"model.kinds": model.get("kinds", {})}


def check_latest(directory: Path, target_of: Callable[[int], RestoreTarget]) -> dict | None:
    """The meta of the latest checkpoint that is not damaged, as far as its arrays need not be read;
    None: there is none.

    Args:
      target_of: returns the target of the checkpoint of a step.
    Raises:
      UserError: as `read_description`.
    """
    for step in reversed(committed_steps(directory)):
        with contextlib.suppress(Damaged):
            return read_description(directory / str(step), target_of(step)).meta
    return None


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
      finite_params: see `jaxlc.checkpoints.save.Checkpoints`.
    Raises:
      UserError: the checkpoint cannot be read, or its parameters have other shapes, or NaN or infinite values.
    """
    path = directory / str(step)
    target = {"params": abstract_params}
    try:
        checksums, stored_shapes = on_every_process(lambda: read_checksums_and_shapes(path))
        target_shapes = shapes_of(target)
        stored_shapes = {
            name: shape
            for name, shape in stored_shapes.items()
            if name.startswith("params/") and (name in target_shapes or not only_these)
        }
        if stored_shapes.keys() != target_shapes.keys():
            raise UserError(
                f"checkpoint {path} has other parameters than this model: pass model= as in the run, or none if it had"
                " none"
            )
        padded = check_same_shapes(path, stored_shapes, target_shapes, vocab_size)
        arguments = ocp.args.PyTreeRestore(
            target,
            restore_args=jax.tree.map(
                lambda x: ocp.ArrayRestoreArgs(
                    sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=not padded
                ),
                target,
            ),
            partial_restore=True,
        )
        restored = read_arrays(
            path, ocp.PyTreeCheckpointHandler(), arguments, checksums, padded, finite_params
        )
    except Damaged as error:
        raise unreadable(directory, step, str(error)) from error
    return restored["params"]


def read_arrays(
    directory: Path,
    handler: Any,
    arguments: Any,
    checksums: dict[str, int],
    padded: set[str],
    finite_params: bool,
):
    """Returns the arrays; the same on every process.

    Raises:
      Damaged: they cannot be read, or have wrong checksums, or parameters with NaN or infinite values.
    """
    arrays = on_every_process(
        lambda: handler.restore(epath.Path(directory) / "state", args=arguments)
    )
    summaries = summaries_of(arrays)
    for name, summary in summaries.items():
        if name not in padded and summary.checksum != checksums[name]:
            raise Damaged(f"array {name} has the wrong checksum")
    if finite_params and (problem := nonfinite_param(summaries)):
        raise Damaged(problem)
    return arrays


def _check_same_settings(directory: Path, stored: dict, required: dict) -> None:
    for path, value in required.items():
        if stored.get(path) != value:
            raise UserError(
                f"checkpoint {directory} has config.{path}={stored.get(path)}, and this config has {value}; use a"
                " different --workdir"
            )


def check_same_shapes(directory: Path, stored: dict, current: dict, vocab_size: int) -> set[str]:
    """Returns the names of the arrays that differ only in vocabulary padding, which depends on the
    mesh.

    The values of the padding have no effect, so such an array may be truncated, or padded with
    zeros.
    """
    padded = set()
    for name in sorted(stored.keys() | current.keys()):
        old = stored.get(name)
        new = current.get(name)
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


class StoredParams:
    """The parameters of one checkpoint, adapters included, without vocabulary padding."""

    def __init__(
        self, workdir: Path, step: int, config: Config, *, load_all: Callable[[], Any] | None = None
    ):
        """
        Args:
          load_all: returns all parameters, with the base model. None: the checkpoint contains the frozen
            parameters, and only those that are asked for are read.
        """
        self._workdir = workdir
        self._step = step
        self._config = config
        self._load_all = load_all
        model = config.model
        self.abstract = dict(
            paths_of(decoder.abstract_params(model, model.vocab_size, config.lora))
        )

    def read(self, paths: Iterable[str]) -> dict[str, np.ndarray | Quantized]:
        """The parameters with these paths, in the dtype in which they are stored.

        Raises:
          UserError: the checkpoint, or the base model that it needs, cannot be read.
        """
        if self._load_all is not None:
            return {path: _values(self._loaded[path], self.abstract[path].shape) for path in paths}
        targets = {}
        quantized = quantized_matrices(self._config.model, self._config)
        on_host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        for path in paths:
            matrix = quantized.get(path)
            shape = self.abstract[path].shape
            stored = jax.ShapeDtypeStruct(shape, self._dtypes.get(f"params/{path}", np.float32))
            if matrix is not None:
                of = functools.partial(FORMATS[matrix.format].of, sizes=matrix.num_dims)
                stored = jax.eval_shape(of, stored)
            targets[path] = jax.tree.map(lambda x: x.update(sharding=on_host), stored)
        tree = unflatten_mapping(targets, sep="/")
        vocab_size = self._config.model.vocab_size
        restored = restore_params(
            self._directory, self._step, tree, vocab_size=vocab_size, only_these=True
        )
        return {path: _values(param, param.shape) for path, param in paths_of(restored)}

    @property
    def _directory(self) -> Path:
        return self._workdir / CHECKPOINTS_DIRECTORY

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        return stored_dtypes(self._directory / str(self._step))

    @cached_property
    def _loaded(self) -> dict[str, jax.Array | Quantized]:
        assert self._load_all is not None
        return dict(paths_of(self._load_all()))


def _values(param: jax.Array | Quantized, shape: tuple[int, ...]) -> np.ndarray | Quantized:
    """Without the padding of the vocabulary, which no quantized parameter has."""
    if isinstance(param, Quantized):
        return param
    return np.asarray(param)[tuple(map(slice, shape))]
