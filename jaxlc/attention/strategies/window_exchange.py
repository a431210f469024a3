"""Sliding windows over packed sequences, in any order of tokens for which `key_ranges` holds: each
rank receives the tokens of other ranks that its windows reach, and no others. With shared prefixes,
tokens are in zigzag order.

Which tokens these are depends on the documents, so `prepare` finds them once per training step, as
indices; how many there are at most does not (sharding/document_layout.py). The tokens that a rank
has and receives are then sorted, so that the keys of each query are contiguous, and one kernel call
attends to them.

Sliding windows over one document: each rank exchanges only the tokens that the window reaches, with
both neighbors.

Packed sequences: window_exchange.py.

A window of w tokens needs the last w - 1 tokens before each of a rank's two chunks (zigzag order):
as many shifts along the chunks (state_passing.py) as there are chunks in them, the last of which
sends only the end of a chunk. One kernel call then attends with each chunk's queries to those
tokens (its halo, the term of stencil codes) and to the chunk's own keys.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxlc.attention.contract import (
    AttentionSpec,
    Kernel,
    KeyRanges,
    OutLse,
    QueryResults,
    TreeRanges,
)
from jaxlc.attention.key_ranges import (
    TokenInfo,
    first_own_key,
    key_ranges,
    seen_by,
    seen_by_branches,
)
from jaxlc.attention.state_passing import predecessors
from jaxlc.attention.strategies.strategy import ShardedQKV, attention_vjp, joined, parted
from jaxlc.core import scopes
from jaxlc.sharding.document_layout import room_by_distance, room_per_chunk
from jaxlc.sharding.mesh import Ranks


def _halo_forward(qkv: ShardedQKV, kernel, spec: AttentionSpec, ranks: Ranks):
    out, lse = kernel.forward(*_chunk_operands(qkv, spec, ranks), spec)
    return _join_chunks(out), _join_chunks(lse, axis=2)


def _halo_backward(
    qkv: ShardedQKV, results: QueryResults, kernel, spec: AttentionSpec, ranks: Ranks
):
    q, k, v, *_ = qkv
    operands = _chunk_operands(qkv, spec, ranks)
    dq, dk, dv = kernel.backward(
        *operands, spec, QueryResults(*map(_split_chunks, results, (1, 2, 1, 2)))
    )
    # A token's gradient is the sum over its own chunk and every halo that contains it. The transpose of the exchange
    # sends these gradients back along the same line, in float32.
    kv_like = jax.ShapeDtypeStruct((*k.shape[:3], k.shape[3] + v.shape[3]), jnp.float32)
    extend = functools.partial(
        _prepend_halo, halo_tokens=_halo_tokens(q.shape[1], spec, ranks), ranks=ranks
    )
    (dkv,) = jax.linear_transpose(extend, kv_like)(joined(dk, dv).astype(jnp.float32))
    return _join_chunks(dq), *parted(dkv, k)


_attend_in_zigzag_order = attention_vjp(_halo_forward, _halo_backward)


def _chunk_operands(qkv: ShardedQKV, spec: AttentionSpec, ranks: Ranks):
    """(q, k, v, ranges) of one kernel call: the two chunks are stacked along its batch, keys start
    with their halo.
    """
    q, k, v, *_ = qkv
    halo_tokens = _halo_tokens(q.shape[1], spec, ranks)
    kv = _prepend_halo(joined(k, v), halo_tokens, ranks)
    # Tied to the queries, see `attend_shard`.
    _, ranges = lax.optimization_barrier(
        (q, _implicit_ranges(*q.shape[:2], halo_tokens, spec, ranks))
    )
    return _split_chunks(q), *parted(kv, k), KeyRanges(*map(_split_chunks, ranges))


def _implicit_ranges(
    batch: int, num_tokens: int, halo_tokens: int, spec: AttentionSpec, ranks: Ranks
) -> KeyRanges:
    """The ranges of a sequence of one document; the first chunks have fewer tokens before them than
    a halo has.
    """
    own_key = halo_tokens + jnp.tile(jnp.arange(num_tokens // 2, dtype=jnp.int32), 2)
    positions_bt = ranks.positions(batch, num_tokens)
    start_bt = own_key - jnp.minimum(positions_bt, spec.window - 1)
    return KeyRanges(start_bt, jnp.broadcast_to(own_key + 1, positions_bt.shape))


def _halo_tokens(num_tokens: int, spec: AttentionSpec, ranks: Ranks) -> int:
    """The length of a halo; num_tokens: of a rank."""
    return min(spec.window - 1, (2 * ranks.size - 1) * (num_tokens // 2))


@jax.named_scope(scopes.WINDOW_HALO)
def _prepend_halo(x_bs: jax.Array, halo_tokens: int, ranks: Ranks) -> jax.Array:
    """[b, s, ...] -> [2 b, halo + s / 2, ...]: both chunks, each with the tokens before it. Linear
    in x.
    """
    pair = jnp.split(x_bs, 2, axis=1)
    parts = [_stack_batch(pair)]
    missing_tokens = halo_tokens
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


class WindowKeys(NamedTuple):
    """The keys of a rank's queries, int32. The extended keys have E tokens for each of the rank's
    `chunks`.
    """

    # own tokens that are sent, those for each distance in turn; the number of own tokens: none
    sent_bC: jax.Array
    order_bE: jax.Array  # [b, chunks * E]: each extended key's index among own and received tokens
    ranges_bt: KeyRanges | TreeRanges  # over the extended keys

    @property
    def num_tokens(self) -> int:
        """Of a rank."""
        return jax.tree.leaves(self.ranges_bt)[0].shape[1]

    @property
    def shared_prefixes(self) -> int:
        """Levels of prefixes."""
        return len(self.ranges_bt.prefixes) if isinstance(self.ranges_bt, TreeRanges) else 0


def prepare(
    tokens: TokenInfo, kernel: Kernel | None, spec: AttentionSpec, ranks: Ranks, chunks: int = 1
) -> WindowKeys | KeyRanges:
    """The `ranges` of `attend`, once per training step. One rank needs no exchange: KeyRanges over its own tokens.

    Args:
      chunks: 1, or 2: the keys of the queries in each half of the tokens are together, and a document need be
        contiguous only within each half.
    """
    assert tokens.positions_BT is not None
    segments_bt = (
        jnp.ones_like(tokens.positions_BT) if tokens.segments_BT is None else tokens.segments_BT
    )
    own = tokens._replace(segments_BT=segments_bt)
    shared_prefixes = 0 if tokens.prefixes_BTD is None else tokens.prefixes_BTD.shape[2]
    if ranks.size == 1:
        return key_ranges(own, own, spec)
    batch, num_tokens = segments_bt.shape
    rank = lax.axis_index(ranks.axis)
    everyone = own.map(lambda x_bt: lax.all_gather(x_bt, ranks.axis))
    sent = [jnp.zeros((batch, 0), jnp.int32)]  # a window of one token needs none
    for distance, room in _rooms(num_tokens, spec, ranks, shared_prefixes):
        receiver = everyone.map(lambda x, at=(rank + distance) % ranks.size: x[at])
        is_needed_bt = functools.reduce(
            jnp.logical_or, [_is_seen(own, part, spec) for part in _split(receiver, chunks)]
        )
        indices_bt = jnp.where(is_needed_bt, jnp.arange(num_tokens, dtype=jnp.int32), num_tokens)
        sent.append(jnp.sort(indices_bt, axis=1)[:, :room])
    sent_bC = jnp.concatenate(sent, axis=1)
    pool = TokenInfo(*own[:2]).map(
        lambda x_bt: _with_received(x_bt, sent_bC, spec, ranks, shared_prefixes)
    )
    num_keys = num_extended_keys(num_tokens, spec, ranks, chunks, shared_prefixes)
    parts = []
    for chunk, queries in enumerate(_split(own, chunks)):
        order_bE, ranges_bt = _keys_of_chunk(
            queries, pool, chunk * num_tokens // chunks, num_keys, spec
        )
        parts.append(
            (order_bE, jax.tree.map(lambda x, first=chunk * num_keys: x + first, ranges_bt))
        )
    return WindowKeys(
        sent_bC, *jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts)
    )


def ranges_specs(spec: AttentionSpec, batch_axes: tuple[str, ...], ranks: Ranks) -> PartitionSpec:
    """The PartitionSpec of all arrays of `prepare`."""
    return PartitionSpec(batch_axes, ranks.axis)


def num_extended_keys(
    num_tokens: int, spec: AttentionSpec, ranks: Ranks, chunks: int, shared_prefixes: int = 0
) -> int:
    """E, for a rank with `num_tokens` tokens."""
    num_received = sum(room for _, room in _rooms(num_tokens, spec, ranks, shared_prefixes))
    # of each chunk of zigzag order, the window before it, and one of each prefix of its first branch
    if shared_prefixes:
        num_windows = (1 + shared_prefixes) * (2 // chunks)
        return min(
            num_tokens // chunks + num_windows * (spec.window - 1), num_tokens + num_received
        )
    if chunks == 1:
        return num_tokens + num_received
    return min(
        num_tokens // 2 + room_per_chunk(num_tokens, ranks.size, spec.window),
        num_tokens + num_received,
    )


@jax.named_scope(scopes.WINDOW_HALO)
def extend(x_bt: jax.Array, keys: WindowKeys, spec: AttentionSpec, ranks: Ranks) -> jax.Array:
    """[b, t, ...] -> [b, chunks * E, ...]: the tokens at the extended keys. Linear in x."""
    return _take(
        _with_received(x_bt, keys.sent_bC, spec, ranks, keys.shared_prefixes), keys.order_bE
    )


def add_extended(
    dx_bE: jax.Array, keys: WindowKeys, spec: AttentionSpec, ranks: Ranks
) -> jax.Array:
    """The transpose of `extend`: the sum of each token's gradients on all ranks."""
    x_bt = jax.ShapeDtypeStruct((dx_bE.shape[0], keys.num_tokens, *dx_bE.shape[2:]), dx_bE.dtype)
    (dx_bt,) = jax.linear_transpose(
        functools.partial(extend, keys=keys, spec=spec, ranks=ranks), x_bt
    )(dx_bE)
    return dx_bt


def _forward(qkv: ShardedQKV, kernel, spec: AttentionSpec, ranks: Ranks):
    return kernel.forward(*_operands(qkv, spec, ranks), spec)


def _backward(qkv: ShardedQKV, results: QueryResults, kernel, spec: AttentionSpec, ranks: Ranks):
    _, k, _, keys, _ = qkv
    dq, dk, dv = kernel.backward(*_operands(qkv, spec, ranks), spec, results)
    if ranks.size == 1:
        return dq, dk, dv
    dkv = add_extended(joined(dk, dv).astype(jnp.float32), keys, spec, ranks)
    return dq, *parted(dkv, k)


_attend = attention_vjp(_forward, _backward)


def attend(qkv: ShardedQKV, *settings) -> OutLse:
    """See `sharded_attention.Strategy`; without ranges, tokens are in zigzag order."""
    attend_window = _attend_in_zigzag_order if qkv.ranges is None else _attend
    return attend_window(qkv, *settings)


def _operands(qkv: ShardedQKV, spec: AttentionSpec, ranks: Ranks):
    """(q, k, v, ranges) of the kernel call."""
    q, k, v, keys, _ = qkv
    if ranks.size == 1:
        return q, k, v, keys
    return q, *parted(extend(joined(k, v), keys, spec, ranks), k), keys.ranges_bt


def _split(tokens: TokenInfo, chunks: int) -> list[TokenInfo]:
    return [
        tokens.map(lambda x_bt, at=chunk: jnp.split(x_bt, chunks, axis=1)[at])
        for chunk in range(chunks)
    ]


def _keys_of_chunk(
    queries: TokenInfo, pool: TokenInfo, first: int, num_keys: int, spec: AttentionSpec
):
    """(order_bE, ranges_bt) of the queries `first` and following of the pool, which starts with the
    rank's own tokens.

    Keys are in the order of the documents among the queries, and by position in each document.
    Prefixes of which the queries have no token are last.
    """
    index_S = jnp.arange(pool.segments_BT.shape[1])
    is_own_S = (first <= index_S) & (index_S < first + queries.segments_BT.shape[1])
    is_key_bS = (pool.segments_BT != 0) & (is_own_S | _is_seen(pool, queries, spec))
    document_bS = first_own_key(pool, queries)
    if queries.prefixes_BTD is not None:
        has_queries_bS = (
            jnp.take_along_axis(queries.segments_BT, document_bS, axis=1) == pool.segments_BT
        )
        document_bS = jnp.where(has_queries_bS, document_bS, num_keys + pool.segments_BT)
    document_bS = jnp.where(is_key_bS, document_bS, jnp.iinfo(jnp.int32).max)
    order_bE = jnp.lexsort((pool.positions_BT, document_bS))[:, :num_keys].astype(jnp.int32)
    keys = TokenInfo(pool.positions_BT, jnp.where(is_key_bS, pool.segments_BT, 0))
    return order_bE, key_ranges(queries, keys.map(lambda x_bS: _take(x_bS, order_bE)), spec)


def _is_seen(keys: TokenInfo, queries: TokenInfo, spec: AttentionSpec) -> jax.Array:
    """bool, the shape of the keys: whether a query at a later position has the key in its window."""
    is_seen = seen_by(keys, queries, spec.window)
    if queries.prefixes_BTD is None:
        return is_seen
    return is_seen | seen_by_branches(keys, queries, spec.window)


def _rooms(
    num_tokens: int, spec: AttentionSpec, ranks: Ranks, shared_prefixes: int
) -> Iterable[tuple[int, int]]:
    """(distance, tokens that are sent)"""
    return room_by_distance(
        num_tokens, ranks.size, spec.window, shared_prefixes=shared_prefixes
    ).items()


def _with_received(
    x_bt: jax.Array, sent_bC: jax.Array, spec: AttentionSpec, ranks: Ranks, shared_prefixes: int
) -> jax.Array:
    """x with the tokens of other ranks appended; zeros, the segment of padding, where a rank needs
    less than fits.
    """
    parts = [x_bt]
    begin = 0
    for distance, room in _rooms(x_bt.shape[1], spec, ranks, shared_prefixes):
        sent = _take(x_bt, sent_bC[:, begin : begin + room])
        to = [(rank, (rank + distance) % ranks.size) for rank in range(ranks.size)]
        parts.append(lax.ppermute(sent, ranks.axis, to))
        begin += room
    return jnp.concatenate(parts, axis=1)


def _take(x_bt: jax.Array, index_bC: jax.Array) -> jax.Array:
    """[b, t, ...] at [b, C] -> [b, C, ...]; zeros at index t. No index below t occurs twice."""
    return jax.vmap(
        lambda x, index: x.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    )(x_bt, index_bC)
