"""Falcon-H1: layers with attention and Mamba-2 side by side, and a multiplier of almost every
projection (transformers: models/falcon_h1).

Granite 3 with experts, and with a shared one (transformers: models/granitemoe and
models/granitemoeshared).

Granite 4: mamba2 layers and layers with attention, dense or with experts; with the multipliers of
Granite 3 (transformers: models/granitemoehybrid). Models without mamba2 layers are described so as
well.

Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: layers of one block, which is Mamba-2, attention
without position embedding, a dense feed-forward block or experts, both without gates (transformers:
models/nemotron_h). Released files have the prefix backbone. in place of model.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.kinds.contract import LayerTensor
from jaxlc.config.kinds.dense import DenseKind
from jaxlc.config.models.families.deepseek import ROUTED_FIELDS
from jaxlc.config.models.families.dense import GRANITE
from jaxlc.config.models.families.family import Family, Fields, kind_sets
from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.core import UserError

_GRANITE_TYPES = dict(mamba="mamba2", linear_attention="mamba2", attention="", full_attention="")


def _granite_read_kinds(config: Fields) -> list[str]:
    attention = "full" if config.get("position_embedding_type") == "rope" else "nope"
    types = config.get("layer_types") or ["mamba"] * config["num_hidden_layers"]
    return [_GRANITE_TYPES.get(name, name) or attention for name in types]


def _granite_write_kinds(model: ModelConfig) -> dict[str, Any]:
    kinds = model.kinds_of_layers
    return dict(
        layer_types=["mamba" if kind == "mamba2" else "attention" for kind in kinds],
        position_embedding_type="rope" if "full" in kinds else "nope",
    )


def _granite_read_settings(config: Fields) -> dict[str, Any]:
    """Without experts, the layers have the shared block alone."""
    num_experts = config.get("num_local_experts")
    shared = config["shared_intermediate_size"]
    settings = {**GRANITE.read_settings(config), **_read_mamba(config), "ffn_dim": shared}
    if not num_experts:
        return settings
    settings["ffn_dim"] = settings["experts.ffn_dim"] = config["intermediate_size"]
    return settings | {
        "experts.router": "topk_softmax",
        "experts.num_experts": num_experts,
        "experts.experts_per_token": config["num_experts_per_tok"],
        "experts.shared_ffn_dim": shared,
    }


def _granite_write_settings(model: ModelConfig) -> dict[str, Any]:
    sizes = model.experts
    mamba = model.mamba2
    return dict(
        **GRANITE.write_settings(model),
        **_write_step_limit(model),
        mamba_expand=mamba.heads * mamba.head_dim // model.model_dim or 2,
        intermediate_size=sizes.ffn_dim or model.ffn_dim,
        shared_intermediate_size=sizes.shared_ffn_dim or model.ffn_dim,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.experts_per_token,
    )


def _read_mamba(config: Fields, width: int | None = None) -> dict[str, Any]:
    """The bounds of the step size, and the width of heads, which all have this width together."""
    head_dim = config.get("mamba_d_head")
    if not isinstance(head_dim, int):  # "auto"
        width = width or config["mamba_expand"] * config["hidden_size"]
        head_dim = width // config["mamba_n_heads"]
    return {**_read_step_limit(config), "mamba2.head_dim": head_dim}


def _read_step_limit(config: Fields) -> dict[str, Any]:
    limits = config.get("time_step_limit") or (0.0, math.inf)
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise UserError(
            f"config.json has time_step_limit={limits}: expected the smallest and the largest step"
        )
    smallest, largest = limits
    largest = 0.0 if largest == math.inf else largest
    return {"mamba2.smallest_step": smallest, "mamba2.largest_step": largest}


def _write_step_limit(model: ModelConfig) -> dict[str, Any]:
    sizes = model.mamba2
    return dict(time_step_limit=[sizes.smallest_step, sizes.largest_step or math.inf])


_MAMBA_FIELDS = {
    "mamba_n_heads": "mamba2.heads",
    "mamba_d_head": "mamba2.head_dim",
    "mamba_n_groups": "mamba2.groups",
    "mamba_d_state": "mamba2.state_dim",
    "mamba_d_conv": "mamba2.conv_taps",
    "mamba_conv_bias": "mamba2.conv_bias",
}
_MAMBA_DEFAULTS = dict(
    mamba_n_heads=128,
    mamba_d_head="auto",
    mamba_n_groups=1,
    mamba_d_state=256,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_conv_bias=True,
    time_step_limit=None,
)
_STEP_LIMIT = ("mamba2.smallest_step", "mamba2.largest_step")
_SHARED = {
    "w_gate": "shared_mlp.input_linear.weight",
    "w_up": "shared_mlp.input_linear.weight",
    "w_down": "shared_mlp.output_linear.weight",
}


def _granite_experts(router: str, gate_up: str, down: str) -> tuple[LayerTensor, ...]:
    """The tensors of experts by the names of their modules."""
    stacked = functools.partial(LayerTensor, num_inputs=1, is_stacked=True)
    return (
        LayerTensor("router", f"block_sparse_moe.{router}", 1),
        stacked("expert_gate", f"block_sparse_moe.{gate_up}"),
        stacked("expert_up", f"block_sparse_moe.{gate_up}"),
        stacked("expert_down", f"block_sparse_moe.{down}"),
    )


GRANITE_MOE = dataclasses.replace(
    GRANITE,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    settings={"experts.router": "topk_softmax"},
    fields={
        **{name: x for name, x in GRANITE.fields.items() if name != "mlp_bias"},
        "num_local_experts": "experts.num_experts",
        "num_experts_per_tok": "experts.experts_per_token",
        "intermediate_size": "experts.ffn_dim",
    },
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    feed_forward_tensors=dict(
        experts=_granite_experts(
            "router.layer.weight", "input_linear.weight", "output_linear.weight"
        )
    ),
    tensor_aliases=_granite_experts("router.weight", "experts.gate_up_proj", "experts.down_proj"),
)


GRANITE_MOE_SHARED = dataclasses.replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    fields={**GRANITE_MOE.fields, "shared_intermediate_size": "experts.shared_ffn_dim"},
    defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    feed_forward_tensors=dict(
        experts=(
            *GRANITE_MOE.feed_forward_tensors["experts"],
            *(LayerTensor(f"shared/{param}", name, 1) for param, name in _SHARED.items()),
        )
    ),
)


GRANITE_MOE_HYBRID: Family = dataclasses.replace(
    GRANITE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    layer_kinds=(*kind_sets("mamba2", "full"), *kind_sets("mamba2", "nope")),
    read_kinds=_granite_read_kinds,
    write_kinds=_granite_write_kinds,
    settings={},
    fields={
        **{name: x for name, x in GRANITE.fields.items() if name != "mlp_bias"},
        **_MAMBA_FIELDS,
    },
    read_settings=_granite_read_settings,
    write_settings=_granite_write_settings,
    varying=(
        "ffn_dim",
        "experts.num_experts",
        "experts.experts_per_token",
        "experts.ffn_dim",
        "experts.shared_ffn_dim",
        "experts.router",
        *_STEP_LIMIT,
    ),
    defaults={
        **GRANITE.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        **_MAMBA_DEFAULTS,
    },
    field_aliases={"layers_block_type": "layer_types"},
    required_values=dict(
        mamba_proj_bias=(False,), normalization_function=("rmsnorm",), attention_dropout=(0, 0.1)
    ),
    irrelevant=(
        "position_embedding_type",  # read by `_granite_read_kinds`
        "mamba_chunk_size",
        "init_method",
    ),
    feed_forward_tensors=dict(
        experts=GRANITE_MOE_SHARED.feed_forward_tensors["experts"],
        dense=tuple(LayerTensor(param, name, 1) for param, name in _SHARED.items()),
    ),
    tensor_aliases=GRANITE_MOE.tensor_aliases,
)


def _falcon_read_kinds(config: Fields) -> list[str]:
    return ["full_mamba2"] * config["num_hidden_layers"]


# fields with several numbers -> their settings
_FALCON_LISTS = {
    "mlp_multipliers": ("mlp_gate_multiplier", "mlp_output_multiplier"),
    "ssm_multipliers": tuple(
        f"mamba2.{part}_multiplier" for part in ("gate", "value", "key", "query", "step")
    ),
}


def _falcon_read_settings(config: Fields) -> dict[str, Any]:
    """Projections without biases commute with multipliers. So the multiplier of the input of
    attention becomes a factor of the multipliers of its logits and of its output, and the multiplier
    of the input of Mamba-2 a factor of the multipliers of its projections.
    """
    into, key, state = (
        config.get(f"{x}_multiplier") or 1.0 for x in ("attention_in", "key", "ssm_in")
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    order = "before_gate" if config["mamba_norm_before_gate"] else "after_gate"
    settings = {
        **_read_mamba(config, config.get("mamba_d_ssm")),
        "logits_scaling": 1 / config["lm_head_multiplier"],
        "attention.query_scale_dim": head_dim * (into**2 * key) ** -2,
        "attention.output_multiplier": into * config["attention_out_multiplier"],
        "mamba2.norm": order if config["mamba_rms_norm"] else "none",
    }
    for name, factor in dict(mlp_multipliers=1.0, ssm_multipliers=state).items():
        names = _FALCON_LISTS[name]
        values = config.get(name) or [1.0] * len(names)
        if len(values) != len(names):
            raise UserError(f"config.json has {name}={values}: expected {len(names)} numbers")
        settings |= {setting: factor * value for setting, value in zip(names, values)}
    return settings


def _falcon_write_settings(model: ModelConfig) -> dict[str, Any]:
    mamba = model.mamba2
    return dict(
        **_write_step_limit(model),
        lm_head_multiplier=1 / model.logits_scaling,
        key_multiplier=(
            model.attention.head_dim / (model.attention.query_scale_dim or model.attention.head_dim)
        )
        ** 0.5,
        **{name: [model.by_path[x] for x in settings] for name, settings in _FALCON_LISTS.items()},
        mamba_d_ssm=mamba.heads * mamba.head_dim,
        mamba_rms_norm=mamba.norm != "none",
        mamba_norm_before_gate=mamba.norm == "before_gate",
    )


_FALCON_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    # converted by `_falcon_read_settings`, as are the next two
    "lm_head_multiplier": "logits_scaling",
    "key_multiplier": "attention.query_scale_dim",
    "attention_out_multiplier": "attention.output_multiplier",
    "ssm_out_multiplier": "mamba2.output_multiplier",
}

FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    layer_kinds=(("full_mamba2",),),
    read_kinds=_falcon_read_kinds,
    fields={**_MAMBA_FIELDS, **_FALCON_MULTIPLIERS},
    read_settings=_falcon_read_settings,
    write_settings=_falcon_write_settings,
    varying=("mamba2.norm", *_STEP_LIMIT, *itertools.chain(*_FALCON_LISTS.values())),
    defaults={
        **_MAMBA_DEFAULTS,
        **dict.fromkeys(_FALCON_MULTIPLIERS, 1.0),
        **dict.fromkeys(("attention_in_multiplier", "ssm_in_multiplier"), 1.0),
        **dict.fromkeys(_FALCON_LISTS),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
    },
    required_values=dict(
        mlp_bias=(False,), projectors_bias=(False,), mamba_proj_bias=(False,), mamba_use_mlp=(True,)
    ),
    irrelevant=("mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"),
    name_parts={
        "model.norm.": "model.final_layernorm.",
        ".mlp.": ".feed_forward.",
        ".post_attention_layernorm.": ".pre_ff_layernorm.",
    },
)


# Layers of one block: their names here, in config.json, and in the older field
# hybrid_override_pattern.
_NEMOTRON_KINDS = dict(
    mamba=dict(attention="mamba2", feed_forward="none"),
    attention=dict(attention="nope", feed_forward="none"),
    mlp=dict(attention="none", feed_forward="dense"),
    moe=dict(attention="none", feed_forward="experts"),
)
_NEMOTRON_TYPES = dict(zip(("linear_attention", "full_attention"), _NEMOTRON_KINDS))
_NEMOTRON_TYPES |= dict(zip("M*-E", _NEMOTRON_KINDS))


def _nemotron_read_kinds(config: Fields) -> list[str]:
    types = config.get("layer_types") or config.get("hybrid_override_pattern")
    types = types or ["linear_attention", "moe", "full_attention", "mlp"]
    return [_NEMOTRON_TYPES.get(name, name) for name in types]


def _nemotron_write_kinds(model: ModelConfig) -> dict[str, Any]:
    names = {kind: letter for letter, kind in _NEMOTRON_TYPES.items()}  # last the letters
    return dict(hybrid_override_pattern="".join(names[kind] for kind in model.kinds_of_layers))


_NEMOTRON_EXPERTS = {
    **ROUTED_FIELDS,
    "moe_shared_expert_intermediate_size": "experts.shared_ffn_dim",
}


def _nemotron_read_settings(config: Fields) -> dict[str, Any]:
    settings = _read_step_limit(config)
    if "moe" not in _nemotron_read_kinds(config):
        return settings
    settings |= {setting: config[name] for name, setting in _NEMOTRON_EXPERTS.items()}
    settings["experts.latent_dim"] = config.get("moe_latent_size") or 0
    return settings | {"experts.router": "sigmoid", "experts.choice_bias": True}


def _nemotron_write_settings(model: ModelConfig) -> dict[str, Any]:
    fields = _write_step_limit(model)
    if model.experts.num_experts:
        fields |= {name: model.by_path[setting] for name, setting in _NEMOTRON_EXPERTS.items()}
        fields["moe_latent_size"] = model.experts.latent_dim or None
    return fields


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    layer_kinds=kind_sets(*_NEMOTRON_KINDS),
    read_kinds=_nemotron_read_kinds,
    write_kinds=_nemotron_write_kinds,
    settings=dict(activation="relu2", tie_embeddings=False),  # transformers never ties them
    fields={
        "layer_norm_epsilon": "norm_epsilon",
        "mamba_num_heads": "mamba2.heads",
        "mamba_head_dim": "mamba2.head_dim",
        "n_groups": "mamba2.groups",
        "ssm_state_size": "mamba2.state_dim",
        "conv_kernel": "mamba2.conv_taps",
        "use_conv_bias": "mamba2.conv_bias",
    },
    read_settings=_nemotron_read_settings,
    write_settings=_nemotron_write_settings,
    varying=(
        "norm_epsilon",
        "experts.router",
        "experts.choice_bias",
        "experts.latent_dim",
        *_STEP_LIMIT,
        *_NEMOTRON_EXPERTS.values(),
    ),
    activation_field="mlp_hidden_act",
    defaults=dict(
        num_key_value_heads=8,
        head_dim=128,
        layer_norm_epsilon=1e-5,
        intermediate_size=21504,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
        use_conv_bias=True,
        time_step_limit=None,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=7688,
        moe_latent_size=None,
        moe_shared_expert_intermediate_size=7688,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
    ),
    required_values=dict(
        tie_word_embeddings=(False,),
        mlp_bias=(False,),
        use_bias=(False,),
        mamba_proj_bias=(False,),
        mamba_hidden_act=("silu",),
        hidden_dropout=(0,),
    ),
    field_aliases={
        "layers_block_type": "layer_types",
        "attention_head_dim": "head_dim",
        "num_local_experts": "n_routed_experts",
    },
    multimodal_prefixes={"backbone.": "model."},
    other_prefixes=("mtp.",),
    irrelevant=(
        # the functions above read the first one
        "hybrid_override_pattern",
        "n_shared_experts",
        # of initial values
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "rescale_prenorm_residual",
        "expand",
        "chunk_size",
        "num_logits_to_keep",
        "residual_in_fp32",
        "auto_map",
        "use_mamba_kernels",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
        "rms_norm_eps",
        "hidden_act",
    ),
    name_parts={
        "model.embed_tokens.": "model.embeddings.",
        "model.norm.": "model.norm_f.",
        **dict.fromkeys((".mamba.", ".self_attn.", ".mlp."), ".mixer."),
        **dict.fromkeys((".input_layernorm.", ".post_attention_layernorm."), ".norm."),
    },
    feed_forward_tensors=dict(
        experts=(
            *experts.TENSORS,
            experts.CHOICE_BIAS,
            *experts.LATENT_TENSORS,
            *experts.shared_tensors("shared_experts"),
        ),
        dense=DenseKind.tensors,
    ),
    tensor_aliases=tuple(
        LayerTensor(f"expert_{x}", f"mlp.experts.{x}_proj", 1, is_stacked=True)
        for x in ("up", "down")
    ),
    kinds=_NEMOTRON_KINDS,
)
