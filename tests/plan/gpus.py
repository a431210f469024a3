"""A small configuration that tests compile for absent GPUs."""

from ml_collections import ConfigDict

from jaxlc.config import defaults


def small_config(**model) -> ConfigDict:
    """Two layers, context=2, one document per sequence: kernel cudnn."""
    config = defaults()
    config.model.update(num_layers=2, **model)
    config.mesh.update(context=2, tensor=2)
    config.attention.document_mask = False
    config.memory.remat = "full"
    config.runtime.transport = "nccl"
    return config
