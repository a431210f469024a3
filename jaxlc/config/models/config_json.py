"""Converts between the config.json of a Hugging Face model and the settings of `ModelConfig`.
Imports no jax.

A field that changes the computation and is not known is an error. `rope_json` reads and writes
RoPE.

The config.json of models that no family of transformers computes has their settings, under
model_type "jaxlc". Tensors have the names that most families use. `model.init_from`, generation and
evaluation read such a directory as any other; transformers does not.
"""

import dataclasses
import math
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxlc.config.kinds import MIXERS, blocks, experts, mixers_by_layer_kind
from jaxlc.config.kinds.contract import HasOwnSettings
from jaxlc.config.models.families import COMMON_SETTINGS, FAMILIES, LAYER_TYPES, Family
from jaxlc.config.models.families.family import Fields, ReadFields
from jaxlc.config.models.model_schema import (
    SECTIONS_OF_MODEL,
    ModelConfig,
    RopeConfig,
    first_and_group,
    model_from,
)
from jaxlc.config.models.rope_json import (
    ROPE_FIELDS,
    max_position_embeddings,
    rope_fields,
    rope_settings,
)
from jaxlc.config.other_names import renamed
from jaxlc.config.values import Above0, From1, From1To10000, flattened, plain, typed, with_floats
from jaxlc.core import Unsupported, UserError, suggestion

Count = From1[int]
Layers = From1To10000[int]
Positive = Above0[float]
_LARGEST: dict[Any, float] = {Count: 2**31 - 1, Layers: 10_000, Positive: sys.float_info.max}
_WORDS: dict[Any, str] = {
    Count: "an integer from 1 to 2^31 - 1",
    Layers: "an integer from 1 to 10000",
    Positive: "a finite number greater than 0",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Layers | str: "an integer from 1 to 10000, or a string",
    Count | str: "an integer from 1 to 2^31 - 1, or a string",
    dict: "an object",
    list[str]: "a list of strings",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
}
# of the fields that do not give a setting of the same type
_OTHER_TYPES: dict[Any, tuple[str, ...]] = {
    Count: (
        "query_pre_attn_scalar", "num_heads", "short_conv_kernel_size", "decoder_sparse_step", "mamba_expand",
        "moe_layer_interval", "rotary_dim", "mamba_d_ssm", "moe_latent_size", "moe_shared_expert_intermediate_size",
        "r", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    ),
    Layers: ("num_hidden_layers", "full_attention_interval", "global_attn_every_n_layers"),
    Positive: (
        "max_position_embeddings", "original_max_position_embeddings", "factor", "rope_theta", "rope_local_base_freq",
        "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "key_multiplier",
        "attention_in_multiplier", "attention_out_multiplier", "lm_head_multiplier", "ssm_in_multiplier",
        "ssm_out_multiplier", "lora_alpha",
    ),
    int: (
        "sliding_window", "no_rope_layer_interval", "max_window_layers", "n_shared_experts", "num_shared_experts",
        "first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts", "moe_layer_start_index",
        "moe_layer_end_index",
    ),
    float: (
        "partial_rotary_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
        "llama_4_scaling_beta", "mscale", "mscale_all_dim", "swiglu_alpha", "swiglu_limit",
    ),
    bool: (
        "truncate", "attn_output_gate", "use_qk_norm", "output_router_logits", "use_sliding_window",
        "mamba_proj_bias", "mla_use_nope", "mamba_rms_norm", "mamba_norm_before_gate", "use_rslora",
    ),
    str: (
        "model_type", "rope_type", "type", "position_embedding_type", "hybrid_override_pattern",
        "base_model_name_or_path",
    ),
    Layers | str: ("sliding_window_pattern", "_sliding_window_pattern"),
    Count | str: ("mamba_d_head",),
    dict: (
        "rope_scaling", "rope_parameters", "full_attention", "sliding_attention", "quantization_config",
        "compression_config", "linear_attn_config",
    ),
    list[str]: ("architectures", "layer_types", "mlp_layer_types", "layers_block_type", "target_parameters"),
    list[int]: (
        "mlp_only_layers", "no_rope_layers", "weight_block_size", "attn_type_list", "kda_layers", "full_attn_layers",
    ),
    list[float]: ("short_factor", "long_factor", "time_step_limit", "ssm_multipliers", "mlp_multipliers"),
}  # fmt: skip


def typed_fields(fields: Fields, where: str, path: str = "") -> dict[str, Any]:
    """`fields`, with null for a part that the model does not have: programs also write false, 0,
    "", [] or {}. Such a value of true or false is false, and other numbers that may be 0 are
    unchanged.

    Args:
      fields: the content of config.json, or an object in it; or of adapter_config.json.
      where: the path of the file.
      path: of the object in the file, such as "rope_scaling.".
    Raises:
      UserError: a field that is read has another type.
    """
    typed = dict(fields)
    for name, value in fields.items():
        hint = _TYPES.get(name, object)
        if not value and hint not in (object, float):
            typed[name] = False if hint is bool else None
        elif value is not None and not _has_type(value, hint):
            raise UserError(f"{where} has {path}{name}={value!r}: expected {_WORDS[hint]}")
        elif isinstance(value, dict):
            typed[name] = typed_fields(value, where, f"{path}{name}.")
    return typed


def _has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(
            _has_type(item, typing.get_args(hint)[0]) for item in value
        )
    if typing.get_origin(hint) is typing.Union:
        return any(_has_type(value, x) for x in typing.get_args(hint))
    if isinstance(value, bool):  # a subclass of int
        return hint in (bool, object)
    if hint in _LARGEST:
        is_number = isinstance(value, (int, float) if hint is Positive else int)
        return is_number and 0 < value <= _LARGEST[hint]
    return isinstance(value, (int, float) if hint is float else hint)


MODEL_TYPE = "jaxlc"
_ARCHITECTURE = "JaxlcForCausalLM"
_SETTINGS = "model"  # the field of config.json with the settings of ModelConfig
_NO_SETTINGS = ("preset", "init_from")  # fields that describe no computation
_HINTS = flattened(  # the types of settings by their paths
    {
        name: typing.get_type_hints(hint) if name in SECTIONS_OF_MODEL else hint
        for name, hint in typing.get_type_hints(ModelConfig).items()
    }
)


def is_own_format(config: Fields) -> bool:
    """Whether this is the content of a config.json of this format."""
    return config.get("model_type") == MODEL_TYPE


def own_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for `model`, which `stored_settings` reads."""
    settings = {
        name: plain(value) for name, value in vars(model).items() if name not in _NO_SETTINGS
    }
    settings["kinds"] = {kind.name: {**dataclasses.asdict(kind)} for kind in model.kinds}
    for kind in settings["kinds"].values():
        kind.pop("name")
    return {"architectures": [_ARCHITECTURE], "model_type": MODEL_TYPE, _SETTINGS: settings}


def own_settings(config: Fields, where: str) -> dict[str, Any]:
    """The settings of ModelConfig in a config.json of this format.

    Args:
      config: the content of config.json.
      where: its path, for errors.
    Raises:
      UserError: they are missing or invalid, or of another version.
    """
    settings = config.get(_SETTINGS)
    if not isinstance(settings, dict):
        raise UserError(f"{where} has no object {_SETTINGS!r}; export the model again")
    known = stored_settings(settings, where)
    missing = sorted(_HINTS.keys() - {*known, *_NO_SETTINGS})
    if missing:
        raise UserError(
            f"{where} has no setting model.{missing[0]}: it is incomplete or of another version of jaxlc"
        )
    return known


def stored_settings(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of ModelConfig, without preset and init_from, from JSON types.

    Raises:
      UserError: a setting is unknown or has another type.
    """
    settings = renamed("model", stored)
    kinds = {"kinds": settings.pop("kinds")} if "kinds" in settings else {}
    known = flattened(settings) | kinds
    unknown = sorted(known.keys() - _HINTS.keys())
    if unknown:
        raise UserError(
            f"{where} has the unknown setting model.{unknown[0]}: it is of another version of jaxlc"
        )
    return {
        path: value if isinstance(value, dict) else typed(f"model.{path}", value, _HINTS[path])
        for path, value in known.items()
        if path not in _NO_SETTINGS
    }


ROPE_SETTINGS = tuple(f"rope.{name}" for name in vars(RopeConfig()))
# Settings that may differ from the model that is loaded: they change which positions attention compares, and how, and
# not the shape of a parameter.
CHANGEABLE_SETTINGS = (*ROPE_SETTINGS, "attention.window")
# Settings that a family may give in another form, or that layers without dense blocks do not have.
_NOT_COMPARED = (
    "preset", "init_from", "layer_kinds", "first_layer_kinds", "kinds", "attention.query_scale_dim", "ffn_dim",
)  # fmt: skip

_FIELDS = {  # config.json -> ModelConfig
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "model_dim",
    "num_attention_heads": "attention.num_heads",
    "num_key_value_heads": "attention.num_kv_heads",
    "head_dim": "attention.head_dim",
    "intermediate_size": "ffn_dim",
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_epsilon",
}
_TYPES = {
    name: Count if _HINTS[setting] is int else _HINTS[setting]
    for family in FAMILIES.values()
    for name, setting in {**_FIELDS, **family.fields}.items()
}
_TYPES |= {name: hint for hint, names in _OTHER_TYPES.items() for name in names}
_DERIVED: dict[str, Callable[[dict[str, Any]], int]] = {  # the values of fields that are null
    **dict.fromkeys(
        ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
        lambda x: x["attention.num_heads"],
    ),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), lambda _: 1),
    "shared_intermediate_size": lambda _: 0,
    "head_dim": lambda x: x["model_dim"] // x["attention.num_heads"],
    "linear_key_head_dim": lambda x: int(0.75 * x["model_dim"] / x["delta_net.key_heads"]),
    "linear_value_head_dim": lambda x: 2 * x["delta_net.key_dim"],
}
# transformers has them in most families
_DEFAULTS: dict[str, Any] = dict(
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    mlp_bias=False,
    attention_bias=False,
    num_key_value_heads=None,
    head_dim=None,
)
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = dict(  # where they give no setting
    attention_dropout=(0,),
    is_decoder=(False, True),  # both are causal
    is_causal=(True,),
    is_encoder_decoder=(False,),
    add_cross_attention=(False,),
    attention_bias=(False,),
)
_ACTIVATIONS = {
    "silu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "clamped_swiglu": "silu",
    "relu2": "relu2",
}  # ModelConfig -> config.json
_IRRELEVANT = {
    "_name_or_path", "_commit_hash", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "initializer_range", "max_position_embeddings", "use_cache", "id2label", "label2id", "problem_type",
    "output_attentions", "output_hidden_states", "return_dict", "torchscript", "chunk_size_feed_forward",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "layer_types",
    "task_specific_params", "tokenizer_class", "finetuning_task", "prefix", "use_bfloat16", "pruned_heads",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "pretraining_tp",
    "router_aux_loss_coef", "output_router_logits",  # train.balance_loss has its own value
}  # fmt: skip
FP8 = "fp8"  # quant_method of weights in FP8, which models of every family may have
BITSANDBYTES = "bitsandbytes"  # the same in NF4
# fields of models with quantized weights
_QUANTIZATION = ("quantization_config", "compression_config")
_OWN_CODE = "code of its own"
_REASONS = {  # part of the name of a field -> the layers of such models, which no kind has
    "index_topk": "sparse attention with an indexer (DSA)",
    "mamba": "state space layers",
    "ssm_": "state space layers",
    "conv_L_cache": "layers of short convolutions",
    "attention_chunk_size": "attention within chunks",
    "softcap": "capped logits",
    "per_layer_input": "embeddings of each layer",
    "auto_map": _OWN_CODE,
}


def settings_of(config: Fields, where: str) -> dict[str, Any]:
    """The settings of ModelConfig, without preset and init_from, of the model that `config`
    describes.

    Args:
      config: the content of config.json.
      where: its path, for errors.
    Raises:
      UserError: a field is missing or has an invalid value or type.
      Unsupported: the decoder does not compute this model; the message names the field.
    """
    if is_own_format(config):
        return own_settings(config, where)
    family = _family_of(config, where)
    config = typed_fields(with_floats(config), where)
    for alias, name in family.field_aliases.items():
        value = config.pop(alias, None)
        named = config.get(name)
        if None not in (value, named) and value != named:
            raise UserError(
                f"{where} has {alias}={value} and {name}={named}, which differ; remove the wrong one"
            )
        if value is not None:
            config[name] = value
    layers = config.get("layer_types") or config.get("hybrid_override_pattern")
    if layers and config.get("num_hidden_layers") is None:  # transformers 5 does not write it
        config["num_hidden_layers"] = len(layers)
    _check_fields(config, family, where)
    defaults = {**_DEFAULTS, **family.defaults}
    settings: dict[str, Any] = {
        **COMMON_SETTINGS,
        **family.settings,
        "attention.query_scale_dim": 0.0,
    }
    fields = ReadFields(where, {**defaults, **config})
    for name, setting in _settings_of_fields(family).items():
        is_derived = fields.get(name) is None and name in _DERIVED
        settings[setting] = _DERIVED[name](settings) if is_derived else fields[name]
    settings.setdefault("ffn_dim", settings.get("experts.ffn_dim"))  # without dense layers
    if family.num_shared_field:
        num_shared = fields.get(family.num_shared_field) or 0
        settings["experts.shared_ffn_dim"] = num_shared * settings["experts.ffn_dim"]
    settings |= family.read_settings(fields)
    if family.has_one_attention_bias:
        settings["attention.out_bias"] = settings["attention.qkv_bias"]
    first, group = _layer_kinds(config, family, where)
    kinds = {*first, *group}
    mixed = {family.kinds.get(kind, {}).get("attention", kind) for kind in kinds}
    settings |= dict.fromkeys(_unused_sizes(family, mixed), 0)
    default = experts.ExpertsKind.name if settings.get("experts.num_experts") else "dense"
    used = {family.kinds.get(kind, {}).get("feed_forward", default) for kind in kinds}
    used |= _mixers(mixed)
    for block in blocks():  # a file may have settings of blocks that no layer has
        if block.name not in used and isinstance(block, HasOwnSettings):
            for setting in block.only_with:
                settings.pop(setting.removeprefix("model."), None)
    window = (
        config.get("sliding_window", defaults.get("sliding_window")) if "sliding" in kinds else 0
    )
    if window is None:
        raise UserError(
            f"{where} has layers of type sliding_attention and no sliding_window; download it again"
        )
    rope = rope_settings(config, where, family, mixed)
    settings |= {"first_layer_kinds": first, "layer_kinds": group, "attention.window": window}
    settings |= rope
    own_kinds = {kind: dict(values) for kind, values in family.kinds.items() if kind in kinds}
    return settings | dict(kinds=own_kinds) if own_kinds else settings


def language_model_of(config: Fields) -> Fields:
    """The fields of the language model in config.json: `config` itself, or text_config of a model
    with images.
    """
    model_type = config.get("model_type") or None
    text = config.get("text_config")
    families = [x for x in FAMILIES.values() if x.multimodal_type == model_type]
    if not families or not isinstance(text, dict):
        return config
    named = text.get("model_type", families[0].model_type)
    if named not in [family.model_type for family in families]:
        return config  # which is refused
    outer = {
        name: config[name] for name in ("dtype", "torch_dtype", *_QUANTIZATION) if name in config
    }
    inner = dict(model_type=named, architectures=[FAMILIES[named].architecture])
    if "tie_word_embeddings" in config:  # transformers reads it here only
        inner["tie_word_embeddings"] = config["tie_word_embeddings"]
    return {**outer, **text, **inner}


def family_of(config: Fields | None, model: ModelConfig) -> Family:
    """The family to export `model` as: that of the config.json it comes from, or the first one with
    the same layers. If there is none, one with names of our own (see `is_own_format`)."""
    if config is not None and not is_own_format(config):
        return FAMILIES[config["model_type"]]
    fitting = (x for x in FAMILIES.values() if config is None and _describes(x, model))
    if (family := next(fitting, None)) is not None:
        return family
    tensors = experts.STACKED_TENSORS if model.experts.bias else experts.TENSORS
    tensors = (*tensors, *experts.shared_tensors("shared_expert"), experts.CHOICE_BIAS)
    return Family(
        model_type=MODEL_TYPE,
        architecture=_ARCHITECTURE,
        settings={path: model.by_path[path] for path in COMMON_SETTINGS},
        feed_forward_tensors=dict(experts=(*tensors, *experts.LATENT_TENSORS))
        if model.experts.num_experts
        else {},
    )


def _describes(family: Family, model: ModelConfig) -> bool:
    """Whether the config.json of `family` for `model` describes this model when it is read again,
    besides its RoPE, which may have another form.
    """
    has_block = model.default_feed_forward in (family.feed_forward_tensors or ("dense",))
    if not has_block or {*model.used_kinds} not in map(set, family.layer_kinds):
        return False
    try:
        settings = settings_of(_first_fields(model, family), "config.json")
    except UserError:
        return False
    read = model_from({"preset": "", **settings})
    has_layers = read.kinds_of_layers == model.kinds_of_layers and {*read.kinds} == {*model.kinds}
    has_scale = (
        model.attention.query_scale_dim in (0, model.attention.head_dim)
        or "attention.query_scale_dim" in family.fields.values()
    )
    different = {
        name
        for name, value in model.by_path.items()
        if value != read.by_path[name]
        and not (isinstance(value, float) and math.isclose(value, read.by_path[name]))
    }
    return has_layers and has_scale and different <= {*_NOT_COMPARED, *ROPE_SETTINGS}


def _first_fields(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The config.json of a model that has none, without its longest sequence and dtype."""
    first: dict[str, Any] = dict(architectures=[family.architecture], model_type=family.model_type)
    # Of the tokenizer; the defaults of transformers belong to a published model.
    first |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    first[family.activation_field] = _ACTIVATIONS[model.activation]
    fixed = {
        name: values[0]
        for name, values in family.required_values.items()
        if name != "rope_interleaved" and values[0] is not None
    }
    fields = _fields_of(model, family)
    return first | fixed | fields | family.write_kinds(model) | rope_fields(model, family)


def config_json_of(
    model: ModelConfig, base: Fields | None, *, seq_len: int, dtype: str
) -> dict[str, Any]:
    """The config.json of `model`. Fields that `model` does not change keep the values they have in
    `base`.

    Args:
      base: config.json of the model that training started from, or None.
      seq_len: the sequence length of the run, for max_position_embeddings.
      dtype: of the exported weights, "bfloat16" or "float32".
    Raises:
      UserError: `base` describes parameters of other shapes.
      Unsupported: transformers does not compute the RoPE of `model` in this family.
    """
    family = family_of(base, model)
    longest = max_position_embeddings(model, seq_len, (base or {}).get(family.length_field) or 0)
    dtype_fields = [name for name in ("dtype", "torch_dtype") if name in (base or {})] or [
        "torch_dtype"
    ]
    changed: dict[str, Any] = {family.length_field: longest, **dict.fromkeys(dtype_fields, dtype)}
    if family.model_type == MODEL_TYPE:
        tokens: Mapping[str, Any] = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        return {**(base or tokens), **own_fields(model), **changed}
    if base is None:
        return _first_fields(model, family) | changed
    # not quantized, and without the code of the repository
    base = {name: value for name, value in base.items() if name not in (*_QUANTIZATION, "auto_map")}
    before = settings_of(base, "config.json")
    before.pop("kinds", None)  # those of `model`, whose weights were loaded
    fields = _fields_of(model, family)
    for name, value in _fields_of(model_from(model.by_path | before), family).items():
        if name == "vocab_size" and value < fields[name]:
            changed[name] = fields[name]
        elif value != fields[name]:
            raise UserError(
                f"config.json of model.init_from has {name}={value} and the run {fields[name]}; restore that file"
            )
    if family.exported_type:
        changed["model_type"] = family.exported_type
    # the length that the run adds may change the RoPE, and whether a window has an effect
    after = settings_of({**base, **changed}, "config.json")
    if after["attention.window"] != model.attention.window:
        changed |= family.write_kinds(model)
        after = settings_of({**base, **changed}, "config.json")
    if all(after[name] == model.by_path[name] for name in ROPE_SETTINGS if name in after):
        return {**base, **changed}
    kept = {name: value for name, value in base.items() if name not in ROPE_FIELDS}
    return kept | rope_fields(model, family, base) | changed


def _family_of(config: Fields, where: str) -> Family:
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        inner = config.get("text_config")
        around = ""
        fields = {**config, str(model_type): True}
        if isinstance(inner, dict):
            around = f" (a model around one of type {inner.get('model_type')!r})"
            fields |= inner
        layers = _reason(fields)
        others = f"{around}; supported are {', '.join([*FAMILIES, MODEL_TYPE])}"
        raise Unsupported(f"unsupported: {where} has model_type {model_type!r}{layers or others}")
    architectures = config.get("architectures") or [family.architecture]
    if str(architectures).lower() != str([family.architecture]).lower():
        raise Unsupported(
            f"unsupported: {where} has architectures {architectures}; only"
            f" {family.architecture or f'a model of type {family.multimodal_type}'} is supported"
        )
    return family


def _check_fields(config: Fields, family: Family, where: str) -> None:
    quantization = quantization_of(config)
    method = quantization.get("quant_method", "an unnamed method")
    supported = [name for name in (FP8, BITSANDBYTES, family.quantization) if name]
    if quantization and method not in supported:
        raise Unsupported(
            f"unsupported: {where} (model_type {family.model_type}) has weights that are quantized with {method}; use"
            f" the model with weights in bfloat16, float16 or float32, or quantized with {' or '.join(supported)}"
        )
    block = quantization.get("weight_block_size")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise UserError(
            f"{where} has weight_block_size={block!r}: expected two integers, at least 1, or null"
        )
    activation = {**COMMON_SETTINGS, **family.settings}["activation"]
    required = {
        **{name: x for name, x in _REQUIRED_VALUES.items() if name not in family.fields},
        family.activation_field: (_ACTIVATIONS[activation],),
        **family.required_values,
    }
    for name, values in required.items():
        value = config.get(name, family.defaults.get(name, values[0]))
        if value not in values and value is not None:
            allowed = " or ".join("null" if x is None else str(x).lower() for x in values)
            raise Unsupported(
                f"unsupported: {where} has {name}={value!r}; only {allowed} is supported"
            )
    known = {
        *_FIELDS,
        *family.fields,
        *family.defaults,
        *required,
        *ROPE_FIELDS,
        "sliding_window",
        *_IRRELEVANT,
        *family.irrelevant,
    }
    unknown = sorted(
        name for name, value in config.items() if value and name not in (*known, *_QUANTIZATION)
    )
    if unknown:
        name = next((name for name in unknown if _reason({name: True})), unknown[0])
        reason = suggestion(name, known, cutoff=0.8) or _reason({name: True})
        advice = (
            ""
            if reason
            else f"; remove it if transformers does not read it in models of type {family.model_type}"
        )
        raise Unsupported(
            f"unsupported: {where} has the unknown field {name}={config[name]!r}{reason}, which may change the"
            f" computation{advice}"
        )


def quantization_of(config: Fields) -> Mapping[str, Any]:
    """The description of quantized weights in config.json; empty if there is none."""
    return next((config[name] for name in _QUANTIZATION if config.get(name)), {})


def _layer_kinds(
    config: Fields, family: Family, where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings model.first_layer_kinds and model.layer_kinds."""
    kinds = family.read_kinds(config)
    supported = set[str]().union(*family.layer_kinds)
    unsupported = [kind for kind in kinds if kind not in supported]
    if unsupported:
        layer_type = LAYER_TYPES.get(
            unsupported[0], "NoPE" if unsupported[0] == "nope" else unsupported[0]
        )
        raise Unsupported(
            f"unsupported: {where} has layers of type {layer_type}; in models of type {family.model_type} only"
            f" {' and '.join(sorted(supported))} layers are supported"
        )
    if len(kinds) != config["num_hidden_layers"]:
        raise UserError(
            f"{where} has types of {len(kinds)} layers, and num_hidden_layers={config['num_hidden_layers']}; correct"
            " one of them"
        )
    return first_and_group(kinds)


def _fields_of(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The fields of config.json that give the sizes of `model`."""
    scale_dim = model.attention.query_scale_dim or model.attention.head_dim
    if scale_dim == int(scale_dim):
        scale_dim = int(scale_dim)
    values = {**model.by_path, "attention.query_scale_dim": scale_dim}
    fields = {name: values[setting] for name, setting in _settings_of_fields(family).items()}
    unused = _unused_sizes(family, model.attentions)
    fields = {
        name: value for name, value in fields.items() if family.fields.get(name) not in unused
    }
    sizes = model.experts
    if family.num_shared_field and sizes.num_experts:
        fields[family.num_shared_field] = sizes.shared_ffn_dim // sizes.ffn_dim
    return fields | family.write_settings(model)


def _mixers(kinds: Collection[str]) -> set[str]:
    return {name for kind in kinds for name in mixers_by_layer_kind().get(kind, ())}


def _unused_sizes(family: Family, kinds: Collection[str]) -> list[str]:
    """Sizes in the fields of a family of mixers that no layer has."""
    unused = (mixer for name, mixer in MIXERS.items() if name not in _mixers(kinds))
    return [name for mixer in unused for name in mixer.sizes if name in family.fields.values()]


def _settings_of_fields(family: Family) -> dict[str, str]:
    """The fields of config.json that give settings, and these; without the width of dense layers if
    there are none.
    """
    left_out = {*family.varying, *(() if family.has_dense_layers else ("ffn_dim",))}
    common = {name: x for name, x in _FIELDS.items() if x not in left_out}
    return {**common, **family.fields}


def _reason(config: Fields) -> str:
    """The layers that models with such fields have, in parentheses; "" for other fields."""
    names = [name for name, value in config.items() if value]
    found = [reason for part, reason in _REASONS.items() if any(part in name for name in names)]
    reasons = dict.fromkeys([x for x in found if x != _OWN_CODE] or found)
    return f" ({' and '.join(reasons)})" if reasons else ""
