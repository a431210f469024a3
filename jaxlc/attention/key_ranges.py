"""Attention masks as one contiguous range of keys per query.

Causal masks, documents and sliding windows have this form for every block of keys in which the
tokens of a document are contiguous, with ascending positions. That holds for a whole packed
sequence in natural order and for any of its tokens in ascending order: a rank's tokens in zigzag
order, a halo followed by its chunk, slices of these. It holds for a rank's tokens under
per-document sharding (sharding/document_layout.py). It does not hold for documents that are
interleaved, nor for the tokens of all ranks in layout order.

Block masks
-----------
For each block, the blocks of the other side that are not fully masked, so that a kernel skips the
rest. A program of a kernel owns one block (of queries in the forward pass and for dQ, of keys for
dK and dV) and loops over blocks of the other side. XLA computes a short list of block ranges for it
before the kernel starts:

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

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, KeyRanges, TreeRanges
from jaxlc.sharding.mesh import Ranks


class TokenInfo(NamedTuple):
    """Positions and segment ids of tokens, int32.

    Documents may continue a prefix, which may continue another one: nodes of a tree. In natural order a node is
    followed by its children, each with all that continues it. So the tokens that have a prefix at one level are
    contiguous, among all tokens in ascending order as well.

    Only differences of positions within a segment matter, so positions may count from the start of
    the sequence or restart with each document. Segment id 0 is padding, which neither attends nor
    is attended to.
    """

    positions_BT: jax.Array | None  # None: only if no mask is causal
    segments_BT: jax.Array | None  # None: one document, without padding
    # The segment ids of the D prefixes that a token's document continues, the root first; 0 from the level of its own
    # document on. Its tokens attend to all of these, too. Positions count on from each prefix. None: no document
    # continues another one.
    prefixes_BTD: jax.Array | None = None

    def map(self, function) -> "TokenInfo":
        return TokenInfo(*(None if x is None else function(x) for x in self))


def key_ranges(
    queries: TokenInfo, keys: TokenInfo, spec: AttentionSpec
) -> KeyRanges | TreeRanges | None:
    """The ranges of queries over keys. None: nothing is masked, since there are no segment ids and
    no causal mask.

    A query attends to a key if their segment ids are equal and not 0 and, if the spec is causal, if
    0 <= query position - key position < window. It also attends to the keys of its document's
    prefixes, in the window.

    O((T + S) log S) time and O(T + S) memory. The caller ensures that documents are contiguous, see
    the docstring of the module; it is not checked.
    """
    q_segments_BT = queries.segments_BT
    k_segments_BS = keys.segments_BT
    if q_segments_BT is None:
        if not spec.causal:
            return None
        q_segments_BT = jnp.ones_like(queries.positions_BT)
        k_segments_BS = jnp.ones_like(keys.positions_BT)
    own = _ranges_in_documents(
        q_segments_BT, queries, keys._replace(segments_BT=k_segments_BS), spec
    )
    if queries.prefixes_BTD is None:
        return own
    levels = jnp.unstack(queries.prefixes_BTD, axis=2)
    return TreeRanges(own, tuple(_ranges_in_documents(x, queries, keys, spec) for x in levels))


def _ranges_in_documents(
    documents_BT: jax.Array, queries: TokenInfo, keys: TokenInfo, spec: AttentionSpec
) -> KeyRanges:
    """The ranges of queries over the keys whose segment ids are `documents_BT`."""
    first_BT, end_BT = jax.vmap(_document_ranges)(documents_BT, keys.segments_BT)
    if spec.causal:
        bisect = jax.vmap(_first_key_from)
        document_end_BT = end_BT
        end_BT = bisect(keys.positions_BT, queries.positions_BT + 1, first_BT, document_end_BT)
        if spec.window is not None:
            first_BT = bisect(
                keys.positions_BT, queries.positions_BT + 1 - spec.window, first_BT, document_end_BT
            )
    is_empty_BT = first_BT >= end_BT
    return KeyRanges(*(jnp.where(is_empty_BT, 0, x).astype(jnp.int32) for x in (first_BT, end_BT)))


def seen_by(keys: TokenInfo, queries: TokenInfo, window: int) -> jax.Array:
    """bool, the shape of the keys: whether a query at a later position has the key in its sliding
    window.

    The documents of the queries are contiguous, with ascending positions.
    """
    first, end = jax.vmap(_document_ranges)(keys.segments_BT, queries.segments_BT)
    next_query = jax.vmap(_first_key_from)(queries.positions_BT, keys.positions_BT + 1, first, end)
    last = queries.positions_BT.shape[1] - 1
    position = jnp.take_along_axis(queries.positions_BT, jnp.minimum(next_query, last), axis=1)
    return (next_query < end) & (position - keys.positions_BT < window)


def seen_by_branches(keys: TokenInfo, queries: TokenInfo, window: int) -> jax.Array:
    """bool, the shape of the keys: whether a query that has the key's document as a prefix has it in
    its window.
    """

    def sequence_ranges(k_positions_S, k_segments_S, positions_T, prefixes_T):
        # the nearest query of each prefix comes first
        by_prefix_T = jnp.lexsort((positions_T, prefixes_T))
        sorted_T = prefixes_T[by_prefix_T]
        first_S = jnp.minimum(jnp.searchsorted(sorted_T, k_segments_S), len(sorted_T) - 1)
        distance_S = positions_T[by_prefix_T][first_S] - k_positions_S
        return (k_segments_S != 0) & (sorted_T[first_S] == k_segments_S) & (distance_S < window)

    by_level = jax.vmap(jax.vmap(sequence_ranges, (None, None, None, 1)))(
        keys.positions_BT, keys.segments_BT, queries.positions_BT, queries.prefixes_BTD
    )
    return by_level.any(1)


def first_own_key(queries: TokenInfo, keys: TokenInfo) -> jax.Array:
    """int32, the shape of the queries: the index of the first key of each query's document; any if
    there is none.
    """
    return jax.vmap(_document_ranges)(queries.segments_BT, keys.segments_BT)[0]


def ring_key_ranges(
    tokens: TokenInfo, spec: AttentionSpec, ranks: Ranks
) -> KeyRanges | TreeRanges | None:
    """The ranges of this rank's tokens over the block of each ring step, int32 [ring steps, b, t].

    In step i, the block has the tokens of rank - i. Call inside `shard_map`.
    """
    blocks = _ring_blocks(tokens, ranks)
    return jax.vmap(lambda block: key_ranges(tokens, block, spec))(blocks)


def ring_key_ranges_of_halves(
    tokens: TokenInfo, spec: AttentionSpec, ranks: Ranks
) -> KeyRanges | None:
    """As `ring_key_ranges`, over each half of each block: int32 [ring steps, halves, b, t].

    The tokens of a document need be contiguous only within each half.
    """

    def halves(x_nbt):
        steps, batch, num_tokens, *levels = x_nbt.shape
        return jnp.moveaxis(x_nbt.reshape(steps, batch, 2, num_tokens // 2, *levels), 2, 1)

    def ranges_of(block):
        return key_ranges(tokens, block, spec)

    return jax.vmap(jax.vmap(ranges_of))(_ring_blocks(tokens, ranks).map(halves))


def _ring_blocks(tokens: TokenInfo, ranks: Ranks) -> TokenInfo:
    """The tokens of rank - i for each ring step i: [ring steps, b, t]."""
    if ranks.size == 1:
        return tokens.map(lambda x_bt: x_bt[None])
    sources = (lax.axis_index(ranks.axis) - jnp.arange(ranks.size)) % ranks.size
    return tokens.map(lambda x_bt: lax.all_gather(x_bt, ranks.axis)[sources])


def _document_ranges(
    q_segments_T: jax.Array, k_segments_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First and last + 1 key of each query's document. Segment ids may be any integers in any
    order.
    """
    by_segment_S = jnp.argsort(k_segments_S, stable=True)
    sorted_S = k_segments_S[by_segment_S]
    left_T, right_T = (
        jnp.searchsorted(sorted_S, q_segments_T, side=side) for side in ("left", "right")
    )
    num_keys_T = jnp.where(q_segments_T == 0, 0, right_T - left_T)
    first_T = by_segment_S[jnp.minimum(left_T, len(k_segments_S) - 1)]
    return first_T, first_T + num_keys_T


def _first_key_from(
    k_positions_S: jax.Array, position_T: jax.Array, first_T: jax.Array, end_T: jax.Array
):
    """The first key in [first, end) whose position is at least `position`, or end; positions ascend
    in the range.
    """

    def halve(_, bounds):
        low_T, high_T = bounds  # the result is in [low, high]
        middle_T = (low_T + high_T) // 2
        is_before = (low_T < high_T) & (
            k_positions_S[jnp.minimum(middle_T, len(k_positions_S) - 1)] < position_T
        )
        return jnp.where(is_before, middle_T + 1, low_T), jnp.where(
            is_before, high_T, jnp.maximum(low_T, middle_T)
        )

    return lax.fori_loop(0, len(k_positions_S).bit_length(), halve, (first_T, end_T))[0]


@dataclass(frozen=True, kw_only=True)
class TuningParams:
    """How one kernel is launched."""

    query_block_tokens: int
    kv_block_tokens: int
    num_warps: int
    num_stages: int  # blocks in flight between global and shared memory


_HALF_PRECISION = TuningParams(
    query_block_tokens=128, kv_block_tokens=128, num_warps=8, num_stages=2
)
_HALF_PRECISION_OF = {"flash_dkv": replace(_HALF_PRECISION, query_block_tokens=64)}
# Operands of twice the size, multiplied without tensor cores.
_FLOAT32 = TuningParams(query_block_tokens=32, kv_block_tokens=32, num_warps=4, num_stages=1)

MIN_BLOCK_TOKENS = 16  # the smallest dimension of a matrix product in Triton
MAX_HEAD_DIM = 256  # blocks of larger head dims do not fit into the registers
WIDE_HEAD_DIM = 128  # above it, blocks have half as many tokens, and so the same size
MAX_BLOCK_RANGES = 8  # ranges in the list of blocks that a program loops over


# Compute capabilities with 99 KiB of shared memory for a block of threads; data-center GPUs have
# 163 KiB and more. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SMALL_SHARED_MEMORY = ("8.6", "8.9", "12.0", "12.1")
_SMALL_BLOCK_TOKENS = 64  # the largest blocks of half precision that fit 99 KiB


def has_small_shared_memory(device: jax.Device) -> bool:
    """Whether the device is in SMALL_SHARED_MEMORY; CPUs have no compute capability."""
    return getattr(device, "compute_capability", None) in SMALL_SHARED_MEMORY


def tuning_params(
    kernel: str, dtype: str, head_dim: int, small_shared_memory: bool
) -> TuningParams:
    """The parameters for a kernel, such as "flash_dkv".

    Args:
      dtype: such as "bfloat16".
      head_dim: of queries and keys or of values, the larger one.
      small_shared_memory: of the GPU, see SMALL_SHARED_MEMORY.
    """
    params = _FLOAT32 if dtype == "float32" else _HALF_PRECISION_OF.get(kernel, _HALF_PRECISION)

    def tokens(tuned: int) -> int:
        limited = min(tuned, _SMALL_BLOCK_TOKENS) if small_shared_memory else tuned
        return limited // 2 if head_dim > WIDE_HEAD_DIM else limited

    return replace(
        params,
        query_block_tokens=tokens(params.query_block_tokens),
        kv_block_tokens=tokens(params.kv_block_tokens),
    )


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


def kv_block_ranges(
    ranges: Ranges | None, mask: BlockMask, *, transposed: bool = False
) -> jax.Array:
    """The ranges of KV blocks for each query block: int32 [B or 1, query blocks, ranges, 3].

    With `transposed`, the ranges of query blocks for each KV block: [B or 1, KV blocks, ranges, 3].
    """
    sides = (
        _Side(mask.first_query, mask.num_queries, mask.query_block),
        _Side(0, mask.num_keys, mask.kv_block),
    )
    limits = (mask.window, 1) if mask.causal else (None, None)
    if transposed:
        sides, limits = sides[::-1], limits[::-1]
    if ranges is None:
        return _implicit_ranges(*sides, *limits)
    visible = _visibility(ranges, mask)
    if transposed:
        visible = [x.swapaxes(1, 2) for x in visible]
    _, other = sides
    return _block_ranges(*visible, num_whole_blocks=other.num_tokens // other.block)


query_block_ranges = functools.partial(kv_block_ranges, transposed=True)


def rectangle_block_ranges(start_BI: jax.Array, end_BI: jax.Array, kv_block: int) -> jax.Array:
    """`kv_block_ranges` where all queries of block I attend to the keys start <= s < end: int32 [B,
    I, 2, 3].
    """
    return _two_ranges(start_BI, end_BI, start_BI, end_BI, kv_block)


def _two_ranges(start, end, full, full_end, block: int) -> jax.Array:
    """The ranges of blocks where some tokens see the tokens start .. end - 1 of the other side, and
    all of them the tokens full .. full_end - 1: int32 [..., 2, 3].
    """
    start //= block
    end = jnp.maximum(start, -(-end // block))
    full = jnp.clip(-(-full // block), start, end)
    full_end = jnp.clip(full_end // block, full, end)
    bounds = (start, full, full_end), (full_end, end, end)
    return jnp.stack([jnp.stack(x, axis=-1) for x in bounds], axis=-2)


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
    bounds = first - back, last + ahead + 1, last - back, first + ahead + 1
    return _two_ranges(*(jnp.clip(x, 0, other.num_tokens) for x in bounds), other.block)[None]


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
