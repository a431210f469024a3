"""Backward pass of attention on a GPU (FlashAttention-2, algorithm 2), for Triton.

Two kernels: one for dQ, whose programs own query blocks, and one for dK and dV, whose programs own KV blocks. Both
compute the attention weights and their gradient: seven matrix products instead of five. In return all sums are in
registers, in a fixed order, without atomic additions, so the results are bitwise reproducible. A program for dK and dV
sums over the query heads that share its key/value head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxlc.attention.kernels.block_mask import Ranges, kv_block_ranges, query_block_ranges
from jaxlc.attention.kernels.triton_blocks import (
    LOG2_E,
    KernelParams,
    all_keys_spec,
    block_ranges_spec,
    key_ranges_specs,
    load_1d,
    load_2d,
    load_mask,
    loop_over_blocks,
    matmul,
    own_rows_spec,
    padded,
    store_2d,
)


class QueryStats(NamedTuple):
    """Per-query inputs of the backward pass; inside a kernel, references to them."""

    dout_BTNH: jax.Array  # in the dtype of q, k and v, for matrix products with them
    lse2_BNT: jax.Array  # float32: lse over all keys, to base 2; 0 for fully masked rows
    delta_BNT: jax.Array  # float32: sum_H(dout out) - dlse


def flash_dq(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: Ranges | None,
    stats: QueryStats,
    params: KernelParams,
) -> jax.Array:
    """Returns the contribution of these keys to dq_BTNH, float32."""
    mask, (batch, num_queries, num_heads, head_dim) = params.mask, q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    blocks = kv_block_ranges(ranges, mask)

    own_rows = functools.partial(own_rows_spec, mask.query_block)
    all_keys = functools.partial(all_keys_spec, (num_keys,), heads_per_kv)
    own_1d = pl.BlockSpec((None, None, mask.query_block), lambda i, n, b: (b, n, i))
    return params.pallas_call(
        functools.partial(_dq_kernel, mask=mask, scale=params.scale, head_dim=head_dim, value_dim=value_dim),
        grid=(pl.cdiv(num_queries, mask.query_block), num_heads, batch),
        in_specs=[
            own_rows(head_dim), all_keys(head_dim), all_keys(value_dim), key_ranges_specs(ranges),
            QueryStats(own_rows(value_dim), own_1d, own_1d), block_ranges_spec(blocks),
        ],
        out_specs=own_rows(head_dim),
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32),
        name="flash_dq",
    )(q_BTNH, k_BSKH, v_BSKH, ranges, stats, blocks)  # fmt: skip


def _dq_kernel(q_ref, k_ref, v_ref, ranges, stats, blocks_ref, dq_ref, *, mask, scale, head_dim, value_dim):
    first_T = pl.program_id(0) * mask.query_block
    q_TH = load_2d(q_ref, first_T, mask.num_queries, head_dim)
    dout_TH = load_2d(stats.dout_BTNH, first_T, mask.num_queries, value_dim)
    lse2_T, delta_T = (load_1d(x, first_T, mask.num_queries) for x in (stats.lse2_BNT, stats.delta_BNT))

    def loop_body(j, dq_TH, masked):
        first_S = j * mask.kv_block
        block = pl.ds(first_S, mask.kv_block)
        # Without a mask, blocks are complete: a multiple of the block size needs no check of bounds.
        num_keys = mask.num_keys if masked else mask.kv_block * (mask.num_keys // mask.kv_block)
        k_SH = load_2d(k_ref.at[block], first_S, num_keys, head_dim)
        v_SH = load_2d(v_ref.at[block], first_S, num_keys, value_dim)
        p_TS = jnp.exp2(scale * LOG2_E * matmul(q_TH, k_SH, transpose_b=True) - lse2_T[:, None])
        if masked and (mask_TS := load_mask(ranges, first_T, first_S, mask)) is not None:
            p_TS = jnp.where(mask_TS, p_TS, 0.0)
        ds_TS = p_TS * (matmul(dout_TH, v_SH, transpose_b=True) - delta_T[:, None])
        return dq_TH + matmul(ds_TS.astype(k_SH.dtype), k_SH)

    dq_TH = loop_over_blocks(blocks_ref, loop_body, jnp.zeros(q_TH.shape, jnp.float32))
    store_2d(dq_ref, scale * dq_TH, first_T, mask.num_queries, head_dim)


def flash_dkv(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: Ranges | None,
    stats: QueryStats,
    params: KernelParams,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dk_BSKH, dv_BSKH), float32, summed over the query heads of each key/value head."""
    mask, (batch, num_queries, num_heads, head_dim) = params.mask, q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    blocks = query_block_ranges(ranges, mask)

    own_rows = functools.partial(own_rows_spec, mask.kv_block)

    def all_queries(width):
        return pl.BlockSpec((None, num_queries, heads_per_kv, padded(width)), lambda j, n, b: (b, 0, n, 0))

    all_1d = pl.BlockSpec((None, heads_per_kv, num_queries), lambda j, n, b: (b, n, 0))
    return params.pallas_call(
        functools.partial(_dkv_kernel, mask=mask, scale=params.scale, head_dim=head_dim, value_dim=value_dim),
        grid=(pl.cdiv(num_keys, mask.kv_block), num_kv_heads, batch),
        in_specs=[
            all_queries(head_dim), own_rows(head_dim), own_rows(value_dim), key_ranges_specs(ranges),
            QueryStats(all_queries(value_dim), all_1d, all_1d), block_ranges_spec(blocks),
        ],
        out_specs=[own_rows(head_dim), own_rows(value_dim)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k_BSKH, v_BSKH)],
        name="flash_dkv",
    )(q_BTNH, k_BSKH, v_BSKH, ranges, stats, blocks)  # fmt: skip


def _dkv_kernel(q_ref, k_ref, v_ref, ranges, stats, blocks_ref, dk_ref, dv_ref, *, mask, scale, head_dim, value_dim):
    first_S = pl.program_id(0) * mask.kv_block
    k_SH = load_2d(k_ref, first_S, mask.num_keys, head_dim)
    v_SH = load_2d(v_ref, first_S, mask.num_keys, value_dim)

    def loop_body(i, carry, masked, head):
        dk_SH, dv_SH = carry
        first_T = i * mask.query_block
        block = pl.ds(first_T, mask.query_block)
        # Queries past the end read as 0, and so does dout. They add nothing, so they need no mask.
        num_queries = mask.num_queries if masked else mask.query_block * (mask.num_queries // mask.query_block)
        q_TH = load_2d(q_ref.at[block, head], first_T, num_queries, head_dim)
        dout_TH = load_2d(stats.dout_BTNH.at[block, head], first_T, num_queries, value_dim)
        lse2_T, delta_T = (load_1d(x.at[head, block], first_T, num_queries) for x in (stats.lse2_BNT, stats.delta_BNT))
        # The transposed weights are the first operand of both matrix products below.
        p_ST = jnp.exp2(scale * LOG2_E * matmul(k_SH, q_TH, transpose_b=True) - lse2_T[None, :])
        if masked and (mask_ST := load_mask(ranges, first_T, first_S, mask, keys_first=True)) is not None:
            p_ST = jnp.where(mask_ST, p_ST, 0.0)
        ds_ST = p_ST * (matmul(v_SH, dout_TH, transpose_b=True) - delta_T[None, :])
        dv_SH += matmul(p_ST.astype(v_SH.dtype), dout_TH)
        return dk_SH + matmul(ds_ST.astype(k_SH.dtype), q_TH), dv_SH

    def one_head(head, carry):
        return loop_over_blocks(blocks_ref, functools.partial(loop_body, head=head), carry)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_SH, v_SH))
    dk_SH, dv_SH = lax.fori_loop(0, q_ref.shape[1], one_head, start)
    store_2d(dk_ref, scale * dk_SH, first_S, mask.num_keys, head_dim)
    store_2d(dv_ref, dv_SH, first_S, mask.num_keys, value_dim)
