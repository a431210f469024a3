"""What the kernels share: loading tiles, their masks, and the loop over the tiles that a program visits.

Triton knows tensors whose sizes are powers of 2, and checks no bounds: a tile that overhangs its array, in tokens or
in head dim, is loaded and stored under a mask, and outside it reads 0.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxlc.kernels.block_mask import Rule, Tokens

LOG2_E = math.log2(math.e)  # exponentials are taken to base 2, which is what the hardware has
LN_2 = math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class KernelParams:
    """How a kernel runs."""

    num_warps: int
    num_stages: int  # tiles in flight between global and shared memory
    interpret: bool

    def compiler_params(self) -> pltriton.CompilerParams:
        return pltriton.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def padded(width: int) -> int:
    """The width of a tile whose rows have `width` elements; a matrix product wants 16 at least."""
    return max(16, pl.next_power_of_2(width))


def load_rows(ref, first, num_rows: int, width: int) -> jax.Array:
    """[tile, H] from a reference to one tile, whose first row is row `first` of `num_rows`."""
    inside = _inside(ref.shape, first, num_rows, width)
    return pltriton.load(ref, mask=inside, other=None if inside is None else 0.0)


def store_rows(ref, x_TH: jax.Array, first, num_rows: int, width: int) -> None:
    pltriton.store(ref, x_TH, mask=_inside(ref.shape, first, num_rows, width))


def load_1d(ref, first, num_rows: int) -> jax.Array:
    """[tile] of one number a token."""
    inside = _inside_rows(ref.shape[0], first, num_rows)
    return pltriton.load(ref, mask=inside, other=None if inside is None else 0)


def store_numbers(ref, x_T: jax.Array, first, num_rows: int) -> None:
    pltriton.store(ref, x_T, mask=_inside_rows(ref.shape[0], first, num_rows))


def _inside_rows(tile: int, first, num_rows: int) -> jax.Array | None:
    """None where every tile is whole."""
    return None if num_rows % tile == 0 else first + jnp.arange(tile) < num_rows


def _inside(shape: tuple[int, int], first, num_rows: int, width: int) -> jax.Array | None:
    rows = _inside_rows(shape[0], first, num_rows)
    if width == shape[1]:
        return None if rows is None else jnp.broadcast_to(rows[:, None], shape)
    columns = jnp.broadcast_to((jnp.arange(shape[1]) < width)[None, :], shape)
    return columns if rows is None else columns & rows[:, None]


def tile_mask(queries: Tokens, keys: Tokens, first_T, first_S, rule: Rule, keys_first: bool = False):
    """Who sees whom in a tile, bool [tile_T, tile_S], or its transpose; None: all is seen.

    `queries` and `keys` are references to whole rows.
    """
    q_axis, k_axis = (0, 1) if keys_first else (1, 0)
    q = _load_tokens(queries, first_T, rule.tile_T, rule.num_queries, rule.first_query)
    k = _load_tokens(keys, first_S, rule.tile_S, rule.num_keys, 0)
    (q_positions, q_segments), (k_positions, k_segments) = (
        [None if x is None else jnp.expand_dims(x, axis) for x in tokens] for tokens, axis in ((q, q_axis), (k, k_axis))
    )
    seen = rule.sees(q_positions, k_positions, q_segments, k_segments)
    is_key = _inside_rows(rule.tile_S, first_S, rule.num_keys)
    if is_key is None:
        return seen
    shape = (rule.tile_S, rule.tile_T) if keys_first else (rule.tile_T, rule.tile_S)
    is_key = jnp.broadcast_to(jnp.expand_dims(is_key, k_axis), shape)
    return is_key if seen is None else seen & is_key


def _load_tokens(tokens: Tokens, first, tile: int, num_tokens: int, offset: int):
    """(positions, segment ids or None) of a tile, each int32 [tile]."""

    def load(ref):
        return load_1d(ref.at[pl.ds(first, tile)], first, num_tokens)

    index = first + offset + jnp.arange(tile, dtype=jnp.int32)
    positions = index if tokens.positions_BT is None else load(tokens.positions_BT)
    return positions, None if tokens.segments_BT is None else load(tokens.segments_BT)


def over_runs(runs_ref, visit, carry):
    """carry = visit(tile, carry, masked) over the tiles of all runs (see `visibility`)."""

    def run(r, carry):
        start, full, end = (runs_ref[r, column] for column in range(3))
        carry = lax.fori_loop(start, full, functools.partial(visit, masked=True), carry)
        return lax.fori_loop(full, end, functools.partial(visit, masked=False), carry)

    return lax.fori_loop(0, runs_ref.shape[0], run, carry)


def matmul(a: jax.Array, b: jax.Array, transpose_b: bool = False) -> jax.Array:
    """a b, or a b^T: float32 sums; float32 operands are multiplied as such, not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def row_specs(tokens: Tokens) -> Tokens:
    """Block specs of whole rows, for a grid (tile, head, batch row)."""
    return Tokens(*(None if x is None else pl.BlockSpec((None, x.shape[1]), lambda i, n, b: (b, 0)) for x in tokens))


def runs_spec(runs: jax.Array) -> pl.BlockSpec:
    """A program's own runs; where masks go by index, all batch rows share them."""
    one_for_all = runs.shape[0] == 1
    return pl.BlockSpec((None, None, *runs.shape[2:]), lambda i, n, b: (0 if one_for_all else b, i, 0, 0))
