"""Queries stay, all of K and V come at once: context parallelism of Llama 3 (2024, section 3.3.2).

One gather instead of hops, so nothing overlaps with it, and every rank holds K and V of the whole sequence while its
layer runs: for sequences where that fits, and for few key/value heads. Zigzag order balances the work of the ranks.
The backward gathers again, so that nothing of that size is kept.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention import halo
from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


def attend(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    masks: Masks,
    kernel: Kernel,
    spec: AttentionSpec,
    ranks: Ranks,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the whole sequence, this rank's piece of it; call inside `shard_map`. As `ring.attend`."""
    if spec.window is not None:  # gathers the halo instead of everything
        return halo.attend(q_btnH, k_bskH, v_bskH, masks, kernel, spec, ranks)
    if masks.q_positions_BT is None:
        positions_bt = ranks.positions(*q_btnH.shape[:2])
        masks = masks._replace(q_positions_BT=positions_bt, k_positions_BS=positions_bt)
    return _attend(q_btnH, k_bskH, v_bskH, masks, kernel, spec, ranks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q, k, v, masks, kernel, spec, ranks):
    out, lse = kernel.forward(q, *_gathered(k, v, ranks), _masks_of_all_keys(masks, ranks), spec)
    return out.astype(q.dtype), lse


def _forward_rule(q, k, v, masks, kernel, spec, ranks):
    out, lse = _attend(q, k, v, masks, kernel, spec, ranks)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")  # see ring.py
    return (out, lse), (q, k, v, masks, out, lse)


def _backward_rule(kernel, spec, ranks, residuals, cotangents):
    q, k, v, masks, out, lse = residuals
    k_all, v_all = _gathered(k, v, ranks)
    dq, dk, dv = kernel.backward(q, k_all, v_all, _masks_of_all_keys(masks, ranks), spec, out, lse, *cotangents)
    # Every rank has a share in every key's gradient: summed in float32, each rank keeps its own piece.
    with jax.named_scope(scopes.ALL_GATHER_KV):
        dk, dv = (lax.psum_scatter(x, ranks.axis, scatter_dimension=1, tiled=True) for x in (dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward_rule, _backward_rule)


@jax.named_scope(scopes.ALL_GATHER_KV)
def _gathered(k_bskH: jax.Array, v_bskH: jax.Array, ranks: Ranks) -> tuple[jax.Array, jax.Array]:
    """K and V of all ranks, in one collective."""
    head_dim = k_bskH.shape[-1]
    kv_bSkH = lax.all_gather(jnp.concatenate([k_bskH, v_bskH], axis=-1), ranks.axis, axis=1, tiled=True)
    return kv_bSkH[..., :head_dim], kv_bSkH[..., head_dim:]


def _masks_of_all_keys(masks: Masks, ranks: Ranks) -> Masks:
    def gathered(x_bs):
        return None if x_bs is None else lax.all_gather(x_bs, ranks.axis, axis=1, tiled=True)

    return masks._replace(k_positions_BS=gathered(masks.k_positions_BS), k_segments_BS=gathered(masks.k_segments_BS))
