"""All-gather context parallelism: each rank attends with its own queries to the gathered K and V (Llama 3, 3.3.2).

One all-gather replaces the ring's sends, so no communication overlaps with attention, and every rank holds K and V of
the whole sequence while its layer runs. Use it for sequences where that fits, and for few key/value heads. Zigzag
order balances the work of the ranks. The backward pass gathers again instead of saving the gathered K and V.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention import halo
from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.attention.strategy import QueryResults, ShardedQKV, attention_vjp
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


def attend(qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: Ranks) -> tuple[jax.Array, jax.Array]:
    """Attention of this rank's queries over the whole sequence; call inside `shard_map`. As `ring.attend`."""
    if spec.window is not None:  # gathers the tokens that the window needs instead of all of them
        return halo.attend(qkv, kernel, spec, ranks)
    if qkv.masks.q_positions_BT is None:
        positions_bt = ranks.positions(*qkv.q_btnH.shape[:2])
        masks = qkv.masks._replace(q_positions_BT=positions_bt, k_positions_BS=positions_bt)
        qkv = qkv._replace(masks=masks)
    return _attend(qkv, kernel, spec, ranks)


def _forward(qkv: ShardedQKV, kernel, spec, ranks: Ranks):
    q, k, v, masks = qkv
    return kernel.forward(q, *_gather_kv(k, v, ranks), _gather_key_masks(masks, ranks), spec)


def _backward(qkv: ShardedQKV, results: QueryResults, kernel, spec, ranks: Ranks):
    q, k, v, masks = qkv
    k_bSkH, v_bSkH = _gather_kv(k, v, ranks)
    dq, dk, dv = kernel.backward(q, k_bSkH, v_bSkH, _gather_key_masks(masks, ranks), spec, *results)
    # Every rank contributes to the gradient of every key. The sum is float32; each rank keeps its own shard of it.
    with jax.named_scope(scopes.ALL_GATHER_KV):
        dk, dv = (lax.psum_scatter(x, ranks.axis, scatter_dimension=1, tiled=True) for x in (dk, dv))
    return dq, dk, dv


_attend = attention_vjp(_forward, _backward)


@jax.named_scope(scopes.ALL_GATHER_KV)
def _gather_kv(k_bskH: jax.Array, v_bskH: jax.Array, ranks: Ranks) -> tuple[jax.Array, jax.Array]:
    """K and V of all ranks, in one collective."""
    head_dim = k_bskH.shape[-1]
    kv_bSkH = lax.all_gather(jnp.concatenate([k_bskH, v_bskH], axis=-1), ranks.axis, axis=1, tiled=True)
    return kv_bSkH[..., :head_dim], kv_bSkH[..., head_dim:]


def _gather_key_masks(masks: Masks, ranks: Ranks) -> Masks:
    def gather(x_bs):
        return None if x_bs is None else lax.all_gather(x_bs, ranks.axis, axis=1, tiled=True)

    return masks._replace(k_positions_BS=gather(masks.k_positions_BS), k_segments_BS=gather(masks.k_segments_BS))
