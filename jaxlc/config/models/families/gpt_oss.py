"""gpt-oss: experts with biases, attention sinks, sliding and full layers in turn (transformers: models/gpt_oss).

Released files have experts in MXFP4 (`jaxlc.hf.files`), and exports have all weights in one data type.
"""

from jaxlc.config.kinds import experts
from jaxlc.config.models.families.family import Family, Fields, read_layer_types, write_layer_types


def _read_kinds(config: Fields) -> list[str]:
    return read_layer_types(config, default=("sliding", "full"))


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    layer_kinds=(frozenset({"sliding", "full"}), frozenset({"full"}), frozenset({"sliding"})),
    read_kinds=_read_kinds,
    write_kinds=write_layer_types,
    settings={
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "experts.router": "topk_softmax",
        "experts.bias": True,
    },
    fields={
        "attention_bias": "qkv_bias",
        "num_local_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "intermediate_size": "experts.ffn_dim",
    },
    field_aliases={"num_experts": "num_local_experts"},
    defaults=dict(
        num_key_value_heads=8,
        head_dim=64,
        attention_bias=True,
        rope_theta=150000.0,
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
    ),
    required_values=dict(swiglu_alpha=(1.702,), swiglu_limit=(7.0,)),
    irrelevant=frozenset(
        {
            *("router_aux_loss_coef", "output_router_logits"),  # train.balance_loss has its own value
            *("initial_context_length", "experts_per_token"),  # repeat the fields of RoPE, and num_experts_per_tok
        }
    ),
    quantization="mxfp4",
    feed_forward_tensors=dict(experts=experts.STACKED_TENSORS),
)
