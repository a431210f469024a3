"""Qwen 3, dense models (transformers: models/qwen3)."""

from jaxlc.config.models.families.family import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=dict(qk_norm="head"),
    fields={"attention_bias": "qkv_bias"},
    defaults=dict(num_key_value_heads=32, head_dim=128, attention_bias=False),
    required_values=dict(use_sliding_window=(False,), use_qk_norm=(True,)),
    irrelevant=frozenset({"max_window_layers", "sliding_window"}),  # without effect: use_sliding_window is false
)
