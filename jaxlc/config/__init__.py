"""What a run is: `defaults()` to edit, `load()` to check and freeze. Imports no jax.

config = defaults()
config.mesh.context = 4
frozen = load(config)
"""

from jaxlc.config.files import check_variant, read_config, shipped_configs, shrink_for_cpu
from jaxlc.config.loading import defaults, load, to_dict, transport_settings, with_settings
from jaxlc.config.mesh_checks import check_num_devices
from jaxlc.config.presets import PRESETS
from jaxlc.config.schema import (
    AttentionConfig,
    Config,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RuntimeConfig,
    TrainConfig,
)

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "Config",
    "DataConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RuntimeConfig",
    "TrainConfig",
    "check_num_devices",
    "check_variant",
    "defaults",
    "load",
    "read_config",
    "shipped_configs",
    "shrink_for_cpu",
    "to_dict",
    "transport_settings",
    "with_settings",
]
