"""Forward pass of attention on a GPU (FlashAttention-2, algorithm 1), for Triton.

One program per query block and head loops over the KV blocks that are not fully masked. It keeps a running maximum, sum
of exponentials and unnormalized output in registers. Query heads that share a key/value head read it from the cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxlc.attention.kernels.block_mask import Ranges, kv_block_ranges
from jaxlc.attention.kernels.triton_blocks import (
    LN_2,
    LOG2_E,
    KernelParams,
    all_keys_spec,
    block_ranges_spec,
    key_ranges_specs,
    load_2d,
    load_mask,
    loop_over_blocks,
    matmul,
    own_rows_spec,
    store_1d,
    store_2d,
)


def flash_forward(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ranges: Ranges | None,
    layer_1: jax.Array | None = None,
    blocks: jax.Array | None = None,
    *,
    params: KernelParams,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNH, lse_BNT), both float32. A fully masked row has out 0, lse -inf.

    Args:
      k, v: [B, S, K, H]; [B, L, S, K, H] with `layer_1`, int32 [1], which selects a layer.
      blocks: the result of `kv_block_ranges` if it is known.
    """
    mask, (batch, num_queries, num_heads, head_dim) = params.mask, q_BTNH.shape
    num_kv_heads, value_dim = v.shape[-2:]
    heads_per_kv = num_heads // num_kv_heads
    blocks = kv_block_ranges(ranges, mask) if blocks is None else blocks

    own_rows = functools.partial(own_rows_spec, mask.query_block)
    all_keys = functools.partial(all_keys_spec, v.shape[1:-2], heads_per_kv)
    kernel = functools.partial(_kernel, mask=mask, scale=params.scale, head_dim=head_dim, value_dim=value_dim)
    return params.pallas_call(
        kernel,
        grid=(pl.cdiv(num_queries, mask.query_block), num_heads, batch),
        in_specs=[
            own_rows(head_dim), all_keys(head_dim), all_keys(value_dim),
            key_ranges_specs(ranges), block_ranges_spec(blocks),
            None if layer_1 is None else pl.BlockSpec((1,), lambda i, n, b: (0,)),
        ],
        out_specs=[own_rows(value_dim), pl.BlockSpec((None, None, mask.query_block), lambda i, n, b: (b, n, i))],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_queries, num_heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
        ],
        name="flash_forward",
    )(q_BTNH, k, v, ranges, blocks, layer_1)  # fmt: skip


def _kernel(q_ref, k_ref, v_ref, ranges, blocks_ref, layer_ref, out_ref, lse_ref, *, mask, scale, head_dim, value_dim):
    first_T = pl.program_id(0) * mask.query_block
    q_TH = load_2d(q_ref, first_T, mask.num_queries, head_dim)
    layer = () if layer_ref is None else (layer_ref[0],)

    def loop_body(j, carry, masked):
        max_T, total_T, out_TH = carry
        first_S = j * mask.kv_block
        block = *layer, pl.ds(first_S, mask.kv_block)
        # Without a mask, blocks are complete: a multiple of the block size needs no check of bounds.
        num_keys = mask.num_keys if masked else mask.kv_block * (mask.num_keys // mask.kv_block)
        k_SH = load_2d(k_ref.at[block], first_S, num_keys, head_dim)
        scores_TS = scale * LOG2_E * matmul(q_TH, k_SH, transpose_b=True)
        if masked and (mask_TS := load_mask(ranges, first_T, first_S, mask)) is not None:
            scores_TS = jnp.where(mask_TS, scores_TS, -jnp.inf)
        new_max_T = jnp.maximum(max_T, scores_TS.max(axis=1))
        finite_max_T = jnp.where(new_max_T == -jnp.inf, 0.0, new_max_T)  # -inf - -inf is NaN
        p_TS = jnp.exp2(scores_TS - finite_max_T[:, None])
        shrink_T = jnp.exp2(max_T - finite_max_T)
        v_SH = load_2d(v_ref.at[block], first_S, num_keys, value_dim)
        out_TH = shrink_T[:, None] * out_TH + matmul(p_TS.astype(v_SH.dtype), v_SH)
        return new_max_T, shrink_T * total_T + p_TS.sum(axis=1), out_TH

    start = (
        jnp.full(mask.query_block, -jnp.inf, jnp.float32),
        jnp.zeros(mask.query_block, jnp.float32),
        jnp.zeros((mask.query_block, v_ref.shape[-1]), jnp.float32),
    )
    max_T, total_T, out_TH = loop_over_blocks(blocks_ref, loop_body, start)
    is_empty = total_T == 0.0
    total_T = jnp.where(is_empty, 1.0, total_T)
    lse_T = jnp.where(is_empty, -jnp.inf, LN_2 * (max_T + jnp.log2(total_T)))
    store_2d(out_ref, out_TH / total_T[:, None], first_T, mask.num_queries, value_dim)
    store_1d(lse_ref, lse_T, first_T, mask.num_queries)
