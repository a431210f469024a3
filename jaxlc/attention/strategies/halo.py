"""Sliding windows over one document: each rank exchanges only the tokens that the window reaches, with both neighbors.

Packed sequences: window_exchange.py.

A window of w tokens needs the last w - 1 tokens before each of a rank's two chunks (zigzag order): as many shifts along
the chunks (state_passing.py) as there are chunks in them, the last of which sends only the end of a chunk. One kernel
call then attends with each chunk's queries to those tokens (its halo, the term of stencil codes) and to the chunk's own
keys."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.state_passing import predecessors
from jaxlc.attention.strategies.strategy import ShardedQKV, attention_vjp
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


def _forward(qkv: ShardedQKV, kernel, spec: AttentionSpec, ranks: Ranks):
    out, lse = kernel.forward(*_chunk_operands(qkv, spec, ranks), spec)
    return _join_chunks(out), _join_chunks(lse, axis=2)


def _backward(qkv: ShardedQKV, results: QueryResults, kernel, spec: AttentionSpec, ranks: Ranks):
    q, k, v, *_ = qkv
    operands = _chunk_operands(qkv, spec, ranks)
    dq, dk, dv = kernel.backward(*operands, spec, QueryResults(*map(_split_chunks, results, (1, 2, 1, 2))))
    # A token's gradient is the sum over its own chunk and every halo that contains it. The transpose of the exchange
    # sends these gradients back along the same line, in float32.
    kv_like = jax.ShapeDtypeStruct((*k.shape[:3], k.shape[3] + v.shape[3]), jnp.float32)
    extend = functools.partial(_prepend_halo, halo_tokens=_halo_tokens(q.shape[1], spec, ranks), ranks=ranks)
    (dkv,) = jax.linear_transpose(extend, kv_like)(jnp.concatenate([dk, dv], axis=-1).astype(jnp.float32))
    return _join_chunks(dq), dkv[..., : k.shape[3]], dkv[..., k.shape[3] :]


# Attention of this rank's queries in the window of `spec`; call inside `shard_map`. As `ring.attend`, without ranges.
attend = attention_vjp(_forward, _backward)


def _chunk_operands(qkv: ShardedQKV, spec: AttentionSpec, ranks: Ranks):
    """(q, k, v, ranges) of one kernel call: the two chunks are stacked along its batch, keys start with their halo."""
    q, k, v, *_ = qkv
    halo_tokens = _halo_tokens(q.shape[1], spec, ranks)
    kv = _prepend_halo(jnp.concatenate([k, v], axis=-1), halo_tokens, ranks)
    # Tied to the queries, see `attend_shard`.
    _, ranges = lax.optimization_barrier((q, _implicit_ranges(*q.shape[:2], halo_tokens, spec, ranks)))
    return _split_chunks(q), kv[..., : k.shape[3]], kv[..., k.shape[3] :], KeyRanges(*map(_split_chunks, ranges))


def _implicit_ranges(batch: int, num_tokens: int, halo_tokens: int, spec: AttentionSpec, ranks: Ranks) -> KeyRanges:
    """The ranges of a sequence of one document; the first chunks have fewer tokens before them than a halo has."""
    own_key = halo_tokens + jnp.tile(jnp.arange(num_tokens // 2, dtype=jnp.int32), 2)
    positions_bt = ranks.positions(batch, num_tokens)
    start_bt = own_key - jnp.minimum(positions_bt, spec.window - 1)
    return KeyRanges(start_bt, jnp.broadcast_to(own_key + 1, positions_bt.shape))


def _halo_tokens(num_tokens: int, spec: AttentionSpec, ranks: Ranks) -> int:
    """The length of a halo; num_tokens: of a rank."""
    return min(spec.window - 1, (2 * ranks.size - 1) * (num_tokens // 2))


@jax.named_scope(scopes.WINDOW_HALO)
def _prepend_halo(x_bs: jax.Array, halo_tokens: int, ranks: Ranks) -> jax.Array:
    """[b, s, ...] -> [2 b, halo + s / 2, ...]: both chunks, each with the tokens before it. Linear in x."""
    pair = jnp.split(x_bs, 2, axis=1)
    parts, missing_tokens = [_stack_batch(pair)], halo_tokens
    while missing_tokens > 0:
        num_sent = min(missing_tokens, pair[0].shape[1])
        pair = predecessors([x[:, x.shape[1] - num_sent :] for x in pair], ranks)
        parts.insert(0, _stack_batch(pair))
        missing_tokens -= num_sent
    return jnp.concatenate(parts, axis=1)


def _stack_batch(pair) -> jax.Array:
    return jnp.concatenate(pair, axis=0)


def _split_chunks(x: jax.Array, axis: int = 1) -> jax.Array:
    """The two chunks along `axis`, stacked along the batch."""
    return _stack_batch(jnp.split(x, 2, axis))


def _join_chunks(x: jax.Array, axis: int = 1) -> jax.Array:
    """The inverse of `_split_chunks`."""
    return jnp.concatenate(jnp.split(x, 2), axis)
