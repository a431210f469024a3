"""Parts shared by the Triton kernels: loads and stores of blocks, block masks, the loop over block ranges.

Triton's tensors have sizes that are powers of 2, and Triton does not check bounds. A block that extends past the end of
its array, in tokens or in head dim, is loaded and stored with a mask; masked elements read as 0.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxlc.kernels.block_mask import BlockMask, SeqInfo

LOG2_E = math.log2(math.e)  # the hardware has exponentials to base 2 only
LN_2 = math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class KernelParams:
    """Compiler parameters of a kernel."""

    num_warps: int
    num_stages: int  # blocks in flight between global and shared memory
    interpret: bool

    def compiler_params(self) -> pltriton.CompilerParams:
        return pltriton.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


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


def load_mask(queries: SeqInfo, keys: SeqInfo, first_T, first_S, mask: BlockMask, keys_first: bool = False):
    """The dense mask of one pair of blocks.

    Args:
      queries, keys: references to the positions and segment ids of a whole row.
      first_T, first_S: index of the first query and of the first key of the blocks.
      keys_first: return the transpose.
    Returns:
      bool [query_block, kv_block]. None: fully visible.
    """
    q_axis, k_axis = (0, 1) if keys_first else (1, 0)
    q = _load_seq_info(queries, first_T, mask.query_block, mask.num_queries, mask.first_query)
    k = _load_seq_info(keys, first_S, mask.kv_block, mask.num_keys, 0)
    (q_positions, q_segments), (k_positions, k_segments) = (
        [None if x is None else jnp.expand_dims(x, axis) for x in tokens] for tokens, axis in ((q, q_axis), (k, k_axis))
    )
    dense_mask = mask.dense_mask(q_positions, k_positions, q_segments, k_segments)
    is_key = _inside_rows(mask.kv_block, first_S, mask.num_keys)
    if is_key is None:
        return dense_mask
    shape = (mask.kv_block, mask.query_block) if keys_first else (mask.query_block, mask.kv_block)
    is_key = jnp.broadcast_to(jnp.expand_dims(is_key, k_axis), shape)
    return is_key if dense_mask is None else dense_mask & is_key


def _load_seq_info(tokens: SeqInfo, first, block: int, num_tokens: int, offset: int):
    """(positions, segment ids or None) of a block, each int32 [block]."""

    def load(ref):
        return load_1d(ref.at[pl.ds(first, block)], first, num_tokens)

    index = first + offset + jnp.arange(block, dtype=jnp.int32)
    positions = index if tokens.positions_BT is None else load(tokens.positions_BT)
    return positions, None if tokens.segments_BT is None else load(tokens.segments_BT)


def loop_over_ranges(ranges_ref, loop_body, carry):
    """`carry = loop_body(block, carry, masked)` over the blocks of all ranges (see block_mask.py)."""

    def one_range(index, carry):
        start, full, end = (ranges_ref[index, column] for column in range(3))
        carry = lax.fori_loop(start, full, functools.partial(loop_body, masked=True), carry)
        return lax.fori_loop(full, end, functools.partial(loop_body, masked=False), carry)

    return lax.fori_loop(0, ranges_ref.shape[0], one_range, carry)


def matmul(a: jax.Array, b: jax.Array, transpose_b: bool = False) -> jax.Array:
    """a b, or a b^T, with float32 sums. float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def seq_specs(tokens: SeqInfo) -> SeqInfo:
    """Block specs of whole rows, for a grid (block, head, batch)."""
    return SeqInfo(*(None if x is None else pl.BlockSpec((None, x.shape[1]), lambda i, n, b: (b, 0)) for x in tokens))


def ranges_spec(ranges: jax.Array) -> pl.BlockSpec:
    """The block spec of a program's ranges; with implicit positions, the whole batch shares them."""
    is_shared = ranges.shape[0] == 1
    return pl.BlockSpec((None, None, *ranges.shape[2:]), lambda i, n, b: (0 if is_shared else b, i, 0, 0))
