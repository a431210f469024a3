"""Families of models with experts; the names in parentheses are their models in transformers.

- Qwen 3 (qwen3_moe): some layers may be dense. Qwen 3 VL (qwen3_vl_moe) has the same language
  model, and always normalizes the weights of experts
- GLM 4.5 and 4.6 (glm4_moe): dense layers, then layers of experts with a sigmoid router and shared
  experts. Layers of multi-token prediction are left out
- MiniMax-M2 (minimax_m2): a sigmoid router, and norms of all heads together
- gpt-oss (gpt_oss): experts with biases, attention sinks, sliding and full layers in turn. Released
  files have experts in MXFP4 (`jaxlc.hf.files`); exports have all weights in one data type
"""

import dataclasses
import functools
from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.kinds.contract import LayerTensor
from jaxlc.config.models.families.dense import QWEN3_VL_TEXT
from jaxlc.config.models.families.family import (
    Family,
    Fields,
    kind_sets,
    read_layer_types,
    write_layer_types,
)
from jaxlc.config.models.model_schema import ModelConfig


def are_dense(config: Fields) -> list[bool]:
    """Whether each layer is dense: every decoder_sparse_step-th layer has experts, unless
    mlp_only_layers names it.
    """
    step = config.get("decoder_sparse_step") or 1
    dense_layers = config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return [layer in dense_layers or (layer + 1) % step > 0 for layer in layers]


def write_dense_layers(model: ModelConfig) -> dict[str, Any]:
    """The fields that `are_dense` reads."""
    blocks = (model.layer_config(kind).feed_forward for kind in model.kinds_of_layers)
    dense_layers = [layer for layer, block in enumerate(blocks) if block == "dense"]
    return dict(decoder_sparse_step=1, mlp_only_layers=dense_layers)


def _read_kinds(config: Fields) -> list[str]:
    return ["dense" if is_dense else "full" for is_dense in are_dense(config)]


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer_kinds=(("full",), ("full", "dense")),
    read_kinds=_read_kinds,
    write_kinds=write_dense_layers,
    settings={"attention.qk_norm": "head"},
    fields={
        "attention_bias": "attention.qkv_bias",
        "num_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "moe_intermediate_size": "experts.ffn_dim",
        "norm_topk_prob": "experts.renormalize",
    },
    field_aliases={"num_local_experts": "num_experts"},
    defaults=dict(
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
    ),
    required_values=dict(use_sliding_window=(False,), use_qk_norm=(True,)),
    irrelevant=(
        "max_window_layers",
        "sliding_window",  # without effect: use_sliding_window is false
        "decoder_sparse_step",
        "mlp_only_layers",  # `_read_kinds` reads them
    ),
    feed_forward_tensors=dict(experts=experts.TENSORS),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
    kinds=dict(dense=dict(feed_forward="dense")),
)


QWEN3_VL_MOE_TEXT = dataclasses.replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    architecture="",
    defaults={
        **QWEN3_MOE.defaults,
        "num_key_value_heads": 16,
        "rope_theta": 5e5,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
    },
    required_values={**QWEN3_MOE.required_values, "norm_topk_prob": (True,)},
    irrelevant=QWEN3_MOE.irrelevant + QWEN3_VL_TEXT.irrelevant,
    feed_forward_tensors=dict(experts=experts.TRANSPOSED_TENSORS),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
    multimodal_type="qwen3_vl_moe",
    multimodal_prefixes=QWEN3_VL_TEXT.multimodal_prefixes,
    other_prefixes=QWEN3_VL_TEXT.other_prefixes,
)


def read_first_dense(config: Fields, num_dense: int, other: str) -> list[str]:
    """The kinds of layers of which the first ones are dense, by mlp_layer_types or their number.

    Args:
      num_dense: without these fields.
      other: the kind of other layers.
    """
    num_layers = config["num_hidden_layers"]
    types = config.get("mlp_layer_types")
    num_dense = config.get("first_k_dense_replace", num_dense) or 0
    types = types or ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    return ["dense" if kind == "dense" else other for kind in types]


def write_first_dense(model: ModelConfig) -> dict[str, Any]:
    """The field that `read_first_dense` reads."""
    return dict(first_k_dense_replace=model.num_layers_of("dense"))


def _read_settings(config: Fields) -> dict[str, Any]:
    shared_ffn_dim = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return {
        "attention.qk_norm": "head" if config["use_qk_norm"] else "none",
        "experts.shared_ffn_dim": shared_ffn_dim,
    }


def _write_settings(model: ModelConfig) -> dict[str, Any]:
    return dict(
        use_qk_norm=model.attention.qk_norm == "head",
        n_shared_experts=model.experts.shared_ffn_dim // model.experts.ffn_dim,
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    layer_kinds=(("full",), ("dense", "full")),
    read_kinds=functools.partial(read_first_dense, num_dense=1, other="full"),
    write_kinds=write_first_dense,
    settings={
        "experts.router": "sigmoid",
        "experts.choice_bias": True,
        "attention.out_bias": False,
    },
    fields={
        "attention_bias": "attention.qkv_bias",
        "n_routed_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "moe_intermediate_size": "experts.ffn_dim",
        "norm_topk_prob": "experts.renormalize",
        "n_group": "experts.groups",
        "topk_group": "experts.groups_per_token",
        "routed_scaling_factor": "experts.scale",
    },
    field_aliases={"num_local_experts": "n_routed_experts"},
    read_settings=_read_settings,
    write_settings=_write_settings,
    varying=("attention.qk_norm", "experts.shared_ffn_dim"),
    defaults=dict(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_routed_experts=128,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        use_qk_norm=False,
    ),
    other_prefixes=("model.layers.{num_layers}.",),
    # `read_first_dense` reads the first one
    irrelevant=("first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers"),
    feed_forward_tensors=dict(
        experts=(*experts.TENSORS, experts.CHOICE_BIAS, *experts.shared_tensors("shared_experts"))
    ),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
    kinds=dict(dense=dict(feed_forward="dense")),
)


_ATTENTIONS = ("lightning attention", "full")  # by entries of attn_type_list


def _minimax_m2_read_kinds(config: Fields) -> list[str]:
    types = config.get("attn_type_list") or [1] * config["num_hidden_layers"]
    return [_ATTENTIONS[x] if x in (0, 1) else f"{x} in attn_type_list" for x in types]


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read_kinds=_minimax_m2_read_kinds,
    settings={
        "attention.qk_norm": "projection",
        "experts.router": "sigmoid",
        "experts.choice_bias": True,
        "experts.renormalize": True,
    },
    fields={
        "num_local_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "intermediate_size": "experts.ffn_dim",
    },
    field_aliases={"num_experts": "num_local_experts"},
    defaults=dict(
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=5e6,
        partial_rotary_factor=1.0,
        rotary_dim=None,
        num_local_experts=256,
        num_experts_per_tok=8,
    ),
    required_values=dict(
        scoring_func=("sigmoid",),
        use_routing_bias=(True,),
        use_qk_norm=(True,),
        qk_norm_type=("per_layer",),
        shared_intermediate_size=(0,),
        router_jitter_noise=(0.0,),
        **{f"layernorm_{x}_beta": (1,) for x in ("full_attention", "mlp")},
    ),
    irrelevant=(
        "attn_type_list",  # the function above reads it
        # of layers that the model does not have, and of multi-token prediction
        "mlp_intermediate_size",
        "shared_moe_mode",
        "layernorm_linear_attention_beta",
        "use_mtp",
        "num_mtp_modules",
        "mtp_transformer_layers",
        "auto_map",  # transformers has the code
    ),
    feed_forward_tensors=dict(experts=experts.MIXTRAL_TENSORS),
    tensor_aliases=(
        *experts.STACKED_LINEAR_TENSORS,
        LayerTensor("choice_bias", "mlp.e_score_correction_bias"),
    ),
)


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    layer_kinds=kind_sets("sliding", "full"),
    read_kinds=functools.partial(read_layer_types, default=("sliding", "full")),
    write_kinds=write_layer_types,
    settings={
        "attention.sinks": True,
        "activation": "clamped_swiglu",
        "experts.router": "topk_softmax",
        "experts.bias": True,
    },
    fields={
        "attention_bias": "attention.qkv_bias",
        "num_local_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "intermediate_size": "experts.ffn_dim",
    },
    field_aliases={"num_experts": "num_local_experts"},
    defaults=dict(
        num_key_value_heads=8,
        head_dim=64,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
    ),
    required_values=dict(swiglu_alpha=(1.702,), swiglu_limit=(7.0,)),
    # they repeat the fields of RoPE, and num_experts_per_tok
    irrelevant=("initial_context_length", "experts_per_token"),
    quantization="mxfp4",
    feed_forward_tensors=dict(experts=experts.STACKED_TENSORS),
)
