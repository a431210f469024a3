"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), accurate at millions of positions.

In float32 the angle position x frequency has an error of a radian at 2^25 positions. So position = hi x 4096 + lo; the
cosines and sines of both angles come from small tables computed in float64, and are combined by

    cos(a + b) = cos a cos b - sin a sin b        sin(a + b) = sin a cos b + cos a sin b

within 1e-6 of float64 at any position.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import ModelConfig

LOW_TOKENS = 4096  # number of positions of the low table


class RopeTables(NamedTuple):
    """float32 numpy arrays, computed in float64, for H/2 frequencies."""

    high_cos: np.ndarray  # [ceil(max_tokens / 4096), H/2]
    high_sin: np.ndarray
    low_cos: np.ndarray  # [4096, H/2]
    low_sin: np.ndarray


def rope_tables(model: ModelConfig, kind: str, max_tokens: int) -> RopeTables | None:
    """Tables of layers of this kind for positions 0 <= position < max_tokens; None for layers without RoPE."""
    if kind == "nope":
        return None
    frequencies = _base_frequencies(model, model.sliding_rope_theta) if kind == "sliding" else _frequencies(model)
    low = np.arange(min(LOW_TOKENS, max_tokens))
    high = np.arange(0, max_tokens, LOW_TOKENS)
    low_angles, high_angles = (np.outer(positions, frequencies) for positions in (low, high))
    tables = (np.cos(high_angles), np.sin(high_angles), np.cos(low_angles), np.sin(low_angles))
    return RopeTables(*(table.astype(np.float32) for table in tables))


def apply_rope(x_BTNH: jax.Array, positions_BT: jax.Array, tables: RopeTables | None) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]), the half-split order of Hugging Face weights.

    Args:
      x_BTNH: queries or keys, any float dtype; rotated in float32.
      positions_BT: int32, less than the tables' max_tokens.
    Returns:
      The rotated x_BTNH, in its dtype; x_BTNH itself without tables.
    """
    if tables is None:
        return x_BTNH
    cos, sin = _cos_sin(positions_BT, tables)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _cos_sin(positions_BT: jax.Array, tables: RopeTables) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, 1, H/2]; the 1 broadcasts over heads."""
    high_BT1, low_BT1 = positions_BT[:, :, None] // LOW_TOKENS, positions_BT[:, :, None] % LOW_TOKENS
    high_cos, high_sin = jnp.asarray(tables.high_cos)[high_BT1], jnp.asarray(tables.high_sin)[high_BT1]
    low_cos, low_sin = jnp.asarray(tables.low_cos)[low_BT1], jnp.asarray(tables.low_sin)[low_BT1]
    return high_cos * low_cos - high_sin * low_sin, high_sin * low_cos + high_cos * low_sin


def _frequencies(model: ModelConfig) -> np.ndarray:
    """float64 [H/2], in radians per token, with the scaling of Llama 3.1 for contexts longer than the original one.

    High frequencies, with many turns within the original context, are unchanged; low frequencies are divided by the
    factor; those between are interpolated (Meta's llama-models, `apply_scaling`).
    """
    frequencies = _base_frequencies(model, model.rope_theta)
    if model.rope_scaling_factor == 1.0:
        return frequencies
    turns = model.rope_scaling_original_tokens * frequencies / (2 * math.pi)
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    unscaled = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: unchanged, 0: divided by the factor
    return unscaled * frequencies + (1 - unscaled) * frequencies / model.rope_scaling_factor


def _base_frequencies(model: ModelConfig, theta: float) -> np.ndarray:
    """float64 [H/2], in radians per token, without scaling."""
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    return theta**-exponents
