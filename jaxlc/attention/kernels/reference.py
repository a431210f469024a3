"""The reference implementation: attention by its definition, in float32 and O(T x S) memory.

Tests compare every other kernel and every strategy with it.
"""

import functools

import jax
import jax.numpy as jnp

from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    KeyRanges,
    QueryResults,
    implicit_ranges,
)

# the default on GPUs is TF32
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def unsupported(problem: AttentionProblem) -> None:
    """See `contract.Kernel.unsupported`. Every problem is supported on every platform."""


def _dense_mask_BNTS(
    q_BTNH: jax.Array, k_BSKH: jax.Array, ranges: KeyRanges | None, spec: AttentionSpec
) -> jax.Array:
    (batch, num_queries, num_heads, _), num_keys = q_BTNH.shape, k_BSKH.shape[1]
    if ranges is None:
        start_T, end_T = implicit_ranges(spec, num_queries, num_keys)
        bounds = 0 if start_T is None else start_T, num_keys if end_T is None else end_T
        ranges = KeyRanges(*(jnp.broadcast_to(x, (batch, num_queries)) for x in bounds))
    return jnp.broadcast_to(
        ranges.dense_mask_BTS(num_keys)[:, None], (batch, num_heads, num_queries, num_keys)
    )


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: KeyRanges | None,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T) v over the visible keys. Returns (out_BTNH, lse_BNT), both float32."""
    q_BTNH, k_BSKH, v_BSKH = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    num_groups = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, num_groups, axis=2) for x in (k_BSKH, v_BSKH))
    scores_BNTS = spec.scale_for(q_BTNH.shape[-1]) * _einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)
    mask_BNTS = _dense_mask_BNTS(q_BTNH, k_BSKH, ranges, spec)
    # For fully masked rows the maximum and the sum are replaced, so that no gradient contains inf -
    # inf.
    is_empty_BNT = ~mask_BNTS.any(axis=-1)
    masked_BNTS = jnp.where(mask_BNTS, scores_BNTS, -jnp.inf)
    max_BNT = jax.lax.stop_gradient(jnp.where(is_empty_BNT, 0.0, masked_BNTS.max(axis=-1)))
    weights_BNTS = jnp.where(
        mask_BNTS, jnp.exp(jnp.where(mask_BNTS, scores_BNTS - max_BNT[..., None], 0.0)), 0.0
    )
    total_BNT = jnp.where(is_empty_BNT, 1.0, weights_BNTS.sum(axis=-1))
    out_BTNH = _einsum("BNTS,BSNH->BTNH", weights_BNTS / total_BNT[..., None], v_BSNH)
    return out_BTNH, jnp.where(is_empty_BNT, -jnp.inf, max_BNT + jnp.log(total_BNT))


def backward(
    q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults
):
    """See `contract.Kernel.backward`. Returns (dq_BTNH, dk_BSKH, dv_BSKH) of this KV block, all
    float32.

    With the global lse, p = exp(scores - lse) are the attention weights of this block's keys, and
    ds = p (dout . v - dout . out + dlse) (FlashAttention, section 3.1 and appendix B.2).
    """
    out_BTNH, lse_BNT, dout_BTNH, dlse_BNT = results
    scale = spec.scale_for(q_BTNH.shape[-1])
    q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH = (
        x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH)
    )
    batch, num_keys, num_kv_heads = k_BSKH.shape[:3]
    num_groups = q_BTNH.shape[2] // num_kv_heads
    k_BSNH, v_BSNH = (jnp.repeat(x, num_groups, axis=2) for x in (k_BSKH, v_BSKH))
    scores_BNTS = scale * _einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)
    mask_BNTS = _dense_mask_BNTS(q_BTNH, k_BSKH, ranges, spec)
    p_BNTS = jnp.where(mask_BNTS, jnp.exp(scores_BNTS - lse_BNT[..., None]), 0.0)
    delta_BNT = _einsum("BTNH,BTNH->BNT", dout_BTNH, out_BTNH) - dlse_BNT
    ds_BNTS = p_BNTS * (_einsum("BTNH,BSNH->BNTS", dout_BTNH, v_BSNH) - delta_BNT[..., None])

    def sum_groups(x_BSNH):
        return x_BSNH.reshape(batch, num_keys, num_kv_heads, num_groups, -1).sum(axis=3)

    dq_BTNH = scale * _einsum("BNTS,BSNH->BTNH", ds_BNTS, k_BSNH)
    dk_BSNH = scale * _einsum("BNTS,BTNH->BSNH", ds_BNTS, q_BTNH)
    dv_BSNH = _einsum("BNTS,BTNH->BSNH", p_BNTS, dout_BTNH)
    return dq_BTNH, sum_groups(dk_BSNH), sum_groups(dv_BSNH)
