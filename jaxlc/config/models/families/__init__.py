"""Published model families: the fields of their Hugging Face config.json, and the names of their
tensors.

A module for dense models, one for experts, one for hybrids. To add a family, describe it in one of
them, add it to FAMILIES, and add it to the cases of tests/hf/models.py.
"""

from jaxlc.config.models.families.dense import (
    EXAONE4,
    GEMMA3_TEXT,
    GRANITE,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_VL_TEXT,
    SEED_OSS,
    SMOLLM3,
)
from jaxlc.config.models.families.experts import (
    GLM4_MOE,
    GPT_OSS,
    MINIMAX_M2,
    QWEN3_MOE,
    QWEN3_VL_MOE_TEXT,
)
from jaxlc.config.models.families.family import COMMON_SETTINGS, LAYER_TYPES, Family, Tensor
from jaxlc.config.models.families.hybrid import (
    OLMO_HYBRID,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(
            LLAMA,
            MISTRAL,
            QWEN2,
            QWEN3,
            QWEN3_MOE,
            QWEN3_5_TEXT,
            QWEN3_5_MOE_TEXT,
            SMOLLM3,
            GEMMA3_TEXT,
            OLMO3,
            MINISTRAL3,
        ),
        *(OLMO_HYBRID, GPT_OSS, GLM4_MOE, OLMO2, SEED_OSS, EXAONE4, GRANITE, QWEN3_NEXT, PHI3),
        *(MINIMAX_M2, QWEN3_VL_TEXT, QWEN3_VL_MOE_TEXT),
    )
}

__all__ = ["COMMON_SETTINGS", "FAMILIES", "LAYER_TYPES", "Family", "Tensor"]
