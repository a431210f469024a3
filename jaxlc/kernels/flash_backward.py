"""Attention's backward pass on a GPU (FlashAttention-2, algorithm 2), for Triton.

Two kernels, one for dQ that owns query tiles and one for dK and dV that owns key tiles. The weights and their gradient
are computed in both: seven matrix products instead of five, for sums in registers, in one order. There are no atomic
additions, so a rerun gives the same bits. dK and dV sum over the query heads that share their head within a program.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxlc.kernels.block_mask import Rule, Tokens, runs_of_keys, runs_of_queries
from jaxlc.kernels.triton_blocks import (
    LOG2_E,
    KernelParams,
    load_1d,
    load_rows,
    matmul,
    over_runs,
    padded,
    row_specs,
    runs_spec,
    store_rows,
    tile_mask,
)


class Rows(NamedTuple):
    """What the backward knows of each query row; of references, within a kernel."""

    dout_BTNH: jax.Array  # in the dtype of q, k and v: it is an operand of their products
    lse2_BNT: jax.Array  # the whole row's, float32, to base 2; 0 for rows that see nothing
    delta_BNT: jax.Array  # float32: sum_H(dout out) - dlse


def flash_dq(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Tokens,
    keys: Tokens,
    rows: Rows,
    *,
    rule: Rule,
    scale: float,
    launch: KernelParams,
) -> jax.Array:
    """Returns dq_BTNH, float32: these keys' share of it."""
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    runs = runs_of_keys(queries, keys, rule)

    def own_rows(width):
        return pl.BlockSpec((None, rule.tile_T, None, padded(width)), lambda i, n, b: (b, i, n, 0))

    def all_keys(width):
        return pl.BlockSpec((None, num_keys, None, padded(width)), lambda i, n, b: (b, 0, n // heads_per_kv, 0))

    own_numbers = pl.BlockSpec((None, None, rule.tile_T), lambda i, n, b: (b, n, i))
    return pl.pallas_call(
        functools.partial(_dq_kernel, rule=rule, scale=scale, head_dim=head_dim, value_dim=value_dim),
        grid=(pl.cdiv(num_queries, rule.tile_T), num_heads, batch),
        in_specs=[
            own_rows(head_dim), all_keys(head_dim), all_keys(value_dim), row_specs(queries), row_specs(keys),
            Rows(own_rows(value_dim), own_numbers, own_numbers), runs_spec(runs),
        ],
        out_specs=own_rows(head_dim),
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32),
        compiler_params=launch.compiler_params(),
        interpret=launch.interpret,
        name="flash_dq",
    )(q_BTNH, k_BSKH, v_BSKH, queries, keys, rows, runs)  # fmt: skip


def _dq_kernel(q_ref, k_ref, v_ref, queries, keys, rows, runs_ref, dq_ref, *, rule, scale, head_dim, value_dim):
    first_T = pl.program_id(0) * rule.tile_T
    q_TH = load_rows(q_ref, first_T, rule.num_queries, head_dim)
    dout_TH = load_rows(rows.dout_BTNH, first_T, rule.num_queries, value_dim)
    lse2_T, delta_T = (load_1d(x, first_T, rule.num_queries) for x in (rows.lse2_BNT, rows.delta_BNT))

    def visit(j, dq_TH, masked):
        first_S = j * rule.tile_S
        tile = pl.ds(first_S, rule.tile_S)
        num_keys = rule.num_keys if masked else rule.tile_S * (rule.num_keys // rule.tile_S)  # full tiles are whole
        k_SH = load_rows(k_ref.at[tile], first_S, num_keys, head_dim)
        v_SH = load_rows(v_ref.at[tile], first_S, num_keys, value_dim)
        p_TS = jnp.exp2(scale * LOG2_E * matmul(q_TH, k_SH, transpose_b=True) - lse2_T[:, None])
        if masked and (seen_TS := tile_mask(queries, keys, first_T, first_S, rule)) is not None:
            p_TS = jnp.where(seen_TS, p_TS, 0.0)
        ds_TS = p_TS * (matmul(dout_TH, v_SH, transpose_b=True) - delta_T[:, None])
        return dq_TH + matmul(ds_TS.astype(k_SH.dtype), k_SH)

    dq_TH = over_runs(runs_ref, visit, jnp.zeros(q_TH.shape, jnp.float32))
    store_rows(dq_ref, scale * dq_TH, first_T, rule.num_queries, head_dim)


def flash_dkv(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Tokens,
    keys: Tokens,
    rows: Rows,
    *,
    rule: Rule,
    scale: float,
    launch: KernelParams,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dk_BSKH, dv_BSKH), float32, summed over the query heads of each key/value head."""
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    runs = runs_of_queries(queries, keys, rule)

    def own_rows(width):
        return pl.BlockSpec((None, rule.tile_S, None, padded(width)), lambda j, n, b: (b, j, n, 0))

    def all_queries(width):
        return pl.BlockSpec((None, num_queries, heads_per_kv, padded(width)), lambda j, n, b: (b, 0, n, 0))

    all_numbers = pl.BlockSpec((None, heads_per_kv, num_queries), lambda j, n, b: (b, n, 0))
    return pl.pallas_call(
        functools.partial(_dkv_kernel, rule=rule, scale=scale, head_dim=head_dim, value_dim=value_dim),
        grid=(pl.cdiv(num_keys, rule.tile_S), num_kv_heads, batch),
        in_specs=[
            all_queries(head_dim), own_rows(head_dim), own_rows(value_dim), row_specs(queries), row_specs(keys),
            Rows(all_queries(value_dim), all_numbers, all_numbers), runs_spec(runs),
        ],
        out_specs=[own_rows(head_dim), own_rows(value_dim)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k_BSKH, v_BSKH)],
        compiler_params=launch.compiler_params(),
        interpret=launch.interpret,
        name="flash_dkv",
    )(q_BTNH, k_BSKH, v_BSKH, queries, keys, rows, runs)  # fmt: skip


def _dkv_kernel(
    q_ref, k_ref, v_ref, queries, keys, rows, runs_ref, dk_ref, dv_ref, *, rule, scale, head_dim, value_dim
):
    first_S = pl.program_id(0) * rule.tile_S
    k_SH = load_rows(k_ref, first_S, rule.num_keys, head_dim)
    v_SH = load_rows(v_ref, first_S, rule.num_keys, value_dim)

    def visit(i, carry, masked, head):
        dk_SH, dv_SH = carry
        first_T = i * rule.tile_T
        tile = pl.ds(first_T, rule.tile_T)
        # Rows past the end read 0 everywhere, dout too: they add nothing, so they need no mask.
        num_queries = rule.num_queries if masked else rule.tile_T * (rule.num_queries // rule.tile_T)
        q_TH = load_rows(q_ref.at[tile, head], first_T, num_queries, head_dim)
        dout_TH = load_rows(rows.dout_BTNH.at[tile, head], first_T, num_queries, value_dim)
        lse2_T, delta_T = (load_1d(x.at[head, tile], first_T, num_queries) for x in (rows.lse2_BNT, rows.delta_BNT))
        # Tiles lie transposed, so that both products below take them as they are.
        p_ST = jnp.exp2(scale * LOG2_E * matmul(k_SH, q_TH, transpose_b=True) - lse2_T[None, :])
        if masked and (seen_ST := tile_mask(queries, keys, first_T, first_S, rule, keys_first=True)) is not None:
            p_ST = jnp.where(seen_ST, p_ST, 0.0)
        ds_ST = p_ST * (matmul(v_SH, dout_TH, transpose_b=True) - delta_T[None, :])
        dv_SH += matmul(p_ST.astype(v_SH.dtype), dout_TH)
        return dk_SH + matmul(ds_ST.astype(k_SH.dtype), q_TH), dv_SH

    def one_head(head, carry):
        return over_runs(runs_ref, functools.partial(visit, head=head), carry)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_SH, v_SH))
    dk_SH, dv_SH = lax.fori_loop(0, q_ref.shape[1], one_head, start)
    store_rows(dk_ref, scale * dk_SH, first_S, rule.num_keys, head_dim)
    store_rows(dv_ref, dv_SH, first_S, rule.num_keys, value_dim)
