"""Qwen 3.5, text models: groups of gated_delta_net layers and one with gated attention, dense or
with experts.

Transformers: models/qwen3_5 and models/qwen3_5_moe. Of models with images, the language model is
loaded.

Qwen3-Next and Qwen3-Coder-Next: the same layers with experts, some of which may be dense. A tensor
has the projections of each key head of gated_delta_net layers, one head after the other
(transformers: models/qwen3_next).

Olmo Hybrid: groups of three gated_delta_net layers and one with attention (transformers:
models/olmo_hybrid).

The published models have no RoPE: the base, in rope_parameters or not, is null. Without this field,
it is 10000.
"""

import dataclasses
from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.models.families.experts import (
    EXPERT_FIELDS,
    are_dense,
    write_dense_layers,
)
from jaxlc.config.models.families.family import (
    LAYER_TYPES,
    Family,
    Fields,
    kind_sets,
    read_layer_types,
    write_layer_types,
)
from jaxlc.config.models.model_schema import ModelConfig


def _read_kinds(config: Fields) -> list[str]:
    """Without layer_types, every full_attention_interval-th layer is full."""
    interval = config.get("full_attention_interval") or 4
    return read_layer_types(config, default=(*("gated_delta_net",) * (interval - 1), "full"))


_SIZES = {
    "linear_num_key_heads": "delta_net.key_heads",
    "linear_num_value_heads": "delta_net.value_heads",
    "linear_key_head_dim": "delta_net.key_dim",
    "linear_value_head_dim": "delta_net.value_dim",
    "linear_conv_kernel_dim": "delta_net.conv_taps",
}

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    layer_kinds=kind_sets("gated_delta_net", "full"),
    read_kinds=_read_kinds,
    write_kinds=write_layer_types,
    settings={"attention.qk_norm": "head", "attention.gate": True, "zero_centered_norm": True},
    fields={"attention_bias": "attention.qkv_bias", **_SIZES},
    defaults=dict(
        num_key_value_heads=4,
        head_dim=256,
        partial_rotary_factor=0.25,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    required_values=dict(
        attn_output_gate=(True,), output_gate_type=("swish",), mamba_ssm_dtype=("float32",)
    ),
    multimodal_type="qwen3_5",
    multimodal_prefixes={"model.language_model.": "model."},
    other_prefixes=("model.visual.", "mtp."),
    irrelevant=(
        "full_attention_interval",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        # equal for all text: its positions have one dimension
        "mrope_section",
        "mrope_interleaved",
    ),
)

# Layers of experts with a shared one; the weights of the chosen experts are always divided by their
# sum.
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings={**QWEN3_5_TEXT.settings, "experts.renormalize": True, "experts.shared_gate": True},
    fields={
        **QWEN3_5_TEXT.fields,
        **EXPERT_FIELDS,
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
    feed_forward_tensors=dict(
        experts=(*experts.STACKED_LINEAR_TENSORS, *experts.shared_tensors("shared_expert"))
    ),
    tensor_aliases=experts.TENSORS,
)


_LINEAR = "gated_delta_net"
# the same mixers with dense feed-forward blocks
_DENSE = {"full": "dense", _LINEAR: "dense_gated_delta_net"}


def _qwen3_next_read_kinds(config: Fields) -> list[str]:
    layers = zip(_read_kinds(config), are_dense(config))
    return [_DENSE.get(kind, kind) if is_dense else kind for kind, is_dense in layers]


def _qwen3_next_write_kinds(model: ModelConfig) -> dict[str, Any]:
    types = [LAYER_TYPES[model.attention_of(kind)] for kind in model.kinds_of_layers]
    return dict(layer_types=types, **write_dense_layers(model))


QWEN3_NEXT = dataclasses.replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    layer_kinds=kind_sets(*_DENSE, *_DENSE.values()),
    read_kinds=_qwen3_next_read_kinds,
    write_kinds=_qwen3_next_write_kinds,
    settings={**QWEN3_5_TEXT.settings, "experts.shared_gate": True},
    fields={**QWEN3_5_MOE_TEXT.fields, "norm_topk_prob": "experts.renormalize"},
    defaults={
        **QWEN3_5_MOE_TEXT.defaults,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    required_values=dict(use_sliding_window=(False,)),
    multimodal_type="",
    multimodal_prefixes={},
    other_prefixes=("mtp.",),
    # the functions above read them
    irrelevant=("full_attention_interval", "decoder_sparse_step", "mlp_only_layers"),
    tensor_names={
        _LINEAR: {
            **{f"w{x}": "linear_attn.in_proj_qkvz.weight" for x in "qkvz"},
            **{f"w{x}": "linear_attn.in_proj_ba.weight" for x in "ba"},
        }
    },
    row_groups={f"linear_attn.in_proj_{x}.weight": "delta_net.key_heads" for x in ("qkvz", "ba")},
    feed_forward_tensors=dict(experts=(*experts.TENSORS, *experts.shared_tensors("shared_expert"))),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
    kinds=dict(
        dense=dict(feed_forward="dense"),
        dense_gated_delta_net=dict(attention=_LINEAR, feed_forward="dense"),
    ),
)


def _olmo_hybrid_read_kinds(config: Fields) -> list[str]:
    """Without layer_types, every fourth layer has attention, or the last one of fewer layers."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = "nope" if parameters.get("rope_theta", config.get("rope_theta", 0)) is None else "full"
    kinds = read_layer_types(config, default=(_LINEAR, _LINEAR, _LINEAR, "full"))
    if not config.get("layer_types") and "full" not in kinds:
        kinds[-1] = "full"
    return [full if kind == "full" else kind for kind in kinds]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    types = [
        "linear_attention" if kind == _LINEAR else "full_attention"
        for kind in model.kinds_of_layers
    ]
    return dict(layer_types=types)


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    layer_kinds=((_LINEAR, "nope"), (_LINEAR, "full")),
    read_kinds=_olmo_hybrid_read_kinds,
    write_kinds=_write_kinds,
    settings={
        "attention.qk_norm": "projection",
        "norm_placement": "post",
        "delta_net.norm_placement": "pre",
        # a constant of the model, which rms_norm_eps does not change
        "delta_net.norm_epsilon": 1e-5,
        "delta_net.negative_eigenvalues": True,
    },
    fields={**_SIZES, "linear_allow_neg_eigval": "delta_net.negative_eigenvalues"},
    defaults=dict.fromkeys(_SIZES) | dict(linear_conv_kernel_dim=4, linear_allow_neg_eigval=True),
    tensor_names={
        _LINEAR: {
            **{f"w{x}": f"linear_attn.{x}_proj.weight" for x in "qkvba"},
            "wz": "linear_attn.g_proj.weight",
            "out_norm/scale": "linear_attn.o_norm.weight",
            "wo": "linear_attn.o_proj.weight",
        }
    },
    # save_pretrained writes three equal parts of the convolution, whatever the sizes of q, k and v
    joined_tensors={
        "input_layernorm.weight": ("attention_layer_norm.weight",),
        "post_attention_layernorm.weight": ("feedforward_layer_norm.weight",),
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{x}_conv1d.weight" for x in "qkv"),
    },
    irrelevant=tuple(  # of initial values
        f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    ),
)
