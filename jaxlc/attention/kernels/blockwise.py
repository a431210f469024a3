"""The portable kernel: attention block by block in plain XLA, O(T + S) memory, on any device.

The softmax runs online over KV blocks (Milakov and Gimelshein 2018; FlashAttention, algorithm 1).
The backward recomputes the attention weights of each block from the lse (FlashAttention-2,
algorithm 2). Where the key ranges of a block of queries show that a pair of blocks is fully masked,
it is skipped. So causal attention costs half of full attention, and short packed documents cost
little.

A loop runs over key/value heads, so that the data of one pair of blocks stays in a core's cache.
Scores, out and dq are stored transposed, BSR and BHR. On CPU, a matrix product with transposed
scores as its first operand takes three times as long, and the backward would have one. XLA also
computes the maximum over the rows of a block five times as fast as the maximum of each row.

Shape letters, besides core/axes.py: I query blocks, J KV blocks, R = G x T rows of a query block:
the G query heads of one key/value head, one after the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    KeyRanges,
    OutLse,
    QueryResults,
    implicit_ranges,
    pad_tokens,
)
from jaxlc.core import Unsupported


class Queries(NamedTuple):
    """All query blocks of one key/value head; inside a scan, one of them, without I."""

    q_IBRH: jax.Array
    ranges_IB1R: "BlockRanges | None"  # None: nothing is masked


class Keys(NamedTuple):
    """All KV blocks of one key/value head; inside a scan, one of them, without J."""

    k_JBSH: jax.Array
    v_JBSH: jax.Array
    first_J: jax.Array  # index of the first key of the block, int32


class BlockRanges(NamedTuple):
    """The key ranges of all rows R, and their bounds in each query block; inside a scan, of one
    block.
    """

    start_IB1R: jax.Array | None  # None: 0
    end_IB1R: jax.Array
    min_start_I: jax.Array  # without fully masked rows
    max_end_I: jax.Array


class QueryStats(NamedTuple):
    """Per-query inputs of the backward pass."""

    dout_IBRH: jax.Array
    lse_IB1R: jax.Array  # -inf replaced by 0: such a row is fully masked in every block
    delta_IB1R: jax.Array  # sum_H(dout out) - dlse


def block_operands(
    q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec
) -> tuple[Queries, Keys]:
    """For all key/value heads: q, k and v have a leading K; ranges do not, since all heads share
    them.

    T and S are padded to multiples of the block sizes. No range contains the padding, and the
    ranges of the padding are empty.
    """
    _, num_queries, num_heads, _ = q_BTNH.shape
    _, num_keys, num_kv_heads, _ = k_BSKH.shape
    q_block_tokens = _block_tokens(spec.query_block_tokens, num_queries, spec)
    kv_block_tokens = _block_tokens(spec.key_block_tokens, num_keys, spec)
    q = _split_heads(q_BTNH, num_kv_heads, q_block_tokens)
    k, v = (_split_heads(x, num_kv_heads, kv_block_tokens) for x in (k_BSKH, v_BSKH))
    first_J = jnp.arange(0, num_keys, kv_block_tokens, dtype=jnp.int32)
    start_BT, end_BT = _implicit_ranges(q_BTNH, num_keys, spec) if ranges is None else ranges
    if end_BT is None and num_keys % kv_block_tokens:
        end_BT = jnp.full((1, num_queries), num_keys, jnp.int32)
    if end_BT is None:
        return Queries(q, None), Keys(k, v, first_J)
    return Queries(
        q, _block_ranges(start_BT, end_BT, q_block_tokens, num_heads // num_kv_heads)
    ), Keys(k, v, first_J)


def query_stats(num_kv_heads: int, results: QueryResults, spec: AttentionSpec) -> QueryStats:
    """For all key/value heads: each array with a leading K."""
    block_tokens = _block_tokens(spec.query_block_tokens, results.out_BTNH.shape[1], spec)
    lse, delta = (
        _split_heads(x_BNT.swapaxes(1, 2)[..., None], num_kv_heads, block_tokens).swapaxes(3, 4)
        for x_BNT in (results.finite_lse_BNT, results.delta_BNT)
    )
    return QueryStats(_split_heads(results.dout_BTNH, num_kv_heads, block_tokens), lse, delta)


def _implicit_ranges(q_BTNH: jax.Array, num_keys: int, spec: AttentionSpec):
    """(start_1T, end_1T) of a call without ranges; see `contract.implicit_ranges`."""
    bounds = implicit_ranges(spec, q_BTNH.shape[1], num_keys)
    # Tied to the queries, see `attend_shard`: XLA and autodiff would hoist constants out of the loop over layers, and
    # with them the dense masks of all blocks.
    _, bounds = lax.optimization_barrier((q_BTNH, bounds))
    return (None if x is None else x[None] for x in bounds)


def _block_ranges(
    start_BT: jax.Array | None, end_BT: jax.Array, block_tokens: int, groups: int
) -> BlockRanges:
    """The ranges of the rows of all query blocks. A row R is a query of one of the `groups` heads."""
    end_IBT = _split_blocks(end_BT, block_tokens)
    start_IBT = (
        jnp.zeros_like(end_IBT) if start_BT is None else _split_blocks(start_BT, block_tokens)
    )
    min_start_I = jnp.where(start_IBT < end_IBT, start_IBT, jnp.iinfo(jnp.int32).max).min((1, 2))
    # One entry per row R. Repeating a mask over T for the G heads makes XLA on CPU three times as
    # slow.
    start_IB1R, end_IB1R = (jnp.tile(x, groups)[:, :, None] for x in (start_IBT, end_IBT))
    return BlockRanges(
        None if start_BT is None else start_IB1R, end_IB1R, min_start_I, end_IBT.max((1, 2))
    )


def _block_tokens(limit: int, num_tokens: int, spec: AttentionSpec) -> int:
    """The block size: at most `limit`, and at least two blocks under a causal mask, so that some
    can be skipped.
    """
    return min(limit, -(-num_tokens // 2) if spec.causal else num_tokens)


def _split_blocks(x_BT: jax.Array, block_tokens: int) -> jax.Array:
    """[B, T, ...] -> [I, B, block, ...], padded with zeros to a multiple of the block size."""
    x_BT = pad_tokens(x_BT, block_tokens)
    return x_BT.reshape(x_BT.shape[0], -1, block_tokens, *x_BT.shape[2:]).swapaxes(0, 1)


def _split_heads(x_BTNH: jax.Array, num_kv_heads: int, block_tokens: int) -> jax.Array:
    """[B, T, N, H] -> [K, I, B, R, H]."""
    x = _split_blocks(x_BTNH, block_tokens)
    *blocks, num_heads, width = x.shape
    x = x.reshape(*blocks, num_kv_heads, num_heads // num_kv_heads, width)  # [I, B, T, K, G, H]
    x = x.transpose(3, 0, 1, 4, 2, 5)  # [K, I, B, G, T, H]
    return x.reshape(*x.shape[:3], -1, width)


def join_blocks(x: jax.Array, like_BTNH: jax.Array) -> jax.Array:
    """[K, I, B, H, R] -> [B, T, N, H], without the padding of T."""
    batch, num_tokens, num_heads, _ = like_BTNH.shape
    num_kv_heads, num_blocks, _, width, _ = x.shape
    # [K, I, B, H, G, T]
    x = x.reshape(num_kv_heads, num_blocks, batch, width, num_heads // num_kv_heads, -1)
    return x.transpose(2, 1, 5, 0, 4, 3).reshape(batch, -1, num_heads, width)[:, :num_tokens]


def unsupported(problem: AttentionProblem) -> None:
    """See `contract.Kernel.unsupported`. Every problem is supported on every platform."""


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: KeyRanges | None,
    spec: AttentionSpec,
) -> OutLse:
    """See `contract.Kernel.forward`.

    Raises:
      Unsupported: a scale that is not positive. The running maximum is of unscaled scores, and for such a scale the
        largest score does not have the largest weight.
    """
    if spec.scale_for(q_BTNH.shape[-1]) <= 0:
        raise Unsupported(
            f"unsupported by attention kernel blockwise: scale {spec.scale} (supported: above 0)"
        )
    if ranges is not None and len(q_BTNH) > 1:
        return _map_sequences(forward, spec, q_BTNH, k_BSKH, v_BSKH, ranges)
    queries, keys = block_operands(q_BTNH, k_BSKH, v_BSKH, ranges, spec)

    def one_head(operands):
        return _forward_of_head(*_of_head(queries, keys, *operands), spec)

    # [K, I, B, H, R], [K, I, B, 1, R]
    out, lse = lax.map(one_head, (queries.q_IBRH, keys.k_JBSH, keys.v_JBSH))
    return join_blocks(out, q_BTNH), join_blocks(lse, q_BTNH)[..., 0].swapaxes(1, 2)


def backward(
    q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults
):
    """See `contract.Kernel.backward`."""
    if ranges is not None and len(q_BTNH) > 1:
        return _map_sequences(backward, spec, q_BTNH, k_BSKH, v_BSKH, ranges, results)
    queries, keys = block_operands(q_BTNH, k_BSKH, v_BSKH, ranges, spec)
    stats = query_stats(k_BSKH.shape[2], results, spec)

    def one_head(operands):
        *qkv, stats = operands
        return _backward_of_head(*_of_head(queries, keys, *qkv), stats, spec)

    dq, dk, dv = lax.map(one_head, (queries.q_IBRH, keys.k_JBSH, keys.v_JBSH, stats))
    return (
        join_blocks(dq, q_BTNH),
        join_blocks(dk.swapaxes(3, 4), k_BSKH),
        join_blocks(dv.swapaxes(3, 4), v_BSKH),
    )


def _map_sequences(function, spec: AttentionSpec, *operands):
    """`forward` or `backward` of each sequence alone, as a batch of one: packed sequences can skip
    different blocks.
    """

    def one_sequence(operands):
        q, k, v, ranges, *results = jax.tree.map(lambda x: x[None], operands)
        return jax.tree.map(lambda x: x[0], function(q, k, v, ranges, spec, *results))

    return lax.map(one_sequence, operands)


def _of_head(queries: Queries, keys: Keys, q_IBRH, k_JBSH, v_JBSH) -> tuple[Queries, Keys]:
    """The operands of one head.

    The barrier ties the ranges, which are the same for every head, to the head's operands.
    Otherwise, differentiating `jax.checkpoint` would hoist them out of the loop, and with them the
    dense masks of all blocks.
    """
    return lax.optimization_barrier(
        (queries._replace(q_IBRH=q_IBRH), keys._replace(k_JBSH=k_JBSH, v_JBSH=v_JBSH))
    )


def _forward_of_head(queries: Queries, keys: Keys, spec: AttentionSpec) -> OutLse:
    """(out_IBHR, lse_IB1R)"""
    _, batch, rows, head_dim = queries.q_IBRH.shape
    value_dim = keys.v_JBSH.shape[-1]

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
                return tuple(
                    map(jnp.add, gradients, _block_gradients(q_block, kv_block, stats_block, spec))
                )

            dq_BHR, *dkv = _skip_if_fully_masked(q_block, kv_block, add, (dq_BHR, *dkv))
            return tuple(dkv), dq_BHR

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (kv_block.k_JBSH, kv_block.v_JBSH))
        dkv, dq_IBHR = lax.scan(per_query_block, start, (queries, stats, dq_IBHR))
        return dq_IBHR, dkv

    dq_IBHR = jnp.zeros(queries.q_IBRH.swapaxes(2, 3).shape, jnp.float32)
    dq_IBHR, (dk_JBSH, dv_JBSH) = lax.scan(per_kv_block, dq_IBHR, keys)
    return dq_IBHR, dk_JBSH, dv_JBSH


def _online_softmax(carry, queries: Queries, keys: Keys, spec: AttentionSpec):
    """Adds one KV block to the running (max, sum of exponentials, unnormalized out) of a query
    block.

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
    v_BHS = keys.v_JBSH.swapaxes(1, 2)
    dtype = keys.v_JBSH.dtype
    out_BHR = shrink_B1R * out_BHR + _matmul("BHS,BSR->BHR", v_BHS, p_BSR.astype(dtype))
    return new_max_B1R, total_B1R, out_BHR


def _block_gradients(queries: Queries, keys: Keys, stats: QueryStats, spec: AttentionSpec):
    """The contribution of one pair of blocks to (dq_BHR, dk_BSH, dv_BSH), float32."""
    scale = spec.scale_for(keys.k_JBSH.shape[-1])
    dtype = keys.v_JBSH.dtype
    scores_BSR = scale * _matmul("BSH,BRH->BSR", keys.k_JBSH, queries.q_IBRH)
    p_BSR = _mask(jnp.exp(scores_BSR - stats.lse_IB1R), queries, keys, 0.0)
    # otherwise XLA on CPU computes the exponentials once per use: twice
    p_BSR = lax.optimization_barrier(p_BSR)
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
    # On CPU, XLA passes 16-bit products to a library that does not support all of these, and has no
    # fallback.
    return lax.platform_dependent(
        a,
        b,
        cpu=lambda *operands: product(*(x.astype(jnp.float32) for x in operands)),
        default=product,
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
    """`compute(carry)`, or carry if the bounds of the key ranges show that the blocks are fully
    masked.
    """
    ranges = queries.ranges_IB1R
    num_keys = keys.k_JBSH.shape[1]
    if ranges is None:
        return compute(carry)
    may_attend = (ranges.min_start_I < keys.first_J + num_keys) & (keys.first_J < ranges.max_end_I)
    return lax.cond(may_attend, compute, lambda carry: carry, carry)
