"""Attention masks as one contiguous range of keys per query.

Causal masks, documents and sliding windows have this form for every block of keys in which the
tokens of a document are contiguous, with ascending positions. That holds for a whole packed
sequence in natural order and for any of its tokens in ascending order: a rank's tokens in zigzag
order, a halo followed by its chunk, slices of these. It holds for a rank's tokens under
per-document sharding (sharding/document_layout.py). It does not hold for documents that are
interleaved, nor for the tokens of all ranks in layout order.
"""

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
    q_segments_BT, k_segments_BS = queries.segments_BT, keys.segments_BT
    if q_segments_BT is None:
        if not spec.causal:
            return None
        q_segments_BT, k_segments_BS = (
            jnp.ones_like(queries.positions_BT),
            jnp.ones_like(keys.positions_BT),
        )
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
        bisect, document_end_BT = jax.vmap(_first_key_from), end_BT
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
    if ranks.size == 1:
        ranges = key_ranges(tokens, tokens, spec)
        return jax.tree.map(lambda x: x[None], ranges)
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
