"""Gated DeltaNet over a sequence that is split on a mesh: convolutions, norms and the delta rule.

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

from jaxlc.attention.delta_rule import sharded_rule
from jaxlc.attention.delta_rule.chunk_rule import Tokens
from jaxlc.attention.delta_rule.convolution import convolution, convolved
from jaxlc.attention.delta_rule.document_fragments import (
    GroupTable,
    group_table,
    halos,
    in_groups,
    in_order,
    with_halos,
)
from jaxlc.attention.delta_rule.sharded_rule import delta_rule, delta_rule_in_groups
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.sharding.mesh import Ranks

_NORM_EPSILON = 1e-6  # added to the sum of squares of queries and keys
_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT)
HEADS = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR)
FILTERS = PartitionSpec(None, TENSOR)


class Documents(NamedTuple):
    """The documents of sequences, int32 [B, T]."""

    # each starts with state 0, and 0 is padding. None: each sequence is one segment
    segments: jax.Array | None
    # The segment that a token's segment continues, 0: none; see `delta_rule`. None: no segment
    # continues another one.
    prefixes: jax.Array | None


class ShardedDeltaNet(NamedTuple):
    """What a layer of Gated DeltaNet computes between its projections, to be called under `jit`."""

    mesh: Mesh
    # Of per-document sharding; not used in zigzag order.
    num_chains: int = 0
    num_taps: int = 0  # of the convolutions

    def prepare(
        self,
        segments_BT: jax.Array | None,
        prefixes_BT: jax.Array | None = None,
        fragments_BT: jax.Array | None = None,
    ) -> Documents | GroupTable:
        """The `ranges` of a call.

        Args:
          fragments_BT: int32, the fragment of each token; see `document_fragments.group_table`. None: zigzag order.
        """
        if fragments_BT is None:
            return Documents(segments_BT, prefixes_BT)
        local = functools.partial(
            group_table, ranks=self._ranks, num_chains=self.num_chains, num_before=max(1, self.num_taps - 1),
            most_tokens=sharded_rule.GROUP_TOKENS,
        )  # fmt: skip
        return self._split(local, (_TOKENS, _TOKENS), _TOKENS)(fragments_BT, segments_BT)

    def __call__(
        self,
        q_BTGK: jax.Array,
        k_BTGK: jax.Array,
        v_BTHV: jax.Array,
        g_BTH: jax.Array,
        beta_BTH: jax.Array,
        filter_q_PGK: jax.Array,
        filter_k_PGK: jax.Array,
        filter_v_PHV: jax.Array,
        *,
        ranges: Documents | GroupTable | None = None,
    ) -> jax.Array:
        """out_BTHV in the dtype of q.

        Args:
          q_BTGK, k_BTGK, v_BTHV: projections, before the convolutions.
          g_BTH, beta_BTH: float32; see `jaxlc.attention.gated_delta_rule`.
          filter_q_PGK, filter_k_PGK, filter_v_PHV: the convolution of each channel.
          ranges: of `prepare`. None: each sequence is one segment, in zigzag order.
        """
        ranks = self._ranks
        ranges = ranges or Documents(None, None)
        in_specs = (*[HEADS] * 5, *[FILTERS] * 3, jax.tree.map(lambda _: _TOKENS, ranges))
        if isinstance(ranges, GroupTable):
            local = functools.partial(_mixed_by_document, ranks=ranks)
        else:
            local = functools.partial(_mixed, ranks=ranks, num_fragments=2 if ranks.size > 1 else 1)
        operands = q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, filter_q_PGK, filter_k_PGK, filter_v_PHV
        return self._split(local, in_specs, HEADS)(*operands, ranges)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(CONTEXT, self.mesh.shape[CONTEXT])

    def _split(self, local, in_specs, out_specs):
        # check_vma: as in `sharded_rule._split`.
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _mixed(
    q,
    k,
    v,
    g_btH,
    beta_btH,
    filter_q,
    filter_k,
    filter_v,
    documents: Documents,
    *,
    ranks: Ranks,
    num_fragments: int,
):
    how = dict(ranks=ranks, num_fragments=num_fragments)

    # the float32 arrays of the convolution and of silu would take more memory than its operands
    @jax.checkpoint
    def filtered_operands(q, k, v, filter_q, filter_k, filter_v):
        q, k, v = (
            filtered(x, taps, *documents, **how)
            for x, taps in zip((q, k, v), (filter_q, filter_k, filter_v))
        )
        return unit_length(q), unit_length(k), v

    q, k, v = filtered_operands(q, k, v, filter_q, filter_k, filter_v)
    out = delta_rule(q, k, v, g_btH, beta_btH, *documents, scale=q.shape[-1] ** -0.5, **how)
    return checkpoint_name(out, "attention_out")


def _mixed_by_document(
    q, k, v, g_btH, beta_btH, filter_q, filter_k, filter_v, table: GroupTable, *, ranks: Ranks
) -> jax.Array:
    arrays, filters = (q, k, v), (filter_q, filter_k, filter_v)
    flat = [x.reshape(*x.shape[:2], -1) for x in arrays]
    with jax.named_scope(scopes.CONVOLUTION):
        ends = np.cumsum([x.shape[-1] for x in flat])
        before = jnp.split(halos(flat, table, ranks), ends[:-1], axis=-1)

    @jax.checkpoint  # as in `_mixed`
    def filtered_operands(arrays, before, filters):
        q, k, v = (_filtered_groups(*operands, table) for operands in zip(arrays, before, filters))
        return unit_length(q), unit_length(k), v

    q, k, v = filtered_operands(arrays, before, filters)
    num_places, num_fragments = table.token_of_place_bGg.shape[-1], table.last_tokens_bFP.shape[1]
    segments_bGg, segment_before_bG = (
        table.segments_bGL[..., -num_places:],
        table.segments_bGL[..., -num_places - 1],
    )
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        g, beta = (in_groups(x, table) for x in (g_btH, beta_btH))
        tokens = Tokens(q, k, v, g, beta, segments_bGg, segment_before_bG)
        groups, fragment_GB = jax.tree.map(lambda x: x.swapaxes(0, 1), (tokens, table.fragment_bG))
        how = dict(ranks=ranks, num_fragments=num_fragments, scale=q.shape[-1] ** -0.5)
        out = in_order(delta_rule_in_groups(groups, fragment_GB, **how).swapaxes(0, 1), table)
    return checkpoint_name(out, "attention_out")


@jax.named_scope(scopes.CONVOLUTION)
def _filtered_groups(
    x_bthW: jax.Array, before_bFPw: jax.Array, filter_PhW: jax.Array, table: GroupTable
) -> jax.Array:
    """As `filtered`, [b, G, g, h, W]."""
    num_taps, heads = len(filter_PhW), x_bthW.shape[2:]
    x_bGgw = in_groups(x_bthW.reshape(*x_bthW.shape[:2], -1), table)
    x_bGLw = with_halos(x_bGgw, before_bFPw, table)
    unused = before_bFPw.shape[2] - (num_taps - 1)

    def flat(x):  # [b, G, L, ...] -> [b x G, L, ...]
        return x.reshape(-1, *x.shape[2:])[:, unused:]

    out = convolved(flat(x_bGLw), flat(table.segments_bGL), filter_PhW.reshape(num_taps, -1))
    return silu(out).reshape(*x_bGgw.shape[:3], *heads)


def filtered(
    x_bthW: jax.Array,
    filter_PhW: jax.Array,
    segments_bt: jax.Array | None,
    prefixes_bt: jax.Array | None = None,
    **how,
) -> jax.Array:
    """silu of the convolution of each channel of each head; `how`: further arguments of
    `convolution`.
    """
    flat = x_bthW.reshape(*x_bthW.shape[:2], -1)
    out = convolution(
        flat, filter_PhW.reshape(len(filter_PhW), -1), segments_bt, prefixes_bt, **how
    )
    return silu(out).reshape(x_bthW.shape)


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x), computed in float32 or wider, in the dtype of x."""
    return jax.nn.silu(_wide(x)).astype(x.dtype)


def unit_length(x: jax.Array) -> jax.Array:
    """x / |x| over the last dimension, computed in float32 or wider, in the dtype of x."""
    wide = _wide(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + _NORM_EPSILON)).astype(
        x.dtype
    )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))
