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
    OutLse,
    QueryResults,
    explicit_ranges,
)

# the default on GPUs is TF32
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def unsupported(problem: AttentionProblem) -> None:
    """See `contract.Kernel.unsupported`. Every problem is supported on every platform."""


def _repeated(x_BSKH: jax.Array, num_heads: int) -> jax.Array:
    """[B, S, N, H], float32: a key/value head for each query head."""
    num_groups = num_heads // x_BSKH.shape[2]
    return jnp.repeat(x_BSKH.astype(jnp.float32), num_groups, axis=2)


def _scores_BNTS(
    q_BTNH: jax.Array, k_BSKH: jax.Array, ranges: KeyRanges | None, spec: AttentionSpec
) -> jax.Array:
    """The scaled scores, float32; -inf where the query does not attend to the key."""
    num_keys = k_BSKH.shape[1]
    k_BSNH = _repeated(k_BSKH, q_BTNH.shape[2])
    scores_BNTS = _einsum("BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k_BSNH)
    mask_BTS = explicit_ranges(ranges, q_BTNH, num_keys, spec).dense_mask_BTS(num_keys)
    scale = spec.scale_for(q_BTNH.shape[-1])
    return jnp.where(mask_BTS[:, None], scale * scores_BNTS, -jnp.inf)


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: KeyRanges | None,
    spec: AttentionSpec,
) -> OutLse:
    """softmax(scale q k^T) v over the visible keys. Returns (out_BTNH, lse_BNT), both float32."""
    scores_BNTS = _scores_BNTS(q_BTNH, k_BSKH, ranges, spec)
    # For fully masked rows the maximum and the sum are replaced, so that no gradient contains inf -
    # inf.
    max_BNT = jax.lax.stop_gradient(scores_BNTS.max(axis=-1))
    is_empty_BNT = jnp.isneginf(max_BNT)
    max_BNT = jnp.where(is_empty_BNT, 0.0, max_BNT)
    weights_BNTS = jnp.exp(scores_BNTS - max_BNT[..., None])
    total_BNT = jnp.where(is_empty_BNT, 1.0, weights_BNTS.sum(axis=-1))
    v_BSNH = _repeated(v_BSKH, q_BTNH.shape[2])
    out_BTNH = _einsum("BNTS,BSNH->BTNH", weights_BNTS / total_BNT[..., None], v_BSNH)
    return out_BTNH, jnp.where(is_empty_BNT, -jnp.inf, max_BNT + jnp.log(total_BNT))


def backward(
    q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults
):
    """See `contract.Kernel.backward`. Returns (dq_BTNH, dk_BSKH, dv_BSKH) of this KV block, all
    float32.

    With the global lse, p = exp(scores - lse) are the attention weights of this block's keys, and
    ds = p (dout . v - dout . out + dlse) (FlashAttention, section 3.1 and appendix B.2). These are
    the gradients of sum(dout . p v) - sum(delta p) with a constant lse.
    """

    def weighted(q_BTNH, k_BSKH, v_BSKH):
        scores_BNTS = _scores_BNTS(q_BTNH, k_BSKH, ranges, spec)
        p_BNTS = jnp.exp(scores_BNTS - results.finite_lse_BNT[..., None])
        v_BSNH = _repeated(v_BSKH, q_BTNH.shape[2])
        return _einsum("BNTS,BSNH->BTNH", p_BNTS, v_BSNH), p_BNTS.sum(axis=-1)

    operands = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    _, gradients = jax.vjp(weighted, *operands)
    return gradients((results.dout_BTNH.astype(jnp.float32), -results.delta_BNT))
