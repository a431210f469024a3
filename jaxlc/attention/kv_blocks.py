"""Attention of a tile's queries inside `shard_map`: to the KV blocks of all groups, or to the keys in a sliding window.

All keys
--------
A tile's queries attend to the group's own KV block and to the blocks of all other groups. query_tiles.py has the
definitions of tile, group and block. A block consists of J sub-chunks of equal length, and a tile's queries are P of
them: sub-chunk 2i of a tile is from rank i's chunk lo, 2i + 1 from its chunk hi.

A KV block step is one kernel call: one sub-chunk of queries attends to one sub-chunk of keys, or to
m = `subchunks_per_step` neighboring ones. The more keys a step has, the less the merges of partial results cost. In its
own block, a rank's two query sub-chunks have index p and J - 1 - p, and as many fully visible sub-chunks before them.
That makes J/m - 1 steps of m sub-chunks and m - 1 steps of one sub-chunk for every p, since the two remainders of a
division by m add up to m - 1.

K and V are one array, so that one permute sends both. Arrays without a shape suffix:

    kv_block, dkv_block, block, dblock    [2, b, s, k, H]: K and V, or their gradients; s: tokens of a block

Sliding windows
---------------
A tile's queries attend to the keys in their window; sequence by sequence, sub-chunk by sub-chunk, with one kernel call
for each. A call has as many keys as a sub-chunk can need: its own tokens, the window - 1 before it, and the tokens that
were received (strategies/window_exchange.py). They are one slice of the extended keys, or of the whole sequence on a
single group. The prefixes of the first branches of a sub-chunk may end before this slice, at most one at each level.
So the call has one more slice for each level, of the last window - 1 tokens of that prefix. The prefixes of the other
branches are in the sub-chunk.

    kv_ext, dkv_ext    [2, b, S, k, H]: K and V of the extended keys, or their gradients
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import (
    AttentionSpec,
    Kernel,
    KeyRanges,
    OutLse,
    QueryResults,
    TreeRanges,
    merge,
)
from jaxlc.attention.strategies.window_exchange import WindowKeys, num_extended_keys
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks

_TOKENS_DIM = 2  # tokens in the shape of a block


class KVBlockStep(NamedTuple):
    """One kernel call: a query sub-chunk of the tile and a range of a block's sub-chunks."""

    query_subchunk: jax.Array  # index in the tile
    first_kv_subchunk: jax.Array  # index in the block
    num_kv_subchunks: int
    ring_step: jax.Array | int  # how many groups away the block's owner is
    spec: AttentionSpec


class GroupState(NamedTuple):
    """The state of one group of ranks for one tile."""

    kernel: Kernel | None  # None: only to move sub-chunks
    spec: AttentionSpec  # causal, for the blocks on the diagonal, or with a sliding window
    outer: Ranks  # the ring of groups
    inner: Ranks  # the ranks of a group
    num_tiles: int
    subchunks_per_step: int  # divides half a block
    tile: jax.Array | int
    # Keys of each half of each ring step's block for the group's queries, [ring steps, halves, b, s]; for a sliding
    # window, see kv_blocks.py.
    ranges: Any

    @property
    def num_tile_subchunks(self) -> int:
        """P"""
        return 2 * self.inner.size

    @property
    def num_block_subchunks(self) -> int:
        """J"""
        return self.num_tile_subchunks * self.num_tiles

    def index_in_block(self, subchunk):
        """The index in the block of a sub-chunk of the tile: chunk hi mirrors chunk lo."""
        index = subchunk // 2 * self.num_tiles + self.tile
        return jnp.where(subchunk % 2 == 0, index, self.num_block_subchunks - 1 - index)

    def to_subchunks(self, x_btnH: jax.Array, tokens_dim: int = 1) -> jax.Array:
        """A rank's tokens of the tile, [..., t, n, ...], to sub-chunks of the group, [P, ..., t, n
        / ranks, ...].
        """
        if self.inner.size > 1:
            heads_dim = tokens_dim + 1
            x_btnH = lax.all_to_all(
                x_btnH, self.inner.axis, split_axis=heads_dim, concat_axis=tokens_dim, tiled=True
            )
        before = x_btnH.shape[:tokens_dim]
        after = x_btnH.shape[tokens_dim + 1 :]
        return jnp.moveaxis(
            x_btnH.reshape(*before, self.num_tile_subchunks, -1, *after), tokens_dim, 0
        )

    def from_subchunks(self, x_PbtnH: jax.Array, tokens_dim: int = 1) -> jax.Array:
        """The inverse of `to_subchunks`."""
        x_bPtnH = jnp.moveaxis(x_PbtnH, 0, tokens_dim)
        x_btnH = x_bPtnH.reshape(*x_bPtnH.shape[:tokens_dim], -1, *x_bPtnH.shape[tokens_dim + 2 :])
        if self.inner.size == 1:
            return x_btnH
        heads_dim = tokens_dim + 1
        return lax.all_to_all(
            x_btnH, self.inner.axis, split_axis=tokens_dim, concat_axis=heads_dim, tiled=True
        )

    def slice_kv(self, block: jax.Array, first, num_subchunks: int = 1) -> jax.Array:
        """The keys and values of sub-chunks `first` to `first + num_subchunks` of a block."""
        tokens = block.shape[_TOKENS_DIM] // self.num_block_subchunks
        return lax.dynamic_slice_in_dim(block, first * tokens, num_subchunks * tokens, _TOKENS_DIM)

    def update_kv(self, block: jax.Array, kv: jax.Array, first) -> jax.Array:
        """The block with `kv` in place of the sub-chunks from `first` on."""
        tokens = block.shape[_TOKENS_DIM] // self.num_block_subchunks
        return lax.dynamic_update_slice_in_dim(block, kv, first * tokens, _TOKENS_DIM)

    def forward(self, q_PbtnH: jax.Array, kv_block: jax.Array) -> OutLse:
        """(out_PbtnH, lse_Pbnt) over the keys of all groups, float32."""
        # overlaps with attention over the group's own block
        block = self._send(kv_block, after=q_PbtnH)

        def attend(step: KVBlockStep, block):
            k_bskH, v_bskH = self.slice_kv(block, step.first_kv_subchunk, step.num_kv_subchunks)
            return self.kernel.forward(
                at(q_PbtnH, step.query_subchunk), k_bskH, v_bskH, self._ranges(step), step.spec
            )

        def merge_step(step: KVBlockStep, block, results):
            merged = merge(*(at(x, step.query_subchunk) for x in results), *attend(step, block))
            return tuple(
                put_at(x, new, step.query_subchunk) for x, new in zip(results, merged, strict=True)
            )

        subchunks = jnp.arange(self.num_tile_subchunks)
        out_PbtnH, lse_Pbnt = lax.map(
            lambda subchunk: attend(self._diagonal_step(subchunk), kv_block), subchunks
        )
        results = out_PbtnH.astype(jnp.float32), lse_Pbnt
        return self._over_blocks(merge_step, kv_block, block, results)

    def backward(
        self, q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH, kv_block, dkv_block
    ) -> tuple[jax.Array, jax.Array]:
        """(dq_PbtnH float32, dkv_block with the contribution of these queries, from every group,
        added).

        Args:
          out_PbtnH, lse_Pbnt: over all keys.
        """
        queries = q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH
        block = self._send(kv_block, after=queries)

        def gradients_of_step(step: KVBlockStep, block, dblock):
            """dq_btnH of this step, and dblock with this step's dk and dv added."""
            k_bskH, v_bskH = self.slice_kv(block, step.first_kv_subchunk, step.num_kv_subchunks)
            q, out, lse, dout = (at(x, step.query_subchunk) for x in queries)
            ranges = self._ranges(step)
            results = QueryResults(out, lse, dout, jnp.zeros_like(lse))
            dq, dk, dv = self.kernel.backward(q, k_bskH, v_bskH, ranges, step.spec, results)
            total = self.slice_kv(
                dblock, step.first_kv_subchunk, step.num_kv_subchunks
            ) + jnp.stack([dk, dv])
            return dq, self.update_kv(dblock, total, step.first_kv_subchunk)

        def add_step(step: KVBlockStep, block, gradients):
            dq_PbtnH, dblock = gradients
            dq_btnH, dblock = gradients_of_step(step, block, dblock)
            dq_btnH = at(dq_PbtnH, step.query_subchunk) + dq_btnH
            return put_at(dq_PbtnH, dq_btnH, step.query_subchunk), dblock

        def diagonal(dkv_block, subchunk):
            return gradients_of_step(self._diagonal_step(subchunk), kv_block, dkv_block)[::-1]

        dkv_block, dq_PbtnH = lax.scan(diagonal, dkv_block, jnp.arange(self.num_tile_subchunks))

        def send_subchunk(index, block):
            return self.update_kv(block, self._send(self.slice_kv(block, index)), index)

        def send_gradient(gradients):
            dq_PbtnH, dblock = gradients
            # one sub-chunk at a time, so that only one is in flight, not a second block
            dblock = lax.fori_loop(0, self.num_block_subchunks, send_subchunk, dblock)
            return (dq_PbtnH, dblock), dblock

        gradients = dq_PbtnH.astype(jnp.float32), dkv_block
        gradients = self._over_blocks(add_step, kv_block, block, gradients, send_gradient)
        if self.outer.size > 1:  # send dK/dV back to the owner rank
            gradients, _ = send_gradient(gradients)
        return gradients

    def _over_blocks(
        self, run_step: Callable, own_block, block, results, moved=lambda results: (results, None)
    ):
        """`results = run_step(step, block, results)` over the rest of the own block, and the blocks
        of the other groups, of which `block` is the first.

        Args:
          moved: what is done with results before each other block; returns them, and what must be
            available before that block is sent on.
        """
        results = self._own_block_steps(
            lambda step, carry: run_step(step, own_block, carry), results
        )
        if self.outer.size == 1:
            return results

        def run_block(ring_step, block, results):
            return self._remote_block_steps(
                ring_step, lambda step, carry: run_step(step, block, carry), results
            )

        def loop_body(ring_step, carry):
            block, results = carry
            results, after = moved(results)
            in_flight = self._send(block, after=after)
            return lax.optimization_barrier((in_flight, run_block(ring_step, block, results)))

        carry = lax.optimization_barrier((block, results))
        block, results = lax.fori_loop(1, self.outer.size - 1, loop_body, carry)
        results, _ = moved(results)
        return run_block(self.outer.size - 1, block, results)

    def _diagonal_step(self, subchunk) -> KVBlockStep:
        """Causal attention of a sub-chunk to itself."""
        return KVBlockStep(subchunk, self.index_in_block(subchunk), 1, 0, self.spec)

    def _own_block_steps(self, run_step: Callable, carry):
        """Runs the steps for the fully visible sub-chunks of the group's own block."""
        per_step = self.subchunks_per_step
        spec = self.spec.not_causal

        def long_step(subchunk, number, carry):
            return run_step(KVBlockStep(subchunk, number * per_step, per_step, 0, spec), carry)

        def short_step(subchunk, number, carry):
            first_left = self.index_in_block(subchunk) // per_step * per_step
            return run_step(KVBlockStep(subchunk, first_left + number, 1, 0, spec), carry)

        def num_long(rank):
            return self.index_in_block(2 * rank) // per_step

        def num_short(rank):
            return self.index_in_block(2 * rank) % per_step

        carry = self._steps_of_all_ranks(
            num_long, self.num_block_subchunks // per_step - 1, long_step, carry
        )
        return self._steps_of_all_ranks(num_short, per_step - 1, short_step, carry)

    def _remote_block_steps(self, ring_step, run_step: Callable, carry):
        """Runs the steps for the block of the group that is `ring_step` groups before this one.

        All query sub-chunks attend to the first half of an earlier group's block. Those of chunk hi
        attend to the whole block of a later group. As in ring.py, `jnp.where` selects between the
        two.
        """
        per_step = self.subchunks_per_step
        spec = self.spec.not_causal
        steps_per_pair = self.num_block_subchunks // per_step
        num_lo_steps = jnp.where(
            lax.axis_index(self.outer.axis) >= ring_step, steps_per_pair // 2, 0
        )

        def long_step(subchunk, number, carry):
            return run_step(
                KVBlockStep(subchunk, number * per_step, per_step, ring_step, spec), carry
            )

        return self._steps_of_all_ranks(lambda rank: num_lo_steps, steps_per_pair, long_step, carry)

    def _steps_of_all_ranks(
        self, num_lo_steps: Callable, steps_per_pair: int, run_step: Callable, carry
    ):
        """`carry = run_step(subchunk, number, carry)` for the two query sub-chunks of each rank of
        the group.

        The sub-chunk of chunk lo has the numbers 0 .. num_lo_steps(rank) - 1. That of chunk hi has
        the rest of the pair's steps, counted from 0.
        """

        def loop_body(index, carry):
            rank = index // steps_per_pair
            number = index % steps_per_pair
            num_lo = num_lo_steps(rank)
            is_hi = number >= num_lo
            return run_step(2 * rank + is_hi, jnp.where(is_hi, number - num_lo, number), carry)

        return lax.fori_loop(0, self.inner.size * steps_per_pair, loop_body, carry)

    def _ranges(self, step: KVBlockStep) -> KeyRanges | TreeRanges | None:
        if isinstance(self.ranges, TreeRanges):
            own, prefixes = self.ranges
            levels = tuple(self._ranges_of(level, step) for level in prefixes)
            return TreeRanges(self._ranges_of(own, step), levels)
        return None if self.ranges is None else self._ranges_of(self.ranges, step)

    def _ranges_of(self, ranges: KeyRanges, step: KVBlockStep) -> KeyRanges:
        half_subchunks = self.num_block_subchunks // 2  # the keys of a step are in one half
        half = step.first_kv_subchunk // half_subchunks
        first_kv_subchunk = step.first_kv_subchunk % half_subchunks
        ranges_bs = KeyRanges(*(at(at(x, step.ring_step), half) for x in ranges))
        tokens = ranges_bs.start_BT.shape[1] // self.num_block_subchunks
        first_query = self.index_in_block(step.query_subchunk) * tokens
        ranges_bt = KeyRanges(
            *(lax.dynamic_slice_in_dim(x, first_query, tokens, 1) for x in ranges_bs)
        )
        return ranges_bt.within(first_kv_subchunk * tokens, step.num_kv_subchunks * tokens)

    @jax.named_scope(scopes.RING_SEND)
    def _send(self, x: jax.Array, after=None) -> jax.Array:
        """Sends x to the next group; returns the x of the previous one.

        Args:
          after: values that must be available before the transfer starts. Transfers run one at a time, so one that
            overlaps with attention must not delay another that attention depends on.
        """
        size = self.outer.size
        if size == 1:
            return x
        if after is not None:
            x, _ = lax.optimization_barrier((x, after))
        return lax.ppermute(
            x, self.outer.axis, [(group, (group + 1) % size) for group in range(size)]
        )


def at(x_P: jax.Array, index) -> jax.Array:
    return lax.dynamic_index_in_dim(x_P, index, keepdims=False)


def put_at(x_P: jax.Array, new: jax.Array, index) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_P, new, index, 0)


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
    """As `GroupState.forward` and `backward`; its spec has the window, and its ranges are over the
    extended keys.
    """

    group: GroupState

    def forward(self, q_PbtnH: jax.Array, kv_ext: jax.Array) -> OutLse:
        """(out_PbtnH, lse_Pbnt float32) over the keys in the window."""
        kernel = self.group.kernel
        spec = self.group.spec

        def attend(call):
            slices, ranges = self._keys(call, q_PbtnH.shape, kv_ext.shape[2])
            k_1skH, v_1skH = _taken(kv_ext, slices)
            return kernel.forward(_call_at(q_PbtnH, call), k_1skH, v_1skH, ranges, spec)

        out, lse = lax.map(attend, jnp.arange(q_PbtnH.shape[0] * q_PbtnH.shape[1]))
        return out.reshape(q_PbtnH.shape), lse.reshape(*q_PbtnH.shape[:2], *lse.shape[2:])

    def backward(
        self, q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH, kv_ext, dkv_ext
    ) -> tuple[jax.Array, jax.Array]:
        """(dq_PbtnH, dkv_ext with the contribution of these queries added)."""
        kernel = self.group.kernel
        spec = self.group.spec

        def add_call(dkv_ext, call):
            slices, ranges = self._keys(call, q_PbtnH.shape, kv_ext.shape[2])
            k_1skH, v_1skH = _taken(kv_ext, slices)
            q, out, lse, dout = (
                _call_at(x, call) for x in (q_PbtnH, out_PbtnH, lse_Pbnt, dout_PbtnH)
            )
            results = QueryResults(out, lse, dout, jnp.zeros_like(lse))
            dq, *dkv = kernel.backward(q, k_1skH, v_1skH, ranges, spec, results)
            return _with_added(dkv_ext, slices, jnp.stack(dkv)), dq

        dkv_ext, dq = lax.scan(add_call, dkv_ext, jnp.arange(q_PbtnH.shape[0] * q_PbtnH.shape[1]))
        return dq.reshape(q_PbtnH.shape), dkv_ext

    def _keys(
        self, call, q_shape: tuple[int, ...], num_extended: int
    ) -> tuple[list[_Slice], KeyRanges | TreeRanges]:
        """The slices of the extended keys that a call has, and the ranges of its queries [1, t]
        over them.
        """
        batch, num_tokens = q_shape[1:3]
        sequence = call % batch
        first_query = self.group.index_in_block(call // batch) * num_tokens
        ranges = self.group.ranges
        ranges_bt = ranges.ranges_bt if isinstance(ranges, WindowKeys) else ranges
        ranges_1t = jax.tree.map(
            lambda x: lax.dynamic_slice(x, (sequence, first_query), (1, num_tokens)), ranges_bt
        )
        num_keys = self._num_keys(num_tokens, num_extended)
        if isinstance(ranges_1t, KeyRanges):
            first = _first_key(ranges_1t, num_keys, num_extended)
            return [_Slice(sequence, first, num_keys)], ranges_1t.within(first, num_keys)
        first = _first_key(ranges_1t.own, num_keys, num_extended)
        slices = [_Slice(sequence, first, num_keys)]
        prefixes = []
        num_prefix_keys = min(max(1, self.group.spec.window - 1), num_extended)
        for level in ranges_1t.prefixes:
            # No prefix is in part before the slice: it would end in the sub-chunk, with its window
            # in the slice.
            starts_1t, ends_1t = level
            is_far_1t = (starts_1t < ends_1t) & ((starts_1t < first) | (first + num_keys < ends_1t))
            far = KeyRanges(*(jnp.where(is_far_1t, x, 0) for x in level))
            first_far = _first_key(far, num_prefix_keys, num_extended)
            begin = sum(part.num_keys for part in slices)
            pairs = zip(far.within(first_far, num_prefix_keys), level.within(first, num_keys))
            prefixes.append(KeyRanges(*(jnp.where(is_far_1t, begin + x, y) for x, y in pairs)))
            slices.append(_Slice(sequence, first_far, num_prefix_keys))
        return slices, TreeRanges(ranges_1t.own.within(first, num_keys), tuple(prefixes))

    def _num_keys(self, num_queries: int, num_extended: int) -> int:
        """Of the slice that has a call's own tokens."""
        group = self.group
        num_received = 0
        if group.outer.size > 1 and not (
            isinstance(group.ranges, WindowKeys) and group.ranges.shared_prefixes
        ):
            num_tokens = num_queries * group.num_block_subchunks
            num_received = (
                num_extended_keys(num_tokens, group.spec, group.outer, CHUNKS)
                - num_tokens // CHUNKS
            )
        return min(num_queries + group.spec.window - 1 + num_received, num_extended)


def _first_key(ranges: KeyRanges, num_keys: int, num_extended: int) -> jax.Array:
    """The first of `num_keys` keys that contain the keys of all queries; any if the queries have
    none.
    """
    is_empty = ranges.start_BT >= ranges.end_BT
    first = jnp.where(is_empty, num_extended, ranges.start_BT).min()
    return jnp.minimum(first, num_extended - num_keys)


def _taken(x_ext: jax.Array, slices: Sequence[_Slice]) -> jax.Array:
    return jnp.concatenate([part.of(x_ext) for part in slices], axis=2)


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
