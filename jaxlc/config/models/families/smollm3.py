"""SmolLM3: every fourth layer has no position embedding; layers may be sliding (transformers: models/smollm3)."""

from typing import Any

from jaxlc.config.models.families.family import Family, Fields, read_layer_types
from jaxlc.config.models.model_schema import ModelConfig

_KINDS = {  # (position embedding, mask) -> kind of layer
    ("full", "sliding"): "sliding",
    ("nope", "full"): "nope",
    ("nope", "sliding"): "sliding_attention without RoPE",
}


def _read_kinds(config: Fields) -> list[str]:
    """no_rope_layers has a 0 for layers without RoPE. Masks follow layer_types, whatever use_sliding_window says; if
    layer_types is absent, the layers without RoPE are sliding if use_sliding_window is true."""
    num_layers, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    positions = ["full" if x else "nope" for x in has_rope[:num_layers]]
    masks = read_layer_types(config)
    if not config.get("layer_types") and config.get("use_sliding_window") and config.get("sliding_window") is not None:
        masks = ["full" if x == "full" else "sliding" for x in positions]
    return [_KINDS.get(pair, pair[1]) for pair in zip(positions, masks)]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    kinds = model.kinds_of_layers
    return dict(
        no_rope_layers=[int(kind != "nope") for kind in kinds],
        layer_types=["sliding_attention" if kind == "sliding" else "full_attention" for kind in kinds],
        use_sliding_window="sliding" in kinds,
        sliding_window=model.window or None,
    )


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    layer_kinds=tuple(map(frozenset, (("full", "nope"), ("full",), ("full", "sliding"), ("full", "nope", "sliding")))),
    read_kinds=_read_kinds,
    write_kinds=_write_kinds,
    defaults=dict(num_key_value_heads=4, head_dim=None, rope_theta=2e6, tie_word_embeddings=True),
    required_values=dict(attention_bias=(False,), mlp_bias=(False,)),
    irrelevant=frozenset(
        {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "max_window_layers", "pretraining_tp"}
    ),
)
