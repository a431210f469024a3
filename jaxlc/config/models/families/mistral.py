"""Mistral 7B and other Mistral models, with a sliding window in all layers or none (transformers: models/mistral)."""

from typing import Any

from jaxlc.config.models.families.family import Family, Fields
from jaxlc.config.models.model_schema import ModelConfig

_DEFAULT_WINDOW = 4096


def _read_kinds(config: Fields) -> list[str]:
    kind = "full" if config.get("sliding_window", _DEFAULT_WINDOW) is None else "sliding"
    return [kind] * config["num_hidden_layers"]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    return dict(sliding_window=model.window or None)


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    layer_kinds=(frozenset({"full"}), frozenset({"sliding"})),
    read_kinds=_read_kinds,
    write_kinds=_write_kinds,
    defaults=dict(num_key_value_heads=8, head_dim=None, sliding_window=_DEFAULT_WINDOW),
    required_values=dict(attention_bias=(False,), layer_types=(None,)),
)
