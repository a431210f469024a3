"""Block masks: for each block, the blocks of the other side that are not fully masked, so that a kernel skips the rest.

A program of a kernel owns one block (of queries in the forward pass and for dQ, of keys for dK and dV) and loops over
blocks of the other side. XLA computes a short list of block ranges for it before the kernel starts:

    range = (start, full, end)    blocks [start, full) are partially masked, blocks [full, end) are fully visible

A causal mask has two ranges: the blocks that are entirely in the past, and those on the diagonal. Documents that are
not contiguous, as in zigzag order, have more. The rest after MAX_BLOCK_RANGES - 1 ranges becomes one range that is
treated as partially masked, which is correct but slower. So the list has O(T + S) entries, and the loops of a kernel
have simple bounds, which the compiler can pipeline.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.kernels.tuning import MAX_BLOCK_RANGES


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """The static part of a mask, and the block sizes of both sides."""

    causal: bool
    window: int | None  # a query attends to itself and the window - 1 positions before it; only with causal
    num_queries: int
    num_keys: int
    query_block: int  # tokens
    kv_block: int  # tokens

    @property
    def first_query(self) -> int:
        """The index of the first query among the keys: the last query is aligned with the last key."""
        return self.num_keys - self.num_queries

    def dense_mask(self, q_positions, k_positions, q_segments, k_segments):
        """The mask of one pair of blocks, bool; operands broadcast, segments may be None. None: fully visible."""
        mask = None
        if q_segments is not None:
            mask = (q_segments == k_segments) & (q_segments != 0)
        if self.causal:
            age = q_positions - k_positions
            is_past = age >= 0 if self.window is None else (age >= 0) & (age < self.window)
            mask = is_past if mask is None else mask & is_past
        return mask


class SeqInfo(NamedTuple):
    """Positions and segment ids of the queries or the keys, int32; inside a kernel, references to those of one row."""

    positions_BT: jax.Array | None  # None: implicit positions; the last query is aligned with the last key
    segments_BT: jax.Array | None  # None: one document. 0 is padding, which neither attends nor is attended to


class _Bounds(NamedTuple):
    """Bounds of positions and segment ids in each block, [B, number of blocks]."""

    first_position: jax.Array
    last_position: jax.Array
    first_segment: jax.Array | None  # ignores padding
    last_segment: jax.Array | None
    has_padding: jax.Array | None


def kv_block_ranges(queries: SeqInfo, keys: SeqInfo, mask: BlockMask) -> jax.Array:
    """The ranges of KV blocks for each query block: int32 [B or 1, query blocks, ranges, 3]."""
    if _has_implicit_positions(queries, mask):
        back, ahead = (mask.window, 1) if mask.causal else (None, None)
        q_side = _Side(mask.first_query, mask.num_queries, mask.query_block)
        return _implicit_ranges(q_side, _Side(0, mask.num_keys, mask.kv_block), back, ahead)
    q, k = _bounds_of_both(queries, keys, mask)
    q, k = _map(lambda x: x[:, :, None], q), _map(lambda x: x[:, None, :], k)
    return _ranges(*_visibility(q, k, mask), num_whole_blocks=mask.num_keys // mask.kv_block)


def query_block_ranges(queries: SeqInfo, keys: SeqInfo, mask: BlockMask) -> jax.Array:
    """The ranges of query blocks for each KV block: int32 [B or 1, KV blocks, ranges, 3]."""
    if _has_implicit_positions(queries, mask):
        back, ahead = (1, mask.window) if mask.causal else (None, None)
        q_side = _Side(mask.first_query, mask.num_queries, mask.query_block)
        return _implicit_ranges(_Side(0, mask.num_keys, mask.kv_block), q_side, back, ahead)
    q, k = _bounds_of_both(queries, keys, mask)
    q, k = _map(lambda x: x[:, None, :], q), _map(lambda x: x[:, :, None], k)
    return _ranges(*_visibility(q, k, mask), num_whole_blocks=mask.num_queries // mask.query_block)


def _has_implicit_positions(queries: SeqInfo, mask: BlockMask) -> bool:
    return queries.segments_BT is None and (queries.positions_BT is None or not mask.causal)


class _Side(NamedTuple):
    """The queries or the keys of a mask with implicit positions."""

    offset: int  # position of the first token
    num_tokens: int
    block: int  # tokens


def _implicit_ranges(own: _Side, other: _Side, back: int | None, ahead: int | None) -> jax.Array:
    """Two exact ranges, where a token at position p needs the positions o with p - back < o < p + ahead.

    None is no limit.
    """
    no_limit = own.num_tokens + other.num_tokens + abs(own.offset) + abs(other.offset)
    back, ahead = (no_limit if x is None else min(x, no_limit) - 1 for x in (back, ahead))
    first = jnp.arange(0, own.num_tokens, own.block, dtype=jnp.int32)
    last = jnp.minimum(first + own.block, own.num_tokens) - 1
    first, last = (x + own.offset - other.offset for x in (first, last))

    def blocks_before(index, rounding):  # of the other side
        return (jnp.clip(index, 0, other.num_tokens) + rounding) // other.block

    start, end = blocks_before(first - back, 0), blocks_before(last + ahead + 1, other.block - 1)
    full = jnp.clip(blocks_before(last - back, other.block - 1), start, end)
    full_end = jnp.clip(blocks_before(first + ahead + 1, 0), full, end)
    two_ranges = ((start, full, full_end), (full_end, jnp.maximum(full_end, end), jnp.maximum(full_end, end)))
    return jnp.stack([jnp.stack(bounds, axis=-1) for bounds in two_ranges], axis=-2)[None]


def _bounds_of_both(queries: SeqInfo, keys: SeqInfo, mask: BlockMask) -> tuple[_Bounds, _Bounds]:
    return (
        _bounds(queries, mask.first_query, mask.num_queries, mask.query_block),
        _bounds(keys, 0, mask.num_keys, mask.kv_block),
    )


def _bounds(tokens: SeqInfo, offset: int, num_tokens: int, block: int) -> _Bounds:
    def blocks(x_BT):  # the last block is padded with its last token
        padded = jnp.pad(x_BT, ((0, 0), (0, -num_tokens % block)), mode="edge")
        return padded.reshape(x_BT.shape[0], -1, block)

    positions_BT = tokens.positions_BT
    if positions_BT is None:
        positions_BT = jnp.arange(offset, offset + num_tokens, dtype=jnp.int32)[None]
    positions = blocks(positions_BT)
    if tokens.segments_BT is None:
        return _Bounds(positions.min(-1), positions.max(-1), None, None, None)
    segments = blocks(tokens.segments_BT)
    first_segment = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments).min(-1)
    return _Bounds(positions.min(-1), positions.max(-1), first_segment, segments.max(-1), (segments == 0).any(-1))


def _visibility(q: _Bounds, k: _Bounds, mask: BlockMask) -> tuple[jax.Array, jax.Array]:
    """(any pair of tokens may be visible, all pairs are), each [B, own blocks, other blocks]."""
    some, every = True, True
    if mask.causal:
        some, every = q.last_position >= k.first_position, q.first_position >= k.last_position
        if mask.window is not None:
            some &= q.first_position - k.last_position < mask.window
            every &= q.last_position - k.first_position < mask.window
    if q.last_segment is not None:
        some &= jnp.maximum(q.first_segment, k.first_segment) <= jnp.minimum(q.last_segment, k.last_segment)
        is_one_document = (q.first_segment == q.last_segment) & ~q.has_padding & ~k.has_padding
        every &= is_one_document & (k.first_segment == q.first_segment) & (k.last_segment == q.first_segment)
    return some, every


def _ranges(some: jax.Array, every: jax.Array, num_whole_blocks: int) -> jax.Array:
    """Block ranges from visibility: [B, own blocks, other blocks] bool -> int32 [B, own blocks, ranges, 3]."""
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


def _map(f, bounds: _Bounds) -> _Bounds:
    return _Bounds(*(None if x is None else f(x) for x in bounds))
