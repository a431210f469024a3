"""Reads parameters of a checkpoint to host memory, some at a time."""

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY, stored_dtypes
from jaxlc.checkpoints.reading import restore_params
from jaxlc.config import Config
from jaxlc.hf.load import paths_of
from jaxlc.models import decoder, freezing


class StoredParams:
    """The parameters of one checkpoint, adapters included, without vocabulary padding."""

    def __init__(self, workdir: Path, step: int, config: Config, *, load_all: Callable[[], Any] | None = None):
        """
        Args:
          load_all: returns all parameters, with the base model. None: the checkpoint contains the frozen
            parameters, and only those that are asked for are read.
        """
        self._workdir, self._step, self._config, self._load_all = workdir, step, config, load_all
        model = config.model
        self.abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size, config.lora)))

    def read(self, paths: Iterable[str]) -> dict[str, np.ndarray]:
        """The parameters with these paths, in the dtype in which they are stored.

        Raises:
          UserError: the checkpoint, or the base model that it needs, cannot be read.
        """
        if self._load_all is not None:
            return {path: self._loaded[path][tuple(slice(n) for n in self.abstract[path].shape)] for path in paths}
        tree: dict = {}
        on_host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        for path in paths:
            dtype = self._dtypes[f"params/{path}"]
            shape = jax.ShapeDtypeStruct(self.abstract[path].shape, dtype, sharding=on_host)
            freezing.insert(tree, path.split("/"), shape)
        vocab_size = self._config.model.vocab_size
        restored = restore_params(self._directory, self._step, tree, vocab_size=vocab_size, only_these=True)
        return {path: np.asarray(param) for path, param in paths_of(restored)}

    @property
    def _directory(self) -> Path:
        return self._workdir / CHECKPOINTS_DIRECTORY

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        return stored_dtypes(self._directory / str(self._step))

    @cached_property
    def _loaded(self) -> dict[str, np.ndarray]:
        assert self._load_all is not None
        return {path: np.asarray(param) for path, param in paths_of(self._load_all())}
