"""Families of dense models; the names in parentheses are their models in transformers.

- Llama 2 and 3, and models of the same architecture such as SmolLM2 (llama)
- IQuest-Coder (iquestcoder): Llama, and exported as such
- AFM 4.5B (arcee): Llama with a feed-forward block without a gate
- Code World Model (cwm): Llama with groups of a full layer and three sliding ones
- EXAONE 4 (exaone4): groups of three sliding layers and one without position embedding, or full
  layers only
- Gemma 3 (gemma3): groups of five sliding layers and a full one
- ERNIE 4.5 (ernie4_5): Llama with interleaved RoPE
- GLM 4 (glm, glm4): interleaved RoPE of half of a head; glm4 has norms before and after each block
- Granite 3 (granite): Llama with multipliers of embeddings, block outputs, attention logits and
  logits
- Mistral 7B and other Mistral models (mistral): a sliding window in all layers or none
- Ministral 3 and Devstral 2 (ministral3)
- Olmo 2 (olmo2)
- Olmo 3 (olmo3): groups of three sliding layers and a full one
- Phi-3, 3.5 mini, 4 and 4 mini (phi3)
- Qwen 2 and 2.5 (qwen2)
- Qwen 3 (qwen3) and Qwen 3 VL (qwen3_vl)
- Seed-OSS (seed_oss)
- SmolLM3 (smollm3): every fourth layer has no position embedding; layers may be sliding

Of models with images, such as Gemma 3 and Mistral Small 3.1 (mistral3), the language model is
loaded. Released files of Granite 3 and Seed-OSS name the dropout of the authors' training. Some of
Phi name code of their own, which computes the same.
"""

import dataclasses
import functools
from typing import Any

from jaxlc.config.models.families.family import (
    Family,
    Fields,
    kind_sets,
    read_layer_types,
    write_layer_types,
)
from jaxlc.config.models.model_schema import ModelConfig

_DEFAULT_WINDOW = 4096

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={"attention_bias": "attention.qkv_bias", "mlp_bias": "mlp_bias"},
    required_values=dict(rope_interleaved=(False,)),  # in configs of SmolLM2
    irrelevant=("is_llama_config",),
)

IQUESTCODER = dataclasses.replace(
    LLAMA,
    model_type="iquestcoder",
    exported_type="llama",
    defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
    required_values=dict(clip_qkv=(None,), use_sliding_window=(False,)),
    irrelevant=("auto_map",),  # code of a model that equals Llama
)

ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    settings=dict(activation="relu2"),
    fields=LLAMA.fields,
    defaults=dict(rms_norm_eps=1e-5),
)


def _write_start(_: ModelConfig) -> dict[str, Any]:
    return dict(bos_token_id=0)  # transformers refuses null


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    layer_kinds=kind_sets("full", "sliding"),
    read_kinds=functools.partial(
        read_layer_types, default=("full", "sliding", "sliding", "sliding")
    ),
    write_kinds=write_layer_types,
    fields={"mlp_bias": "mlp_bias"},
    write_settings=_write_start,
    defaults=dict(
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        sliding_window=8192,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e6,
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
)


def _group(pattern: int | str) -> list[str]:
    """The kinds of a group of layers: `pattern` is its length, the last layer being full, or has a
    letter for each layer, L for a sliding one and G for a full one."""
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    return [dict(L="sliding", G="full").get(letter, letter) for letter in letters]


def _exaone4_read_kinds(config: Fields) -> list[str]:
    """Layers without a window have no position embedding in models with sliding layers. The last
    layer is full if a pattern of letters describes the layers."""
    if config.get("sliding_window", _DEFAULT_WINDOW) is None:
        return read_layer_types(config)
    pattern = config.get("sliding_window_pattern") or 4
    kinds = read_layer_types(config, _group(pattern))
    if isinstance(pattern, str) and not config.get("layer_types"):
        kinds[-1] = "full"
    return ["nope" if kind == "full" else kind for kind in kinds]


def write_masks(model: ModelConfig) -> dict[str, Any]:
    """The field layer_types without regard to position embeddings, and sliding_window."""
    is_sliding = [model.attention_of(kind) == "sliding" for kind in model.kinds_of_layers]
    return dict(
        layer_types=["sliding_attention" if x else "full_attention" for x in is_sliding],
        sliding_window=model.attention.window or None,
    )


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    layer_kinds=(("full",), ("sliding", "nope"), ("sliding",)),
    read_kinds=_exaone4_read_kinds,
    write_kinds=write_masks,
    settings={"attention.qk_norm": "head", "norm_placement": "post"},
    defaults=dict(num_key_value_heads=32, sliding_window=_DEFAULT_WINDOW, rms_norm_eps=1e-5),
    irrelevant=("sliding_window_pattern",),
)


def _read_kinds(config: Fields) -> list[str]:
    """Older configs have sliding_window_pattern."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return read_layer_types(config, default=_group(pattern))


# prefixes of models with images: in files, and of the modules of transformers 5
_LANGUAGE_MODEL = {"language_model.": "", "model.language_model.": "model."}
_VISION = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer_kinds=(("sliding", "full"), ("full",)),
    read_kinds=_read_kinds,
    write_kinds=write_layer_types,
    settings={
        "attention.qk_norm": "head",
        "norm_placement": "pre_and_post",
        "zero_centered_norm": True,
        "activation": "gelu_tanh",
        "scale_embeddings": True,
    },
    fields={"query_pre_attn_scalar": "attention.query_scale_dim"},
    defaults=dict(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
    activation_field="hidden_activation",
    rope_by_layer_type=True,
    required_values=dict(use_bidirectional_attention=(False,)),
    multimodal_type="gemma3",
    multimodal_prefixes=_LANGUAGE_MODEL,
    other_prefixes=_VISION,
    irrelevant=(
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "cache_implementation",
        "hidden_act",
    ),
)


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def _read_multiplier(config: Fields) -> dict[str, Any]:
    """Attention logits are multiplied by attention_multiplier, not divided by a root."""
    return {"attention.query_scale_dim": config["attention_multiplier"] ** -2}


def _write_multiplier(model: ModelConfig) -> dict[str, Any]:
    return dict(
        attention_multiplier=(model.attention.query_scale_dim or model.attention.head_dim) ** -0.5
    )


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields={
        "attention_bias": "attention.qkv_bias",
        "mlp_bias": "mlp_bias",
        "attention_multiplier": "attention.query_scale_dim",  # converted by `_read_multiplier`
        **{name: name for name in _MULTIPLIERS},
    },
    read_settings=_read_multiplier,
    write_settings=_write_multiplier,
    defaults=dict.fromkeys(("attention_multiplier", *_MULTIPLIERS), 1.0),
    required_values=dict(attention_dropout=(0, 0.1)),
)


def _mistral_read_kinds(config: Fields, default: int | None = _DEFAULT_WINDOW) -> list[str]:
    """All layers have the window, or none: also if it is at least as long as any text."""
    window = config.get("sliding_window", default)
    longest = config.get("max_position_embeddings")
    has_window = window is not None and (longest is None or window < longest)
    return ["sliding" if has_window else "full"] * config["num_hidden_layers"]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    return dict(sliding_window=model.attention.window or None)


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    layer_kinds=(("full",), ("sliding",)),
    read_kinds=_mistral_read_kinds,
    write_kinds=_write_kinds,
    defaults=dict(num_key_value_heads=8, sliding_window=_DEFAULT_WINDOW),
    required_values=dict(layer_types=(None,)),
    multimodal_type="mistral3",
    multimodal_prefixes=_LANGUAGE_MODEL,
    other_prefixes=_VISION,
)


# YaRN with queries that grow with the position.
MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    read_kinds=functools.partial(_mistral_read_kinds, default=None),
    defaults=dict(
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        sliding_window=None,
        llama_4_scaling_beta=0.0,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=16.0,
            original_max_position_embeddings=16384,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    irrelevant=("max_position_embeddings",),  # in rope_parameters
)


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    layer_kinds=(("sliding", "full"), ("full",)),
    read_kinds=functools.partial(
        read_layer_types, default=("sliding", "sliding", "sliding", "full")
    ),
    write_kinds=write_layer_types,
    settings={"attention.qk_norm": "projection", "norm_placement": "post"},
    defaults=dict(sliding_window=4096, rope_theta=5e5, rms_norm_eps=1e-5),
    rope_by_layer_type=True,
)


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    settings=OLMO3.settings,
    defaults=dict(rms_norm_eps=1e-5),
)


_QKV = "self_attn.qkv_proj.weight"
_GATE_UP = "mlp.gate_up_proj.weight"

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    layer_kinds=MISTRAL.layer_kinds,
    read_kinds=functools.partial(_mistral_read_kinds, default=None),
    write_kinds=_write_kinds,
    defaults=dict(
        rms_norm_eps=1e-5, partial_rotary_factor=1.0, original_max_position_embeddings=4096
    ),
    rope_scalings=("none", "ntk", "longrope"),
    tensor_names=dict(
        attention=dict(wq=_QKV, wk=_QKV, wv=_QKV), dense=dict(w_gate=_GATE_UP, w_up=_GATE_UP)
    ),
    required_values=dict(
        mlp_bias=(False,),
        lm_head_bias=(False,),
        embd_pdrop=(0,),
        resid_pdrop=(0,),
        full_attn_mod=(1,),
        interpolate_factor=(1,),
    ),
    irrelevant=("auto_map",),
)


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    settings={"attention.interleaved": True, "attention.out_bias": False},
    fields={"attention_bias": "attention.qkv_bias"},
    defaults=dict(
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        partial_rotary_factor=0.5,
        attention_bias=True,
    ),
    tensor_names=dict(dense=PHI3.tensor_names["dense"]),
)


GLM4 = dataclasses.replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    settings={**GLM.settings, "norm_placement": "pre_and_post"},
    name_parts=dict(
        post_attention_layernorm="post_self_attn_layernorm",
        pre_feedforward_layernorm="post_attention_layernorm",
        post_feedforward_layernorm="post_mlp_layernorm",
    ),
)


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    settings={"attention.interleaved": True},
    defaults=dict(
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=True,
    ),
    required_values=dict(use_bias=(False,), compression_ratio=(1,)),
)


_WINDOW_FIELDS = ("use_sliding_window", "max_window_layers")
_WINDOWS = kind_sets("full", "sliding")


def _read_windows(config: Fields) -> list[str]:
    """If use_sliding_window is true, layers from max_window_layers on are sliding, or those that
    layer_types says."""
    num_layers = config["num_hidden_layers"]
    has_window = config.get("use_sliding_window")
    has_window = has_window and config.get("sliding_window", _DEFAULT_WINDOW) is not None
    num_full = (config.get("max_window_layers", 28) or 0) if has_window else num_layers
    by_default = ["full" if layer < num_full else "sliding" for layer in range(num_layers)]
    kinds = read_layer_types(config, by_default)
    without = "sliding_attention without use_sliding_window and sliding_window"
    return [without if kind == "sliding" and not has_window else kind for kind in kinds]


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    """The fields that `_read_windows` reads: layer_types takes precedence over max_window_layers,
    which old programs read.
    """
    kinds = model.kinds_of_layers
    return dict(
        **write_masks(model),
        use_sliding_window="sliding" in kinds,
        max_window_layers=(*kinds, "sliding").index("sliding"),
    )


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    layer_kinds=_WINDOWS,
    read_kinds=_read_windows,
    write_kinds=_write_windows,
    settings={"attention.qkv_bias": True},
    defaults=dict(num_key_value_heads=32, sliding_window=_DEFAULT_WINDOW),
    required_values=dict(use_mrope=(False,)),
    irrelevant=_WINDOW_FIELDS,
)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    layer_kinds=_WINDOWS,
    read_kinds=_read_windows,
    write_kinds=_write_windows,
    settings={"attention.qk_norm": "head"},
    fields={"attention_bias": "attention.qkv_bias"},
    defaults=dict(num_key_value_heads=32, head_dim=128, sliding_window=_DEFAULT_WINDOW),
    required_values=dict(use_qk_norm=(True,)),
    irrelevant=_WINDOW_FIELDS,
)


# For text, whose positions have one dimension, the layers of Qwen 3; deepstack only adds features of images.
QWEN3_VL_TEXT = dataclasses.replace(
    QWEN3,
    model_type="qwen3_vl_text",
    architecture="",
    defaults={**QWEN3.defaults, "rope_theta": 5e5},
    required_values={**QWEN3.required_values, "use_sliding_window": (False,)},
    irrelevant=(*QWEN3.irrelevant, "mrope_section", "mrope_interleaved"),
    multimodal_type="qwen3_vl",
    multimodal_prefixes={"model.language_model.": "model."},
    other_prefixes=("model.visual.",),
)


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields={
        "attention_bias": "attention.qkv_bias",
        "attention_out_bias": "attention.out_bias",
        "mlp_bias": "mlp_bias",
    },
    defaults=dict(
        num_key_value_heads=8, head_dim=128, attention_bias=True, attention_out_bias=False
    ),
    required_values=dict(attention_dropout=(0, 0.1), residual_dropout=(0, 0.1)),
)


_KINDS = {  # (position embedding, mask) -> kind of layer
    ("full", "sliding"): "sliding",
    ("nope", "full"): "nope",
    ("nope", "sliding"): "sliding_attention without RoPE",
}


def _smollm3_read_kinds(config: Fields) -> list[str]:
    """no_rope_layers has a 0 for layers without RoPE. Masks follow layer_types, whatever
    use_sliding_window says; if layer_types is absent, the layers without RoPE are sliding if
    use_sliding_window is true."""
    num_layers = config["num_hidden_layers"]
    interval = config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    positions = ["full" if x else "nope" for x in has_rope[:num_layers]]
    masks = read_layer_types(config)
    if (
        not config.get("layer_types")
        and config.get("use_sliding_window")
        and config.get("sliding_window") is not None
    ):
        masks = ["full" if x == "full" else "sliding" for x in positions]
    return [_KINDS.get(pair, pair[1]) for pair in zip(positions, masks)]


def _smollm3_write_kinds(model: ModelConfig) -> dict[str, Any]:
    has_rope = [int(kind != "nope") for kind in model.kinds_of_layers]
    return dict(**_write_windows(model), no_rope_layers=has_rope)


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    layer_kinds=tuple(x for x in kind_sets("full", "nope", "sliding") if "full" in x),
    read_kinds=_smollm3_read_kinds,
    write_kinds=_smollm3_write_kinds,
    fields={"mlp_bias": "mlp_bias"},
    defaults=dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True),
    irrelevant=(*_WINDOW_FIELDS, "no_rope_layers", "no_rope_layer_interval"),
)
