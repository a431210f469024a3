"""Qwen 2 and 2.5, dense models (transformers: models/qwen2)."""

from jaxlc.config.models.families.family import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=dict(qkv_bias=True),
    defaults=dict(num_key_value_heads=32, head_dim=None),
    required_values=dict(use_sliding_window=(False,), use_mrope=(False,)),
    irrelevant=frozenset({"max_window_layers", "sliding_window"}),  # without effect: use_sliding_window is false
)
