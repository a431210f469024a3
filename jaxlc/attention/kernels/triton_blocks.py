"""Parts shared by the Triton kernels: loads and stores of blocks, block masks, the loop over block ranges.

Triton's tensors have sizes that are powers of 2, and Triton does not check bounds. A block that extends past the end of
its array, in tokens or in head dim, is loaded and stored with a mask; masked elements read as 0.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxlc.attention.kernels.block_mask import BlockMask, Ranges
from jaxlc.attention.kernels.tuning import TuningParams

LOG2_E = math.log2(math.e)  # the hardware has exponentials to base 2 only
LN_2 = math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class KernelParams:
    """What a kernel computes besides its operands, and how it is compiled."""

    mask: BlockMask
    scale: float
    tuning: TuningParams
    interpret: bool

    def pallas_call(self, kernel: Callable, **options: Any) -> Callable:
        """`pl.pallas_call` with these parameters of the compiler."""
        compiler_params = pltriton.CompilerParams(num_warps=self.tuning.num_warps, num_stages=self.tuning.num_stages)
        return pl.pallas_call(kernel, compiler_params=compiler_params, interpret=self.interpret, **options)


def padded(width: int) -> int:
    """The width of a block whose rows have `width` elements: a power of 2, at least 16 for matrix products."""
    return max(16, pl.next_power_of_2(width))


def load_2d(ref, first, num_rows: int, width: int) -> jax.Array:
    """[block, H] from a reference to one block, whose first row is row `first` of `num_rows`."""
    inside = _inside(ref.shape, first, num_rows, width)
    return pltriton.load(ref, mask=inside, other=None if inside is None else 0.0)


def store_2d(ref, x_TH: jax.Array, first, num_rows: int, width: int) -> None:
    pltriton.store(ref, x_TH, mask=_inside(ref.shape, first, num_rows, width))


def load_1d(ref, first, num_rows: int) -> jax.Array:
    """[block], one element per token."""
    inside = _inside_rows(ref.shape[0], first, num_rows)
    return pltriton.load(ref, mask=inside, other=None if inside is None else 0)


def store_1d(ref, x_T: jax.Array, first, num_rows: int) -> None:
    pltriton.store(ref, x_T, mask=_inside_rows(ref.shape[0], first, num_rows))


def _inside_rows(block: int, first, num_rows: int) -> jax.Array | None:
    """Which rows of a block are inside the array. None: the block size divides the array, so all are."""
    return None if num_rows % block == 0 else first + jnp.arange(block) < num_rows


def _inside(shape: tuple[int, int], first, num_rows: int, width: int) -> jax.Array | None:
    rows = _inside_rows(shape[0], first, num_rows)
    if width == shape[1]:
        return None if rows is None else jnp.broadcast_to(rows[:, None], shape)
    columns = jnp.broadcast_to((jnp.arange(shape[1]) < width)[None, :], shape)
    return columns if rows is None else columns & rows[:, None]


def load_mask(ranges: Ranges | None, first_T, first_S, mask: BlockMask, keys_first: bool = False):
    """The dense mask of one pair of blocks.

    Args:
      ranges: references to the key ranges of a whole row. None: the implicit mask.
      first_T, first_S: index of the first query and of the first key of the blocks.
      keys_first: return the transpose.
    Returns:
      bool [query_block, kv_block]. None: fully visible.
    """
    q_axis, k_axis = (0, 1) if keys_first else (1, 0)
    keys = jnp.expand_dims(first_S + jnp.arange(mask.kv_block, dtype=jnp.int32), k_axis)
    if ranges is None:
        start, end = mask.implicit_range(first_T + jnp.arange(mask.query_block, dtype=jnp.int32))
    else:  # queries past the end read as 0: an empty range
        start, end = (load_1d(x.at[pl.ds(first_T, mask.query_block)], first_T, mask.num_queries) for x in ranges)
    dense_mask = None if end is None else keys < jnp.expand_dims(end, q_axis)
    if start is not None:
        dense_mask &= keys >= jnp.expand_dims(start, q_axis)
    is_key = _inside_rows(mask.kv_block, first_S, mask.num_keys)
    if dense_mask is not None or is_key is None:  # ranges contain no keys past the end
        return dense_mask
    shape = (mask.kv_block, mask.query_block) if keys_first else (mask.query_block, mask.kv_block)
    return jnp.broadcast_to(jnp.expand_dims(is_key, k_axis), shape)


def loop_over_blocks(blocks_ref, loop_body, carry):
    """`carry = loop_body(block, carry, masked)` over the blocks of all block ranges (see block_mask.py)."""

    def one_range(index, carry):
        start, full, end = (blocks_ref[index, column] for column in range(3))
        carry = lax.fori_loop(start, full, functools.partial(loop_body, masked=True), carry)
        return lax.fori_loop(full, end, functools.partial(loop_body, masked=False), carry)

    return lax.fori_loop(0, blocks_ref.shape[0], one_range, carry)


def matmul(a: jax.Array, b: jax.Array, transpose_b: bool = False) -> jax.Array:
    """a b, or a b^T, with float32 sums. float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def own_rows_spec(block_tokens: int, width: int) -> pl.BlockSpec:
    """The block spec of an operand [B, T, N, H] of which a program owns one block, for a grid (block, head, batch)."""
    return pl.BlockSpec((None, block_tokens, None, padded(width)), lambda i, n, b: (b, i, n, 0))


def all_keys_spec(sizes: tuple[int, ...], heads_per_kv: int, width: int) -> pl.BlockSpec:
    """The block spec of all keys or values of a program's query head; the same grid.

    Args:
      sizes: (number of keys,), or (number of layers, number of keys).
    """
    zeros = (0,) * len(sizes)
    return pl.BlockSpec((None, *sizes, None, padded(width)), lambda i, n, b: (b, *zeros, n // heads_per_kv, 0))


def key_ranges_specs(ranges: Ranges | None):
    """Block specs of the key ranges of a whole row, for a grid (block, head, batch)."""
    return jax.tree.map(lambda x: pl.BlockSpec((None, x.shape[1]), lambda i, n, b: (b, 0)), ranges)


def block_ranges_spec(blocks: jax.Array) -> pl.BlockSpec:
    """The block spec of a program's block ranges; with an implicit mask, the whole batch shares them."""
    is_shared = blocks.shape[0] == 1
    return pl.BlockSpec((None, None, *blocks.shape[2:]), lambda i, n, b: (0 if is_shared else b, i, 0, 0))
