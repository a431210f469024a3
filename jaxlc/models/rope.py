"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), accurate at millions of positions.

Layers of kind `full` use `model.rope.theta` with `model.rope.scaling`, layers of kind `sliding`
`model.rope.sliding_theta`, without scaling unless `model.rope.sliding_scaling`. Layers of kind
`nope` have no position embedding.

In float32 the angle position x frequency has an error of a radian at 2^25 positions. So position =
hi x 4096 + lo; the cosines and sines of both angles come from small tables computed in float64, and
are combined by

    cos(a + b) = cos a cos b - sin a sin b        sin(a + b) = sin a cos b + cos a sin b

within 1e-6 of float64 at any position.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import ModelConfig
from jaxlc.config.kinds import unrotated_kinds
from jaxlc.config.models.model_schema import attention_factor

LOW_TOKENS = 4096  # number of positions of the low table


class RopeTables(NamedTuple):
    """float32 numpy arrays, computed in float64, for R/2 frequencies; R = model.rotated_dim
    is rotated.

    With a leading dimension B, each sequence has tables of its own.
    """

    # [ceil(max_tokens / 4096), R/2], multiplied by the attention factor, as high_sin
    high_cos: np.ndarray
    high_sin: np.ndarray
    low_cos: np.ndarray  # [4096, R/2]
    low_sin: np.ndarray


TablesOfKinds = dict[str, RopeTables | None]  # by kind of layers


class Frequencies(NamedTuple):
    """The rotation of a kind of layers."""

    radians_per_token: np.ndarray  # float64 [R/2]
    attention_factor: float  # multiplies cos and sin, so that attention logits have its square


def depends_on_length(model: ModelConfig) -> bool:
    """Whether the frequencies depend on the `rope_tokens` of `rope_tables`."""
    return model.rope.scaling in ("dynamic_ntk", "longrope")


def rope_tables(
    model: ModelConfig, kind: str, max_tokens: int, rope_tokens: int | None = None
) -> RopeTables | None:
    """Tables for positions 0 <= position < max_tokens of layers of one kind with attention; None for those without
    position embeddings.

    Args:
      kind: as in `model.used_kinds`.
      rope_tokens: the length that dynamic_ntk and longrope choose frequencies for: data.seq_len for all sequences of a
        run, also shorter documents and longer prompts; the length of the text for a model that was loaded from a
        Hugging Face directory. None: max_tokens.
    """
    if model.attention_of(kind) in unrotated_kinds():
        return None
    radians, factor = rope_frequencies(
        model, kind, max_tokens if rope_tokens is None else rope_tokens
    )
    low = np.arange(min(LOW_TOKENS, max_tokens))
    high = np.arange(0, max_tokens, LOW_TOKENS)
    low_angles, high_angles = (np.outer(positions, radians) for positions in (low, high))
    tables = (
        factor * np.cos(high_angles),
        factor * np.sin(high_angles),
        np.cos(low_angles),
        np.sin(low_angles),
    )
    return RopeTables(*(table.astype(jnp.float32) for table in tables))


def apply_rope(x_BTNH: jax.Array, positions_BT: jax.Array, tables: RopeTables | None) -> jax.Array:
    """Rotates each pair (x[i], x[i + R/2]) of the first R dimensions, the half-split order of
    Hugging Face weights.

    Args:
      x_BTNH: queries or keys, any float dtype; rotated in float32.
      positions_BT: int32, less than the tables' max_tokens.
    Returns:
      The rotated x_BTNH, in its dtype; x_BTNH itself without tables.
    """
    if tables is None:
        return x_BTNH
    cos, sin = _cos_sin(positions_BT, tables)
    dim = 2 * tables.low_cos.shape[-1]
    first, second = jnp.split(x_BTNH[..., :dim].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x_BTNH.dtype)
    if dim == x_BTNH.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BTNH[..., dim:]], axis=-1)


def query_factor(model: ModelConfig) -> float:
    """The factor of queries with `rope.query_mscale`, as `yarn_get_mscale` of DeepSeek V3."""
    return (1 + 0.1 * model.rope.query_mscale * math.log(model.rope.factor)) ** 2


def query_scale(model: ModelConfig, positions_BT: jax.Array) -> jax.Array:
    """The factor of queries, float32 [B, T, 1, 1]: 1 + beta ln(1 + floor(position / original)).

    It is 1 within the original context. Source: transformers, models/ministral3.

    Args:
      model: with `rope.query_beta` and `rope.original_tokens`.
      positions_BT: int32, within a document; of padding any number, also a negative one.
    """
    positions_BT11 = jnp.maximum(positions_BT, 0)[:, :, None, None]
    contexts_BT11 = positions_BT11 // model.rope.original_tokens
    return 1 + model.rope.query_beta * jnp.log1p(contexts_BT11.astype(jnp.float32))


def _cos_sin(positions_BT: jax.Array, tables: RopeTables) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, 1, R/2]; the 1 broadcasts over heads."""

    def rows(table, index_BT1: jax.Array) -> jax.Array:
        if table.ndim == 3:
            return jnp.take_along_axis(table, index_BT1, axis=1, mode="clip")[:, :, None]
        return jnp.asarray(table)[index_BT1]

    high_BT1 = positions_BT[:, :, None] // LOW_TOKENS
    low_BT1 = positions_BT[:, :, None] % LOW_TOKENS
    high_cos = rows(tables.high_cos, high_BT1)
    high_sin = rows(tables.high_sin, high_BT1)
    low_cos = rows(tables.low_cos, low_BT1)
    low_sin = rows(tables.low_sin, low_BT1)
    return high_cos * low_cos - high_sin * low_sin, high_sin * low_cos + high_cos * low_sin


def rope_frequencies(model: ModelConfig, kind: str, seq_len: int) -> Frequencies:
    """Frequencies of the layers of one kind that has RoPE.

    linear: Chen et al. 2023, arXiv:2306.15595. ntk: Peng et al. 2023, arXiv:2309.00071, section
    3.1. dynamic_ntk: section 3.3, with the base of transformers. yarn: sections 3.2 and 3.4, with
    the ramp over dimensions of the authors' code. longrope: Ding et al. 2024, arXiv:2402.13753.
    llama3: Meta's llama-models, `apply_scaling`.

    Args:
      seq_len: length that dynamic_ntk and longrope depend on.
    """
    dim = model.layer_config(kind).rotated_dim
    scale = model.rope.factor
    theta = model.rope.theta
    if model.attention_of(kind) == "sliding":
        theta = model.rope.sliding_theta
        if not model.rope.sliding_scaling:
            return Frequencies(_powers(theta, dim), 1.0)
    if model.rope.scaling == "ntk":
        theta *= scale ** (dim / (dim - 2))
    elif model.rope.scaling == "dynamic_ntk":
        ratio = max(1.0, seq_len / model.rope.original_tokens)
        theta *= (scale * ratio - (scale - 1)) ** (dim / (dim - 2))
    unscaled = _powers(theta, dim)
    divisors: float | np.ndarray = 1.0
    if model.rope.scaling == "linear":
        divisors = scale
    elif model.rope.scaling == "longrope":
        is_long = seq_len > model.rope.original_tokens
        divisors = np.array(model.rope.long_factors if is_long else model.rope.short_factors)
    elif model.rope.scaling in ("yarn", "llama3"):
        kept = (
            _yarn_kept(model, dim, theta)
            if model.rope.scaling == "yarn"
            else _llama3_kept(model, unscaled)
        )
        return Frequencies(kept * unscaled + (1 - kept) * unscaled / scale, attention_factor(model))
    return Frequencies(unscaled / divisors, attention_factor(model))


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta^(-2i/dim), float64 [dim/2]."""
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def _yarn_kept(model: ModelConfig, dim: int, theta: float) -> np.ndarray:
    """float64 [R/2]: 1 for frequencies that are unchanged, 0 for those divided by the factor,
    linear between.
    """

    def dimension(num_turns: float) -> float:
        """Index, not rounded, of the frequency that makes `num_turns` turns within the original
        context.
        """
        wavelength = model.rope.original_tokens / num_turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first = dimension(model.rope.beta_fast)
    last = dimension(model.rope.beta_slow)
    if model.rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    width = last - first or 0.001
    return 1 - np.clip((np.arange(dim // 2) - first) / width, 0.0, 1.0)


def _llama3_kept(model: ModelConfig, frequencies: np.ndarray) -> np.ndarray:
    """float64 [R/2]: 1 for frequencies that are unchanged, 0 for those divided by the factor,
    linear between.
    """
    turns = model.rope.original_tokens * frequencies / (2 * math.pi)
    low = model.rope.low_freq_factor
    high = model.rope.high_freq_factor
    return np.clip((turns - low) / (high - low), 0.0, 1.0)
