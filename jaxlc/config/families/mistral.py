"""Mistral 7B v0.2 and later, and other Mistral models without a sliding window (transformers: models/mistral)."""

from jaxlc.config.families.family import Family, decoder_tensors

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    qk_norm="none",
    tensors=decoder_tensors(qk_norm=False),
    defaults=dict(num_key_value_heads=8, head_dim=None, sliding_window=4096),
    required_values=dict(sliding_window=(None,), attention_bias=(False,)),
)
