"""Inside `shard_map`: a tile's queries attend to the keys in their sliding window; sequence by sequence, sub-chunk by
sub-chunk, with one kernel call for each.

A call has as many keys as a sub-chunk can need: its own tokens, the window - 1 before it, and the tokens that were
received (strategies/window_exchange.py). They are one slice of the extended keys, or of the whole sequence on a single
group. Of the branches of a sub-chunk, the prefix of the first ones may end before this slice, but not those of others,
which are in the sub-chunk: the call has one more slice, of the last window - 1 tokens of that prefix.

    kv_ext, dkv_ext    [2, b, S, k, H]: K and V of the extended keys, or their gradients
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import KeyRanges, QueryResults, TreeRanges
from jaxlc.attention.strategies.window_exchange import WindowKeys, num_extended_keys
from jaxlc.attention.tiles.kv_blocks import GroupState

CHUNKS = 2  # a tile has sub-chunks of both halves of a group's tokens, see query_tiles.py


class _Slice(NamedTuple):
    """Some extended keys of one sequence."""

    sequence: jax.Array
    first: jax.Array
    num_keys: int

    @property
    def start(self) -> tuple:
        zero = jnp.int32(0)  # one dtype, also with 64-bit types
        return zero, self.sequence.astype(jnp.int32), self.first.astype(jnp.int32), zero, zero

    def of(self, x_ext: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x_ext, self.start, (2, 1, self.num_keys, *x_ext.shape[3:]))


class SlidingSteps(NamedTuple):
    """As `GroupState.forward` and `backward`; its spec has the window, and its ranges are over the extended keys."""

    group: GroupState

    def forward(self, q_PbtnH: jax.Array, kv_ext: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(out_PbtnH, lse_Pbnt float32) over the keys in the window."""
        kernel, spec = self.group.kernel, self.group.spec

        def attend(call):
            slices, ranges = self._keys(call, q_PbtnH.shape, kv_ext.shape[2])
            k_1skH, v_1skH = _taken(kv_ext, slices)
            return kernel.forward(_call_at(q_PbtnH, call), k_1skH, v_1skH, ranges, spec)

        out, lse = lax.map(attend, jnp.arange(q_PbtnH.shape[0] * q_PbtnH.shape[1]))
        return out.reshape(q_PbtnH.shape), lse.reshape(*q_PbtnH.shape[:2], *lse.shape[2:])

    def backward(self, q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH, kv_ext, dkv_ext) -> tuple[jax.Array, jax.Array]:
        """(dq_PbtnH, dkv_ext with the contribution of these queries added)."""
        kernel, spec = self.group.kernel, self.group.spec

        def add_call(dkv_ext, call):
            slices, ranges = self._keys(call, q_PbtnH.shape, kv_ext.shape[2])
            k_1skH, v_1skH = _taken(kv_ext, slices)
            q, out, lse, dout = (_call_at(x, call) for x in (q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH))
            results = QueryResults(out, lse, dout, jnp.zeros_like(lse))
            dq, *dkv = kernel.backward(q, k_1skH, v_1skH, ranges, spec, results)
            return _with_added(dkv_ext, slices, jnp.stack(dkv)), dq

        dkv_ext, dq = lax.scan(add_call, dkv_ext, jnp.arange(q_PbtnH.shape[0] * q_PbtnH.shape[1]))
        return dq.reshape(q_PbtnH.shape), dkv_ext

    def _keys(self, call, q_shape: tuple[int, ...], num_extended: int) -> tuple[list[_Slice], KeyRanges | TreeRanges]:
        """The slices of the extended keys that a call has, and the ranges of its queries [1, t] over them."""
        batch, num_tokens = q_shape[1:3]
        sequence, first_query = call % batch, self.group.index_in_block(call // batch) * num_tokens
        ranges = self.group.ranges
        ranges_bt = ranges.ranges_bt if isinstance(ranges, WindowKeys) else ranges
        ranges_1t = jax.tree.map(lambda x: lax.dynamic_slice(x, (sequence, first_query), (1, num_tokens)), ranges_bt)
        num_keys = self._num_keys(num_tokens, num_extended)
        if isinstance(ranges_1t, KeyRanges):
            first = _first_key(ranges_1t, num_keys, num_extended)
            return [_Slice(sequence, first, num_keys)], ranges_1t.within(first, num_keys)
        first = _first_key(ranges_1t.own, num_keys, num_extended)
        own, near = (x.within(first, num_keys) for x in ranges_1t)
        # No prefix is in part before the slice: it would end in the sub-chunk, with its window in the slice.
        starts_1t, ends_1t = ranges_1t.prefix
        is_far_1t = (starts_1t < ends_1t) & ((starts_1t < first) | (first + num_keys < ends_1t))
        far = KeyRanges(*(jnp.where(is_far_1t, x, 0) for x in ranges_1t.prefix))
        num_prefix_keys = min(max(1, self.group.spec.window - 1), num_extended)
        first_far = _first_key(far, num_prefix_keys, num_extended)
        far = far.within(first_far, num_prefix_keys)
        prefix = KeyRanges(*(jnp.where(is_far_1t, num_keys + x, y) for x, y in zip(far, near)))
        slices = [_Slice(sequence, first, num_keys), _Slice(sequence, first_far, num_prefix_keys)]
        return slices, TreeRanges(own, prefix)

    def _num_keys(self, num_queries: int, num_extended: int) -> int:
        """Of the slice that has a call's own tokens."""
        group = self.group
        num_received = 0
        if group.outer.size > 1 and not (isinstance(group.ranges, WindowKeys) and group.ranges.shared_prefixes):
            num_tokens = num_queries * group.num_block_subchunks
            num_received = num_extended_keys(num_tokens, group.spec, group.outer, CHUNKS) - num_tokens // CHUNKS
        return min(num_queries + group.spec.window - 1 + num_received, num_extended)


def _first_key(ranges: KeyRanges, num_keys: int, num_extended: int) -> jax.Array:
    """The first of `num_keys` keys that have those of all queries; any if the queries have none."""
    is_empty = ranges.start_BT >= ranges.end_BT
    first = jnp.where(is_empty, num_extended, ranges.start_BT).min()
    return jnp.minimum(first, num_extended - num_keys)


def _taken(x_ext: jax.Array, slices: Sequence[_Slice]) -> jax.Array:
    return jnp.concatenate([part.of(x_ext) for part in slices], axis=2) if len(slices) > 1 else slices[0].of(x_ext)


def _with_added(x_ext: jax.Array, slices: Sequence[_Slice], x: jax.Array) -> jax.Array:
    """x_ext with x, the keys of all slices, added. Slices may overlap."""
    begin = 0
    for part in slices:
        total = part.of(x_ext) + lax.slice_in_dim(x, begin, begin + part.num_keys, axis=2)
        x_ext = lax.dynamic_update_slice(x_ext, total, part.start)
        begin += part.num_keys
    return x_ext


def _call_at(x_Pbt: jax.Array, call) -> jax.Array:
    """[1, t, ...] or [1, n, t]: what a call has of x."""
    return lax.dynamic_slice_in_dim(x_Pbt.reshape(-1, *x_Pbt.shape[2:]), call, 1, axis=0)
