"""Inside `shard_map`: a tile's queries attend to the keys in their sliding window; sequence by sequence, sub-chunk by
sub-chunk, with one kernel call for each.

A call has as many keys as a sub-chunk can need: its own tokens, the window - 1 before it, and the tokens that were
received (strategies/window_exchange.py). They are one slice of the extended keys, or of the whole sequence on a single
group.

    kv_ext, dkv_ext    [2, b, S, k, H]: K and V of the extended keys, or their gradients
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import KeyRanges, QueryResults
from jaxlc.attention.strategies.window_exchange import WindowKeys, num_extended_keys
from jaxlc.attention.tiles.kv_blocks import GroupState

CHUNKS = 2  # a tile has sub-chunks of both halves of a group's tokens, see query_tiles.py


class SlidingSteps(NamedTuple):
    """As `GroupState.forward` and `backward`; its spec has the window, and its ranges are over the extended keys."""

    group: GroupState

    def forward(self, q_PbtnH: jax.Array, kv_ext: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(out_PbtnH, lse_Pbnt float32) over the keys in the window."""
        kernel, spec = self.group.kernel, self.group.spec

        def attend(call):
            first, ranges = self._keys(call, q_PbtnH.shape, kv_ext.shape[2])
            k_1skH, v_1skH = self._slice(kv_ext, call, first, q_PbtnH.shape)
            return kernel.forward(_call_at(q_PbtnH, call), k_1skH, v_1skH, ranges, spec)

        out, lse = lax.map(attend, jnp.arange(q_PbtnH.shape[0] * q_PbtnH.shape[1]))
        return out.reshape(q_PbtnH.shape), lse.reshape(*q_PbtnH.shape[:2], *lse.shape[2:])

    def backward(self, q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH, kv_ext, dkv_ext) -> tuple[jax.Array, jax.Array]:
        """(dq_PbtnH, dkv_ext with the contribution of these queries added)."""
        kernel, spec = self.group.kernel, self.group.spec

        def add_call(dkv_ext, call):
            first, ranges = self._keys(call, q_PbtnH.shape, kv_ext.shape[2])
            k_1skH, v_1skH = self._slice(kv_ext, call, first, q_PbtnH.shape)
            q, out, lse, dout = (_call_at(x, call) for x in (q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH))
            results = QueryResults(out, lse, dout, jnp.zeros_like(lse))
            dq, *dkv = kernel.backward(q, k_1skH, v_1skH, ranges, spec, results)
            total = self._slice(dkv_ext, call, first, q_PbtnH.shape) + jnp.stack(dkv)
            return lax.dynamic_update_slice(dkv_ext, total, (0, call % q_PbtnH.shape[1], first, 0, 0)), dq

        dkv_ext, dq = lax.scan(add_call, dkv_ext, jnp.arange(q_PbtnH.shape[0] * q_PbtnH.shape[1]))
        return dq.reshape(q_PbtnH.shape), dkv_ext

    def _keys(self, call, q_shape: tuple[int, ...], num_extended: int) -> tuple[jax.Array, KeyRanges]:
        """The first extended key of a call, and the ranges of its queries [1, t] counted from it."""
        batch, num_tokens = q_shape[1:3]
        ranges = self.group.ranges
        ranges = ranges.ranges_bt if isinstance(ranges, WindowKeys) else ranges
        at = call % batch, self.group.index_in_block(call // batch) * num_tokens
        ranges_1t = KeyRanges(*(lax.dynamic_slice(x, at, (1, num_tokens)) for x in ranges))
        num_keys = self._num_keys(num_tokens, num_extended)
        is_empty_1t = ranges_1t.start_BT >= ranges_1t.end_BT
        first = jnp.where(is_empty_1t, num_extended, ranges_1t.start_BT).min()
        first = jnp.minimum(first, num_extended - num_keys)
        return first, ranges_1t.within(first, num_keys)

    def _slice(self, x_ext: jax.Array, call, first, q_shape: tuple[int, ...]) -> jax.Array:
        num_keys = self._num_keys(q_shape[2], x_ext.shape[2])
        sizes = (2, 1, num_keys, *x_ext.shape[3:])
        return lax.dynamic_slice(x_ext, (0, call % q_shape[1], first, 0, 0), sizes)

    def _num_keys(self, num_queries: int, num_extended: int) -> int:
        group = self.group
        num_received = 0
        if group.outer.size > 1:
            num_tokens = num_queries * group.num_block_subchunks
            num_received = num_extended_keys(num_tokens, group.spec, group.outer, CHUNKS) - num_tokens // CHUNKS
        return min(num_queries + group.spec.window - 1 + num_received, num_extended)


def _call_at(x_Pbt: jax.Array, call) -> jax.Array:
    """[1, t, ...] or [1, n, t]: what a call has of x."""
    return lax.dynamic_slice_in_dim(x_Pbt.reshape(-1, *x_Pbt.shape[2:]), call, 1, axis=0)
