"""The operands of the blockwise kernel, cut into blocks.

Shape letters, besides those of core/axes.py: I query blocks, J KV blocks, R = G x T rows of a query block: the G query
heads of one key/value head, one after the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults, implicit_ranges


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
    """The key ranges of all rows R, and their bounds in each query block; inside a scan, those of one block."""

    start_IB1R: jax.Array | None  # None: 0
    end_IB1R: jax.Array
    min_start_I: jax.Array  # without fully masked rows
    max_end_I: jax.Array


class QueryStats(NamedTuple):
    """Per-query inputs of the backward pass."""

    dout_IBRH: jax.Array
    lse_IB1R: jax.Array  # -inf replaced by 0: such a row is fully masked in every block
    delta_IB1R: jax.Array  # sum_H(dout out) - dlse


def block_operands(q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec) -> tuple[Queries, Keys]:
    """For all key/value heads: q, k and v have a leading K; ranges do not, since all heads share them.

    T and S are padded to multiples of the block sizes. No range contains the padding, and the ranges of the padding are
    empty.
    """
    (_, num_queries, num_heads, _), (_, num_keys, num_kv_heads, _) = q_BTNH.shape, k_BSKH.shape
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
    return Queries(q, _block_ranges(start_BT, end_BT, q_block_tokens, num_heads // num_kv_heads)), Keys(k, v, first_J)


def query_stats(num_kv_heads: int, results: QueryResults, spec: AttentionSpec) -> QueryStats:
    """For all key/value heads: each array with a leading K."""
    out_BTNH, lse_BNT, dout_BTNH, dlse_BNT = results
    block_tokens = _block_tokens(spec.query_block_tokens, out_BTNH.shape[1], spec)
    delta_BTN = (out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)).sum(axis=-1)
    delta_BTN -= dlse_BNT.swapaxes(1, 2)
    lse_BTN = jnp.where(jnp.isneginf(lse_BNT), 0.0, lse_BNT).swapaxes(1, 2)
    lse, delta = (_split_heads(x[..., None], num_kv_heads, block_tokens) for x in (lse_BTN, delta_BTN))
    return QueryStats(_split_heads(dout_BTNH, num_kv_heads, block_tokens), lse.swapaxes(3, 4), delta.swapaxes(3, 4))


def _implicit_ranges(q_BTNH: jax.Array, num_keys: int, spec: AttentionSpec):
    """(start_1T, end_1T) of a call without ranges; see `contract.implicit_ranges`."""
    bounds = implicit_ranges(spec, q_BTNH.shape[1], num_keys)
    # Tied to the queries, see `attend_shard`: XLA and autodiff would hoist constants out of the loop over layers, and
    # with them the dense masks of all blocks.
    _, bounds = lax.optimization_barrier((q_BTNH, bounds))
    return (None if x is None else x[None] for x in bounds)


def _block_ranges(start_BT: jax.Array | None, end_BT: jax.Array, block_tokens: int, groups: int) -> BlockRanges:
    """The ranges of the rows of all query blocks. A row R is a query of one of the `groups` heads."""
    end_IBT = _split_blocks(end_BT, block_tokens)
    start_IBT = jnp.zeros_like(end_IBT) if start_BT is None else _split_blocks(start_BT, block_tokens)
    min_start_I = jnp.where(start_IBT < end_IBT, start_IBT, jnp.iinfo(jnp.int32).max).min((1, 2))
    # One entry per row R. Repeating a mask over T for the G heads makes XLA on CPU three times as slow.
    start_IB1R, end_IB1R = (jnp.tile(x, groups)[:, :, None] for x in (start_IBT, end_IBT))
    return BlockRanges(None if start_BT is None else start_IB1R, end_IB1R, min_start_I, end_IBT.max((1, 2)))


def _block_tokens(limit: int, num_tokens: int, spec: AttentionSpec) -> int:
    """The block size: at most `limit`, and at least two blocks under a causal mask, so that some can be skipped."""
    return min(limit, -(-num_tokens // 2) if spec.causal else num_tokens)


def _split_blocks(x_BT: jax.Array, block_tokens: int) -> jax.Array:
    """[B, T, ...] -> [I, B, block, ...], padded with zeros to a multiple of the block size."""
    missing = -x_BT.shape[1] % block_tokens
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2)) if missing else x_BT
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
    x = x.reshape(num_kv_heads, num_blocks, batch, width, num_heads // num_kv_heads, -1)  # [K, I, B, H, G, T]
    return x.transpose(2, 1, 5, 0, 4, 3).reshape(batch, -1, num_heads, width)[:, :num_tokens]
