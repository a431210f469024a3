"""All-gather context parallelism: each rank attends with its own queries to the gathered K and V
(Llama 3, 3.3.2).

One all-gather replaces the ring's sends, so no communication overlaps with attention, and every
rank holds K and V of the whole sequence while its layer runs. Use it for sequences where that fits,
and for few key/value heads. The order of the tokens balances the work of the ranks: zigzag order,
or the pieces of documents in `document_layout`. In both, the gathered tokens of a document are not
contiguous. So K and V are put into natural order before the kernel call. The backward pass gathers
again instead of saving the gathered K and V.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxlc.attention.contract import AttentionSpec, Kernel, KeyRanges, QueryResults, TreeRanges
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.strategies.strategy import ShardedQKV, attention_vjp, joined, parted
from jaxlc.core import scopes
from jaxlc.sharding.document_layout import natural_order, zigzag_order
from jaxlc.sharding.mesh import Ranks


class GatheredRanges(NamedTuple):
    """The ranges of this rank's queries over the keys of all ranks in natural order, and that
    order.
    """

    over_keys: KeyRanges | TreeRanges | None  # None: nothing is masked
    order_bS: jax.Array  # int32: index among the gathered keys
    inverse_bS: jax.Array


def prepare(
    tokens: TokenInfo, kernel: Kernel | None, spec: AttentionSpec, ranks: Ranks
) -> GatheredRanges:
    """The `ranges` of `attend`, once per training step."""
    keys = tokens.map(lambda x_bt: lax.all_gather(x_bt, ranks.axis, axis=1, tiled=True))
    positions_and_segments = [x for x in keys[:2] if x is not None]
    order_bS = jax.vmap(jnp.lexsort)(positions_and_segments)
    keys = TokenInfo(*keys[:2]).map(lambda x_bS: jnp.take_along_axis(x_bS, order_bS, axis=1))
    return GatheredRanges(key_ranges(tokens, keys, spec), order_bS, jnp.argsort(order_bS, axis=1))


def ranges_specs(spec: AttentionSpec, batch_axes: tuple[str, ...], ranks: Ranks):
    """The PartitionSpecs of the arrays of `prepare`."""
    all_tokens = PartitionSpec(batch_axes)
    return GatheredRanges(PartitionSpec(batch_axes, ranks.axis), all_tokens, all_tokens)


def _forward(qkv: ShardedQKV, kernel, spec, ranks: Ranks):
    ranges = _ranges(qkv, spec, ranks)
    return kernel.forward(qkv.q_btnH, *_gather_kv(qkv, ranges, ranks), ranges.over_keys, spec)


def _backward(qkv: ShardedQKV, results: QueryResults, kernel, spec, ranks: Ranks):
    ranges = _ranges(qkv, spec, ranks)
    operands = qkv.q_btnH, *_gather_kv(qkv, ranges, ranks)
    dq, dk, dv = kernel.backward(*operands, ranges.over_keys, spec, results)
    # Every rank contributes to the gradient of every key. The sum is float32; each rank keeps its
    # own shard of it.
    with jax.named_scope(scopes.ALL_GATHER_KV):
        dk, dv = (_reorder(x.astype(jnp.float32), ranges.inverse_bS) for x in (dk, dv))
        dk, dv = (
            lax.psum_scatter(x, ranks.axis, scatter_dimension=1, tiled=True) for x in (dk, dv)
        )
    return dq, dk, dv


attend = attention_vjp(_forward, _backward)


@jax.named_scope(scopes.ALL_GATHER_KV)
def _gather_kv(qkv: ShardedQKV, ranges: GatheredRanges, ranks: Ranks) -> list[jax.Array]:
    """K and V of all ranks in natural order, in one collective."""
    _, k_bskH, v_bskH, *_ = qkv
    kv_bSkH = lax.all_gather(joined(k_bskH, v_bskH), ranks.axis, axis=1, tiled=True)
    return parted(_reorder(kv_bSkH, ranges.order_bS), k_bskH)


def _reorder(x_bSkH: jax.Array, order_bS: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_bSkH, order_bS[:, :, None, None], axis=1, mode="promise_in_bounds")


def _ranges(qkv: ShardedQKV, spec: AttentionSpec, ranks: Ranks) -> GatheredRanges:
    """Those of qkv, or of a sequence of one document in zigzag order."""
    if qkv.ranges is not None:
        return qkv.ranges
    batch, num_tokens, _, _ = qkv.q_btnH.shape
    zigzag_S = zigzag_order(ranks.size * num_tokens, ranks.size)
    orders = (
        jnp.asarray(order_S, jnp.int32)[None] for order_S in (natural_order(zigzag_S), zigzag_S)
    )
    if not spec.causal:
        return GatheredRanges(None, *orders)
    end_bt = ranks.positions(batch, num_tokens) + 1
    # Tied to the queries, see `attend_shard`.
    _, ranges = lax.optimization_barrier((qkv.q_btnH, KeyRanges(jnp.zeros_like(end_bt), end_bt)))
    return GatheredRanges(ranges, *orders)
