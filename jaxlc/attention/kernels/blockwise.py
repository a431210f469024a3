"""The portable kernel: attention block by block in plain XLA, O(T + S) memory, on any device.

The softmax runs online over KV blocks (Milakov and Gimelshein 2018; FlashAttention, algorithm 1). The backward
recomputes the attention weights of each block from the lse (FlashAttention-2, algorithm 2). Where the key ranges of a
block of queries show that a pair of blocks is fully masked, it is skipped. So causal attention costs half of full
attention, and short packed documents cost little.

A loop runs over key/value heads, so that the data of one pair of blocks stays in a core's cache. Shape letters are
those of blockwise_operands.py. Scores, out and dq are stored transposed, BSR and BHR. On CPU, a matrix product with
transposed scores as its first operand takes three times as long, and the backward would have one. XLA also computes the
maximum over the rows of a block five times as fast as the maximum of each row.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels.blockwise_operands import (
    Keys,
    Queries,
    QueryStats,
    block_operands,
    join_blocks,
    query_stats,
)
from jaxlc.core.errors import Unsupported


def unsupported(problem: AttentionProblem) -> None:
    """See `contract.Kernel.unsupported`. Every problem is supported on every platform."""


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ranges: KeyRanges | None, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`.

    Raises:
      Unsupported: a scale that is not positive. The running maximum is of unscaled scores, and for such a scale the
        largest score does not have the largest weight.
    """
    if spec.scale_for(q_BTNH.shape[-1]) <= 0:
        raise Unsupported(f"unsupported by attention kernel blockwise: scale {spec.scale} (supported: above 0)")
    if ranges is not None and len(q_BTNH) > 1:
        return _map_sequences(lambda *operands: forward(*operands, spec), q_BTNH, k_BSKH, v_BSKH, ranges)
    queries, keys = block_operands(q_BTNH, k_BSKH, v_BSKH, ranges, spec)

    def one_head(operands):
        return _forward_of_head(*_of_head(queries, keys, *operands), spec)

    out, lse = lax.map(one_head, (queries.q_IBRH, keys.k_JBSH, keys.v_JBSH))  # [K, I, B, H, R], [K, I, B, 1, R]
    return join_blocks(out, q_BTNH), join_blocks(lse, q_BTNH)[..., 0].swapaxes(1, 2)


def backward(q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults):
    """See `contract.Kernel.backward`."""
    if ranges is not None and len(q_BTNH) > 1:

        def one_sequence(q, k, v, ranges, results):
            return backward(q, k, v, ranges, spec, results)

        return _map_sequences(one_sequence, q_BTNH, k_BSKH, v_BSKH, ranges, results)
    queries, keys = block_operands(q_BTNH, k_BSKH, v_BSKH, ranges, spec)
    stats = query_stats(k_BSKH.shape[2], results, spec)

    def one_head(operands):
        *qkv, stats = operands
        return _backward_of_head(*_of_head(queries, keys, *qkv), stats, spec)

    dq, dk, dv = lax.map(one_head, (queries.q_IBRH, keys.k_JBSH, keys.v_JBSH, stats))
    return join_blocks(dq, q_BTNH), join_blocks(dk.swapaxes(3, 4), k_BSKH), join_blocks(dv.swapaxes(3, 4), v_BSKH)


def _map_sequences(function, *operands):
    """`function` of each sequence alone, as a batch of one: packed sequences can skip different blocks."""

    def one_sequence(operands):
        results = function(*jax.tree.map(lambda x: x[None], operands))
        return jax.tree.map(lambda x: x[0], results)

    return lax.map(one_sequence, operands)


def _of_head(queries: Queries, keys: Keys, q_IBRH, k_JBSH, v_JBSH) -> tuple[Queries, Keys]:
    """The operands of one head.

    The barrier ties the ranges, which are the same for every head, to the head's operands. Otherwise, differentiating
    `jax.checkpoint` would hoist them out of the loop, and with them the dense masks of all blocks.
    """
    return lax.optimization_barrier((queries._replace(q_IBRH=q_IBRH), keys._replace(k_JBSH=k_JBSH, v_JBSH=v_JBSH)))


def _forward_of_head(queries: Queries, keys: Keys, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """(out_IBHR, lse_IB1R)"""
    (_, batch, rows, head_dim), value_dim = queries.q_IBRH.shape, keys.v_JBSH.shape[-1]

    def per_query_block(_, q_block: Queries):
        def per_kv_block(carry, kv_block: Keys):
            def attend(carry):
                return _online_softmax(carry, q_block, kv_block, spec)

            return _skip_if_fully_masked(q_block, kv_block, attend, carry), None

        start = (
            jnp.full((batch, 1, rows), -jnp.inf, jnp.float32),
            jnp.zeros((batch, 1, rows), jnp.float32),
            jnp.zeros((batch, value_dim, rows), jnp.float32),
        )
        (max_B1R, total_B1R, out_BHR), _ = lax.scan(per_kv_block, start, keys)
        is_empty = total_B1R == 0
        total_B1R = jnp.where(is_empty, 1.0, total_B1R)
        lse_B1R = spec.scale_for(head_dim) * max_B1R + jnp.log(total_B1R)
        return None, (out_BHR / total_B1R, jnp.where(is_empty, -jnp.inf, lse_B1R))

    return lax.scan(per_query_block, None, queries)[1]


def _backward_of_head(queries: Queries, keys: Keys, stats: QueryStats, spec: AttentionSpec):
    """(dq_IBHR, dk_JBSH, dv_JBSH)"""

    def per_kv_block(dq_IBHR, kv_block: Keys):
        def per_query_block(dkv, blocks):
            q_block, stats_block, dq_BHR = blocks

            def add(gradients):
                return tuple(map(jnp.add, gradients, _block_gradients(q_block, kv_block, stats_block, spec)))

            dq_BHR, *dkv = _skip_if_fully_masked(q_block, kv_block, add, (dq_BHR, *dkv))
            return tuple(dkv), dq_BHR

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (kv_block.k_JBSH, kv_block.v_JBSH))
        dkv, dq_IBHR = lax.scan(per_query_block, start, (queries, stats, dq_IBHR))
        return dq_IBHR, dkv

    dq_IBHR = jnp.zeros(queries.q_IBRH.swapaxes(2, 3).shape, jnp.float32)
    dq_IBHR, (dk_JBSH, dv_JBSH) = lax.scan(per_kv_block, dq_IBHR, keys)
    return dq_IBHR, dk_JBSH, dv_JBSH


def _online_softmax(carry, queries: Queries, keys: Keys, spec: AttentionSpec):
    """Adds one KV block to the running (max, sum of exponentials, unnormalized out) of a query block.

    The maximum is of unscaled scores.
    """
    max_B1R, total_B1R, out_BHR = carry
    scale = spec.scale_for(queries.q_IBRH.shape[-1])
    scores_BSR = _matmul("BSH,BRH->BSR", keys.k_JBSH, queries.q_IBRH)
    scores_BSR = _mask(scores_BSR, queries, keys, -jnp.inf)
    new_max_B1R = jnp.maximum(max_B1R, scores_BSR.max(axis=1, keepdims=True))
    finite_max_B1R = jnp.where(jnp.isneginf(new_max_B1R), 0.0, new_max_B1R)  # -inf - -inf is NaN
    p_BSR = jnp.exp(scale * (scores_BSR - finite_max_B1R))
    shrink_B1R = jnp.exp(scale * (max_B1R - finite_max_B1R))
    total_B1R = shrink_B1R * total_B1R + p_BSR.sum(axis=1, keepdims=True)
    v_BHS, dtype = keys.v_JBSH.swapaxes(1, 2), keys.v_JBSH.dtype
    out_BHR = shrink_B1R * out_BHR + _matmul("BHS,BSR->BHR", v_BHS, p_BSR.astype(dtype))
    return new_max_B1R, total_B1R, out_BHR


def _block_gradients(queries: Queries, keys: Keys, stats: QueryStats, spec: AttentionSpec):
    """The contribution of one pair of blocks to (dq_BHR, dk_BSH, dv_BSH), float32."""
    scale, dtype = spec.scale_for(keys.k_JBSH.shape[-1]), keys.v_JBSH.dtype
    scores_BSR = scale * _matmul("BSH,BRH->BSR", keys.k_JBSH, queries.q_IBRH)
    p_BSR = _mask(jnp.exp(scores_BSR - stats.lse_IB1R), queries, keys, 0.0)
    p_BSR = lax.optimization_barrier(p_BSR)  # otherwise XLA on CPU computes the exponentials once per use: twice
    dp_BSR = _matmul("BSH,BRH->BSR", keys.v_JBSH, stats.dout_IBRH)
    ds_BSR = (scale * p_BSR * (dp_BSR - stats.delta_IB1R)).astype(dtype)
    dq_BHR = _matmul("BHS,BSR->BHR", keys.k_JBSH.swapaxes(1, 2), ds_BSR)
    dk_BSH = _matmul("BSR,BRH->BSH", ds_BSR, queries.q_IBRH)
    dv_BSH = _matmul("BSR,BRH->BSH", p_BSR.astype(dtype), stats.dout_IBRH)
    return dq_BHR, dk_BSH, dv_BSH


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    def product(a, b):
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    if a.dtype == jnp.float32:
        return product(a, b)
    # On CPU, XLA passes 16-bit products to a library that does not support all of these, and has no fallback.
    return lax.platform_dependent(
        a, b, cpu=lambda *operands: product(*(x.astype(jnp.float32) for x in operands)), default=product
    )


def _mask(x_BSR: jax.Array, queries: Queries, keys: Keys, masked: float) -> jax.Array:
    """x with `masked` where the query does not attend to the key."""
    ranges = queries.ranges_IB1R
    if ranges is None:
        return x_BSR
    keys_S1 = keys.first_J + jnp.arange(x_BSR.shape[1], dtype=jnp.int32)[:, None]
    mask_BSR = keys_S1 < ranges.end_IB1R
    if ranges.start_IB1R is not None:
        mask_BSR &= keys_S1 >= ranges.start_IB1R
    return jnp.where(mask_BSR, x_BSR, masked)


def _skip_if_fully_masked(queries: Queries, keys: Keys, compute, carry):
    """`compute(carry)`, or carry if the bounds of the key ranges show that the blocks are fully masked."""
    ranges, num_keys = queries.ranges_IB1R, keys.k_JBSH.shape[1]
    if ranges is None:
        return compute(carry)
    may_attend = (ranges.min_start_I < keys.first_J + num_keys) & (keys.first_J < ranges.max_end_I)
    return lax.cond(may_attend, compute, lambda carry: carry, carry)
