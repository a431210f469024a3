"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), exact at millions of positions.

The angle position x frequency in float32 is off by a radian at 2^25 positions. Here position = hi x 4096 + lo; the
cosines and sines of both parts' angles come from small tables computed in float64, and

    cos(a + b) = cos a cos b - sin a sin b        sin(a + b) = sin a cos b + cos a sin b

join them: within 1e-6 of float64 at any position.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import ModelConfig

LOW_TOKENS = 4096  # positions that the low table tells apart


class RopeTables(NamedTuple):
    """float32 numpy arrays, made in float64; H/2 frequencies each."""

    high_cos: np.ndarray  # [ceil(max_tokens / 4096), H/2]
    high_sin: np.ndarray
    low_cos: np.ndarray  # [4096, H/2]
    low_sin: np.ndarray


def rope_tables(model: ModelConfig, max_tokens: int) -> RopeTables:
    """Tables for positions 0 <= position < max_tokens."""
    frequencies = _frequencies(model)
    low = np.arange(min(LOW_TOKENS, max_tokens))
    high = np.arange(0, max_tokens, LOW_TOKENS)
    low_angles, high_angles = (np.outer(positions, frequencies) for positions in (low, high))
    tables = (np.cos(high_angles), np.sin(high_angles), np.cos(low_angles), np.sin(low_angles))
    return RopeTables(*(table.astype(np.float32) for table in tables))


def apply_rope(x_BTNH: jax.Array, positions_BT: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]), the half-split order of Llama's and Hugging Face's weights.

    Args:
      x_BTNH: queries or keys, any float dtype; rotated in float32.
      positions_BT: int32, less than the tables' max_tokens.
    Returns:
      the rotated x_BTNH, in its dtype.
    """
    cos, sin = _cos_sin(positions_BT, tables)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _cos_sin(positions_BT: jax.Array, tables: RopeTables) -> tuple[jax.Array, jax.Array]:
    """float32 [B, T, 1, H/2] each; the 1 stands for the heads."""
    high_BT1, low_BT1 = positions_BT[:, :, None] // LOW_TOKENS, positions_BT[:, :, None] % LOW_TOKENS
    high_cos, high_sin = jnp.asarray(tables.high_cos)[high_BT1], jnp.asarray(tables.high_sin)[high_BT1]
    low_cos, low_sin = jnp.asarray(tables.low_cos)[low_BT1], jnp.asarray(tables.low_sin)[low_BT1]
    return high_cos * low_cos - high_sin * low_sin, high_sin * low_cos + high_cos * low_sin


def _frequencies(model: ModelConfig) -> np.ndarray:
    """float64 [H/2], in radians per token, with Llama 3.1's scaling for contexts longer than it was trained on.

    Frequencies that turn often within the original context stay as they are, those that hardly turn are divided by
    the factor, and those between are blended (Meta's llama-models, `apply_scaling`).
    """
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    frequencies = model.rope_theta**-exponents
    if model.rope_scaling_factor == 1.0:
        return frequencies
    turns = model.rope_scaling_original_tokens * frequencies / (2 * math.pi)
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: stays, 0: divided
    return kept * frequencies + (1 - kept) * frequencies / model.rope_scaling_factor
