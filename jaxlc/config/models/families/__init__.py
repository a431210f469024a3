"""Published model families: the fields of their Hugging Face config.json, and the names of their tensors.

One module per family. To add one, write its module, add it to FAMILIES, and add it to the cases of tests/hf/models.py.
"""

from jaxlc.config.models.families.family import COMMON_SETTINGS, LAYER_TYPES, Family, Tensor
from jaxlc.config.models.families.gemma3 import GEMMA3_TEXT
from jaxlc.config.models.families.glm4_moe import GLM4_MOE
from jaxlc.config.models.families.gpt_oss import GPT_OSS
from jaxlc.config.models.families.llama import LLAMA
from jaxlc.config.models.families.mistral import MISTRAL
from jaxlc.config.models.families.olmo3 import OLMO3
from jaxlc.config.models.families.olmo_hybrid import OLMO_HYBRID
from jaxlc.config.models.families.qwen2 import QWEN2
from jaxlc.config.models.families.qwen3 import QWEN3
from jaxlc.config.models.families.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from jaxlc.config.models.families.qwen3_moe import QWEN3_MOE
from jaxlc.config.models.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, SMOLLM3, GEMMA3_TEXT, OLMO3),
        *(OLMO_HYBRID, GPT_OSS, GLM4_MOE),
    )
}

__all__ = ["COMMON_SETTINGS", "FAMILIES", "LAYER_TYPES", "Family", "Tensor"]
