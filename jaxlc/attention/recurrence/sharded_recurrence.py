"""Recurrent layers over a sequence that is split on a mesh: convolutions, norms and the recurrence.

Tokens are in zigzag order, or in the order of per-document sharding, in which ranks have fragments
of several chains (document_fragments.py).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.recurrence import sharded_rule
from jaxlc.attention.recurrence.chunks import Rule, Tokens
from jaxlc.attention.recurrence.convolution import convolution
from jaxlc.attention.recurrence.document_fragments import (
    GroupTable,
    group_table,
    halos,
    in_groups,
    in_order,
    with_halos,
)
from jaxlc.attention.recurrence.sharded_rule import recurrence, recurrence_in_groups
from jaxlc.attention.strategies.strategy import repeat_heads
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.sharding.mesh import Ranks

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

        def of_filter(x):
            return PartitionSpec(*[None] * (x.ndim - 2), TENSOR)

        specs = jax.tree.map(lambda _: HEADS, self)
        return specs._replace(filters=jax.tree.map(of_filter, self.filters))

    def split_over(self, num_ranks: int) -> "Operands":
        """With the heads of q and k repeated up to the number of ranks that split them, if there
        are fewer."""
        filter_q, filter_k, filter_v = self.filters

        def repeated(x, axis):
            return repeat_heads(x, num_ranks, axis)

        def repeated_filter(conv):
            bias = None if conv.bias_hW is None else repeated(conv.bias_hW, 0)
            return Filter(repeated(conv.taps_PhW, 1), bias)

        return self._replace(
            q_BTGK=repeated(self.q_BTGK, 2),
            k_BTGK=repeated(self.k_BTGK, 2),
            filters=(repeated_filter(filter_q), repeated_filter(filter_k), filter_v),
        )

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
          fragments_BT: int32, the fragment of each token; see `document_fragments.group_table`. None: zigzag order.
        """
        if fragments_BT is None:
            return Documents(segments_BT, prefixes_BTD)
        local = functools.partial(
            group_table, ranks=self._ranks, num_chains=self.num_chains, num_before=max(1, self.num_taps - 1),
            most_tokens=sharded_rule.GROUP_TOKENS,
        )  # fmt: skip
        return self._split(local, (_TOKENS, _TOKENS), _TOKENS)(fragments_BT, segments_BT)

    def __call__(self, *operands, ranges: Documents | GroupTable | None = None) -> jax.Array:
        """out_BTHV in the dtype of q.

        Args:
          operands: the fields of `Operands`.
          ranges: of `prepare`. None: each sequence is one segment, in zigzag order.
        """
        operands = Operands(*operands).split_over(self.mesh.shape[TENSOR])
        ranks = self._ranks
        ranges = ranges or Documents(None, None)
        in_specs = (operands.specs, jax.tree.map(lambda _: _TOKENS, ranges))
        how = dict(rule=self.rule, ranks=ranks)
        if isinstance(ranges, GroupTable):
            local = functools.partial(_mixed_by_document, **how)
        else:
            local = functools.partial(_mixed, num_fragments=2 if ranks.size > 1 else 1, **how)
        return self._split(local, in_specs, HEADS)(operands, ranges)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(CONTEXT, self.mesh.shape[CONTEXT])

    def _split(self, local, in_specs, out_specs):
        # check_vma: as in `sharded_rule._split`.
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


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
    num_places, num_fragments = table.token_of_place_bGg.shape[-1], table.last_tokens_bFP.shape[1]
    segments_bGg, segment_before_bG = (
        table.segments_bGL[..., -num_places:],
        table.segments_bGL[..., -num_places - 1],
    )
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        gates = jax.tree.map(lambda x: in_groups(x, table), operands[3:6])
        tokens = Tokens(*q_k_v, *gates, segments_bGg, segment_before_bG)
        groups, fragment_GB = jax.tree.map(lambda x: x.swapaxes(0, 1), (tokens, table.fragment_bG))
        how = dict(ranks=ranks, num_fragments=num_fragments)
        out = recurrence_in_groups(groups, rule, fragment_GB, **how)
        out = in_order(out.swapaxes(0, 1), table)
    return checkpoint_name(out, "attention_out")


def _filtered_groups(
    x_bthW: jax.Array, before_bFPw: jax.Array, conv: Filter, table: GroupTable
) -> jax.Array:
    """As `filtered`, [b, G, g, h, W]."""
    flat_btw, heads = x_bthW.reshape(*x_bthW.shape[:2], -1), x_bthW.shape[2:]
    with jax.named_scope(scopes.CONVOLUTION):
        x_bGLw = with_halos(in_groups(flat_btw, table), before_bFPw, table)
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
    flat, taps_PhW = x_bthW.reshape(*x_bthW.shape[:2], -1), conv.taps_PhW
    out = convolution(flat, taps_PhW.reshape(len(taps_PhW), -1), segments_bt, prefixes_btD, **how)
    wide = _wide(out).reshape(x_bthW.shape)
    if conv.bias_hW is not None:
        wide += conv.bias_hW
    return jax.nn.silu(wide).astype(x_bthW.dtype)


def unit_lengths(rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    """q, k and v, with q and k of length 1 if the rule has that."""
    return (unit_length(q), unit_length(k), v) if rule.unit_length else (q, k, v)


def unit_length(x: jax.Array) -> jax.Array:
    """x / |x| over the last dimension, computed in float32 or wider, in the dtype of x."""
    wide = _wide(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + _NORM_EPSILON)).astype(
        x.dtype
    )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))
