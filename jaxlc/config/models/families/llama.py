"""Llama 2 and 3, and models of the same architecture such as SmolLM2 (transformers: models/llama)."""

from jaxlc.config.models.families.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    # None: num_key_value_heads is num_attention_heads, and head_dim is hidden_size / num_attention_heads.
    fields={"attention_bias": "qkv_bias"},
    defaults=dict(num_key_value_heads=None, head_dim=None, attention_bias=False),
    required_values=dict(
        mlp_bias=(False,),
        rope_interleaved=(False,),  # in configs of SmolLM2
    ),
    irrelevant=frozenset({"pretraining_tp", "is_llama_config"}),
)
