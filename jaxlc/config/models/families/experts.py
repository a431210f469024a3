"""Families of models with experts; the names in parentheses are their models in transformers.

- Qwen 3 (qwen3_moe): some layers may be dense. Qwen 3 VL (qwen3_vl_moe) has the same language
  model, and always normalizes the weights of experts
- MiniMax-M2 (minimax_m2): a sigmoid router, and norms of all heads together
- Qwen 1.5 and 2 (qwen2_moe): some layers may be dense; a shared expert with a gate
- Mixtral (mixtral), and OLMoE (olmoe) with norms of all heads together
- Mellum 2 (mellum): groups of three sliding layers and a full one
- Hy3 (hy_v3): a dense layer, then layers of experts with a sigmoid router and a shared expert
- K-EXAONE (exaone_moe): the same, in groups of three sliding layers and one without position
  embedding
- ERNIE 4.5 (ernie4_5_moe): interleaved RoPE; a range of layers has experts, whose softmax router has
  a bias of the choice, and shared experts
- Trinity of Arcee (afmoe): the same, with norms before and after each block, and a gate of attention
  with a projection of its own
- gpt-oss (gpt_oss): experts with biases, attention sinks, sliding and full layers in turn. Released
  files have experts in MXFP4 (`jaxlc.hf.files`); exports have all weights in one data type
"""

import dataclasses
import functools
from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.kinds.contract import LayerTensor
from jaxlc.config.models.families.deepseek import (
    GLM4_MOE,
    GROUP_FIELDS,
    SIGMOID_ROUTER,
    read_first_dense,
)
from jaxlc.config.models.families.dense import (
    ERNIE4_5,
    EXAONE4,
    MINISTRAL3,
    QWEN3_VL_TEXT,
    write_masks,
)
from jaxlc.config.models.families.family import (
    Family,
    Fields,
    kind_sets,
    nothing,
    read_layer_types,
    write_layer_types,
)
from jaxlc.config.models.model_schema import ModelConfig

EXPERT_FIELDS = {
    "num_experts": "experts.num_experts",
    "num_experts_per_tok": "experts.experts_per_token",
    "moe_intermediate_size": "experts.ffn_dim",
}
_ALIASES = {"num_local_experts": "num_experts"}
_CHOICE_BIAS = experts.CHOICE_BIAS._replace(name="mlp.e_score_correction_bias")


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
        **EXPERT_FIELDS,
        "norm_topk_prob": "experts.renormalize",
    },
    field_aliases=_ALIASES,
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


_ATTENTIONS = ("lightning attention", "full")  # by entries of attn_type_list


def _minimax_m2_read_kinds(config: Fields) -> list[str]:
    types = config.get("attn_type_list") or [1] * config["num_hidden_layers"]
    return [_ATTENTIONS[x] if x in (0, 1) else f"{x} in attn_type_list" for x in types]


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read_kinds=_minimax_m2_read_kinds,
    settings={**SIGMOID_ROUTER, "attention.qk_norm": "projection", "experts.renormalize": True},
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
    tensor_aliases=(*experts.STACKED_LINEAR_TENSORS, _CHOICE_BIAS),
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
    fields={"attention_bias": "attention.qkv_bias", **MINIMAX_M2.fields},
    field_aliases=MINIMAX_M2.field_aliases,
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


QWEN2_MOE = dataclasses.replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    settings={"experts.shared_gate": True},
    fields={
        "qkv_bias": "attention.qkv_bias",
        **EXPERT_FIELDS,
        "norm_topk_prob": "experts.renormalize",
        "shared_expert_intermediate_size": "experts.shared_ffn_dim",
    },
    defaults=dict(
        num_key_value_heads=16,
        qkv_bias=True,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
    ),
    required_values=dict(use_sliding_window=(False,)),
    feed_forward_tensors=dict(experts=(*experts.TENSORS, *experts.shared_tensors("shared_expert"))),
)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layer_kinds=MINISTRAL3.layer_kinds,
    read_kinds=MINISTRAL3.read_kinds,
    write_kinds=MINISTRAL3.write_kinds,
    settings={"experts.renormalize": True},
    fields=MINIMAX_M2.fields,
    field_aliases=MINIMAX_M2.field_aliases,
    defaults=dict(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    required_values=dict(router_jitter_noise=(0.0,)),
    feed_forward_tensors=dict(
        experts=tuple(x._replace(is_float32=False) for x in experts.MIXTRAL_TENSORS[:4])
    ),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
)


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    settings={"attention.qk_norm": "projection"},
    fields={
        "attention_bias": "attention.qkv_bias",
        "num_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "intermediate_size": "experts.ffn_dim",
        "norm_topk_prob": "experts.renormalize",
    },
    field_aliases=_ALIASES,
    defaults=dict(rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
    required_values=dict(clip_qkv=(None,)),
    feed_forward_tensors=dict(experts=experts.TENSORS),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
)


def _with_blocks(config: Fields, kinds: list[str], num_dense: int) -> list[str]:
    """Adds a prefix to the kinds of dense layers; see `read_first_dense`."""
    blocks = read_first_dense(config, num_dense, other="sparse")
    return [f"dense_{x}" if block == "dense" else x for x, block in zip(kinds, blocks)]


def _write_blocks(model: ModelConfig) -> dict[str, Any]:
    """The field mlp_layer_types, which `read_first_dense` reads."""
    blocks = (model.layer_config(kind).feed_forward for kind in model.kinds_of_layers)
    return dict(mlp_layer_types=["dense" if x == "dense" else "sparse" for x in blocks])


def _mellum_read_kinds(config: Fields) -> list[str]:
    return _with_blocks(config, read_layer_types(config), num_dense=0)


MELLUM = dataclasses.replace(
    QWEN3_MOE,
    model_type="mellum",
    architecture="MellumForCausalLM",
    layer_kinds=kind_sets("full", "sliding"),
    read_kinds=_mellum_read_kinds,
    write_kinds=write_layer_types,
    defaults=dict(
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=1024,
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=500000.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        ),
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=896,
        norm_topk_prob=True,
    ),
    required_values={},
    rope_by_layer_type=True,
    other_prefixes=("mtp.",),
    irrelevant=(
        "mlp_layer_types",  # `_mellum_read_kinds` reads it
        "use_sliding_window",  # layer_types has the windows
        "max_window_layers",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "mtp_layer_types",
        "mtp_mlp_layer_types",
    ),
    kinds={},
)


def _ernie_read_kinds(config: Fields) -> list[str]:
    """Layers from moe_layer_start_index to moe_layer_end_index, of which -1 is the last one, have
    experts if moe_layer_interval divides their number, counted from 1."""
    num_layers = config["num_hidden_layers"]
    last = config.get("moe_layer_end_index", -1) or 0
    sparse = range(
        config.get("moe_layer_start_index", 1) or 0, num_layers if last == -1 else last + 1
    )
    interval = config.get("moe_layer_interval") or 1
    has_experts = (i in sparse and (i + 1) % interval == 0 for i in range(num_layers))
    return ["full" if x else "dense" for x in has_experts]


def _ernie_write_kinds(model: ModelConfig) -> dict[str, Any]:
    sparse = [i for i, kind in enumerate(model.kinds_of_layers) if kind == "full"]
    return dict(
        moe_layer_start_index=sparse[0],
        moe_layer_end_index=sparse[-1],
        moe_layer_interval=sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    )


_ERNIE_BIAS = LayerTensor(  # [1, experts]
    "choice_bias", "mlp.moe_statics.e_score_correction_bias", 1, is_float32=True
)

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    layer_kinds=QWEN3_MOE.layer_kinds,
    read_kinds=_ernie_read_kinds,
    write_kinds=_ernie_write_kinds,
    settings={
        **ERNIE4_5.settings,
        "experts.choice_bias": True,
        "experts.renormalize": True,
    },
    fields={
        "moe_num_experts": "experts.num_experts",
        "moe_k": "experts.experts_per_token",
        "moe_intermediate_size": "experts.ffn_dim",
    },
    field_aliases=dict.fromkeys(("num_experts", "num_local_experts"), "moe_num_experts")
    | dict(num_experts_per_tok="moe_k"),
    num_shared_field="moe_num_shared_experts",
    defaults=dict(
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=True,
        moe_num_experts=64,
        moe_k=6,
        moe_num_shared_experts=2,
        moe_intermediate_size=1536,
    ),
    required_values=dict(use_bias=(False,), moe_norm_min=(1e-12,)),
    other_prefixes=("model.mtp_", "mtp."),
    irrelevant=(
        "moe_layer_start_index",  # `_ernie_read_kinds` reads the first three
        "moe_layer_end_index",
        "moe_layer_interval",
        "num_nextn_predict_layers",
        # of the authors' program
        "moe_capacity",
        "moe_gate",
        "moe_use_aux_free",
        "auto_map",
    ),
    feed_forward_tensors=dict(
        experts=(
            experts.TENSORS[0]._replace(is_float32=True),
            *experts.TENSORS[1:],
            _ERNIE_BIAS,
            *experts.shared_tensors("shared_experts"),
        )
    ),
    tensor_aliases=(
        *experts.STACKED_LINEAR_TENSORS,
        _ERNIE_BIAS._replace(name="mlp.gate.moe_statics.e_score_correction_bias"),
    ),
    kinds=QWEN3_MOE.kinds,
)


def _router_gate_tensors(shared: str) -> tuple[LayerTensor, ...]:
    """Of experts with a module `router`, and a shared expert in the module `shared`."""
    return (
        experts.TENSORS[0]._replace(name="mlp.router.gate.weight"),
        *experts.TENSORS[1:],
        experts.CHOICE_BIAS._replace(name="mlp.expert_bias"),
        *experts.shared_tensors(shared),
    )


HY_V3 = dataclasses.replace(
    GLM4_MOE,
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    write_kinds=_write_blocks,
    settings={**SIGMOID_ROUTER, "attention.qk_norm": "head", "experts.renormalize": True},
    fields={
        "attention_bias": "attention.qkv_bias",
        **EXPERT_FIELDS,
        "router_scaling_factor": "experts.scale",
    },
    field_aliases=_ALIASES | {"expert_hidden_dim": "moe_intermediate_size"},
    read_settings=nothing,
    write_settings=nothing,
    varying=(),
    num_shared_field="num_shared_experts",
    defaults=dict(
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=11_158_840.0,
        num_experts=192,
        num_experts_per_tok=8,
        num_shared_experts=1,
        moe_intermediate_size=1536,
        router_scaling_factor=2.826,
    ),
    required_values=dict(
        mlp_bias=(False,),
        qk_norm=(True,),
        route_norm=(True,),
        moe_router_use_sigmoid=(True,),
        moe_router_enable_expert_bias=(True,),
    ),
    irrelevant=(
        *GLM4_MOE.irrelevant,
        "mlp_layer_types",
        # data types and kernels of the authors' program
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "enable_moe_fp32_combine",
        "use_grouped_mm",
        "eod_token_id",
    ),
    feed_forward_tensors=dict(experts=_router_gate_tensors("shared_mlp")),
    tensor_aliases=(
        *experts.STACKED_LINEAR_TENSORS,
        _CHOICE_BIAS,
        *experts.shared_tensors("shared_experts"),
    ),
)


_EXAONE_DENSE = {f"dense_{kind}": kind for kind in ("sliding", "nope")}


def _exaone_moe_read_kinds(config: Fields) -> list[str]:
    return _with_blocks(config, [*EXAONE4.read_kinds(config)], num_dense=1)


def _exaone_moe_write_kinds(model: ModelConfig) -> dict[str, Any]:
    return write_masks(model) | _write_blocks(model)


EXAONE_MOE = dataclasses.replace(
    HY_V3,
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    layer_kinds=kind_sets("sliding", "nope", *_EXAONE_DENSE),
    read_kinds=_exaone_moe_read_kinds,
    write_kinds=_exaone_moe_write_kinds,
    settings={**SIGMOID_ROUTER, "attention.qk_norm": "head"},
    fields=EXPERT_FIELDS | GROUP_FIELDS,
    field_aliases=_ALIASES,
    defaults=dict(
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        num_experts=64,
        num_experts_per_tok=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=1,
        topk_group=1,
    ),
    required_values=dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",)),
    other_prefixes=("mtp.",),
    irrelevant=(
        "sliding_window_pattern",
        # dense layers; a file that contradicts the function above lacks tensors
        "mlp_layer_types",
        "is_moe_layer",
        "first_k_dense_replace",
        "first_last_k_dense_replace",
        "num_nextn_predict_layers",
    ),
    feed_forward_tensors=dict(
        experts=(*experts.TENSORS, _CHOICE_BIAS, *experts.shared_tensors("shared_experts"))
    ),
    tensor_aliases=(*experts.STACKED_LINEAR_TENSORS, experts.CHOICE_BIAS),
    kinds={
        kind: dict(attention=attention, feed_forward="dense")
        for kind, attention in _EXAONE_DENSE.items()
    },
)


def _afmoe_read_kinds(config: Fields) -> list[str]:
    """Full layers have no position embedding."""
    every = config.get("global_attn_every_n_layers") or 4
    kinds = read_layer_types(config, ["sliding"] * (every - 1) + ["full"])
    own = ["nope" if kind == "full" else kind for kind in kinds]
    return _with_blocks(config, own, config.get("num_dense_layers", 1))


def _afmoe_write_kinds(model: ModelConfig) -> dict[str, Any]:
    blocks = [model.layer_config(kind).feed_forward for kind in model.kinds_of_layers]
    return write_masks(model) | dict(num_dense_layers=blocks.count("dense"))


AFMOE = dataclasses.replace(
    EXAONE_MOE,
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    read_kinds=_afmoe_read_kinds,
    write_kinds=_afmoe_write_kinds,
    settings={
        **SIGMOID_ROUTER,
        "attention.qk_norm": "head",
        "attention.gate": True,
        "attention.gate_projection": True,
        "experts.renormalize": True,
        "norm_placement": "pre_and_post",
    },
    fields={
        "attention_bias": "attention.qkv_bias",
        **EXPERT_FIELDS,
        "route_scale": "experts.scale",
        "mup_enabled": "scale_embeddings",
    },
    defaults=dict(
        head_dim=128,
        rms_norm_eps=1e-5,
        sliding_window=1024,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        moe_intermediate_size=1408,
        route_scale=1.0,
        mup_enabled=False,
    ),
    required_values=dict(
        score_func=("sigmoid",),
        route_norm=(True,),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
    ),
    other_prefixes=(),
    # the first two are read by the functions above
    irrelevant=(
        "global_attn_every_n_layers",
        "num_dense_layers",
        "load_balance_coeff",
        "use_grouped_mm",
        "auto_map",
    ),
    feed_forward_tensors=dict(experts=_router_gate_tensors("shared_experts")),
    tensor_aliases=experts.STACKED_LINEAR_TENSORS,
    name_parts={f"{x}_feedforward_layernorm": f"{x}_mlp_layernorm" for x in ("pre", "post")},
)
