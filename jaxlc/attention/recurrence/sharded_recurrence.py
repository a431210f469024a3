"""Recurrent layers over a sequence that is split on a mesh: convolutions, norms and the recurrence.

Tokens are in zigzag order, or in the order of per-document sharding, in which ranks have fragments
of several chains.

In that order the recurrence needs groups of equal numbers of tokens, none of which has tokens of two fragments
(`sharding/document_balance.py`, `Assignment.fragments`). So the tokens are gathered into groups, and the last group
of a fragment ends with empty places. The numbers of groups and of places are static. Chains are independent of each
other, so the exchange between ranks is as in zigzag order, which is one chain, with one more dimension.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.recurrence import chunks, sharded_rule
from jaxlc.attention.recurrence.chunks import Rule, Tokens
from jaxlc.attention.recurrence.convolution import convolution
from jaxlc.attention.recurrence.sharded_rule import groups_at_once, recurrence, recurrence_in_groups
from jaxlc.attention.state_passing import like, predecessors
from jaxlc.attention.strategies.strategy import repeat_heads
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, scopes
from jaxlc.sharding.mesh import Ranks, ranks_of, shard_map


class GroupTable(NamedTuple):
    """The groups of a rank, int32; G groups of g places, F fragments, P tokens before a group."""

    place_of_token_bt: jax.Array
    token_of_place_bGg: jax.Array  # -1: none
    # of P tokens before the group and of its places, L = P + g; of empty places: the last one
    segments_bGL: jax.Array
    fragment_bG: jax.Array  # of each group; F: none. A fragment has consecutive groups
    started_bG: jax.Array  # the fragment whose first group it is; -1: none
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
    started_bG = jnp.where(is_first_bG, fragment_bG, -1)
    before_bFP = before_fragments(ends_bFP, ranks)
    return GroupTable(
        place_of_token_bt=place_bt,
        token_of_place_bGg=jnp.where(exists_bGg, token_bGg, -1),
        segments_bGL=with_halos(own_bGg, before_bFP, started_bG),
        fragment_bG=fragment_bG,
        started_bG=started_bG,
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


def with_halos(x_bGg: jax.Array, halos_bFP: jax.Array, started_bG: jax.Array) -> jax.Array:
    """The groups with the P tokens before each, [b, G, P + g, ...]: the last tokens of the group
    before it, or `halos` where a fragment starts.
    """
    ends_bGP = x_bGg[:, :-1, -halos_bFP.shape[2] :]
    ends_bGP = jnp.pad(ends_bGP, [(0, 0), (1, 0), *[(0, 0)] * (x_bGg.ndim - 2)])
    is_start = like(started_bG >= 0, x_bGg)
    before_bGP = jnp.where(is_start, rows_at(halos_bFP, started_bG), ends_bGP)
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
    index = like(index_bn, x_bm)
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


_NORM_EPSILON = 1e-6  # added to the sum of squares of queries and keys
_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT)
HEADS = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR)


class Filter(NamedTuple):
    """A convolution of each channel of each head, P taps, which silu follows."""

    taps_PhW: jax.Array
    bias_hW: jax.Array | None = None


class Operands(NamedTuple):
    """What a recurrent layer projects its tokens to. The heads of k and q are H or divide H."""

    q_BTGK: jax.Array  # before their convolutions, as k and v
    k_BTGK: jax.Array
    v_BTHV: jax.Array
    g_BTH: jax.Array  # float32, as beta and skip; or [B, T, H, K]. See `chunks.Tokens`
    beta_BTH: jax.Array
    skip_BTH: jax.Array | None
    filters: tuple[Filter, Filter, Filter]  # of q, k and v

    @property
    def specs(self) -> "Operands":
        """How the arrays are split on the mesh."""
        filters = jax.tree.map(
            lambda x: PartitionSpec(*[None] * (x.ndim - 2), TENSOR), self.filters
        )
        return jax.tree.map(lambda _: HEADS, self)._replace(filters=filters)

    def split_over(self, num_ranks: int) -> "Operands":
        """With the heads of q and k repeated up to the number of ranks that split them, if there
        are fewer."""
        *key_filters, filter_v = self.filters
        q, k, filters = jax.tree.map(
            lambda x: repeat_heads(x, num_ranks, x.ndim - 2),
            (self.q_BTGK, self.k_BTGK, key_filters),
        )
        return self._replace(q_BTGK=q, k_BTGK=k, filters=(*filters, filter_v))

    def tokens(self, q, k, v, *segments) -> Tokens:
        """With q, k and v after their convolutions; `segments` are the other fields of `Tokens`."""
        return Tokens(q, k, v, self.g_BTH, self.beta_BTH, self.skip_BTH, *segments)


class Documents(NamedTuple):
    """The documents of sequences, int32."""

    # [B, T]; each starts with state 0, and 0 is padding. None: each sequence is one segment
    segments: jax.Array | None
    prefixes: jax.Array | None  # [B, T, D], of `chunks.Tokens`


class ShardedRecurrence(NamedTuple):
    """What a recurrent layer computes between its projections, to be called under `jit`."""

    mesh: Mesh
    rule: Rule
    # Of per-document sharding; not used in zigzag order.
    num_chains: int = 0
    num_taps: int = 0  # of the convolutions

    def prepare(
        self,
        segments_BT: jax.Array | None,
        prefixes_BTD: jax.Array | None = None,
        fragments_BT: jax.Array | None = None,
    ) -> Documents | GroupTable:
        """The `ranges` of a call.

        Args:
          fragments_BT: int32, the fragment of each token; see `group_table`. None: zigzag order.
        """
        if fragments_BT is None:
            return Documents(segments_BT, prefixes_BTD)
        local = functools.partial(
            group_table, ranks=ranks_of(self.mesh), num_chains=self.num_chains, num_before=max(1, self.num_taps - 1),
            most_tokens=sharded_rule.GROUP_TOKENS,
        )  # fmt: skip
        return shard_map(local, self.mesh, (_TOKENS, _TOKENS), _TOKENS)(fragments_BT, segments_BT)

    def __call__(self, *operands, ranges: Documents | GroupTable | None = None) -> jax.Array:
        """out_BTHV in the dtype of q.

        Args:
          operands: the fields of `Operands`.
          ranges: of `prepare`. None: each sequence is one segment, in zigzag order.
        """
        operands = Operands(*operands).split_over(self.mesh.shape[TENSOR])
        ranks = ranks_of(self.mesh)
        ranges = ranges or Documents(None, None)
        in_specs = (operands.specs, _TOKENS)
        how = dict(rule=self.rule, ranks=ranks)
        if isinstance(ranges, GroupTable):
            local = functools.partial(_mixed_by_document, **how)
        else:
            local = functools.partial(_mixed, num_fragments=2 if ranks.size > 1 else 1, **how)
        return shard_map(local, self.mesh, in_specs, HEADS)(operands, ranges)


def _mixed(
    operands: Operands, documents: Documents, *, rule: Rule, ranks: Ranks, num_fragments: int
) -> jax.Array:
    how = dict(ranks=ranks, num_fragments=num_fragments)

    # the float32 arrays of the convolution and of silu would take more memory than its operands
    @jax.checkpoint
    def filtered_operands(arrays, filters):
        return unit_lengths(
            rule, *(filtered(*pair, *documents, **how) for pair in zip(arrays, filters))
        )

    q_k_v = filtered_operands(operands[:3], operands.filters)
    tokens = operands.tokens(*q_k_v, documents.segments, None, documents.prefixes)
    return checkpoint_name(recurrence(tokens, rule, **how), "attention_out")


def _mixed_by_document(
    operands: Operands, table: GroupTable, *, rule: Rule, ranks: Ranks
) -> jax.Array:
    arrays = operands[:3]
    flat = [x.reshape(*x.shape[:2], -1) for x in arrays]
    with jax.named_scope(scopes.CONVOLUTION):
        ends = np.cumsum([x.shape[-1] for x in flat])
        before = jnp.split(halos(flat, table, ranks), ends[:-1], axis=-1)

    @jax.checkpoint  # as in `_mixed`
    def filtered_operands(*arrays):
        return unit_lengths(rule, *(_filtered_groups(*x, table) for x in zip(*arrays)))

    q_k_v = filtered_operands(arrays, before, operands.filters)
    num_places = table.token_of_place_bGg.shape[-1]
    num_fragments = table.last_tokens_bFP.shape[1]
    segments_bGg = table.segments_bGL[..., -num_places:]
    segment_before_bG = table.segments_bGL[..., -num_places - 1]
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        gates = jax.tree.map(lambda x: in_groups(x, table), operands[3:6])
        tokens = Tokens(*q_k_v, *gates, segments_bGg, segment_before_bG)
        groups, fragment_GB = jax.tree.map(lambda x: x.swapaxes(0, 1), (tokens, table.fragment_bG))
        out = recurrence_in_groups(groups, rule, ranks, num_fragments, fragment_GB)
        out = in_order(out.swapaxes(0, 1), table)
    return checkpoint_name(out, "attention_out")


def _filtered_groups(
    x_bthW: jax.Array, before_bFPw: jax.Array, conv: Filter, table: GroupTable
) -> jax.Array:
    """As `filtered`, [b, G, g, h, W]."""
    flat_btw = x_bthW.reshape(*x_bthW.shape[:2], -1)
    heads = x_bthW.shape[2:]
    with jax.named_scope(scopes.CONVOLUTION):
        x_bGLw = with_halos(in_groups(flat_btw, table), before_bFPw, table.started_bG)
    segments_BL = table.segments_bGL.reshape(-1, x_bGLw.shape[2])  # of b x G sequences
    out_BLhW = filtered(x_bGLw.reshape(*segments_BL.shape, *heads), conv, segments_BL)
    return out_BLhW.reshape(*x_bGLw.shape[:3], *heads)[:, :, before_bFPw.shape[2] :]


def filtered(
    x_bthW: jax.Array,
    conv: Filter,
    segments_bt: jax.Array | None,
    prefixes_btD: jax.Array | None = None,
    **how,
) -> jax.Array:
    """silu of the convolution and its bias of each channel of each head, computed in float32 or wider,
    in the dtype of x; `how`: further arguments of `convolution`.
    """
    flat = x_bthW.reshape(*x_bthW.shape[:2], -1)
    taps_PhW = conv.taps_PhW
    out = convolution(flat, taps_PhW.reshape(len(taps_PhW), -1), segments_bt, prefixes_btD, **how)
    wide = _wide(out).reshape(x_bthW.shape)
    if conv.bias_hW is not None:
        wide += conv.bias_hW
    return jax.nn.silu(wide).astype(x_bthW.dtype)


def unit_lengths(rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    """q, k and v, with q and k of length 1 for the delta rule."""
    return (unit_length(q), unit_length(k), v) if rule.corrects else (q, k, v)


def unit_length(x: jax.Array) -> jax.Array:
    """x / |x| over the last dimension, computed in float32 or wider, in the dtype of x."""
    wide = _wide(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + _NORM_EPSILON)).astype(
        x.dtype
    )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))
