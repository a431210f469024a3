"""Gated DeltaNet over a sequence that is split on a mesh, in zigzag order: convolutions, norms and the delta rule."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.delta_rule.convolution import convolution
from jaxlc.attention.delta_rule.sharded_rule import delta_rule
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.sharding.mesh import Ranks

_NORM_EPSILON = 1e-6  # added to the sum of squares of queries and keys
_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT)
HEADS = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR)
FILTERS = PartitionSpec(None, TENSOR)


class Documents(NamedTuple):
    """The documents of sequences, int32 [B, T]."""

    segments: jax.Array | None  # each starts with state 0, and 0 is padding. None: each sequence is one segment
    # The segment that a token's segment continues, 0: none; see `delta_rule`. None: no segment continues another one.
    prefixes: jax.Array | None


class ShardedDeltaNet(NamedTuple):
    """What a layer of Gated DeltaNet computes between its projections, to be called under `jit`."""

    mesh: Mesh
    ranks_per_node: int | None = None  # of the context axis; see `Ranks.per_node`

    def prepare(
        self,
        positions_BT: jax.Array | None,
        segments_BT: jax.Array | None,
        q_like=None,
        prefixes_BT: jax.Array | None = None,
    ) -> Documents:
        """The `ranges` of a call."""
        del positions_BT, q_like
        return Documents(segments_BT, prefixes_BT)

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
        ranges: Documents | None = None,
    ) -> jax.Array:
        """out_BTHV in the dtype of q. Tokens are in zigzag order.

        Args:
          q_BTGK, k_BTGK, v_BTHV: projections, before the convolutions.
          g_BTH, beta_BTH: float32; see `jaxlc.attention.gated_delta_rule`.
          filter_q_PGK, filter_k_PGK, filter_v_PHV: the convolution of each channel.
          ranges: of `prepare`. None: each sequence is one segment.
        """
        ranks = Ranks(CONTEXT, self.mesh.shape[CONTEXT], self.ranks_per_node)
        ranges = ranges or Documents(None, None)
        in_specs = (*[HEADS] * 5, *[FILTERS] * 3, jax.tree.map(lambda _: _TOKENS, ranges))
        local = functools.partial(_mixed, ranks=ranks, num_fragments=2 if ranks.size > 1 else 1)
        # check_vma: as in `linear_attention._split`.
        split = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=HEADS, check_vma=False)
        operands = q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, filter_q_PGK, filter_k_PGK, filter_v_PHV
        return split(*operands, ranges)


def _mixed(
    q, k, v, g_btH, beta_btH, filter_q, filter_k, filter_v, documents: Documents, *, ranks: Ranks, num_fragments: int
):
    how = dict(ranks=ranks, num_fragments=num_fragments)

    @jax.checkpoint  # the float32 arrays of the convolution and of silu would take more memory than its operands
    def filtered_operands(q, k, v, filter_q, filter_k, filter_v):
        q, k, v = (filtered(x, taps, *documents, **how) for x, taps in zip((q, k, v), (filter_q, filter_k, filter_v)))
        return unit_length(q), unit_length(k), v

    q, k, v = filtered_operands(q, k, v, filter_q, filter_k, filter_v)
    out = delta_rule(q, k, v, g_btH, beta_btH, *documents, scale=q.shape[-1] ** -0.5, **how)
    return checkpoint_name(out, "attention_out")


def filtered(
    x_bthW: jax.Array, filter_PhW: jax.Array, segments_bt: jax.Array | None, prefixes_bt: jax.Array | None = None, **how
) -> jax.Array:
    """silu of the convolution of each channel of each head; `how`: further arguments of `convolution`."""
    flat = x_bthW.reshape(*x_bthW.shape[:2], -1)
    out = convolution(flat, filter_PhW.reshape(len(filter_PhW), -1), segments_bt, prefixes_bt, **how)
    return silu(out).reshape(x_bthW.shape)


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x), computed in float32 or wider, in the dtype of x."""
    return jax.nn.silu(_wide(x)).astype(x.dtype)


def unit_length(x: jax.Array) -> jax.Array:
    """x / |x| over the last dimension, computed in float32 or wider, in the dtype of x."""
    wide = _wide(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + _NORM_EPSILON)).astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))
