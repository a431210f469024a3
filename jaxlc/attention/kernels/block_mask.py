"""Block masks: for each block, the blocks of the other side that are not fully masked, so that a
kernel skips the rest.

A program of a kernel owns one block (of queries in the forward pass and for dQ, of keys for dK and
dV) and loops over blocks of the other side. XLA computes a short list of block ranges for it before
the kernel starts:

    range = (start, full, end)    blocks [start, full) are partially masked, blocks [full, end) are fully visible

A causal mask has two ranges: the blocks that are entirely in the past, and those on the diagonal. A
block of keys has more where the queries that attend to it are not contiguous. The rest after
MAX_BLOCK_RANGES - 1 ranges becomes one range that is treated as partially masked, which is correct
but slower. So the list has O(T + S) entries, and the loops of a kernel have simple bounds, which
the compiler can pipeline.

`TuningParams` has the tuning parameters of the Pallas kernels: block sizes, warps, pipeline stages.
The values were chosen for an H100 from the register and shared memory use that its compiler reports
(docs/log.md). They were timed on one (benchmarks/2026-11-26-h100.md); other values were not.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class TuningParams:
    """How one kernel is launched."""

    query_block_tokens: int
    kv_block_tokens: int
    num_warps: int
    num_stages: int  # blocks in flight between global and shared memory


_HALF_PRECISION = {
    "flash_forward": TuningParams(
        query_block_tokens=128, kv_block_tokens=128, num_warps=8, num_stages=2
    ),
    "flash_dq": TuningParams(
        query_block_tokens=128, kv_block_tokens=128, num_warps=8, num_stages=2
    ),
    "flash_dkv": TuningParams(
        query_block_tokens=64, kv_block_tokens=128, num_warps=8, num_stages=2
    ),
}
# Operands of twice the size, multiplied without tensor cores.
_FLOAT32 = TuningParams(query_block_tokens=32, kv_block_tokens=32, num_warps=4, num_stages=1)

MIN_BLOCK_TOKENS = 16  # the smallest dimension of a matrix product in Triton
MAX_HEAD_DIM = 128  # a block with a larger head dim does not fit into the registers
MAX_BLOCK_RANGES = 8  # ranges in the list of blocks that a program loops over; see block_mask.py


# Compute capabilities with 99 KiB of shared memory for a block of threads; data-center GPUs have
# 163 KiB and more. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SMALL_SHARED_MEMORY = ("8.6", "8.9", "12.0")
SMALL_BLOCK_TOKENS = 64  # the largest blocks of half precision that fit 99 KiB


def tuning_params(kernel: str, dtype: str) -> TuningParams:
    """The parameters for a kernel, by its name in this table, and a dtype such as "bfloat16"."""
    return _FLOAT32 if dtype == "float32" else _HALF_PRECISION[kernel]


# (start_BT, end_BT), int32: query t attends to the keys start <= s < end; start == end == 0 for a fully masked row.
# None: the implicit mask of a BlockMask. Inside a kernel, references to the ranges of one row.
Ranges = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """The implicit mask, which applies where there are no ranges, and the block sizes of both
    sides.
    """

    causal: bool
    # a query attends to itself and the window - 1 positions before it; only with causal
    window: int | None
    num_queries: int
    num_keys: int
    query_block: int  # tokens
    kv_block: int  # tokens

    @property
    def first_query(self) -> int:
        """The index of the first query among the keys: the last query is aligned with the last key."""
        return self.num_keys - self.num_queries

    def implicit_range(self, query):
        """(start, end) of the implicit mask for the queries of these indices. A start of None is 0,
        an end of None is num_keys."""
        if not self.causal:
            return None, None
        end = query + self.first_query + 1
        return None if self.window is None else end - self.window, end


def kv_block_ranges(ranges: Ranges | None, mask: BlockMask) -> jax.Array:
    """The ranges of KV blocks for each query block: int32 [B or 1, query blocks, ranges, 3]."""
    if ranges is None:
        back, ahead = (mask.window, 1) if mask.causal else (None, None)
        q_side = _Side(mask.first_query, mask.num_queries, mask.query_block)
        return _implicit_ranges(q_side, _Side(0, mask.num_keys, mask.kv_block), back, ahead)
    some, every = _visibility(ranges, mask)
    return _block_ranges(some, every, num_whole_blocks=mask.num_keys // mask.kv_block)


def rectangle_block_ranges(start_BI: jax.Array, end_BI: jax.Array, kv_block: int) -> jax.Array:
    """`kv_block_ranges` where all queries of block I attend to the keys start <= s < end: int32 [B,
    I, 2, 3].
    """
    start = start_BI // kv_block
    end = jnp.maximum(start, -(-end_BI // kv_block))
    full = jnp.minimum(-(-start_BI // kv_block), end)
    full_end = jnp.maximum(full, end_BI // kv_block)
    return jnp.stack(
        [jnp.stack(x, axis=-1) for x in ((start, full, full_end), (full_end, end, end))], axis=-2
    )


def query_block_ranges(ranges: Ranges | None, mask: BlockMask) -> jax.Array:
    """The ranges of query blocks for each KV block: int32 [B or 1, KV blocks, ranges, 3]."""
    if ranges is None:
        back, ahead = (1, mask.window) if mask.causal else (None, None)
        q_side = _Side(mask.first_query, mask.num_queries, mask.query_block)
        return _implicit_ranges(_Side(0, mask.num_keys, mask.kv_block), q_side, back, ahead)
    some, every = (x.swapaxes(1, 2) for x in _visibility(ranges, mask))
    return _block_ranges(some, every, num_whole_blocks=mask.num_queries // mask.query_block)


class _Side(NamedTuple):
    """The queries or the keys of an implicit mask."""

    offset: int  # position of the first token
    num_tokens: int
    block: int  # tokens


def _implicit_ranges(own: _Side, other: _Side, back: int | None, ahead: int | None) -> jax.Array:
    """Two exact ranges, where a token at position p needs the positions o with p - back < o < p +
    ahead.

    None is no limit.
    """
    no_limit = own.num_tokens + other.num_tokens + abs(own.offset) + abs(other.offset)
    back, ahead = (no_limit if x is None else min(x, no_limit) - 1 for x in (back, ahead))
    first = jnp.arange(0, own.num_tokens, own.block, dtype=jnp.int32)
    last = jnp.minimum(first + own.block, own.num_tokens) - 1
    first, last = (x + own.offset - other.offset for x in (first, last))

    def blocks_before(index, rounding):  # counts blocks of the other side
        return (jnp.clip(index, 0, other.num_tokens) + rounding) // other.block

    start, end = blocks_before(first - back, 0), blocks_before(last + ahead + 1, other.block - 1)
    full = jnp.clip(blocks_before(last - back, other.block - 1), start, end)
    full_end = jnp.clip(blocks_before(first + ahead + 1, 0), full, end)
    two_ranges = (
        (start, full, full_end),
        (full_end, jnp.maximum(full_end, end), jnp.maximum(full_end, end)),
    )
    return jnp.stack([jnp.stack(bounds, axis=-1) for bounds in two_ranges], axis=-2)[None]


def _visibility(ranges: Ranges, mask: BlockMask) -> tuple[jax.Array, jax.Array]:
    """(some pair of tokens may be visible, all pairs are), bool [B, query blocks, KV blocks]."""
    start_BT, end_BT = ranges
    is_empty_BT = start_BT >= end_BT

    def blocks(x_BT):  # the last block is padded with its last query
        padded = jnp.pad(x_BT, ((0, 0), (0, -mask.num_queries % mask.query_block)), mode="edge")
        return padded.reshape(x_BT.shape[0], -1, 1, mask.query_block)

    first_key = jnp.arange(0, mask.num_keys, mask.kv_block, dtype=jnp.int32)
    last_key = jnp.minimum(first_key + mask.kv_block, mask.num_keys) - 1
    min_start = blocks(jnp.where(is_empty_BT, mask.num_keys, start_BT)).min(-1)
    some = (min_start <= last_key) & (first_key < blocks(end_BT).max(-1))
    # end 0 of an empty row
    every = (blocks(start_BT).max(-1) <= first_key) & (last_key < blocks(end_BT).min(-1))
    return some, every


def _block_ranges(some: jax.Array, every: jax.Array, num_whole_blocks: int) -> jax.Array:
    """Block ranges from visibility: [B, own blocks, other blocks] bool -> int32 [B, own blocks,
    ranges, 3].
    """
    num_blocks = some.shape[-1]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    full = some & every & (block < num_whole_blocks)  # an incomplete block is always masked

    def first(condition, at):
        return jnp.where(condition & (block >= at[..., None]), block, num_blocks).min(axis=-1)

    def next_range(at, _):
        start = first(some, at)
        first_full = first(~some | full, start)
        end = first(~full, first_full)
        return end, jnp.stack([start, first_full, end], axis=-1)

    at = jnp.zeros(some.shape[:-1], jnp.int32)
    at, ranges = lax.scan(next_range, at, length=min(MAX_BLOCK_RANGES, num_blocks) - 1)
    end = jnp.where(some, block + 1, 0).max(axis=-1)
    rest = jnp.stack([jnp.minimum(first(some, at), end), end, end], axis=-1)
    return jnp.concatenate([jnp.moveaxis(ranges, 0, -2), rest[..., None, :]], axis=-2)
