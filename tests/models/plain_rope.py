"""A reference RoPE in numpy: float64, one frequency at a time, written from the papers; and a model
of each kind.
"""

import dataclasses
import math

import numpy as np

from jaxlc.config.models.model_schema import RopeConfig
from jaxlc.config.models.presets import PRESETS

# Name -> settings of RopeConfig on top of those of LLAMA, for every kind of scaling and every parameter.
SCALINGS = {
    "none": {},
    "linear": dict(scaling="linear", factor=8.0),
    "ntk": dict(scaling="ntk", factor=8.0),
    "dynamic_ntk": dict(scaling="dynamic_ntk", factor=2.0, original_tokens=8192),
    "yarn": dict(scaling="yarn", factor=32.0, original_tokens=8192),
    "yarn_options": dict(
        scaling="yarn",
        factor=40.0,
        original_tokens=4096,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.25,
        truncate=False,
    ),
    "longrope": dict(
        scaling="longrope",
        factor=16.0,
        original_tokens=8192,
        short_factors=tuple(1 + i / 64 for i in range(64)),
        long_factors=tuple(1 + i / 2 for i in range(64)),
    ),
    "longrope_options": dict(
        scaling="longrope",
        factor=16.0,
        original_tokens=8192,
        attention_factor=0.75,
        short_factors=(1.5,) * 64,
        long_factors=(3.0,) * 64,
    ),
    "llama3": dict(scaling="llama3", factor=8.0, original_tokens=8192),
    "partial": dict(fraction=0.25),
    "partial_yarn": dict(
        fraction=0.5,
        scaling="yarn",
        factor=8.0,
        original_tokens=8192,
    ),
}
LLAMA = dataclasses.replace(
    PRESETS["llama3.1-8b"], rope=RopeConfig(theta=500_000.0, sliding_theta=20_000.0)
)


def with_rope(model, **settings):
    """The model with other settings of RoPE."""
    return dataclasses.replace(model, rope=dataclasses.replace(model.rope, **settings))


def scaled_model(name, **settings):
    """LLAMA with the RoPE of a name of SCALINGS, and other settings of RoPE."""
    return with_rope(LLAMA, **(SCALINGS[name] | settings))


def plain_rope(x_TH, positions_T, model, *, kind="full", seq_len=0):
    """RoPE as Hugging Face transformers computes it: rotate_half and full-width cos and sin;
    float64.
    """
    if kind == "nope":
        return x_TH
    if kind == "sliding" and model.rope.sliding_scaling:
        kind, model = "full", with_rope(model, theta=model.rope.sliding_theta)
    dim = int(model.attention.head_dim * model.rope.fraction)
    pairs = [plain_frequency(i, dim, model, kind, seq_len) for i in range(dim // 2)]
    factor = plain_attention_factor(model) if kind == "full" else 1.0
    angles_TR = np.concatenate([np.outer(np.asarray(positions_T, np.float64), pairs)] * 2, axis=-1)
    rotary_TR = np.asarray(x_TH[:, :dim], np.float64)
    rotated_TR = np.concatenate([-rotary_TR[:, dim // 2 :], rotary_TR[:, : dim // 2]], axis=-1)
    result_TR = rotary_TR * (factor * np.cos(angles_TR)) + rotated_TR * (factor * np.sin(angles_TR))
    return np.concatenate([result_TR, x_TH[:, dim:]], axis=-1)


def plain_frequency(i, dim, model, kind, seq_len):
    """Radians per token of pair `i` of dim / 2."""
    if kind == "sliding":
        return 1 / model.rope.sliding_theta ** (2 * i / dim)
    theta, s = model.rope.theta, model.rope.factor
    frequency, original = 1 / theta ** (2 * i / dim), model.rope.original_tokens
    match model.rope.scaling:
        case "none":
            return frequency
        case "linear":  # positions are divided by s
            return frequency / s
        case "ntk":  # the lowest frequency is divided by s, the highest one unchanged
            return 1 / (theta * s ** (dim / (dim - 2))) ** (2 * i / dim)
        case "dynamic_ntk":
            if seq_len <= original:
                return frequency
            return 1 / (theta * (s * seq_len / original - (s - 1)) ** (dim / (dim - 2))) ** (
                2 * i / dim
            )
        case "longrope":
            factors = (model.rope.short_factors, model.rope.long_factors)[seq_len > original]
            return frequency / factors[i]
        case "llama3":
            return _llama3(frequency, model)
        case "yarn":
            return _yarn(i, dim, frequency, model)


def plain_attention_factor(model):
    if model.rope.attention_factor:
        return model.rope.attention_factor
    if model.rope.scaling == "yarn":
        return 0.1 * math.log(model.rope.factor) + 1
    if model.rope.scaling == "longrope":
        return (1 + math.log(model.rope.factor) / math.log(model.rope.original_tokens)) ** 0.5
    return 1.0


def _llama3(frequency, model):
    low_wavelength = model.rope.original_tokens / model.rope.low_freq_factor
    high_wavelength = model.rope.original_tokens / model.rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < high_wavelength:
        return frequency
    if wavelength > low_wavelength:
        return frequency / model.rope.factor
    smooth = (model.rope.original_tokens / wavelength - model.rope.low_freq_factor) / (
        model.rope.high_freq_factor - model.rope.low_freq_factor
    )
    return (1 - smooth) * frequency / model.rope.factor + smooth * frequency


def _yarn(i, dim, frequency, model):
    """A pair with beta turns in the original context L has theta^(2i/dim) = L / (2 pi beta), solved
    for i.
    """

    def pair_with_turns(beta):
        wavelength_per_turn = model.rope.original_tokens / (2 * math.pi * beta)
        return dim / 2 * math.log(wavelength_per_turn, model.rope.theta)

    start, end = (
        pair_with_turns(model.rope.beta_fast),
        pair_with_turns(model.rope.beta_slow),
    )
    if model.rope.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, dim - 1)
    if i <= start:
        return frequency
    if i >= end:
        return frequency / model.rope.factor
    ramp = (i - start) / (end - start)
    return (1 - ramp) * frequency + ramp * frequency / model.rope.factor
