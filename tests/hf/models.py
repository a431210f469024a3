"""Tiny models of every family as Hugging Face directories, written with the package `safetensors`.

Weights are large enough that logits have a standard deviation above 1 and that every part of the
model has an effect.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxlc.models.quantized import BLOCK, SCALES_BLOCK, Nf4

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # larger than hidden_size / num_attention_heads
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    attention_dropout=0.0,
    initializer_range=0.02,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=60,  # torch gives the embedding of this id no gradient
    use_cache=True,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0
)
LINEAR_SIZES = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
EXPERT_SIZES = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
)
PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
POST_NORMS = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
# Of hybrids in float32. Outputs of a delta net may be close to 0; then its norm amplifies their rounding errors, by up
# to 1 / sqrt(epsilon). With 1e-5, gradients of transformers in float32 differ by up to 3e-4 from those in float64.
HYBRID_NORM_EPSILON = 1e-3
# numbers of shared experts, in different families
SHARED_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
CHOICE_BIAS = ("e_score_correction_bias", "expert_bias")  # no parameter in transformers
# in float32 in all files
FLOAT32_NAMES = (*CHOICE_BIAS, "self_attn.A_log", "self_attn.dt_bias")
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family, and what transformers calls the parameters that not all families have."""

    config: dict  # config.json
    # norms of a layer -> their names here
    norms: dict[str, str] = field(default_factory=lambda: PRE_NORMS)
    qk_norm: str = "none"  # as in ModelConfig
    biases: str = ""  # projections of attention with a bias, such as "qkv"
    has_sinks: bool = False
    has_gate: bool = False
    group_layers: int = 1  # layers of the repeating group
    first_layers: int = 0  # layers before the groups
    # Layers of Gated DeltaNet: their norms, as `norms`, and names of modules that are not those of
    # Qwen 3.5.
    delta_norms: dict[str, str] = field(default_factory=lambda: PRE_NORMS)
    delta_modules: dict[str, str] = field(default_factory=dict)
    linear_layers: tuple[int, ...] = ()  # of a config.json without layer_types
    dense_layers: tuple[int, ...] = ()  # of a model with experts
    # Architecture of the model with images whose text_config `config` is.
    wrapper: str = ""
    has_latents: bool = False  # attention is latent attention
    # Types of layers -> names of their mixers here.
    mixers: dict[str, str] = field(default_factory=dict)
    blocks: str = ""  # of layers of one block: their letters in hybrid_override_pattern


def _config(model_type: str, architecture: str, **fields) -> dict:
    """In the form of transformers 4, unless `fields` has the RoPE of transformers 5."""
    dtype = "dtype" if "rope_parameters" in fields else "torch_dtype"
    config = (
        SMALL
        | {"model_type": model_type, "architectures": [architecture], dtype: "bfloat16"}
        | fields
    )
    if config["intermediate_size"] is None:
        del config["intermediate_size"]  # a family without dense layers
    if config["head_dim"] is None and model_type != "llama":
        del config["head_dim"]  # other families do not have the field, or not with null
    return config


def _llama(**fields) -> dict:
    return _config("llama", "LlamaForCausalLM", **fields)


def _mistral(**fields) -> dict:
    return _config("mistral", "MistralForCausalLM", tie_word_embeddings=False, **fields)


LATENT_FIELDS = dict(
    head_dim=None,
    tie_word_embeddings=False,
    max_position_embeddings=256,
    num_key_value_heads=4,
    kv_lora_rank=10,
    q_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    attention_bias=False,
)


def _latent(model_type: str, architecture: str, wrapper: str = "", **fields) -> Case:
    """A model with latent attention: a dense layer, then layers of experts."""
    config = LATENT_FIELDS | dict(
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    )
    config = _config(model_type, architecture, **config | fields)
    return Case(config=config, has_latents=True, first_layers=1, dense_layers=(0,), wrapper=wrapper)


def _granite_hybrid(**fields) -> Case:
    """Two layers of Mamba-2 around one with attention."""
    config = dict(
        tie_word_embeddings=True,
        rope_theta=30000.0,
        head_dim=None,
        attention_bias=False,
        attention_multiplier=0.3,
        embedding_multiplier=0.7,
        logits_scaling=1.4,
        residual_multiplier=0.6,
        layer_types=[LINEAR, FULL, LINEAR],
        rms_norm_eps=HYBRID_NORM_EPSILON,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=12,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        mamba_chunk_size=16,
        shared_intermediate_size=40,
    )
    config = _config("granitemoehybrid", "GraniteMoeHybridForCausalLM", **config | fields)
    return Case(
        config=config,
        group_layers=2,
        mixers={LINEAR: "mamba2", FULL: fields["position_embedding_type"]},
    )


def _granite_moe(model_type: str, architecture: str, **fields) -> Case:
    """Granite 3 with experts."""
    config = _config(
        model_type,
        architecture,
        tie_word_embeddings=True,
        rope_theta=30000.0,
        head_dim=None,
        attention_bias=False,
        attention_multiplier=0.3,
        embedding_multiplier=0.7,
        logits_scaling=1.4,
        residual_multiplier=0.6,
        num_local_experts=8,
        num_experts_per_tok=2,
        **fields,
    )
    return Case(config=config)


# names in most families -> in Falcon-H1
FALCON_NAMES = {
    "model.norm.": "model.final_layernorm.",
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
}


# of experts, by model_type: names in most families -> in released files
RELEASED_NAMES = {
    "afmoe": {
        "gate.e_score_correction_bias": "expert_bias",
        "mlp.gate.": "mlp.router.gate.",
    },
    "ernie4_5_moe": {"gate.e_score_correction_bias": "moe_statics.e_score_correction_bias"},
    "exaone_moe": {"gate.e_score_correction_bias": "e_score_correction_bias"},
    "hy_v3": {
        "gate.e_score_correction_bias": "expert_bias",
        "mlp.gate.": "mlp.router.gate.",
        "shared_experts": "shared_mlp",
    },
}


def _falcon_h1(**fields) -> Case:
    """Layers with attention and Mamba-2 side by side; all multipliers differ."""
    config = dict(
        tie_word_embeddings=False,
        rope_theta=30000.0,
        attention_bias=False,
        mlp_bias=False,
        projectors_bias=False,
        embedding_multiplier=0.7,
        lm_head_multiplier=1.3,
        key_multiplier=0.5,
        attention_in_multiplier=1.1,
        attention_out_multiplier=0.6,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.75,
        # exact in float32, to which transformers rounds them
        ssm_multipliers=[1.4375, 1.15625, 0.5625, 1.25, 0.65625],
        mlp_multipliers=[1.4, 0.6],
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=12,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        mamba_chunk_size=16,
        rms_norm_eps=HYBRID_NORM_EPSILON,
        **fields,
    )
    config = _config("falcon_h1", "FalconH1ForCausalLM", **config)
    return Case(config=config, mixers={FULL: "full_mamba2"})


def _kimi_linear() -> Case:
    """Kimi Delta Attention in the first and the third layer; the first one is dense."""
    config = dict(
        tie_word_embeddings=False,
        num_key_value_heads=4,
        kv_lora_rank=10,
        q_lora_rank=None,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=12,
        mla_use_nope=True,
        linear_attn_config=dict(
            kda_layers=[1, 3],
            full_attn_layers=[2],
            num_heads=4,
            head_dim=8,
            short_conv_kernel_size=4,
        ),
        first_k_dense_replace=1,
        num_experts=8,
        num_shared_experts=2,
        num_experts_per_token=2,
        moe_intermediate_size=24,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        num_expert_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        attention_bias=False,
        rms_norm_eps=HYBRID_NORM_EPSILON,
        model_max_length=64,
    )
    config = _config("kimi_linear", "KimiLinearForCausalLM", **config)
    del config["max_position_embeddings"]
    del config["head_dim"]
    return Case(
        config=config,
        has_latents=True,
        dense_layers=(0,),
        linear_layers=(0, 2),
        group_layers=3,
        mixers={LINEAR: "kimi_delta", FULL: "latent_nope"},
    )


def _nemotron(pattern: str, **fields) -> Case:
    """Layers of one block, by the letters of hybrid_override_pattern."""
    config = dict(
        tie_word_embeddings=False,
        hybrid_override_pattern=pattern,
        num_hidden_layers=len(pattern),
        layer_norm_epsilon=HYBRID_NORM_EPSILON,
        mlp_hidden_act="relu2",
        mamba_hidden_act="silu",
        mamba_num_heads=8,
        mamba_head_dim=6,
        ssm_state_size=12,
        conv_kernel=4,
        use_conv_bias=True,
        time_step_limit=[0.1, 1.5],
        attention_bias=False,
        mlp_bias=False,
        num_nextn_predict_layers=0,
    )
    config = _config("nemotron_h", "NemotronHForCausalLM", **config | fields)
    for name in ("rms_norm_eps", "hidden_act"):
        del config[name]
    return Case(config=config, blocks=pattern, group_layers=len(pattern))


# Both forms of RoPE, tied and untied.
CASES: dict[str, Case] = {
    "llama": Case(
        config=_llama(
            tie_word_embeddings=False,
            rope_theta=10000.0,
            rope_scaling=LLAMA3_ROPE,
            pretraining_tp=1,
            attention_bias=False,
            mlp_bias=False,
        )
    ),
    "llama_tied": Case(
        config=_llama(
            tie_word_embeddings=True,
            rope_parameters=dict(LLAMA3_ROPE, rope_theta=20000.0),
            head_dim=None,
            attention_bias=True,
            mlp_bias=True,
        ),
        biases="qkvo",
    ),
    "mistral": Case(  # Mistral Small 3
        config=_mistral(rope_theta=30000.0, sliding_window=None),
        wrapper="Mistral3ForConditionalGeneration",
    ),
    "mistral_window": Case(config=_mistral(rope_theta=30000.0, sliding_window=12)),
    "ministral3": Case(
        config=_config(
            "ministral3",
            "Ministral3ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=YARN_ROPE
            | dict(type="yarn", rope_theta=30000.0, mscale=1.0, mscale_all_dim=1.0)
            | dict(original_max_position_embeddings=14, llama_4_scaling_beta=0.4),
            max_position_embeddings=256,
            sliding_window=None,
        )
    ),
    "qwen2": Case(
        config=_config(
            "qwen2",
            "Qwen2ForCausalLM",
            tie_word_embeddings=True,
            rope_theta=40000.0,
            rope_scaling=YARN_ROPE,
            max_position_embeddings=256,
            head_dim=None,
            use_sliding_window=False,
            sliding_window=64,
            max_window_layers=2,
        ),
        biases="qkv",
    ),
    "qwen2_window": Case(
        config=_config(
            "qwen2",
            "Qwen2ForCausalLM",
            tie_word_embeddings=False,
            rope_theta=40000.0,
            rope_scaling=YARN_ROPE,
            max_position_embeddings=256,
            head_dim=None,
            use_sliding_window=True,
            sliding_window=12,
            max_window_layers=1,
        ),
        biases="qkv",
        first_layers=1,
    ),
    "qwen3_window": Case(
        config=_config(
            "qwen3",
            "Qwen3ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(LLAMA3_ROPE, rope_theta=40000.0),
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=12,
            max_window_layers=28,
            layer_types=[SLIDING, FULL, SLIDING],
        ),
        biases="qkvo",
        qk_norm="head",
        group_layers=2,
    ),
    "qwen3": Case(
        config=_config(
            "qwen3",
            "Qwen3ForCausalLM",
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=40000.0),
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
            layer_types=[FULL] * 3,
        ),
        qk_norm="head",
    ),
    "qwen3_moe": Case(
        config=_config(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            tie_word_embeddings=False,
            rope_theta=40000.0,
            rope_scaling=None,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            **EXPERT_SIZES,
            norm_topk_prob=True,
        ),
        qk_norm="head",
        group_layers=2,
        dense_layers=(1,),
    ),
    "qwen3_5": Case(
        config=_config(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default", rope_theta=70000.0, partial_rotary_factor=0.25
            ),
            attention_bias=True,
            layer_types=[FULL] * 3,
        ),
        biases="qkvo",
        qk_norm="head",
        has_gate=True,
    ),
    "qwen3_5_hybrid": Case(
        config=_config(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=70000.0,
                partial_rotary_factor=0.25,
                mrope_section=[1, 1, 0],
                mrope_interleaved=True,
            ),
            attention_bias=False,
            layer_types=[LINEAR, LINEAR, FULL],
            full_attention_interval=3,
            attn_output_gate=True,
            rms_norm_eps=HYBRID_NORM_EPSILON,
            mamba_ssm_dtype="float32",
            mtp_num_hidden_layers=1,
            **LINEAR_SIZES,
        ),
        qk_norm="head",
        has_gate=True,
        group_layers=3,
    ),
    "qwen3_5_moe": Case(
        config=_config(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default", rope_theta=70000.0, partial_rotary_factor=0.25
            ),
            attention_bias=False,
            layer_types=[LINEAR, FULL, LINEAR],
            rms_norm_eps=HYBRID_NORM_EPSILON,
            intermediate_size=None,
            **LINEAR_SIZES,
            **EXPERT_SIZES,
            shared_expert_intermediate_size=20,
        ),
        qk_norm="head",
        has_gate=True,
        group_layers=2,
    ),
    "qwen3_next": Case(  # as released: without layer_types, and a tensor for each expert
        config=_config(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            tie_word_embeddings=False,
            rope_theta=70000.0,
            rope_scaling=YARN_ROPE,
            partial_rotary_factor=0.25,
            max_position_embeddings=256,
            attention_bias=False,
            full_attention_interval=2,
            decoder_sparse_step=1,
            mlp_only_layers=[2],
            use_sliding_window=False,
            rms_norm_eps=HYBRID_NORM_EPSILON,
            **LINEAR_SIZES,
            **EXPERT_SIZES,
            norm_topk_prob=True,
            shared_expert_intermediate_size=20,
        ),
        qk_norm="head",
        has_gate=True,
        linear_layers=(0, 2),
        group_layers=3,
        dense_layers=(2,),
    ),
    "qwen3_vl": Case(
        config=_config(
            "qwen3_vl_text",
            "",
            tie_word_embeddings=True,
            rope_scaling=dict(rope_type="default", mrope_section=[4, 2, 2], mrope_interleaved=True),
            rope_theta=50000.0,
            attention_bias=False,
        ),
        qk_norm="head",
        wrapper="Qwen3VLForConditionalGeneration",
    ),
    "qwen3_vl_moe": Case(
        config=_config(
            "qwen3_vl_moe_text",
            "",
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=50000.0,
                mrope_section=[4, 2, 2],
                mrope_interleaved=True,
            ),
            attention_bias=False,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
        qk_norm="head",
        group_layers=2,
        dense_layers=(1,),
        wrapper="Qwen3VLMoeForConditionalGeneration",
    ),
    "glm4_moe": Case(
        config=_config(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default", rope_theta=30000.0, partial_rotary_factor=0.5
            ),
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            num_nextn_predict_layers=1,
        ),
        biases="qkv",
        qk_norm="head",
        first_layers=1,
        dense_layers=(0,),
    ),
    "dots1": Case(
        config=_config(
            "dots1",
            "Dots1ForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            attention_bias=False,
            sliding_window=None,
            max_window_layers=3,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
        ),
        qk_norm="head",
        first_layers=1,
        dense_layers=(0,),
    ),
    "ernie4_5_moe": Case(
        config=_config(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            tie_word_embeddings=True,
            rope_theta=10000.0,
            head_dim=None,
            use_bias=False,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_intermediate_size=24,
            moe_layer_start_index=1,
            moe_layer_end_index=2,
            moe_layer_interval=1,
            num_nextn_predict_layers=1,
        ),
        first_layers=1,
        dense_layers=(0,),
    ),
    "minimax_m2": Case(  # with the fields and tensors of released files
        config=_config(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=YARN_ROPE,
            rotary_dim=8,
            max_position_embeddings=256,
            attn_type_list=[1, 1, 1],
            intermediate_size=24,
            mlp_intermediate_size=96,
            num_local_experts=8,
            num_experts_per_tok=2,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            shared_intermediate_size=0,
            shared_moe_mode="sigmoid",
            layernorm_full_attention_beta=1.0,
            layernorm_linear_attention_beta=1.0,
            layernorm_mlp_beta=1.0,
            use_mtp=True,
            num_mtp_modules=3,
            mtp_transformer_layers=1,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            router_jitter_noise=0.0,
        ),
        qk_norm="projection",
    ),
    "qwen2_moe": Case(
        config=_config(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            tie_word_embeddings=False,
            rope_theta=40000.0,
            head_dim=None,
            use_sliding_window=False,
            sliding_window=64,
            max_window_layers=2,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            **EXPERT_SIZES,
            norm_topk_prob=False,
            shared_expert_intermediate_size=20,
        ),
        biases="qkv",
        group_layers=2,
        dense_layers=(1,),
    ),
    "mixtral": Case(
        config=_config(
            "mixtral",
            "MixtralForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            sliding_window=12,
            intermediate_size=24,
            num_local_experts=8,
            num_experts_per_tok=2,
            output_router_logits=False,
            router_aux_loss_coef=0.02,
        ),
    ),
    "olmoe": Case(
        config=_config(
            "olmoe",
            "OlmoeForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=None,
            head_dim=None,
            attention_bias=False,
            clip_qkv=None,
            intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            output_router_logits=False,
            router_aux_loss_coef=0.01,
        ),
        qk_norm="projection",
    ),
    "mellum": Case(
        config=_config(
            "mellum",
            "MellumForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(
                full_attention=dict(YARN_ROPE, rope_theta=50000.0, attention_factor=1.2),
                sliding_attention=dict(rope_type="default", rope_theta=2000.0),
            ),
            max_position_embeddings=256,
            attention_bias=False,
            layer_types=[SLIDING, FULL, SLIDING],
            mlp_layer_types=["sparse"] * 3,
            sliding_window=12,
            use_sliding_window=True,
            max_window_layers=0,
            **EXPERT_SIZES,
            norm_topk_prob=True,
        ),
        qk_norm="head",
        group_layers=2,
    ),
    "solar_open": Case(
        config=_config(
            "solar_open",
            "SolarOpenForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=YARN_ROPE,
            partial_rotary_factor=1.0,
            max_position_embeddings=256,
            first_k_dense_replace=0,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
        ),
    ),
    "hy_v3": Case(  # with the fields and tensors of released files
        config=_config(
            "hy_v3",
            "HYV3ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=30000.0),
            first_k_dense_replace=1,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=2,
            moe_intermediate_size=24,
            expert_hidden_dim=24,
            router_scaling_factor=1.5,
            qk_norm=True,
            route_norm=True,
            moe_router_use_sigmoid=True,
            moe_router_enable_expert_bias=True,
            enable_attention_fp32_softmax=False,
            enable_moe_fp32_combine=False,
            num_nextn_predict_layers=1,
        ),
        qk_norm="head",
        first_layers=1,
        dense_layers=(0,),
    ),
    "exaone_moe": Case(  # with the fields and tensors of released files
        config=_config(
            "exaone_moe",
            "ExaoneMoeForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=None,
            layer_types=[SLIDING, SLIDING, FULL],
            sliding_window=12,
            sliding_window_pattern="LLG",
            first_last_k_dense_replace=1,
            is_moe_layer=[False, True, True],
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=2,
            moe_intermediate_size=24,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
        ),
        qk_norm="head",
        group_layers=3,
        dense_layers=(0,),
        mixers={FULL: "nope"},
    ),
    "afmoe": Case(  # with the fields and tensors of released files
        config=_config(
            "afmoe",
            "AfmoeForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=None,
            layer_types=[SLIDING, SLIDING, FULL],
            global_attn_every_n_layers=3,
            sliding_window=12,
            num_dense_layers=1,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=2,
            moe_intermediate_size=24,
            n_group=1,
            topk_group=1,
            num_expert_groups=1,
            num_limited_groups=1,
            load_balance_coeff=0.001,
            route_norm=True,
            route_scale=1.5,
            score_func="sigmoid",
            mup_enabled=True,
            use_grouped_mm=True,
        ),
        norms={
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "attention_post_norm",
            "pre_mlp_layernorm": "mlp_norm",
            "post_mlp_layernorm": "mlp_post_norm",
        },
        qk_norm="head",
        has_gate=True,
        group_layers=3,
        dense_layers=(0,),
        mixers={FULL: "nope"},
    ),
    "cwm": Case(
        config=_config(
            "cwm",
            "CwmForCausalLM",
            tie_word_embeddings=False,
            rope_theta=10000.0,
            rope_scaling=LLAMA3_ROPE,
            sliding_window=12,
            layer_types=[FULL, SLIDING, SLIDING],
            mlp_bias=False,
        ),
        first_layers=1,
    ),
    "gpt_oss": Case(
        config=_config(
            "gpt_oss",
            "GptOssForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(YARN_ROPE, rope_theta=150000.0, truncate=False),
            attention_bias=True,
            max_position_embeddings=256,
            sliding_window=12,
            layer_types=[SLIDING, FULL, SLIDING],
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            swiglu_limit=7.0,
            router_aux_loss_coef=0.9,
        ),
        biases="qkvo",
        has_sinks=True,
        group_layers=2,
    ),
    "seed_oss": Case(
        config=_config(
            "seed_oss",
            "SeedOssForCausalLM",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=YARN_ROPE,
            max_position_embeddings=256,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=False,
            residual_dropout=0.0,
            pretraining_tp=1,
        ),
        biases="qkvo",
    ),
    "arcee": Case(
        config=_config(
            "arcee",
            "ArceeForCausalLM",
            hidden_act="relu2",
            tie_word_embeddings=False,
            rope_theta=30000.0,
            rope_scaling=YARN_ROPE,
            max_position_embeddings=256,
            attention_bias=True,
            mlp_bias=True,
        ),
        biases="qkvo",
    ),
    "glm4": Case(
        config=_config(
            "glm4",
            "Glm4ForCausalLM",
            tie_word_embeddings=False,
            rope_theta=10000.0,
            rope_scaling=YARN_ROPE,
            max_position_embeddings=256,
            partial_rotary_factor=0.5,
            attention_bias=True,
        ),
        norms={
            "input_layernorm": "attention_norm",
            "post_self_attn_layernorm": "attention_post_norm",
            "post_attention_layernorm": "mlp_norm",
            "post_mlp_layernorm": "mlp_post_norm",
        },
        biases="qkv",
    ),
    "glm": Case(
        config=_config(
            "glm",
            "GlmForCausalLM",
            tie_word_embeddings=False,
            rope_theta=10000.0,
            partial_rotary_factor=0.5,
            attention_bias=True,
        ),
        biases="qkv",
    ),
    "ernie4_5": Case(
        config=_config(
            "ernie4_5",
            "Ernie4_5ForCausalLM",
            tie_word_embeddings=True,
            rope_theta=10000.0,
            use_bias=False,
            compression_ratio=1.0,
        ),
    ),
    "phi3": Case(  # the fields of Phi-4-mini
        config=_config(
            "phi3",
            "Phi3ForCausalLM",
            tie_word_embeddings=True,
            rope_theta=10000.0,
            rope_scaling=dict(
                type="longrope",
                short_factor=[1 + i / 8 for i in range(3)],
                long_factor=[1.5 + i for i in range(3)],
            ),
            original_max_position_embeddings=32,
            max_position_embeddings=96,
            partial_rotary_factor=0.75,
            head_dim=None,
            attention_bias=False,
            mlp_bias=False,
            lm_head_bias=False,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            full_attn_mod=1,
            interpolate_factor=1,
            sliding_window=512,
        ),
    ),
    "phi3_window": Case(
        config=_config(
            "phi3",
            "Phi3ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                partial_rotary_factor=1.0,
                original_max_position_embeddings=32,
                short_factor=[1 + i / 8 for i in range(4)],
                long_factor=[1.5 + i for i in range(4)],
            ),
            original_max_position_embeddings=32,
            max_position_embeddings=64,
            head_dim=None,
            sliding_window=12,
        ),
    ),
    "smollm3": Case(
        config=_config(
            "smollm3",
            "SmolLM3ForCausalLM",
            tie_word_embeddings=True,
            rope_theta=50000.0,
            rope_scaling=None,
            head_dim=None,
            attention_bias=False,
            mlp_bias=False,
            use_sliding_window=False,  # masks follow layer_types nevertheless
            sliding_window=12,
            no_rope_layers=[1, 0, 1],
            no_rope_layer_interval=2,
            layer_types=[SLIDING, FULL, FULL],
        ),
        group_layers=3,
    ),
    "gemma3": Case(
        config=_config(
            "gemma3_text",
            "Gemma3ForCausalLM",
            tie_word_embeddings=True,
            num_hidden_layers=4,
            rope_theta=60000.0,
            rope_local_base_freq=1000.0,
            rope_scaling=dict(rope_type="linear", factor=8.0),
            query_pre_attn_scalar=24,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=12,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING],
            attention_bias=False,
            use_bidirectional_attention=False,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
        norms={
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        },
        qk_norm="head",
        group_layers=3,
    ),
    "exaone4": Case(  # without sliding layers, all layers have RoPE
        config=_config(
            "exaone4",
            "Exaone4ForCausalLM",
            tie_word_embeddings=True,
            rope_theta=20000.0,
            rope_scaling=LLAMA3_ROPE,
            sliding_window=None,
            sliding_window_pattern=None,
            layer_types=[FULL] * 3,
        ),
        norms=POST_NORMS,
        qk_norm="head",
    ),
    "exaone4_hybrid": Case(  # full layers have none
        config=_config(
            "exaone4",
            "Exaone4ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(LLAMA3_ROPE, rope_theta=20000.0),
            num_hidden_layers=4,
            sliding_window=12,
            sliding_window_pattern="LLLG",
            layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        ),
        norms=POST_NORMS,
        qk_norm="head",
        group_layers=4,
    ),
    "granite": Case(
        config=_config(
            "granite",
            "GraniteForCausalLM",
            tie_word_embeddings=True,
            rope_theta=30000.0,
            rope_scaling=YARN_ROPE,
            max_position_embeddings=256,
            head_dim=None,
            attention_bias=False,
            mlp_bias=False,
            attention_multiplier=0.3,
            embedding_multiplier=0.7,
            logits_scaling=1.4,
            residual_multiplier=0.6,
            task_specific_params=dict(limits=[0.0, math.inf]),  # written as Infinity
        )
    ),
    "granitemoe": _granite_moe("granitemoe", "GraniteMoeForCausalLM"),
    "granitemoeshared": _granite_moe(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", shared_intermediate_size=40
    ),
    "olmo2": Case(
        config=_config(
            "olmo2",
            "Olmo2ForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(LLAMA3_ROPE, rope_theta=20000.0),
            head_dim=None,
            attention_bias=False,
        ),
        norms=POST_NORMS,
        qk_norm="projection",
    ),
    "olmo3": Case(
        config=_config(
            "olmo3",
            "Olmo3ForCausalLM",
            tie_word_embeddings=False,
            rope_theta=500000.0,
            rope_scaling=YARN_ROPE | dict(attention_factor=1.2),
            max_position_embeddings=256,
            sliding_window=12,
            head_dim=None,
            layer_types=[SLIDING, FULL, SLIDING],
            attention_bias=False,
        ),
        norms=POST_NORMS,
        qk_norm="projection",
        group_layers=2,
    ),
    "olmo_hybrid": Case(
        config=_config(
            "olmo_hybrid",
            "OlmoHybridForCausalLM",
            tie_word_embeddings=False,
            rope_parameters=dict(rope_theta=None),
            head_dim=None,
            attention_bias=False,
            layer_types=[LINEAR, FULL, LINEAR],
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=6,  # 3/4 of hidden_size / heads, and twice that
            linear_value_head_dim=12,
            linear_conv_kernel_dim=4,
            rms_norm_eps=HYBRID_NORM_EPSILON,
            linear_allow_neg_eigval=True,
            linear_a_log_max=16.0,
        ),
        norms=POST_NORMS,
        qk_norm="projection",
        group_layers=2,
        delta_modules={
            **{f"in_proj_{x}": f"{x}_proj" for x in ("q", "k", "v", "b", "a")},
            "in_proj_z": "g_proj",
            "norm": "o_norm",
            "out_proj": "o_proj",
        },
    ),
    "granite_hybrid": _granite_hybrid(
        mamba_n_groups=2,
        position_embedding_type="nope",
        num_local_experts=0,
        num_experts_per_tok=0,
        time_step_limit=[0.1, 2.0],
    ),
    "granite_hybrid_moe": _granite_hybrid(
        mamba_n_groups=1,
        position_embedding_type="rope",
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
        time_step_limit=[0.0, math.inf],
    ),
    "falcon_h1": _falcon_h1(
        mamba_n_groups=2, mamba_rms_norm=False, time_step_limit=[0.1, 2.0], num_hidden_layers=3
    ),
    "falcon_h1_norm": _falcon_h1(
        mamba_n_groups=1, mamba_rms_norm=True, mamba_norm_before_gate=False, head_dim=12
    ),
    "kimi_linear": _kimi_linear(),
    "nemotron_h": _nemotron("M-*-M", n_groups=2),
    "nemotron_h_latent": _nemotron(
        "ME*E",
        n_groups=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=16,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        n_group=1,
        topk_group=1,
    ),
    "nemotron_h_moe": _nemotron(
        "ME*EM",
        n_groups=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        n_group=4,
        topk_group=2,
    ),
    "deepseek_v3": _latent(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        rope_parameters=dict(YARN_ROPE, rope_theta=30000.0, mscale=1.0, mscale_all_dim=0.8),
        norm_topk_prob=True,
        rope_interleave=True,
        num_nextn_predict_layers=1,
    ),
    "deepseek_v2": _latent(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        rope_theta=30000.0,
        rope_scaling=dict(YARN_ROPE, mscale=0.707, mscale_all_dim=0.707),
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        topk_group=1,  # fewer groups than experts of a token, which would always be in the best ones
        norm_topk_prob=False,
    ),
    "youtu": Case(
        config=_config(
            "youtu",
            "YoutuForCausalLM",
            **LATENT_FIELDS | dict(tie_word_embeddings=True),
            pad_token_id=None,  # transformers sets its row of the embedding to 0
            rope_parameters=dict(YARN_ROPE, rope_theta=30000.0, mscale=1.0, mscale_all_dim=0.8),
            rope_interleave=True,
        ),
        has_latents=True,
    ),
    "mistral4": _latent(
        "mistral4",
        "Mistral4ForCausalLM",
        wrapper="Mistral3ForConditionalGeneration",
        # transformers multiplies logits by a factor of mscale_all_dim
        rope_parameters=YARN_ROPE
        | dict(type="yarn", rope_theta=30000.0, attention_factor=1.0)
        | dict(original_max_position_embeddings=14, llama_4_scaling_beta=0.4),
        rope_interleave=True,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
    ),
    "glm4_moe_lite": _latent(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        rope_parameters=dict(rope_type="default", rope_theta=30000.0),
        q_lora_rank=16,  # with 12, gradients of transformers in float32 differ by 1.1e-4 from float64
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        norm_topk_prob=True,
    ),
}


def mixers_of(case: Case) -> list[str]:
    """LINEAR, or FULL for any other attention, of each layer."""
    layers = range(case.config["num_hidden_layers"])
    types = case.config.get("layer_types") or [
        LINEAR if layer in case.linear_layers else FULL for layer in layers
    ]
    return [LINEAR if x == LINEAR else FULL for x in types]


def tensors_of(case: str, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes of transformers."""
    rng = np.random.default_rng(0)
    config = CASES[case].config
    D, F, V = config["hidden_size"], config.get("intermediate_size", 0), config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    H = config.get("head_dim") or D // N
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    if CASES[case].blocks:
        shapes = _of_nemotron(config)
    layer_shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": ((1 + CASES[case].has_gate) * N * H, D),
        "self_attn.k_proj.weight": (K * H, D),
        "self_attn.v_proj.weight": (K * H, D),
        "self_attn.o_proj.weight": (D, N * H),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    if config["model_type"] == "afmoe":
        layer_shapes["self_attn.q_proj.weight"] = (N * H, D)
        layer_shapes["self_attn.gate_proj.weight"] = (N * H, D)
    if config.get("hidden_act") == "relu2":
        del layer_shapes["mlp.gate_proj.weight"]
    layer_shapes |= {f"{name}.weight": (D,) for name in CASES[case].norms}
    if config.get("mlp_bias"):
        for name in [x for x in layer_shapes if x.startswith("mlp.")]:
            layer_shapes[name.replace("weight", "bias")] = layer_shapes[name][:1]
    if config["model_type"] in FUSED:
        layer_shapes = _with_fused_projections(layer_shapes, FUSED[config["model_type"]])
    for x in CASES[case].biases:
        layer_shapes[f"self_attn.{x}_proj.bias"] = layer_shapes[f"self_attn.{x}_proj.weight"][:1]
    if CASES[case].has_sinks:
        layer_shapes["self_attn.sinks"] = (N,)
    if CASES[case].qk_norm != "none":
        heads = (1, 1) if CASES[case].qk_norm == "head" else (N, K)
        layer_shapes |= {f"self_attn.{x}_norm.weight": (n * H,) for x, n in zip("qk", heads)}
    if CASES[case].has_latents:
        layer_shapes = _with_latents(layer_shapes, config)
    for layer, mixer in enumerate([] if CASES[case].blocks else mixers_of(CASES[case])):
        own_shapes = layer_shapes
        if mixer == LINEAR and not CASES[case].mixers:
            own_shapes = _with_delta_net(layer_shapes, CASES[case])
        if config["model_type"] == "kimi_linear":
            own_shapes = _of_kimi_linear(layer_shapes, config, mixer, layer)
        elif config["model_type"].startswith("granitemoe"):
            own_shapes = _of_granite_hybrid(layer_shapes, config, mixer)
        elif config["model_type"] == "falcon_h1":
            own_shapes = layer_shapes | _mamba_shapes(config)
        elif config["model_type"] == "gpt_oss":
            own_shapes = _with_stacked_experts(own_shapes, config)
        elif number_of_experts(config) and layer not in CASES[case].dense_layers:
            own_shapes = _with_experts(own_shapes, config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own_shapes.items()}
    if config["model_type"] == "falcon_h1":
        for name, own in FALCON_NAMES.items():
            shapes = {x.replace(name, own): shape for x, shape in shapes.items()}
    routers = dict(
        minimax_m2="block_sparse_moe.gate.weight", ernie4_5_moe="mlp.gate.weight"
    )  # in float32
    router = routers.get(config["model_type"])
    float32_names = (*FLOAT32_NAMES, *([router] if router else []))
    # the factor of a norm is 1 + its weight
    center = -1 if config["model_type"].startswith(("gemma3", "qwen3_5", "qwen3_next")) else 0
    centered = {name for name in shapes if "norm" in name and "linear_attn" not in name}
    return {
        name: (_draw(rng, name, shape) + center * (name in centered)).astype(
            np.float32 if name.endswith(float32_names) else dtype
        )
        for name, shape in shapes.items()
    }


# model_type -> one tensor for gate and up projection, and one for queries, keys and values
_GATE_UP = {"mlp.gate_up_proj.weight": [f"mlp.{x}_proj.weight" for x in ("gate", "up")]}
FUSED = {
    "glm": _GATE_UP,
    "glm4": _GATE_UP,
    "phi3": _GATE_UP | {"self_attn.qkv_proj.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"]},
}


def _with_fused_projections(
    layer_shapes: dict[str, tuple[int, ...]], fused: dict[str, list[str]]
) -> dict[str, tuple[int, ...]]:
    shapes = dict(layer_shapes)
    for whole, parts in fused.items():
        rows, columns = zip(*map(shapes.pop, parts))
        shapes[whole] = sum(rows), columns[0]
    return shapes


def _with_latents(
    layer_shapes: dict[str, tuple[int, ...]], config: dict
) -> dict[str, tuple[int, ...]]:
    """The tensors of a dense layer with latent attention."""
    D, N, R = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    V, P, Q = config["v_head_dim"], config["qk_rope_head_dim"], config["q_lora_rank"]
    queries = N * (config["qk_nope_head_dim"] + P)
    shapes = {
        "kv_a_proj_with_mqa.weight": (R + P, D),
        "kv_a_layernorm.weight": (R,),
        "kv_b_proj.weight": (N * (config["qk_nope_head_dim"] + V), R),
        "o_proj.weight": (D, N * V),
    }
    shapes |= (
        {
            "q_a_proj.weight": (Q, D),
            "q_a_layernorm.weight": (Q,),
            "q_b_proj.weight": (queries, Q),
        }
        if Q
        else {"q_proj.weight": (queries, D)}
    )
    return {
        name: shape for name, shape in layer_shapes.items() if not name.startswith("self_attn")
    } | {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _with_delta_net(
    layer_shapes: dict[str, tuple[int, ...]], case: Case
) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer with Gated DeltaNet in place of attention."""
    config = case.config
    D, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels = 2 * keys + values
    parts = {
        "in_proj_q.weight": (keys, D),
        "in_proj_k.weight": (keys, D),
        "in_proj_v.weight": (values, D),
    }
    if not case.delta_modules:
        parts = {"in_proj_qkv.weight": (channels, D)}
    parts |= {f"in_proj_{x}.weight": (n, D) for x, n in dict(z=values, b=heads, a=heads).items()}
    if config["model_type"] == "qwen3_next":
        parts = {
            "in_proj_qkvz.weight": (channels + values, D),
            "in_proj_ba.weight": (2 * heads, D),
        }
    shapes = {
        **parts,
        "conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (D, values),
    }
    norms = {f"{name}.weight": (D,) for name in case.delta_norms}
    others = {name: shape for name, shape in layer_shapes.items() if name.startswith("mlp.")}
    return (
        others
        | norms
        | {f"linear_attn.{renamed(name, case)}": shape for name, shape in shapes.items()}
    )


def _of_kimi_linear(
    layer_shapes: dict[str, tuple[int, ...]], config: dict, mixer: str, layer: int
) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer of Kimi Linear, as released."""
    D, linear = config["hidden_size"], config["linear_attn_config"]
    heads, width = linear["num_heads"], linear["head_dim"]
    channels = heads * width
    delta = {
        **{f"{x}_proj.weight": (channels, D) for x in "qkv"},
        **{f"{x}_conv1d.weight": (channels, 1, linear["short_conv_kernel_size"]) for x in "qkv"},
        "b_proj.weight": (heads, D),
        **{f"{x}_a_proj.weight": (width, D) for x in "fg"},
        **{f"{x}_b_proj.weight": (channels, width) for x in "fg"},
        "A_log": (1, 1, heads, 1),
        "dt_bias": (channels,),
        "o_norm.weight": (width,),
        "o_proj.weight": (D, channels),
    }
    shapes = dict(layer_shapes)
    if mixer == LINEAR:
        shapes = {name: x for name, x in shapes.items() if not name.startswith("self_attn.")}
        shapes |= {f"self_attn.{name}": x for name, x in delta.items()}
    if layer < config["first_k_dense_replace"]:
        return shapes
    E, F = config["num_experts"], config["moe_intermediate_size"]
    S = config["num_shared_experts"] * F
    experts = {
        "gate.weight": (E, D),
        "gate.e_score_correction_bias": (E,),
        **{f"shared_experts.{x}_proj.weight": (S, D) for x in ("gate", "up")},
        "shared_experts.down_proj.weight": (D, S),
    }
    for expert in range(E):
        experts |= {f"experts.{expert}.{x}.weight": (F, D) for x in ("w1", "w3")}
        experts[f"experts.{expert}.w2.weight"] = D, F
    shapes = {name: x for name, x in shapes.items() if not name.startswith("mlp.")}
    return shapes | {f"block_sparse_moe.{name}": x for name, x in experts.items()}


def _of_nemotron(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of Nemotron-H, as released."""
    D, V, F = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    N, K, H = (config[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    heads = config["mamba_num_heads"]
    values = heads * config["mamba_head_dim"]
    channels = values + 2 * config["n_groups"] * config["ssm_state_size"]
    blocks = {
        "M": {
            "in_proj.weight": (values + channels + heads, D),
            "conv1d.weight": (channels, 1, config["conv_kernel"]),
            "conv1d.bias": (channels,),
            **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
            "norm.weight": (values,),
            "out_proj.weight": (D, values),
        },
        "*": {
            "q_proj.weight": (N * H, D),
            **dict.fromkeys(("k_proj.weight", "v_proj.weight"), (K * H, D)),
            "o_proj.weight": (D, N * H),
        },
        "-": {"up_proj.weight": (F, D), "down_proj.weight": (D, F)},
    }
    if E := config.get("n_routed_experts"):
        F, S = (config[x] for x in ("moe_intermediate_size", "moe_shared_expert_intermediate_size"))
        L = config.get("moe_latent_size") or D
        blocks["E"] = {
            "gate.weight": (E, D),
            "gate.e_score_correction_bias": (E,),
            "shared_experts.up_proj.weight": (S, D),
            "shared_experts.down_proj.weight": (D, S),
        }
        for expert in range(E):
            blocks["E"][f"experts.{expert}.up_proj.weight"] = F, L
            blocks["E"][f"experts.{expert}.down_proj.weight"] = L, F
        if L != D:
            blocks["E"]["fc1_latent_proj.weight"] = L, D
            blocks["E"]["fc2_latent_proj.weight"] = D, L
    shapes = {
        "backbone.embeddings.weight": (V, D),
        "backbone.norm_f.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for layer, block in enumerate(config["hybrid_override_pattern"]):
        stem = f"backbone.layers.{layer}"
        shapes[f"{stem}.norm.weight"] = (D,)
        shapes |= {f"{stem}.mixer.{name}": shape for name, shape in blocks[block].items()}
    return shapes


def _mamba_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of Mamba-2 of Granite 4 and Falcon-H1."""
    D, heads, N = (config[x] for x in ("hidden_size", "mamba_n_heads", "mamba_d_state"))
    values = heads * config["mamba_d_head"]
    channels = values + 2 * config["mamba_n_groups"] * N
    shapes = {
        "in_proj.weight": (values + channels + heads, D),
        "conv1d.weight": (channels, 1, config["mamba_d_conv"]),
        "conv1d.bias": (channels,),
        **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
        "out_proj.weight": (D, values),
    }
    if config.get("mamba_rms_norm", True):
        shapes["norm.weight"] = (values,)
    return {f"mamba.{name}": shape for name, shape in shapes.items()}


def _of_granite_hybrid(
    layer_shapes: dict[str, tuple[int, ...]], config: dict, mixer: str
) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer of Granite 3 or 4, as released."""
    D, S = config["hidden_size"], config.get("shared_intermediate_size")
    shapes = {name: x for name, x in layer_shapes.items() if not name.startswith("mlp.")}
    if mixer == LINEAR:
        shapes = {name: x for name, x in shapes.items() if not name.startswith("self_attn.")}
        shapes |= _mamba_shapes(config)
    if E := config["num_local_experts"]:
        F = config["intermediate_size"]
        shapes |= {
            "block_sparse_moe.router.layer.weight": (E, D),
            "block_sparse_moe.input_linear.weight": (E, 2 * F, D),
            "block_sparse_moe.output_linear.weight": (E, D, F),
        }
    if S:
        shapes |= {
            "shared_mlp.input_linear.weight": (2 * S, D),
            "shared_mlp.output_linear.weight": (D, S),
        }
    return shapes


def renamed(name: str, case: Case) -> str:
    """The name of a tensor of Gated DeltaNet, from that of Qwen 3.5."""
    module, *parameter = name.split(".")
    return ".".join([case.delta_modules.get(module, module), *parameter])


def _with_experts(
    layer_shapes: dict[str, tuple[int, ...]], config: dict
) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer with a tensor for each expert in place of the dense feed-forward
    block.
    """
    D, E = config["hidden_size"], number_of_experts(config)
    F = config.get("moe_intermediate_size") or config["intermediate_size"]
    shapes = {"mlp.gate.weight": (E, D)}
    if config["model_type"] == "qwen3_vl_moe_text":
        shapes |= {"mlp.experts.gate_up_proj": (E, D, 2 * F), "mlp.experts.down_proj": (E, F, D)}
    if config["model_type"] in ("qwen3_5_moe_text", "mistral4"):
        shapes |= {"mlp.experts.gate_up_proj": (E, 2 * F, D), "mlp.experts.down_proj": (E, D, F)}
    if "shared_expert_intermediate_size" in config:
        S = config["shared_expert_intermediate_size"]
        shapes |= {f"mlp.shared_expert.{name}_proj.weight": (S, D) for name in ("gate", "up")}
        shapes |= {
            "mlp.shared_expert.down_proj.weight": (D, S),
            "mlp.shared_expert_gate.weight": (1, D),
        }
    if num_shared := next((config[x] for x in SHARED_FIELDS if config.get(x)), 0):
        S = num_shared * F
        shapes |= {f"mlp.shared_experts.{name}_proj.weight": (S, D) for name in ("gate", "up")}
        shapes |= {
            "mlp.shared_experts.down_proj.weight": (D, S),
            "mlp.gate.e_score_correction_bias": (E,),
        }
    if config["model_type"] in ("deepseek_v2", "mistral4"):
        del shapes["mlp.gate.e_score_correction_bias"]
    for expert in () if "mlp.experts.down_proj" in shapes else range(E):
        shapes |= {f"mlp.experts.{expert}.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = D, F
    if config["model_type"] == "ernie4_5_moe":
        shapes["mlp.gate.e_score_correction_bias"] = (1, E)
    if config["model_type"] == "minimax_m2":
        shapes["mlp.e_score_correction_bias"] = (E,)
    if config["model_type"] in ("minimax_m2", "mixtral"):
        shapes = {name_in_mixtral(name): shape for name, shape in shapes.items()}
    for name, own in RELEASED_NAMES.get(config["model_type"], {}).items():
        shapes = {x.replace(name, own): shape for x, shape in shapes.items()}
    others = {name: x for name, x in layer_shapes.items() if not name.startswith("mlp")}
    return others | shapes


def number_of_experts(config: dict) -> int:
    """0 of a model without experts."""
    names = "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"
    return next((config[name] for name in names if name in config), 0)


def name_in_mixtral(name: str) -> str:
    """The name of a tensor of experts in files with the names of Mixtral."""
    name = name.replace("mlp.", "block_sparse_moe.")
    for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = name.replace(ours, theirs)
    return name


def _with_stacked_experts(
    layer_shapes: dict[str, tuple[int, ...]], config: dict
) -> dict[str, tuple[int, ...]]:
    """As `_with_experts`, with tensors for all experts, and biases."""
    D, F, E = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    shapes = {
        "mlp.router.weight": (E, D),
        "mlp.router.bias": (E,),
        "mlp.experts.gate_up_proj": (E, D, 2 * F),
        "mlp.experts.gate_up_proj_bias": (E, 2 * F),
        "mlp.experts.down_proj": (E, F, D),
        "mlp.experts.down_proj_bias": (E, D),
    }
    return {
        name: shape for name, shape in layer_shapes.items() if not name.startswith("mlp")
    } | shapes


VISION = dict(
    **dict(
        depth=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ),
    **dict(num_heads=2, out_hidden_size=32, num_position_embeddings=16),
    deepstack_visual_indexes=[0],
)


def config_json_in_files(case: str) -> dict:
    """The content of config.json: of the model with images, if there is no other one."""
    config, wrapper = CASES[case].config, CASES[case].wrapper
    if not wrapper:
        return config
    text = {name: value for name, value in config.items() if name != "architectures"}
    outer = {
        name: text[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in text
    }
    is_mistral = config["model_type"].startswith("mistral")
    model_type = "mistral3" if is_mistral else config["model_type"].removesuffix("_text")
    outer |= dict(architectures=[wrapper], model_type=model_type)
    return outer | dict(text_config=text, vision_config=VISION, image_token_id=7)


def stored_tensors_of(case: str, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """The tensors in the files of a case: `tensors_of` and, of a model with images, a part of the
    others, in float32.
    """
    tensors = tensors_of(case, dtype)
    if not CASES[case].wrapper:
        return tensors
    rng = np.random.default_rng(1)
    if CASES[case].config["model_type"].startswith("mistral"):
        renamed = {f"language_model.{name}": x for name, x in tensors.items()}
        stem = "vision_tower.transformer.layers.0"
        shapes = {"attention_norm.weight": (16,), "attention.q_proj.weight": (16, 16)}
    else:
        renamed = {x.replace("model.", "model.language_model.", 1): y for x, y in tensors.items()}
        stem = "model.visual.blocks.0"
        shapes = {"norm1.weight": (16,), "attn.qkv.weight": (48, 16), "attn.qkv.bias": (48,)}
    others = {
        f"{stem}.{name}": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return renamed | others


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith(CHOICE_BIAS):
        return rng.standard_normal(shape) / 5  # it is added to sigmoids
    if name.endswith(("bias", ".sinks")):
        return rng.standard_normal(shape)
    if len(shape) == 3 and (".experts." in name or "_linear" in name):
        return rng.standard_normal(shape) * 1.5 / shape[1] ** 0.5
    if name.endswith(("A_log", "dt_bias")):
        return rng.uniform(-3, 0, shape)  # states that remember some tens of tokens
    if len(shape) == 1:
        return rng.uniform(0.5, 2, shape)
    return rng.standard_normal(shape) * 1.5 / math.prod(shape[1:]) ** 0.5


def write_model(
    directory: Path,
    case: str,
    *,
    num_files: int = 2,
    dtype=ml_dtypes.bfloat16,
    scale: float = 1.0,
    **changes,
) -> Path:
    """Writes config.json, the tensors and a tokenizer.

    Args:
      scale: of the matrices. With 4, losses of random tokens are about 17, and gradients of some entries almost cancel.
      changes: fields of config.json; the tensors have the shapes of the unchanged config.
    """
    directory.mkdir(parents=True)
    config, content = CASES[case].config, config_json_in_files(case)
    content = json.loads(json.dumps(content))  # a copy
    content.get("text_config", content).update(changes)
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    tensors = {
        name: (x * scale).astype(x.dtype) if x.ndim > 1 and "vis" not in name else x
        for name, x in stored_tensors_of(case, dtype).items()
    }
    write_tensors(directory, tensors, num_files=num_files)
    write_tokenizer(directory, config["vocab_size"] - 1)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (directory / "chat_template.jinja").write_text("{{ messages }}  \n")
    return directory


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], *, num_files: int) -> None:
    names = sorted(tensors)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    file_of = {
        name: f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors"
        for i, name in enumerate(names)
    }
    for file in sorted(set(file_of.values())):
        save_file(
            {name: tensors[name] for name in names if file_of[name] == file},
            directory / file,
            {"format": "pt"},
        )
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of})
    )


def write_tokenizer(
    directory: Path, vocab_size: int, special_tokens: tuple[str, ...] = ("<unk>", "<s>", "</s>")
) -> None:
    """A tokenizer with special tokens, one token per letter or digit, and `vocab_size` tokens."""
    words = [*special_tokens, *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    words += [f"word{i}" for i in range(vocab_size - len(words))]
    special = [
        dict(
            id=i,
            content=words[i],
            single_word=False,
            lstrip=False,
            rstrip=False,
            normalized=False,
            special=True,
        )
        for i in range(len(special_tokens))
    ]
    content = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=special,
        normalizer=None,
        pre_tokenizer=dict(
            type="Split", pattern=dict(String=""), behavior="Isolated", invert=False
        ),
        post_processor=None,
        decoder=None,
        model=dict(
            type="WordLevel", vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>"
        ),
    )
    (directory / "tokenizer.json").write_text(json.dumps(content))


def write_nf4_model(directory: Path, **sizes) -> Path:
    """A Llama model whose matrices of layers are in NF4, in one file with the names of bitsandbytes.

    Args:
      sizes: fields of config.json that differ from the case `llama`.
    """
    case = replace(CASES["llama"], config=CASES["llama"].config | sizes)
    with mock.patch.dict(CASES, llama_nf4=case):
        write_model(directory, "llama_nf4", num_files=1)
    tensors = load_file(directory / "model.safetensors")
    for name in [x for x, y in tensors.items() if ".layers." in x and y.ndim == 2]:
        weight = tensors[name]
        codes, scales, maxima, offset = map(np.asarray, Nf4.of(jnp.array(weight.T), (1, 1)).arrays)
        state = dict(blocksize=BLOCK, nested_blocksize=SCALES_BLOCK, nested_offset=float(offset))
        state |= dict(quant_type="nf4", dtype="bfloat16", shape=weight.shape)
        tensors |= {
            name: codes.reshape(-1, 1),
            f"{name}.absmax": scales.reshape(-1),
            f"{name}.nested_absmax": maxima,
            f"{name}.quant_state.bitsandbytes__nf4": np.array([*json.dumps(state).encode()], "u1"),
        }
    write_tensors(directory, tensors, num_files=1)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="bitsandbytes", load_in_4bit=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
