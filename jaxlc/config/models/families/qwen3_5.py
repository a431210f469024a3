"""Qwen 3.5, text models: groups of gated_delta_net layers and one with gated attention, dense or with experts.

Transformers: models/qwen3_5 and models/qwen3_5_moe. Of models with images, the language model is loaded.
"""

import dataclasses

from jaxlc.config.kinds import experts
from jaxlc.config.models.families.family import Family, Fields, read_layer_types, write_layer_types

_KINDS = frozenset({"gated_delta_net", "full"})


def _read_kinds(config: Fields) -> list[str]:
    """Without layer_types, every full_attention_interval-th layer is full."""
    interval = config.get("full_attention_interval") or 4
    return read_layer_types(config, default=(*("gated_delta_net",) * (interval - 1), "full"))


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    layer_kinds=(_KINDS, frozenset({"full"}), frozenset({"gated_delta_net"})),
    read_kinds=_read_kinds,
    write_kinds=write_layer_types,
    settings=dict(qk_norm="head", zero_centered_norm=True, attention_gate=True),
    fields={
        "attention_bias": "qkv_bias",
        "linear_num_key_heads": "delta_net.key_heads",
        "linear_num_value_heads": "delta_net.value_heads",
        "linear_key_head_dim": "delta_net.key_dim",
        "linear_value_head_dim": "delta_net.value_dim",
        "linear_conv_kernel_dim": "delta_net.conv_taps",
    },
    defaults=dict(
        num_key_value_heads=4,
        head_dim=256,
        attention_bias=False,
        partial_rotary_factor=0.25,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    required_values=dict(attn_output_gate=(True,), output_gate_type=("swish",), mamba_ssm_dtype=("float32",)),
    multimodal_type="qwen3_5",
    multimodal_prefixes={"model.language_model.": "model."},
    other_prefixes=("model.visual.", "mtp."),
    irrelevant=frozenset(
        {
            *("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
            *("mrope_section", "mrope_interleaved"),  # equal for all text: its positions have one dimension
        }
    ),
)

# Layers of experts with a shared one; the weights of the chosen experts are always divided by their sum.
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings={**QWEN3_5_TEXT.settings, "experts.renormalize": True, "experts.shared_gate": True},
    fields={
        **QWEN3_5_TEXT.fields,
        "num_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "moe_intermediate_size": "experts.ffn_dim",
        "shared_expert_intermediate_size": "experts.shared_ffn_dim",
    },
    defaults={
        **QWEN3_5_TEXT.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    multimodal_type="qwen3_5_moe",
    # train.balance_loss has its own value
    irrelevant=QWEN3_5_TEXT.irrelevant | {"router_aux_loss_coef", "output_router_logits"},
    feed_forward_tensors=dict(experts=(*experts.STACKED_LINEAR_TENSORS, *experts.shared_tensors("shared_expert"))),
    tensor_aliases=experts.TENSORS,
)
