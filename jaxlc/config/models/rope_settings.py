"""The settings that each `model.rope_scaling` uses, and checks of the RoPE settings. Imports no jax."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlc.config.models.model_schema import ModelConfig

# Kind of scaling -> the settings rope_scaling_... that it uses.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic_ntk": ("factor", "original_tokens"),
    "yarn": ("factor", "original_tokens", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("factor", "original_tokens", "attention_factor", "short_factors", "long_factors"),
    "llama3": ("factor", "original_tokens", "low_freq_factor", "high_freq_factor"),
}
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name.startswith("rope_scaling")
}
NO_EFFECT_AT_1 = ("linear", "ntk", "yarn", "llama3")  # with rope_scaling_factor=1 and attention factor 1


def with_scaling(shape: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model, `shape`, updated with `explicit`.

    If `explicit` names another kind of scaling, the parameters of the kind in `shape` return to their defaults, except
    the original context length if the new kind uses it as well.
    """
    scaling = explicit.get("rope_scaling", shape["rope_scaling"])
    if scaling == shape["rope_scaling"] or scaling not in PARAMETERS:
        return {**shape, **explicit}
    kept = {"rope_scaling_original_tokens"} if "original_tokens" in PARAMETERS[scaling] else set()
    return {**shape, **{name: value for name, value in DEFAULTS.items() if name not in kept}, **explicit}


def attention_factor(model: ModelConfig) -> float:
    """The factor of cos and sin that `rope_scaling_attention_factor` gives, or its rule if that is 0.

    yarn: 0.1 ln s + 1 (Peng et al. 2023, arXiv:2309.00071, section 3.4); longrope: sqrt(1 + ln s / ln original tokens)
    (Ding et al. 2024, arXiv:2402.13753, the authors' code); 1 for the other kinds.
    """
    if model.rope_scaling_attention_factor:
        return model.rope_scaling_attention_factor
    log_factor = math.log(model.rope_scaling_factor)
    if model.rope_scaling == "yarn":
        return 0.1 * log_factor + 1
    if model.rope_scaling == "longrope":
        return math.sqrt(1 + log_factor / math.log(model.rope_scaling_original_tokens))
    return 1.0


def rope_problems(model: ModelConfig) -> Iterator[str]:
    """Contradictions among the RoPE settings."""
    yield from _fraction_problems(model)
    yield from _unused_parameters(model)
    scaling, factor = model.rope_scaling, model.rope_scaling_factor
    scaled_kinds = {"full", "sliding"} if model.sliding_rope_scaling else {"full"}
    if scaling != "none" and scaled_kinds.isdisjoint(model.attentions):
        yield (
            f"config.model.rope_scaling={scaling!r} has no effect, since config.model.layer_kinds names no full layers;"
            " use --config.model.rope_scaling=none, or --config.model.sliding_rope_scaling for sliding layers"
        )
    if model.sliding_rope_scaling and "sliding" not in model.attentions:
        yield (
            "config.model.sliding_rope_scaling=True has no effect, since config.model.layer_kinds names no sliding"
            " layers; use --noconfig.model.sliding_rope_scaling"
        )
    if scaling in NO_EFFECT_AT_1 and factor == 1 and attention_factor(model) == 1:
        yield (
            f"config.model.rope_scaling={scaling!r} needs a rope_scaling_factor greater than 1, the new context length"
            " divided by the original one; use --config.model.rope_scaling_factor=4 or another factor"
        )
    if "original_tokens" in PARAMETERS[scaling] and not model.rope_scaling_original_tokens:
        yield (
            f"config.model.rope_scaling={scaling!r} needs --config.model.rope_scaling_original_tokens, the context"
            " length that the model was trained with; often max_position_embeddings of its config.json"
        )
    if scaling == "llama3" and model.rope_scaling_low_freq_factor >= model.rope_scaling_high_freq_factor:
        yield (
            f"config.model.rope_scaling_low_freq_factor={model.rope_scaling_low_freq_factor} must be less than"
            f" rope_scaling_high_freq_factor={model.rope_scaling_high_freq_factor}"
        )
    if scaling == "yarn" and model.rope_scaling_beta_slow >= model.rope_scaling_beta_fast:
        yield (
            f"config.model.rope_scaling_beta_slow={model.rope_scaling_beta_slow} must be less than"
            f" rope_scaling_beta_fast={model.rope_scaling_beta_fast}"
        )
    if scaling == "longrope":
        yield from _longrope_problems(model)


def _fraction_problems(model: ModelConfig) -> Iterator[str]:
    rotated = model.head_dim * model.rope_fraction
    smallest = 4 if model.rope_scaling in ("ntk", "dynamic_ntk") else 2  # their base has the exponent d / (d - 2)
    if rotated % 2 or rotated < smallest:
        yield (
            f"config.model.rope_fraction={model.rope_fraction} of head_dim={model.head_dim} gives {rotated:g}"
            f" dimensions, and RoPE needs an even number, at least {smallest}; use a different rope_fraction"
        )


def _unused_parameters(model: ModelConfig) -> Iterator[str]:
    used = {"rope_scaling", *(f"rope_scaling_{name}" for name in PARAMETERS[model.rope_scaling])}
    for name, default in DEFAULTS.items():
        value = getattr(model, name)
        if name in used or value == default:
            continue
        users = [kind for kind, names in PARAMETERS.items() if name.removeprefix("rope_scaling_") in names]
        yield (
            f"config.model.{name}={value} has no effect with config.model.rope_scaling={model.rope_scaling!r}; use"
            f" --config.model.rope_scaling={' or '.join(users)} with it, or set it to {default}"
        )


def _longrope_problems(model: ModelConfig) -> Iterator[str]:
    num_frequencies = int(model.head_dim * model.rope_fraction) // 2
    for name, factors in (
        ("rope_scaling_short_factors", model.rope_scaling_short_factors),
        ("rope_scaling_long_factors", model.rope_scaling_long_factors),
    ):
        if len(factors) != num_frequencies:
            yield (
                f"config.model.{name} has {len(factors)} numbers, and rope_scaling='longrope' needs {num_frequencies},"
                " one for each frequency: head_dim x rope_fraction / 2"
            )
        if any(factor <= 0 for factor in factors):
            yield f"config.model.{name} contains {min(factors)}; its numbers must be greater than 0"
