"""The settings of a run: `read_config()` or `defaults()` to edit, `load()` to check and freeze.
Imports no jax.

config = read_config("quickstart")
config.train.steps = 20
frozen = load(config)
"""

from jaxlc.config.checks.mesh_checks import check_evaluation, check_num_devices
from jaxlc.config.files import check_variant, read_config, shipped_configs, shrink_for_cpu
from jaxlc.config.frozen import Config, Stage, to_dict, unchecked
from jaxlc.config.loading import from_dict, load, load_stages, with_settings
from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.schema import (
    AttentionConfig,
    DataConfig,
    EvalsConfig,
    LoraConfig,
    MemoryConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    RuntimeConfig,
    TrainConfig,
)
from jaxlc.config.settings import defaults

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "Config",
    "DataConfig",
    "EvalsConfig",
    "LoraConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RuntimeConfig",
    "Stage",
    "TrainConfig",
    "check_evaluation",
    "check_num_devices",
    "check_variant",
    "defaults",
    "from_dict",
    "load",
    "load_stages",
    "read_config",
    "shipped_configs",
    "shrink_for_cpu",
    "to_dict",
    "unchecked",
    "with_settings",
]


def __dir__() -> list[str]:
    return list(__all__)
