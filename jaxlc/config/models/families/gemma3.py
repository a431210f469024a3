"""Gemma 3: groups of five sliding layers and a full one (transformers: models/gemma3).

Of models with images, the language model is loaded.
"""

from jaxlc.config.models.families.family import Family, Fields, read_layer_types, write_layer_types


def _read_kinds(config: Fields) -> list[str]:
    """Older configs have sliding_window_pattern, the number of layers of a group."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return read_layer_types(config, default=(*("sliding",) * (pattern - 1), "full"))


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer_kinds=(frozenset({"sliding", "full"}), frozenset({"full"})),
    read_kinds=_read_kinds,
    write_kinds=write_layer_types,
    settings=dict(
        qk_norm="head",
        norm_placement="pre_and_post",
        zero_centered_norm=True,
        activation="gelu_tanh",
        scale_embeddings=True,
    ),
    fields={"query_pre_attn_scalar": "query_scale_dim"},
    defaults=dict(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
    activation_field="hidden_activation",
    rope_by_layer_type=True,
    required_values=dict(
        attention_bias=(False,),
        use_bidirectional_attention=(False,),
    ),
    multimodal_type="gemma3",
    multimodal_prefixes={"language_model.": "", "model.language_model.": "model."},
    other_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    irrelevant=frozenset({"sliding_window_pattern", "_sliding_window_pattern", "cache_implementation", "hidden_act"}),
)
