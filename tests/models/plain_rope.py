"""A reference RoPE in numpy: float64, one frequency at a time, written from the papers; and a model
of each kind.
"""

import dataclasses
import math

import numpy as np

from jaxlc.config.models.presets import PRESETS

# Name -> settings of ModelConfig on top of LLAMA, for every kind of scaling and every parameter.
SCALINGS = {
    "none": {},
    "linear": dict(rope_scaling="linear", rope_scaling_factor=8.0),
    "ntk": dict(rope_scaling="ntk", rope_scaling_factor=8.0),
    "dynamic_ntk": dict(
        rope_scaling="dynamic_ntk", rope_scaling_factor=2.0, rope_scaling_original_tokens=8192
    ),
    "yarn": dict(rope_scaling="yarn", rope_scaling_factor=32.0, rope_scaling_original_tokens=8192),
    "yarn_options": dict(
        rope_scaling="yarn",
        rope_scaling_factor=40.0,
        rope_scaling_original_tokens=4096,
        rope_scaling_beta_fast=16.0,
        rope_scaling_beta_slow=2.0,
        rope_scaling_attention_factor=1.25,
        rope_scaling_truncate=False,
    ),
    "longrope": dict(
        rope_scaling="longrope",
        rope_scaling_factor=16.0,
        rope_scaling_original_tokens=8192,
        rope_scaling_short_factors=tuple(1 + i / 64 for i in range(64)),
        rope_scaling_long_factors=tuple(1 + i / 2 for i in range(64)),
    ),
    "longrope_options": dict(
        rope_scaling="longrope",
        rope_scaling_factor=16.0,
        rope_scaling_original_tokens=8192,
        rope_scaling_attention_factor=0.75,
        rope_scaling_short_factors=(1.5,) * 64,
        rope_scaling_long_factors=(3.0,) * 64,
    ),
    "llama3": dict(
        rope_scaling="llama3", rope_scaling_factor=8.0, rope_scaling_original_tokens=8192
    ),
    "partial": dict(rope_fraction=0.25),
    "partial_yarn": dict(
        rope_fraction=0.5,
        rope_scaling="yarn",
        rope_scaling_factor=8.0,
        rope_scaling_original_tokens=8192,
    ),
}
LLAMA = dataclasses.replace(
    PRESETS["llama3.1-8b"],
    rope_scaling="none",
    rope_scaling_factor=1.0,
    rope_scaling_original_tokens=0,
    sliding_rope_theta=20_000.0,
)


def scaled_model(name, **settings):
    return dataclasses.replace(LLAMA, **(SCALINGS[name] | settings))


def plain_rope(x_TH, positions_T, model, *, kind="full", seq_len=0):
    """RoPE as Hugging Face transformers computes it: rotate_half and full-width cos and sin;
    float64.
    """
    if kind == "nope":
        return x_TH
    if kind == "sliding" and model.sliding_rope_scaling:
        kind, model = "full", dataclasses.replace(model, rope_theta=model.sliding_rope_theta)
    dim = int(model.head_dim * model.rope_fraction)
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
        return 1 / model.sliding_rope_theta ** (2 * i / dim)
    theta, s = model.rope_theta, model.rope_scaling_factor
    frequency, original = 1 / theta ** (2 * i / dim), model.rope_scaling_original_tokens
    match model.rope_scaling:
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
            factors = (model.rope_scaling_short_factors, model.rope_scaling_long_factors)[
                seq_len > original
            ]
            return frequency / factors[i]
        case "llama3":
            return _llama3(frequency, model)
        case "yarn":
            return _yarn(i, dim, frequency, model)


def plain_attention_factor(model):
    if model.rope_scaling_attention_factor:
        return model.rope_scaling_attention_factor
    if model.rope_scaling == "yarn":
        return 0.1 * math.log(model.rope_scaling_factor) + 1
    if model.rope_scaling == "longrope":
        return (
            1 + math.log(model.rope_scaling_factor) / math.log(model.rope_scaling_original_tokens)
        ) ** 0.5
    return 1.0


def _llama3(frequency, model):
    low_wavelength = model.rope_scaling_original_tokens / model.rope_scaling_low_freq_factor
    high_wavelength = model.rope_scaling_original_tokens / model.rope_scaling_high_freq_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < high_wavelength:
        return frequency
    if wavelength > low_wavelength:
        return frequency / model.rope_scaling_factor
    smooth = (
        model.rope_scaling_original_tokens / wavelength - model.rope_scaling_low_freq_factor
    ) / (model.rope_scaling_high_freq_factor - model.rope_scaling_low_freq_factor)
    return (1 - smooth) * frequency / model.rope_scaling_factor + smooth * frequency


def _yarn(i, dim, frequency, model):
    """A pair with beta turns in the original context L has theta^(2i/dim) = L / (2 pi beta), solved
    for i.
    """

    def pair_with_turns(beta):
        wavelength_per_turn = model.rope_scaling_original_tokens / (2 * math.pi * beta)
        return dim / 2 * math.log(wavelength_per_turn, model.rope_theta)

    start, end = (
        pair_with_turns(model.rope_scaling_beta_fast),
        pair_with_turns(model.rope_scaling_beta_slow),
    )
    if model.rope_scaling_truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, dim - 1)
    if i <= start:
        return frequency
    if i >= end:
        return frequency / model.rope_scaling_factor
    ramp = (i - start) / (end - start)
    return (1 - ramp) * frequency + ramp * frequency / model.rope_scaling_factor
