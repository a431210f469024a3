"""Families with the layers of DeepSeek V3: its latent attention, or its experts, which have a
sigmoid router and shared experts; the names in parentheses are their models in transformers.

- GLM 4.5 and 4.6 (glm4_moe): dense layers, then layers of experts. Layers of multi-token prediction
  are left out
- Solar Open (solar_open): GLM 4.5 without dense layers and norms of heads
- dots.llm1 (dots1): GLM 4.5 with norms of heads in all models
- DeepSeek V3 and V2 (deepseek_v3, deepseek_v2), Kimi K2 and GLM 4.7 Flash (glm4_moe_lite): dense
  layers first, then layers of experts with shared ones. Kimi K2 has the layers of DeepSeek V3, and
  is exported as such. Layers of multi-token prediction are left out
- Youtu-LLM (youtu): dense layers only
- Mistral Small 4 (mistral4): layers of experts with a shared one, and queries as in Ministral 3
- Kimi Linear (kimi_linear): layers of Kimi Delta Attention, and of latent attention without
  position embedding
"""

import dataclasses
import functools
from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.kinds.contract import LayerTensor, conv_tensors
from jaxlc.config.kinds.dense import DenseKind
from jaxlc.config.models.families.dense import MINISTRAL3, QWEN3
from jaxlc.config.models.families.family import Family, Fields, kind_sets, nothing
from jaxlc.config.models.model_schema import ModelConfig

SIGMOID_ROUTER = {"experts.router": "sigmoid", "experts.choice_bias": True}


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
    return {"attention.qk_norm": "head" if config["use_qk_norm"] else "none"}


def _write_settings(model: ModelConfig) -> dict[str, Any]:
    return dict(use_qk_norm=model.attention.qk_norm == "head")


GROUP_FIELDS = {
    "norm_topk_prob": "experts.renormalize",
    "n_group": "experts.groups",
    "topk_group": "experts.groups_per_token",
    "routed_scaling_factor": "experts.scale",
}
ROUTED_FIELDS = {
    "n_routed_experts": "experts.num_experts",
    "num_experts_per_tok": "experts.experts_per_token",
    "moe_intermediate_size": "experts.ffn_dim",
    **GROUP_FIELDS,
}

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    layer_kinds=(("full",), ("dense", "full")),
    read_kinds=functools.partial(read_first_dense, num_dense=1, other="full"),
    write_kinds=write_first_dense,
    settings={**SIGMOID_ROUTER, "attention.out_bias": False},
    fields={"attention_bias": "attention.qkv_bias", **ROUTED_FIELDS},
    field_aliases={"num_local_experts": "n_routed_experts"},
    read_settings=_read_settings,
    write_settings=_write_settings,
    varying=("attention.qk_norm",),
    num_shared_field="n_shared_experts",
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


SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    layer_kinds=(("full",),),
    read_kinds=functools.partial(read_first_dense, num_dense=0, other="full"),
    write_kinds=nothing,
    defaults={
        **GLM4_MOE.defaults,
        "head_dim": 128,
        "rope_theta": 1e6,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 1280,
    },
    required_values=dict(use_qk_norm=(False,)),
    kinds={},
)


def _dots1_read_kinds(config: Fields) -> list[str]:
    """Layers with a window are not supported: no published model has them."""
    masks = QWEN3.read_kinds({"max_window_layers": 62, **config, "use_sliding_window": True})
    kinds = read_first_dense(config, num_dense=0, other="full")
    return [kind if mask == "full" else mask for kind, mask in zip(kinds, masks)]


DOTS1 = dataclasses.replace(
    GLM4_MOE,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    read_kinds=_dots1_read_kinds,
    settings={**SIGMOID_ROUTER, "attention.qk_norm": "head"},
    read_settings=nothing,
    write_settings=nothing,
    varying=(),
    defaults=dict(
        num_key_value_heads=32,
        n_shared_experts=0,
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),
    required_values=dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,)),
    other_prefixes=(),
    irrelevant=("first_k_dense_replace", "max_window_layers", "use_sliding_window", "auto_map"),
)


_read_kinds = functools.partial(read_first_dense, other="latent")


def _read_latent(config: Fields) -> dict[str, Any]:
    # null: head_dim is invalid
    rotated_dim, own_dim = (config[f"qk_{part}_head_dim"] or 0 for part in ("rope", "nope"))
    head_dim = own_dim + rotated_dim
    return {
        "attention.head_dim": head_dim,
        "rope.fraction": rotated_dim / (head_dim or 1),
        "latent.query_rank": config.get("q_lora_rank") or 0,
        "latent.interleaved": bool(config.get("rope_interleave", True)),
    }


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    return dict(
        qk_rope_head_dim=model.rotated_dim,
        qk_nope_head_dim=model.attention.head_dim - model.rotated_dim,
        q_lora_rank=model.latent.query_rank or None,
        rope_interleave=model.latent.interleaved,
    )


_SIZES = dict(
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    v_head_dim=128,
)
_DEFAULTS = _SIZES | dict(
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)

_LATENT_FIELDS = {"kv_lora_rank": "latent.rank", "v_head_dim": "latent.value_dim"}


def _youtu_read_kinds(config: Fields) -> list[str]:
    return ["latent"] * config["num_hidden_layers"]


YOUTU = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    layer_kinds=(("latent",),),
    read_kinds=_youtu_read_kinds,
    fields=_LATENT_FIELDS,
    read_settings=_read_latent,
    write_settings=_write_latent,
    varying=("attention.head_dim", "rope.fraction", "latent.query_rank", "latent.interleaved"),
    # attention reads the last one, besides the RoPE
    defaults={**_SIZES, "tie_word_embeddings": True, "mscale_all_dim": 0.0},
    # `_read_latent` reads the first one
    irrelevant=("rope_interleave", "qk_head_dim", "embedding_initializer_range"),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer_kinds=kind_sets("dense", "latent"),
    read_kinds=functools.partial(_read_kinds, num_dense=3),
    write_kinds=write_first_dense,
    settings=SIGMOID_ROUTER,
    fields=_LATENT_FIELDS | ROUTED_FIELDS,
    field_aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    read_settings=_read_latent,
    write_settings=_write_latent,
    varying=YOUTU.varying,
    num_shared_field="n_shared_experts",
    defaults={**_DEFAULTS, "mscale_all_dim": 0.0},  # attention reads it, besides the RoPE
    required_values=dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,)),
    other_prefixes=("model.layers.{num_layers}.",),
    irrelevant=(
        # the functions above read the first three
        "first_k_dense_replace",
        "mlp_layer_types",
        "rope_interleave",
        "qk_head_dim",
        "num_nextn_predict_layers",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "auto_map",
    ),
    feed_forward_tensors=GLM4_MOE.feed_forward_tensors,
    tensor_aliases=GLM4_MOE.tensor_aliases,
    kinds=dict(dense=dict(attention="latent", feed_forward="dense")),
)

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2", exported_type="deepseek_v3")

GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read_kinds=functools.partial(_read_kinds, num_dense=1),
    defaults={
        **DEEPSEEK_V3.defaults,
        "qk_nope_head_dim": 192,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
)

_GROUPS_FIRST = "group_limited_greedy"  # topk_method with groups; without it, they have no effect


def _v2_read_settings(config: Fields) -> dict[str, Any]:
    settings = _read_latent(config)
    if config.get("topk_method") == _GROUPS_FIRST:
        return settings
    return settings | {"experts.groups": 1, "experts.groups_per_token": 1}


def _v2_write_settings(model: ModelConfig) -> dict[str, Any]:
    method = _GROUPS_FIRST if model.experts.groups > 1 else "greedy"
    return dict(_write_latent(model), topk_method=method)


# Groups are chosen by the largest probability in them, and weights are not divided by their sum.
DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read_kinds=functools.partial(_read_kinds, num_dense=0),
    settings={"experts.router": "softmax"},
    fields={x: y for x, y in DEEPSEEK_V3.fields.items() if x != "norm_topk_prob"},
    field_aliases={"num_experts": "n_routed_experts"},
    read_settings=_v2_read_settings,
    write_settings=_v2_write_settings,
    defaults={
        **DEEPSEEK_V3.defaults,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.0,
    },
    required_values={
        **DEEPSEEK_V3.required_values,
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", _GROUPS_FIRST),
        "norm_topk_prob": (False,),
        "mlp_bias": (False,),
    },
    feed_forward_tensors=dict(
        experts=(*experts.TENSORS, *experts.shared_tensors("shared_experts"))
    ),
)

# Released models have one group. The logits of attention have no factor of YaRN (yarn.apply_scale=false in Mistral's
# own files); transformers has multiplied them by the square of mscale_all_dim's factor since 5.17.
MISTRAL4 = dataclasses.replace(
    DEEPSEEK_V2,
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    fields=DEEPSEEK_V3.fields,
    field_aliases=DEEPSEEK_V3.field_aliases,
    read_settings=_read_latent,
    write_settings=_write_latent,
    defaults={
        **_DEFAULTS,
        "qk_nope_head_dim": 64,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,  # which the dims of heads give
        "llama_4_scaling_beta": 0.0,
        "rope_parameters": dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=128.0,
            original_max_position_embeddings=8192,
            attention_factor=1.0,
            llama_4_scaling_beta=0.1,
        ),
    },
    required_values=dict(n_group=(1,)),
    irrelevant=(*DEEPSEEK_V3.irrelevant, "max_position_embeddings"),  # in rope_parameters
    multimodal_type=MINISTRAL3.multimodal_type,
    multimodal_prefixes=MINISTRAL3.multimodal_prefixes,
    other_prefixes=(*DEEPSEEK_V3.other_prefixes, *MINISTRAL3.other_prefixes),
    feed_forward_tensors=dict(
        experts=(*experts.STACKED_LINEAR_TENSORS, *experts.shared_tensors("shared_experts"))
    ),
    tensor_aliases=experts.TENSORS,
)


_KIMI_TYPES = dict(linear_attention="kimi_delta", full_attention="latent_nope")
_KIMI_DENSE = {f"dense_{kind}": kind for kind in _KIMI_TYPES.values()}
_KIMI_NAMES = {  # of DeepSeek V3 -> of Kimi Linear
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
}
_KIMI_SIZES = {  # in linear_attn_config, which are fields of transformers, too
    "num_heads": "kda.key_heads",
    "head_dim": "kda.head_dim",
    "short_conv_kernel_size": "kda.conv_taps",
}


def _kimi_read_kinds(config: Fields) -> list[str]:
    """linear_attn_config counts layers from 1."""
    indices = range(config["num_hidden_layers"])
    linear = config.get("linear_attn_config") or {}
    if config.get("layer_types"):
        mixers = [_KIMI_TYPES.get(name, name) for name in config["layer_types"]]
    elif linear.get("kda_layers"):
        mixers = ["kimi_delta" if i + 1 in linear["kda_layers"] else "latent_nope" for i in indices]
    else:
        mixers = ["latent_nope" if i and i % 4 == 0 else "kimi_delta" for i in indices]
    blocks = _read_kinds(config, num_dense=1)
    return [f"dense_{x}" if block == "dense" else x for x, block in zip(mixers, blocks)]


def _kimi_write_kinds(model: ModelConfig) -> dict[str, Any]:
    kinds = model.kinds_of_layers
    is_linear = [model.attention_of(kind) == "kimi_delta" for kind in kinds]
    linear = dict(
        kda_layers=[i + 1 for i, x in enumerate(is_linear) if x],
        full_attn_layers=[i + 1 for i, x in enumerate(is_linear) if not x],
    )
    linear |= {name: model.by_path[setting] for name, setting in _KIMI_SIZES.items()}
    num_dense = sum(kind in _KIMI_DENSE for kind in kinds)
    return dict(linear_attn_config=linear, first_k_dense_replace=num_dense)


def _kimi_read_settings(config: Fields) -> dict[str, Any]:
    linear = config.get("linear_attn_config") or {}
    sizes = {setting: linear[x] for x, setting in _KIMI_SIZES.items() if linear.get(x)}
    return _read_latent(config) | sizes | {"latent.interleaved": False}


def _kimi_write_settings(model: ModelConfig) -> dict[str, Any]:
    fields = _write_latent(model)
    del fields["rope_interleave"]
    return fields


def _in_kimi(fields: Fields) -> dict[str, Any]:
    """With the names of Kimi Linear."""
    return {_KIMI_NAMES.get(name, name): value for name, value in fields.items()}


def _in_mixtral(tensor: LayerTensor) -> LayerTensor:
    return tensor._replace(name=tensor.name.replace("mlp.", "block_sparse_moe."))


KIMI_LINEAR = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    layer_kinds=kind_sets(*_KIMI_TYPES.values(), *_KIMI_DENSE),
    read_kinds=_kimi_read_kinds,
    write_kinds=_kimi_write_kinds,
    settings={**DEEPSEEK_V3.settings, "tie_embeddings": False},  # transformers never ties them
    fields={
        **_in_kimi(DEEPSEEK_V3.fields),
        "linear_num_heads": "kda.key_heads",
        "linear_head_dim": "kda.head_dim",
        "linear_conv_kernel_dim": "kda.conv_taps",
    },
    field_aliases={**_KIMI_NAMES, "num_local_experts": "num_experts"},
    read_settings=_kimi_read_settings,
    write_settings=_kimi_write_settings,
    num_shared_field="num_shared_experts",
    defaults=_in_kimi(_DEFAULTS)
    | dict(
        q_lora_rank=None,
        moe_intermediate_size=1024,
        num_expert_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
        linear_num_heads=32,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    required_values=dict(
        tie_word_embeddings=(False,),
        moe_router_activation_func=("sigmoid",),
        moe_layer_freq=(1,),
        mla_use_nope=(True,),
    ),
    length_field="model_max_length",
    irrelevant=(
        *DEEPSEEK_V3.irrelevant,
        "linear_attn_config",
        "model_max_length",
        "use_grouped_topk",
    ),
    feed_forward_tensors=dict(
        experts=(
            _in_mixtral(experts.TENSORS[0]),
            *experts.MIXTRAL_TENSORS[1:4],
            *map(_in_mixtral, (experts.CHOICE_BIAS, *experts.shared_tensors("shared_experts"))),
        )
    ),
    tensor_aliases=(
        *map(_in_mixtral, DenseKind.tensors),  # as transformers 5 saves dense layers
        *experts.STACKED_LINEAR_TENSORS,
        experts.CHOICE_BIAS,
        *experts.shared_tensors("shared_experts"),
        *conv_tensors("self_attn.conv1d.weight"),
        LayerTensor("wf_down", "self_attn.forget_gate.f_a_proj.weight", 1),
        LayerTensor("wf_up", "self_attn.forget_gate.f_b_proj.weight", 1),
        LayerTensor("log_decay", "self_attn.forget_gate.A_log", None, is_float32=True),
        LayerTensor("decay_bias", "self_attn.forget_gate.dt_bias", is_float32=True),
    ),
    kinds={
        kind: dict(attention=attention, feed_forward="dense")
        for kind, attention in _KIMI_DENSE.items()
    },
)
