"""Published model families: the fields of their Hugging Face config.json, and the names of their tensors.

One module per family. To add one, write its module, add it to FAMILIES, and add it to the cases of tests/hf/models.py.
"""

from jaxlc.config.families.family import Family, Tensor
from jaxlc.config.families.llama import LLAMA
from jaxlc.config.families.mistral import MISTRAL
from jaxlc.config.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN3)}

__all__ = ["FAMILIES", "Family", "Tensor"]
