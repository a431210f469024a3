"""A small step compiled for GPUs that are not here, shared by the tests of the plan."""

import importlib.util

import pytest
from ml_collections import ConfigDict

from jaxlc.config import defaults

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="the extra `plan` installs the GPU compiler"
)
# What is compiled for GPUs that are not here is written to JAX's cache, but cannot be read back.
ignores_cache = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")


def small_config(**model) -> ConfigDict:
    """Two layers, a ring of 2 between neighbours and rows of one document: kernel cudnn."""
    config = defaults()
    config.model.update(num_layers=2, **model)
    config.mesh.update(context=2, tensor=2)
    config.attention.document_mask = False
    config.memory.remat = "full"
    config.runtime.transport = "nccl"
    return config
