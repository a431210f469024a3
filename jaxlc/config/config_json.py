"""Between the config.json of a Hugging Face model and the settings of `ModelConfig`. Imports no jax.

A field that changes the computation and is not known is an error. jaxlc/config/rope_json.py reads and writes RoPE.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jaxlc.config.families import FAMILIES, Family
from jaxlc.config.rope_json import ROPE_FIELDS, max_position_embeddings, rope_fields, rope_settings
from jaxlc.config.schema import ModelConfig
from jaxlc.core.errors import Unsupported, UserError

ROPE_SETTINGS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith("rope_"))
# Settings that may differ from the model that is loaded: they change which positions attention compares, and how, and
# not the shape of a parameter.
CHANGEABLE_SETTINGS = (*ROPE_SETTINGS, "sliding_rope_theta", "window")

_FIELDS = {  # config.json -> ModelConfig
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "model_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_epsilon",
}
_DEFAULTS: dict[str, Any] = dict(tie_word_embeddings=False, rms_norm_eps=1e-6)  # of transformers, in all families
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = dict(
    hidden_act=("silu",),
    attention_dropout=(0,),
    partial_rotary_factor=(1,),
    is_decoder=(False, True),  # both are causal
    is_encoder_decoder=(False,),
    add_cross_attention=(False,),
)
_FULL_ATTENTION: dict[str, Any] = dict(layer_kinds=("full",), window=0)
_IRRELEVANT = {
    *("_name_or_path", "_commit_hash", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *("initializer_range", "max_position_embeddings", "use_cache", "id2label", "label2id", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "chunk_size_feed_forward"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "layer_types"),
    *("task_specific_params", "tokenizer_class", "finetuning_task", "prefix", "use_bfloat16", "pruned_heads"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version"),
}
_REASONS = {  # part of the name of a field -> what such models have
    "quantization": "quantized weights",
    "expert": "a mixture of experts",
    "moe": "a mixture of experts",
    "lora_rank": "multi-head latent attention",
    "linear_": "linear attention",
    "softcap": "capped logits",
    "mamba": "state space layers",
    "auto_map": "code of its own",
}


def settings_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of ModelConfig, without preset and init_from, of the model that `config` describes.

    Args:
      config: the content of config.json.
      where: its path, for errors.
    Raises:
      UserError: a field is missing or has an invalid value.
      Unsupported: the decoder does not compute this model; the message names the field.
    """
    family = _family_of(config, where)
    _check_fields(config, family, where)
    defaults = {**_DEFAULTS, **family.defaults}
    settings = {}
    for name, setting in _FIELDS.items():
        value = config.get(name, defaults.get(name))
        if value is None:
            value = _derived(name, settings)
        if value is None:
            raise UserError(f"{where} has no field {name}: it is incomplete; download it again")
        settings[setting] = value
    rope = rope_settings(config, where, family, _FULL_ATTENTION["layer_kinds"])
    return settings | dict(qk_norm=family.qk_norm) | _FULL_ATTENTION | rope


def family_of(config: Mapping[str, Any] | None, model: ModelConfig) -> Family:
    """The family to export `model` as: that of the config.json it comes from, or one with the same layers."""
    if config is not None:
        return FAMILIES[config["model_type"]]
    return FAMILIES["qwen3" if model.qk_norm == "head" else "llama"]


def config_json_of(model: ModelConfig, base: Mapping[str, Any] | None, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """The config.json of `model`. Fields that `model` does not change keep the values they have in `base`.

    Args:
      base: config.json of the model that training started from, or None.
      seq_len: the sequence length of the run, for max_position_embeddings.
      dtype: of the exported weights, "bfloat16" or "float32".
    Raises:
      UserError: `base` describes parameters of other shapes.
      Unsupported: transformers does not compute the RoPE of `model` in this family.
    """
    family = family_of(base, model)
    fields = {name: getattr(model, setting) for name, setting in _FIELDS.items()}
    longest = max_position_embeddings(model, seq_len, (base or {}).get("max_position_embeddings") or 0)
    dtype_field = "dtype" if "dtype" in (base or {}) else "torch_dtype"
    changed = {"max_position_embeddings": longest, dtype_field: dtype}
    if base is None:
        first = dict(architectures=[family.architecture], model_type=family.model_type, hidden_act="silu")
        fixed = {name: values[0] for name, values in family.required_values.items() if name != "rope_interleaved"}
        return first | fields | fixed | rope_fields(model, family) | changed
    before = settings_of(base, "config.json")
    changed_shapes = [name for name, setting in _FIELDS.items() if before[setting] != fields[name]]
    if changed_shapes:
        name = changed_shapes[0]
        raise UserError(
            f"config.json of model.init_from has {name}={base[name]} and the run {fields[name]}; restore it"
        )
    after = settings_of({**base, **changed}, "config.json")  # the length that the run adds may change the RoPE
    if all(after[name] == getattr(model, name) for name in ROPE_SETTINGS):
        return {**base, **changed}
    kept = {name: value for name, value in base.items() if name not in ROPE_FIELDS}
    return kept | rope_fields(model, family) | changed


def _family_of(config: Mapping[str, Any], where: str) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise Unsupported(
            f"unsupported: {where} has model_type {model_type!r}{_reason(config)}; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise Unsupported(
            f"unsupported: {where} has architectures {architectures}; only {family.architecture} is supported"
        )
    return family


def _check_fields(config: Mapping[str, Any], family: Family, where: str) -> None:
    required = {**_REQUIRED_VALUES, **family.required_values}
    for name, values in required.items():
        value = config.get(name, family.defaults.get(name, values[0]))
        if value not in values and value is not None:
            allowed = " or ".join("null" if x is None else str(x).lower() for x in values)
            raise Unsupported(f"unsupported: {where} has {name}={value!r}; only {allowed} is supported")
    windowed = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if windowed:
        raise Unsupported(f"unsupported: {where} has layers of type {windowed[0]}; only full_attention is supported")
    known = {*_FIELDS, *required, *ROPE_FIELDS, *_IRRELEVANT, *family.irrelevant}
    unknown = sorted(name for name, value in config.items() if name not in known and value is not None)
    if unknown:
        name = unknown[0]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        question = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise Unsupported(
            f"unsupported: {where} has the unknown field {name}={config[name]!r}{question}{_reason({name: 0})}, which"
            " may change the computation; remove it if it does not"
        )


def _reason(config: Mapping[str, Any]) -> str:
    """What the names of the fields say about the model, in parentheses."""
    reasons = (reason for part, reason in _REASONS.items() if any(part in name for name in config))
    reason = next(reasons, None)
    return f" ({reason})" if reason else ""


def _derived(name: str, settings: Mapping[str, Any]) -> int | None:
    """The value of a field that is null."""
    if name == "num_key_value_heads":
        return settings["num_heads"]
    if name == "head_dim":
        return settings["model_dim"] // settings["num_heads"]
    return None
