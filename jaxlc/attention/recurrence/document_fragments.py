"""The groups of tokens of a rank in the order of per-document sharding; for code inside
`shard_map`.

A rank has two fragments of each of several chains, of any lengths (`sharding/document_balance.py`,
`Assignment.fragments`); fragments of all ranks in the order of a chain are consecutive tokens. The
recurrence needs groups of equal numbers of tokens, none of which has tokens of two fragments. So
the tokens are gathered into groups, and the last group of a fragment ends with empty places. The
numbers of groups and of places are static.

Chains are independent of each other. So the exchange between ranks is as in zigzag order, which is
one chain, with one more dimension.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.attention.recurrence import chunks
from jaxlc.attention.recurrence.sharded_rule import groups_at_once
from jaxlc.attention.state_passing import predecessors
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


class GroupTable(NamedTuple):
    """The groups of a rank, int32; G groups of g places, F fragments, P tokens before a group."""

    place_of_token_bt: jax.Array
    token_of_place_bGg: jax.Array  # -1: none
    # of P tokens before the group and of its places, L = P + g; of empty places: the last one
    segments_bGL: jax.Array
    fragment_bG: jax.Array  # of each group; F: none. Those of a fragment are consecutive
    last_tokens_bFP: jax.Array  # the last P tokens of each fragment; -1: the fragment has fewer
    place_in_last_bt: jax.Array  # of each token, among the last ones of all fragments; -1: none


def group_tokens(rank_tokens: int, num_fragments: int, most: int) -> int:
    """Tokens of a group: a power of 2 of at most `most`, with which empty places are few in
    proportion.
    """
    size = most
    while size > chunks.CHUNK_TOKENS and 8 * num_fragments * size > rank_tokens:
        size //= 2
    return size


@jax.named_scope(scopes.LINEAR_ATTENTION)
def group_table(
    fragments_bt: jax.Array,
    segments_bt: jax.Array,
    *,
    ranks: Ranks,
    num_chains: int,
    num_before: int,
    most_tokens: int,
) -> GroupTable:
    """The table of a rank's tokens.

    Args:
      fragments_bt: 2 x chain, and 1 more in the second fragment of a chain; the tokens of a fragment are contiguous.
      num_before: tokens before each group that the convolutions read, at least 1. A fragment that is neither the first
        nor the last with tokens of a document has at least as many.
      most_tokens: of a group.
    """
    batch, num_tokens = fragments_bt.shape
    num_fragments = 2 * num_chains
    size = group_tokens(num_tokens, num_fragments, most_tokens)
    num_groups = (num_tokens + num_fragments * (size - 1)) // size
    num_groups += -num_groups % groups_at_once(num_groups, batch, size)
    is_fragment_bFt = fragments_bt[:, None] == jnp.arange(num_fragments, dtype=jnp.int32)[:, None]
    count_bF = is_fragment_bFt.sum(-1, dtype=jnp.int32)
    begin_bF = jnp.argmax(is_fragment_bFt, axis=-1).astype(jnp.int32)
    groups_bF = -(-count_bF // size)
    end_group_bF = jnp.cumsum(groups_bF, axis=1)
    first_group_bF = end_group_bF - groups_bF
    first_place_bF = first_group_bF * size - begin_bF
    place_bt = _taken(first_place_bF, fragments_bt) + jnp.arange(num_tokens, dtype=jnp.int32)

    groups_G = jnp.arange(num_groups, dtype=jnp.int32)
    fragment_bG = (groups_G[:, None] >= end_group_bF[:, None]).sum(-1, dtype=jnp.int32)
    known_bG = jnp.minimum(fragment_bG, num_fragments - 1)
    places_Gg = groups_G[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    end_bF = begin_bF + count_bF
    token_bGg = places_Gg - _taken(first_place_bF, known_bG)[..., None]
    last_bG = jnp.where(fragment_bG < num_fragments, _taken(end_bF, known_bG) - 1, -1)
    exists_bGg = token_bGg <= last_bG[..., None]
    last_tokens_bFP = end_bF[..., None] + jnp.arange(-num_before, 0, dtype=jnp.int32)
    last_tokens_bFP = jnp.where(last_tokens_bFP >= begin_bF[..., None], last_tokens_bFP, -1)

    own_bGg = _taken(segments_bt, jnp.clip(token_bGg, 0, jnp.maximum(last_bG, 0)[..., None]))
    own_bGg = jnp.where((last_bG >= 0)[..., None], own_bGg, 0)
    ends_bFP = jnp.where(
        last_tokens_bFP >= 0, _taken(segments_bt, jnp.maximum(last_tokens_bFP, 0)), 0
    )
    is_first_bG = (groups_G == _taken(first_group_bF, known_bG)) & (fragment_bG < num_fragments)
    before_bFP = before_fragments(ends_bFP, ranks)
    before_bGP = _take(before_bFP, known_bG[..., None])
    before_bGP = jnp.where(
        is_first_bG[..., None], before_bGP, _ends_of_previous(own_bGg, num_before)
    )
    return GroupTable(
        place_of_token_bt=place_bt,
        token_of_place_bGg=jnp.where(exists_bGg, token_bGg, -1),
        segments_bGL=jnp.concatenate([before_bGP, own_bGg], axis=2),
        fragment_bG=fragment_bG,
        last_tokens_bFP=last_tokens_bFP,
        place_in_last_bt=_inverse(last_tokens_bFP.reshape(batch, -1), num_tokens),
    )


def in_groups(x_bt: jax.Array, table: GroupTable) -> jax.Array:
    """The tokens of the groups, [b, G, g, ...]; 0 in empty places."""
    token_of_place_bp = table.token_of_place_bGg.reshape(len(x_bt), -1)
    x_bp = picked(x_bt, token_of_place_bp, table.place_of_token_bt)
    return x_bp.reshape(*table.token_of_place_bGg.shape, *x_bt.shape[2:])


def in_order(x_bGg: jax.Array, table: GroupTable) -> jax.Array:
    """The inverse of `in_groups`, [b, t, ...]."""
    x_bp = x_bGg.reshape(x_bGg.shape[0], -1, *x_bGg.shape[3:])
    return picked(x_bp, table.place_of_token_bt, table.token_of_place_bGg.reshape(len(x_bp), -1))


def halos(arrays_btW: list[jax.Array], table: GroupTable, ranks: Ranks) -> jax.Array:
    """The P tokens before each fragment, [b, F, P, sum of W]; 0 where there are none."""
    last_bn = table.last_tokens_bFP.reshape(len(table.last_tokens_bFP), -1)
    ends_bnW = jnp.concatenate(
        [picked(x, last_bn, table.place_in_last_bt) for x in arrays_btW], axis=-1
    )
    return before_fragments(ends_bnW.reshape(*table.last_tokens_bFP.shape, -1), ranks)


def with_halos(x_bGg: jax.Array, halos_bFP: jax.Array, table: GroupTable) -> jax.Array:
    """The groups with the P tokens before each, [b, G, P + g, ...]."""
    num_fragments, num_before = halos_bFP.shape[1:3]
    fragment_bG = table.fragment_bG
    previous_bG = jnp.pad(fragment_bG[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    is_first_bG = (fragment_bG != previous_bG) & (fragment_bG < num_fragments)
    index_bG = jnp.where(is_first_bG, fragment_bG, -1)
    before_bGP = rows_at(halos_bFP, index_bG)
    is_first = is_first_bG.reshape(*is_first_bG.shape, *[1] * (x_bGg.ndim - 2))
    before_bGP = jnp.where(is_first, before_bGP, _ends_of_previous(x_bGg, num_before))
    return jnp.concatenate([before_bGP, x_bGg], axis=2)


def before_fragments(ends_bF: jax.Array, ranks: Ranks) -> jax.Array:
    """What the fragment before each has in its place, [b, F, ...]; zeros before a chain."""
    before = predecessors([ends_bF[:, 0::2], ends_bF[:, 1::2]], ranks)
    return jnp.stack(before, axis=2).reshape(ends_bF.shape)


def rows_at(x_bm: jax.Array, index_bn: jax.Array) -> jax.Array:
    """As `picked`, of few rows."""
    return picked(x_bm, index_bn, _inverse(index_bn, x_bm.shape[1]))


@jax.custom_vjp
def picked(x_bm: jax.Array, index_bn: jax.Array, inverse_bm: jax.Array) -> jax.Array:
    """Rows of x [b, m, ...] by their index, [b, n, ...]; 0 where it is negative.

    Each row is picked at most once, so that the gradient is not a scatter.

    Args:
      inverse_bm: where each row of x is in the result; negative: nowhere.
    """
    index = index_bn.reshape(*index_bn.shape, *[1] * (x_bm.ndim - 2))
    return jnp.where(index >= 0, _take(x_bm, jnp.maximum(index, 0)), 0)


def _picked_forward(x_bm, index_bn, inverse_bm):
    return picked(x_bm, index_bn, inverse_bm), (index_bn, inverse_bm)


def _picked_backward(indices, gradient_bn):
    index_bn, inverse_bm = indices
    return picked(gradient_bn, inverse_bm, index_bn), None, None


picked.defvjp(_picked_forward, _picked_backward)


def _inverse(index_bn: jax.Array, num_rows: int) -> jax.Array:
    """int32 [b, rows]: where each row is in an index of few rows; -1: nowhere."""
    is_row_brn = jnp.arange(num_rows, dtype=jnp.int32)[:, None] == index_bn[:, None]
    return jnp.where(is_row_brn.any(-1), jnp.argmax(is_row_brn, axis=-1), -1).astype(jnp.int32)


def _taken(values_bm: jax.Array, index: jax.Array) -> jax.Array:
    """Values by an index [b, ...]."""
    flat = index.reshape(len(index), -1)
    return _take(values_bm, flat).reshape(index.shape)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _ends_of_previous(x_bGg: jax.Array, num_tokens: int) -> jax.Array:
    """The last tokens of the group before each, [b, G, tokens, ...]; zeros before the first."""
    ends = x_bGg[:, :-1, -num_tokens:]
    return jnp.pad(ends, [(0, 0), (1, 0), *[(0, 0)] * (x_bGg.ndim - 2)])
