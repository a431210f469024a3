"""Attention's forward pass on a GPU (FlashAttention-2, algorithm 1), for Triton.

One program for each query tile of each head: it visits the key tiles it sees and keeps a running maximum, sum of
exponentials and unnormalized output in registers. Query heads that share a key/value head read it from the cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxlc.kernels.block_mask import Rule, Tokens, runs_of_keys
from jaxlc.kernels.triton_blocks import (
    LN_2,
    LOG2_E,
    KernelParams,
    load_rows,
    matmul,
    over_runs,
    padded,
    row_specs,
    runs_spec,
    store_numbers,
    store_rows,
    tile_mask,
)


def flash_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    rule: Rule,
    scale: float,
    launch: KernelParams,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNH, lse_BNT), both float32. A row without keys has out 0, lse -inf."""
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    runs = runs_of_keys(queries, keys, rule)

    def own_rows(width):
        return pl.BlockSpec((None, rule.tile_T, None, padded(width)), lambda i, n, b: (b, i, n, 0))

    def all_keys(width):
        return pl.BlockSpec((None, num_keys, None, padded(width)), lambda i, n, b: (b, 0, n // heads_per_kv, 0))

    kernel = functools.partial(_kernel, rule=rule, scale=scale, head_dim=head_dim, value_dim=value_dim)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_queries, rule.tile_T), num_heads, batch),
        in_specs=[
            own_rows(head_dim), all_keys(head_dim), all_keys(value_dim),
            row_specs(queries), row_specs(keys), runs_spec(runs),
        ],
        out_specs=[own_rows(value_dim), pl.BlockSpec((None, None, rule.tile_T), lambda i, n, b: (b, n, i))],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_queries, num_heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
        ],
        compiler_params=launch.compiler_params(),
        interpret=launch.interpret,
        name="flash_forward",
    )(q_BTNH, k_BSKH, v_BSKH, queries, keys, runs)  # fmt: skip


def _kernel(q_ref, k_ref, v_ref, queries, keys, runs_ref, out_ref, lse_ref, *, rule, scale, head_dim, value_dim):
    first_T = pl.program_id(0) * rule.tile_T
    q_TH = load_rows(q_ref, first_T, rule.num_queries, head_dim)

    def visit(j, carry, masked):
        max_T, total_T, out_TH = carry
        first_S = j * rule.tile_S
        rows = pl.ds(first_S, rule.tile_S)
        num_keys = rule.num_keys if masked else rule.tile_S * (rule.num_keys // rule.tile_S)  # full tiles are whole
        k_SH = load_rows(k_ref.at[rows], first_S, num_keys, head_dim)
        scores_TS = scale * LOG2_E * matmul(q_TH, k_SH, transpose_b=True)
        if masked and (seen_TS := tile_mask(queries, keys, first_T, first_S, rule)) is not None:
            scores_TS = jnp.where(seen_TS, scores_TS, -jnp.inf)
        new_max_T = jnp.maximum(max_T, scores_TS.max(axis=1))
        finite_max_T = jnp.where(new_max_T == -jnp.inf, 0.0, new_max_T)  # -inf - -inf is NaN
        p_TS = jnp.exp2(scores_TS - finite_max_T[:, None])
        shrink_T = jnp.exp2(max_T - finite_max_T)
        v_SH = load_rows(v_ref.at[rows], first_S, num_keys, value_dim)
        out_TH = shrink_T[:, None] * out_TH + matmul(p_TS.astype(v_SH.dtype), v_SH)
        return new_max_T, shrink_T * total_T + p_TS.sum(axis=1), out_TH

    start = (
        jnp.full(rule.tile_T, -jnp.inf, jnp.float32),
        jnp.zeros(rule.tile_T, jnp.float32),
        jnp.zeros((rule.tile_T, v_ref.shape[1]), jnp.float32),
    )
    max_T, total_T, out_TH = over_runs(runs_ref, visit, start)
    is_empty = total_T == 0.0
    total_T = jnp.where(is_empty, 1.0, total_T)
    lse_T = jnp.where(is_empty, -jnp.inf, LN_2 * (max_T + jnp.log2(total_T)))
    store_rows(out_ref, out_TH / total_T[:, None], first_T, rule.num_queries, value_dim)
    store_numbers(lse_ref, lse_T, first_T, rule.num_queries)
