"""Published model families: the fields of their Hugging Face config.json, and the names of their
tensors.

A module for dense models, one for experts, one for the layers of DeepSeek, one for hybrids, and one
for state space layers. To add a family, describe it in one of them, and add it to the cases of
tests/hf/models.py.
"""

from jaxlc.config.models.families import deepseek, dense, experts, hybrid, state_space
from jaxlc.config.models.families.family import COMMON_SETTINGS, LAYER_TYPES, Family

# In the order of the modules: a model without a config.json is exported as the first that fits.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (dense, experts, hybrid, deepseek, state_space)
    for family in vars(module).values()
    if isinstance(family, Family)
}

__all__ = ["COMMON_SETTINGS", "FAMILIES", "LAYER_TYPES", "Family"]
