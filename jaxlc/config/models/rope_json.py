"""Converts between the RoPE of a Hugging Face config.json and the settings of `ModelConfig`.
Imports no jax.

Two forms are read and written: `rope_theta`, `rope_scaling` and Gemma 3's `rope_local_base_freq` of
transformers 4, and `rope_parameters` of transformers 5, which has one entry for each layer type in
families with `rope_by_layer_type`.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxlc.config.models.families import Family
from jaxlc.config.models.families.family import Fields
from jaxlc.config.models.model_schema import (
    DEFAULTS,
    NO_EFFECT_AT_1,
    PARAMETERS,
    ModelConfig,
    attention_factor,
)
from jaxlc.core import Unsupported, UserError

_LONGEST = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_ROTATED = "rotary_dim"
_QUERY_BETA = "llama_4_scaling_beta"
_QUERY_MSCALE = "mscale_all_dim"
_THETA = "rope_theta"
_DEFAULT_THETA = 10000.0
_LOCAL_THETA = "rope_local_base_freq"
_SCALING = "rope_scaling"
# Fields of config.json. The length takes precedence over the same key in rope_scaling.
ROPE_FIELDS = (_THETA, _SCALING, "rope_parameters", _LOCAL_THETA, _ORIGINAL, _PARTIAL)
_TYPES = {  # rope_type -> model.rope.scaling
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic_ntk",
    "yarn": "yarn",
    "longrope": "longrope",
    "llama3": "llama3",
}
_PARAMETERS = {  # key in rope_scaling -> setting of model.rope
    "factor": "factor",
    _ORIGINAL: "original_tokens",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
    _QUERY_BETA: "query_beta",
    _QUERY_MSCALE: "query_mscale",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}
_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "truncate", _QUERY_BETA, _QUERY_MSCALE)


def rope_settings(
    config: Fields, where: str, family: Family, kinds: Collection[str]
) -> dict[str, Any]:
    """The RoPE settings of the model that `config` describes.

    Args:
      config: the content of config.json.
      where: its path, for errors.
      kinds: those that some layers have.
    Raises:
      UserError: a field is missing, or the two forms differ.
      Unsupported: a RoPE that the layers do not compute, or an unknown field.
    """
    if _has_no_rope(kinds):  # these have no effect
        theta = float(config.get(_THETA) or family.defaults.get(_THETA, _DEFAULT_THETA))
        return {**DEFAULTS, "rope.theta": theta, "rope.fraction": 1.0, "rope.scaling": "none"}
    if config.get(_PARTIAL, 1) is None:  # null is 1; only an absent field has the family's default
        config = {**config, _PARTIAL: 1.0}
    if _ORIGINAL in family.defaults:
        config = {_ORIGINAL: family.defaults[_ORIGINAL], **config}
    if family.rope_by_layer_type:  # transformers reads the length within rope_scaling only
        config = {name: value for name, value in config.items() if name != _ORIGINAL}
    old = config.get(_SCALING)
    new = config.get("rope_parameters") or (not old and family.defaults.get("rope_parameters"))
    settings = _settings(new or old or {}, config, where, family)
    stated = {"rope.theta": config.get(_THETA), "rope.sliding_theta": config.get(_LOCAL_THETA)}
    if new and old:
        stated |= _one_rope({_THETA: settings["rope.theta"], **old}, config, where, family)
    wrong = next(
        (name for name, value in stated.items() if value is not None and value != settings[name]),
        None,
    )
    if wrong:
        fields = {
            name: config[name]
            for name in (_THETA, _LOCAL_THETA, _SCALING, "rope_parameters")
            if config.get(name)
        }
        differ = " and ".join(f"{name}={value}" for name, value in fields.items())
        raise UserError(
            f"{where} has {differ}, which differ in model.{wrong}; remove the wrong ones"
        )
    unused = {*family.varying}
    if "sliding" not in kinds:
        unused.add("rope.sliding_theta")
    elif family.rope_by_layer_type and not settings["rope.truncate"]:
        raise Unsupported(
            f"unsupported: {where} has truncate=false, which transformers ignores in this model_type"
        )
    else:
        is_scaled = not family.rope_by_layer_type and settings["rope.scaling"] != "none"
        settings["rope.sliding_scaling"] = is_scaled
    return {name: value for name, value in settings.items() if name not in unused}


def rope_fields(model: ModelConfig, family: Family, base: Fields | None = None) -> dict[str, Any]:
    """Both forms of the RoPE of `model`; only the new one if the old one cannot express it.

    Args:
      base: config.json of a model whose RoPE of images remains.
    Raises:
      Unsupported: transformers does not compute this RoPE in models of this family.
    """
    if _has_no_rope(model.attentions):
        return dict(rope_parameters=dict(rope_type="default", rope_theta=None))
    _check_family(model, family)
    theta = model.rope.theta
    scaling: dict[str, Any] | None = None
    if model.rope.scaling == "ntk":  # another base
        dim = model.rotated_dim
        theta *= model.rope.factor ** (dim / (dim - 2))
    elif model.rope.scaling != "none":
        rope_type = next(name for name, x in _TYPES.items() if x == model.rope.scaling)
        scaling = {"rope_type": rope_type}
        for name, parameter in _names_of(rope_type).items():
            value = getattr(model.rope, parameter)
            is_default = name in _OPTIONAL and value == DEFAULTS[f"rope.{parameter}"]
            if name != _LONGEST and (not is_default or name in family.defaults):
                scaling[name] = list(value) if isinstance(value, tuple) else value
    old: dict[str, Any] = dict(rope_theta=theta, rope_scaling=scaling)
    if scaling and model.rope.scaling == "longrope":  # transformers 4 ignores the factor
        scaling["attention_factor"] = attention_factor(model)
        old[_ORIGINAL] = model.rope.original_tokens  # which it reads here
    before = (base or {}).get("rope_parameters") or (base or {}).get(_SCALING) or {}
    kept = {name: value for name, value in before.items() if name in family.irrelevant}
    full = (scaling or {"rope_type": "default"}) | {"rope_theta": theta} | kept
    if _PARTIAL in family.defaults:
        old[_PARTIAL] = full[_PARTIAL] = model.rope.fraction
    if _ROTATED in family.defaults:
        old[_ROTATED] = model.rotated_dim
    if not family.rope_by_layer_type:
        return old | dict(rope_parameters=full)
    sliding = dict(rope_type="default", rope_theta=model.rope.sliding_theta)
    new = dict(rope_parameters=dict(full_attention=full, sliding_attention=sliding))
    if "rope_local_base_freq" in family.defaults:
        return old | dict(rope_local_base_freq=model.rope.sliding_theta) | new
    return old | new if model.rope.sliding_theta == theta else new


def max_position_embeddings(model: ModelConfig, seq_len: int, base: int) -> int:
    """The value of this field in the config.json of `model`: the longest context, at least that of
    the base model.

    transformers reads it as the original context length of dynamic NTK. For YaRN, transformers 4
    divides it by the original length to get the factor, which is exact unless one of the other
    lengths is longer.

    Args:
      seq_len: the longest sequences of training.
      base: the value for the model that training started from, or 0.
    """
    if model.rope.scaling == "dynamic_ntk":
        return model.rope.original_tokens
    is_yarn = model.rope.scaling == "yarn"
    scaled = round(model.rope.factor * model.rope.original_tokens) if is_yarn else 0
    return max(seq_len, base, scaled)


def _has_no_rope(kinds: Collection[str]) -> bool:
    return "nope" in kinds and not {"full", "sliding"} & {*kinds}


def _settings(
    parameters: Mapping[str, Any], config: Fields, where: str, family: Family
) -> dict[str, Any]:
    """The settings that rope_parameters or rope_scaling give, with the fields outside of them."""
    nested = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    theta = config.get(_THETA, family.defaults.get(_THETA, _DEFAULT_THETA))  # None: it is null
    full = parameters
    sliding = dict[str, Any]()
    local = config.get(_LOCAL_THETA, family.defaults.get(_LOCAL_THETA))
    if nested or (family.rope_by_layer_type and config.get("rope_parameters")):
        known = (
            [f"{kind}_attention" for kind in ("full", "sliding")]
            if family.rope_by_layer_type
            else []
        )
        unknown = sorted(name for name in parameters if name not in known)
        if unknown:
            raise Unsupported(
                f"unsupported: {where} has RoPE parameters of their own for {unknown[0]} layers; supported are"
                f" {' and '.join(known) or 'only those for all layers'}"
            )
        full, sliding = (parameters.get(name) or {} for name in known)
    settings = _one_rope({_THETA: theta, **full}, config, where, family)
    if not family.rope_by_layer_type:
        return settings | {"rope.sliding_theta": settings["rope.theta"]}
    if local is None:
        local = theta if nested else settings["rope.theta"]
    own = _one_rope({_THETA: local, **sliding}, config, where, family)
    if own["rope.scaling"] != "none":
        raise Unsupported(
            f"unsupported: {where} scales RoPE of sliding_attention layers; only default is supported"
        )
    return settings | {"rope.sliding_theta": own["rope.theta"]}


def _one_rope(
    parameters: dict[str, Any], config: Fields, where: str, family: Family
) -> dict[str, Any]:
    """The settings of model.rope that one dict of parameters gives; `type` is the older name of
    `rope_type`.
    """
    old_type = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", old_type)
    rope_type = "longrope" if rope_type == "su" else rope_type  # the older name in Phi-3
    known = [x for x in _TYPES if _TYPES[x] in (family.rope_scalings or _TYPES.values())]
    if rope_type not in known:
        raise Unsupported(
            f"unsupported: {where} has RoPE of type {rope_type!r}; supported are {', '.join(known)}"
        )
    theta = parameters.pop(_THETA)
    default = family.defaults.get(_PARTIAL, 1)
    if theta is None:
        raise Unsupported(f"unsupported: {where} has {_THETA}=null, a model without RoPE")
    stated = [parameters.pop(_PARTIAL, None), config.get(_PARTIAL)]
    if _ROTATED in family.defaults and config.get(_ROTATED):
        stated.append(config[_ROTATED] / (config.get("head_dim") or family.defaults["head_dim"]))
    fraction = next((x for x in stated if x is not None), default)
    if fraction != 1 and _PARTIAL not in family.defaults:
        raise Unsupported(f"unsupported: {where} has {_PARTIAL}={fraction}; only 1 is supported")
    parameters = {
        name: value for name, value in parameters.items() if name not in family.irrelevant
    }
    scaling = _TYPES[rope_type]
    settings = {
        **DEFAULTS,
        "rope.theta": float(theta),
        "rope.fraction": float(fraction),
        "rope.scaling": scaling,
    }
    names = _names_of(rope_type)
    values = _values(names, parameters, rope_type, config)
    if rope_type == "yarn":
        _set_attention_factor(values, parameters)
        if _QUERY_MSCALE not in family.defaults:
            values[_QUERY_MSCALE] = None
    for name, parameter in names.items():
        if (value := values[name]) is not None:
            kind = type(DEFAULTS[f"rope.{parameter}"])
            settings[f"rope.{parameter}"] = kind(map(float, value) if kind is tuple else value)
        elif name not in _OPTIONAL:
            raise UserError(f"{where} has RoPE of type {rope_type} without {name}; add it")
    unknown = sorted(
        name for name in parameters.keys() - values.keys() if parameters[name] is not None
    )
    if unknown:
        raise Unsupported(
            f"unsupported: {where} has the unknown RoPE parameter {unknown[0]}={parameters[unknown[0]]} for type"
            f" {rope_type}"
        )
    if settings["rope.query_beta"] and _QUERY_BETA not in family.defaults:
        raise Unsupported(
            f"unsupported: {where} has {_QUERY_BETA}={settings['rope.query_beta']}, which transformers ignores"
            f" in models of type {family.model_type}"
        )
    is_unscaled = (
        settings["rope.factor"] == 1
        and settings["rope.attention_factor"] in (0, 1)
        and not settings["rope.query_beta"]
    )
    return settings | DEFAULTS if scaling in NO_EFFECT_AT_1 and is_unscaled else settings


def _set_attention_factor(values: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Removes DeepSeek's two factors from `parameters`, and sets the attention factor that they
    give. One without the other has no effect.
    """
    mscale = parameters.pop("mscale", None)
    mscale_all_dim = parameters.pop(_QUERY_MSCALE, None)
    if mscale and mscale_all_dim and values["attention_factor"] is None and values["factor"]:
        # the check of settings refuses a factor below 1
        numerator, denominator = (
            0.1 * x * math.log(abs(values["factor"])) + 1 for x in (mscale, mscale_all_dim)
        )
        values["attention_factor"] = numerator / denominator


def _names_of(rope_type: str) -> dict[str, str]:
    """The entries of _PARAMETERS for one type; the original length of dynamic NTK is
    max_position_embeddings.
    """
    used = PARAMETERS[_TYPES[rope_type]]
    names = {name: parameter for name, parameter in _PARAMETERS.items() if parameter in used}
    if rope_type == "dynamic":
        names[_LONGEST] = names.pop(_ORIGINAL)
    return names


def _values(
    names: Iterable[str], parameters: Mapping[str, Any], rope_type: str, config: Fields
) -> dict[str, Any]:
    """The values of `names` in `parameters`, or None; lengths outside of rope_scaling take
    precedence.

    The original length is max_position_embeddings if it is absent. The factor of longrope, or a
    null factor of YaRN, is max_position_embeddings / original length. Longrope's only gives the
    attention factor, which is 1 for a factor below 1.
    """
    outside = {name: config[name] for name in (_LONGEST, _ORIGINAL) if config.get(name) is not None}
    values = {name: outside.get(name, parameters.get(name)) for name in names}
    longest = outside.get(_LONGEST)
    if _ORIGINAL in values and values[_ORIGINAL] is None:
        values[_ORIGINAL] = longest
    original = values.get(_ORIGINAL)
    is_derived = rope_type == "longrope" or (rope_type == "yarn" and "factor" in parameters)
    if is_derived and values["factor"] is None and longest and original:
        values["factor"] = longest / original
    if rope_type == "longrope" and values["factor"] is not None:
        values["factor"] = max(1.0, values["factor"])
    return values


def _check_family(model: ModelConfig, family: Family) -> None:
    if model.rope.scaling not in (family.rope_scalings or (model.rope.scaling,)):
        raise Unsupported(
            f"unsupported: export with config.model.rope.scaling={model.rope.scaling!r} of a model of type"
            f" {family.model_type} (supported: {', '.join(family.rope_scalings)})"
        )
    has_fraction = _PARTIAL in family.defaults or "rope.fraction" in family.varying
    if model.rope.fraction != 1 and not has_fraction:
        raise Unsupported(
            f"unsupported: export with config.model.rope.fraction={model.rope.fraction}, which transformers ignores in"
            f" models of type {family.model_type}"
        )
    scales_queries = model.rope.query_beta
    needed = _QUERY_BETA in family.defaults
    if (scales_queries and not needed) or (needed and model.rope.scaling != "yarn"):
        raise Unsupported(
            f"unsupported: export with config.model.rope.scaling={model.rope.scaling} and rope.query_beta="
            f"{scales_queries} of a model of type {family.model_type}, which {'needs yarn' if needed else 'needs 0'}"
        )
    if model.rope.query_mscale and _QUERY_MSCALE not in family.defaults:
        raise Unsupported(
            f"unsupported: export with config.model.rope.query_mscale={model.rope.query_mscale}, which"
            f" transformers ignores in models of type {family.model_type}"
        )
    if family.rope_by_layer_type:
        if not model.rope.truncate:
            raise Unsupported(
                "unsupported: export with config.model.rope.truncate=False, which transformers ignores in"
                f" models of type {family.model_type}"
            )
        if model.rope.sliding_scaling:
            raise Unsupported(
                "unsupported: export with config.model.rope.sliding_scaling=True of a model of type"
                f" {family.model_type} (supported: False)"
            )
    elif "sliding" in model.attentions and (
        model.rope.sliding_scaling != (model.rope.scaling != "none")
        or model.rope.sliding_theta != model.rope.theta
    ):
        raise Unsupported(
            f"unsupported: export of a model of type {family.model_type} with another RoPE in sliding layers than in"
            " full ones; use the same rope.theta and rope.sliding_theta, and rope.sliding_scaling with rope.scaling"
        )
