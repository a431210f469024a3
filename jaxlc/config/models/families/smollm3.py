"""SmolLM3: every fourth layer has no position embedding (transformers: models/smollm3)."""

from typing import Any

from jaxlc.config.models.families.family import Family, Fields
from jaxlc.config.models.model_schema import ModelConfig


def _read_kinds(config: Fields) -> list[str]:
    """no_rope_layers has a 0 for layers without RoPE."""
    interval = config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(config["num_hidden_layers"])]
    return ["full" if x else "nope" for x in has_rope[: config["num_hidden_layers"]]]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    kinds = model.kinds_of_layers
    return dict(no_rope_layers=[int(kind != "nope") for kind in kinds], layer_types=["full_attention"] * len(kinds))


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    layer_kinds=(frozenset({"full", "nope"}), frozenset({"full"})),
    read_kinds=_read_kinds,
    write_kinds=_write_kinds,
    defaults=dict(num_key_value_heads=4, head_dim=None, rope_theta=2e6, tie_word_embeddings=True),
    required_values=dict(attention_bias=(False,), mlp_bias=(False,), use_sliding_window=(False,)),
    irrelevant=frozenset(
        {"no_rope_layers", "no_rope_layer_interval", "sliding_window", "max_window_layers", "pretraining_tp"}
    ),
)
