"""Ring attention: each rank keeps its queries; K and V go once around the context axis (Liu et al., arXiv:2310.01889).

Runs inside `shard_map`. Each rank has its shard of the sequence in zigzag order: two chunks (lo, hi) of equal length.
Then causal masking needs no control flow, and every rank does the same work in every step:

    step 0   the rank's own KV block: one causal kernel call over (lo, hi)
    step i   the KV block of rank - i. Two products of half-blocks are needed, both without a causal mask:
             (q_hi, k_lo) always, and (q_lo, k_lo) if the block is from an earlier rank, otherwise (q_hi, k_hi). The
             halves are selected with dynamic slices, and one kernel call computes both products, as a batch of two.

A packed sequence may be in the order of per-document sharding (sharding/document_layout.py), in which the pieces of a
rank have other lengths for each document. So with ranges of keys, one kernel call computes the whole block, and the
kernel skips the blocks that no range reaches: a ring step whose block shares no document with the queries costs no
matrix products. In sequences of short documents, only the first ring steps have work. If the spec permits it, the
others are skipped, sends included (`_run`).

For latent attention, the ring sends the latents of the tokens, and each step expands the block that it received to the
keys and values of its heads (`LatentBlocks`): (R + P) x 2 bytes a token and hop in bf16, and in the backward pass the
gradient in float32 as well. Its sums over tensor ranks are float32, too.

The backward goes around the ring a second time with the global out and lse; dK/dV are sent along with the KV block
that they belong to. All running sums are float32. The order of operations makes the sends overlap with attention:

    - K and V are one array, or the latents that they are products of. XLA runs one collective at a time, so the second
      of two permutes would be exposed.
    - A send starts before the kernel call that it overlaps with. `optimization_barrier` ties the received block to the
      result of that call. Without the barrier, the compiler runs every send first and all KV blocks are live at once.
      With the barrier after the merge, newer XLA versions overlap the send with the merge, and both are limited by
      memory bandwidth.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxlc.attention.contract import (
    AttentionSpec,
    Kernel,
    KeysValues,
    QueryResults,
    calls_of,
    merge,
    prepared,
)
from jaxlc.attention.key_ranges import TokenInfo, ring_key_ranges
from jaxlc.attention.strategies.strategy import Expansion, ShardedQKV, attention_vjp
from jaxlc.core import scopes
from jaxlc.sharding.document_layout import NUM_FIRST_RING_STEPS
from jaxlc.sharding.mesh import Ranks


class ZigzagPair(NamedTuple):
    """The two products of half-blocks in one ring step: for each, the index of its half, 0 (lo) or
    1 (hi).

    Sums are updated in place: halves that a product does not use are neither read nor written.
    """

    query_halves: tuple[int, jax.Array]
    key_halves: tuple[int, jax.Array]

    @classmethod
    def select(cls, is_earlier) -> "ZigzagPair":
        """The halves for a block from an earlier rank, or from a later one."""
        second = jnp.where(is_earlier, 0, 1)
        return cls((1, second), (0, second))

    def operands(self, q, k, v):
        return _pair(q, self.query_halves), _pair(k, self.key_halves), _pair(v, self.key_halves)

    def results(self, results: QueryResults) -> QueryResults:
        return QueryResults(
            *(_pair(x, self.query_halves, axis) for x, axis in zip(results, (1, 2, 1, 2)))
        )


class HeadBlocks(NamedTuple):
    """What is sent of a rank's keys and values: the arrays themselves."""

    k_bskH: jax.Array
    v_bskH: jax.Array

    def packed(self) -> jax.Array:
        return _pack(*self)

    def keys_values(self, block: jax.Array) -> KeysValues:
        return _unpack(block, *self)

    def gradient(self, block: jax.Array, dk, dv) -> tuple[jax.Array, tuple]:
        """(gradient of a block, float32; gradient of weights: none)"""
        del block
        return _pack(dk, dv).astype(jnp.float32), ()

    def gradients(self, dblock: jax.Array, dweights: tuple) -> KeysValues:
        """The gradients of `ShardedQKV.k_bskH` and v_bskH."""
        del dweights
        return _unpack(dblock, *self)


class LatentBlocks(NamedTuple):
    """The same where keys and values are products of latents with weights: the latents are sent,
    and each ring step expands the block that it received.
    """

    latent_bsC: jax.Array
    weights: Expansion
    dtype: Any  # of what is sent

    def packed(self) -> jax.Array:
        return self.latent_bsC.astype(self.dtype)

    def keys_values(self, block: jax.Array) -> KeysValues:
        return self.weights.keys_values(block)

    def gradient(self, block: jax.Array, dk, dv) -> tuple[jax.Array, Expansion]:
        """(gradient of a block, float32; of the weights, float32)"""

        def expanded(block, weights):
            return weights.keys_values(block.astype(self.dtype))

        operands = (
            block.astype(jnp.float32),
            jax.tree.map(lambda x: x.astype(jnp.float32), self.weights),
        )
        _, pull_back = jax.vjp(expanded, *operands)
        return pull_back((dk.astype(self.dtype), dv.astype(self.dtype)))

    def gradients(self, dblock: jax.Array, dweights: Expansion) -> tuple[jax.Array, Expansion]:
        return dblock, dweights


def _blocks(qkv: ShardedQKV) -> HeadBlocks | LatentBlocks:
    if isinstance(qkv.v_bskH, Expansion):
        return LatentBlocks(qkv.k_bskH, qkv.v_bskH, qkv.q_btnH.dtype)
    return HeadBlocks(qkv.k_bskH, qkv.v_bskH)


def half_of(x, half, axis=1):
    """Half 0 or 1 of the tokens of x."""
    size = x.shape[axis] // 2
    return lax.dynamic_slice_in_dim(x, half * size, size, axis)


def update_half(x, half, new, axis=1):
    """x with `new` in place of one half."""
    return lax.dynamic_update_slice_in_dim(x, new, half * (x.shape[axis] // 2), axis)


def _pair(x, halves, axis=1):
    """Two halves of x, stacked along the batch."""
    return jnp.concatenate([half_of(x, half, axis) for half in halves])


def add_to_halves(x, halves, pair):
    """x with each element of the pair added to its half; both halves may be the same one."""
    for half, addend in zip(halves, jnp.split(pair, 2)):
        x = update_half(x, half, half_of(x, half) + addend)
    return x


class SkippableSteps(NamedTuple):
    """The ranges of all ring steps, where those after step 1 are skipped if no document needs them."""

    ranges: Any
    are_needed: jax.Array  # bool [1]; equal on all devices, since collectives are skipped too


class PreparedSteps(NamedTuple):
    """What a kernel's `prepare` returns for the calls of each ring step; arrays [ring steps, b,
    ...].
    """

    own_step: Any
    other_steps: Any


def prepare(tokens: TokenInfo, kernel: Kernel | None, spec: AttentionSpec, ranks: Ranks):
    """The `ranges` of `attend`, once per training step: int32 [ring steps, b, t].

    `SkippableSteps` of these, if the spec permits to skip steps.

    Args:
      kernel: the kernel of `attend`, whose `prepare` is applied to the ranges of each ring step. None: it is not.
    """
    ranges = ring_key_ranges(tokens, spec, ranks)
    if not _skips_steps(spec, ranks):
        return _prepared_steps(ranges, kernel, spec, ranks)
    has_keys = jnp.stack(
        [(x[NUM_FIRST_RING_STEPS:] > 0).any() for x in jax.tree.leaves(ranges)]
    ).any()
    # An all-gather, as of the tokens, since transports other than NCCL have no all-reduce.
    all_have_keys = lax.all_gather(has_keys, jax.sharding.get_abstract_mesh().manual_axes)
    return SkippableSteps(_prepared_steps(ranges, kernel, spec, ranks), all_have_keys.any()[None])


def _skips_steps(spec: AttentionSpec, ranks: Ranks) -> bool:
    return spec.skips_ring_steps and ranks.size > NUM_FIRST_RING_STEPS


def _prepared_steps(ranges, kernel: Kernel | None, spec: AttentionSpec, ranks: Ranks):
    if ranges is None or not hasattr(kernel, "prepare"):
        return ranges
    num_keys = jax.tree.leaves(ranges)[0].shape[-1]
    own_step = jax.tree.map(
        lambda x: x[None], prepared(kernel, _ranges_of_step(ranges, 0), num_keys, spec)
    )
    if ranks.size == 1:
        # the loop over other steps is traced, but has no iteration
        return PreparedSteps(own_step, own_step)
    other_steps = jax.tree.map(lambda x: x[1:], ranges)
    return PreparedSteps(
        own_step,
        jax.vmap(lambda ranges: prepared(kernel, ranges, num_keys, spec.not_causal))(other_steps),
    )


def ranges_specs(
    spec: AttentionSpec, batch_axes: tuple[str, ...], ranks: Ranks
) -> PartitionSpec | SkippableSteps:
    """The PartitionSpecs of the arrays of `prepare`."""
    steps = PartitionSpec(None, batch_axes, ranks.axis)
    return SkippableSteps(steps, PartitionSpec()) if _skips_steps(spec, ranks) else steps


def _forward(qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: Ranks):
    return _run(_forward_steps, qkv, kernel, spec, ranks)


def _backward(
    qkv: ShardedQKV, results: QueryResults, kernel: Kernel, spec: AttentionSpec, ranks: Ranks
):
    return _run(functools.partial(_backward_steps, results), qkv, kernel, spec, ranks)


def _run(run_steps: Callable, qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: Ranks):
    """The result of `run_steps(qkv, ring, number of steps)`, for all ring steps or for as many as
    are needed.
    """
    may_skip = isinstance(qkv.ranges, SkippableSteps)
    ranges = qkv.ranges.ranges if may_skip else qkv.ranges
    ring = RingState(kernel, spec, ranks, lax.axis_index(ranks.axis), ranges)
    if not may_skip:
        return run_steps(qkv, ring, ranks.size)

    def run(num_steps):
        results = run_steps(qkv, ring, num_steps)
        if qkv.sinks_n is not None:  # which join in float32
            return results
        # XLA does not fuse casts after a conditional with the sums in it.
        return jax.tree.map(lambda x: x.astype(qkv.q_btnH.dtype) if x.ndim == 4 else x, results)

    def run_first_steps():
        with jax.named_scope(scopes.FIRST_RING_STEPS):
            return run(NUM_FIRST_RING_STEPS)

    return lax.cond(qkv.ranges.are_needed[0], lambda: run(ranks.size), run_first_steps)


def _forward_steps(qkv: ShardedQKV, ring: "RingState", num_steps: int):
    q = qkv.q_btnH
    blocks = _blocks(qkv)
    own = blocks.packed()
    block = ring.send(own)  # overlaps with attention over the rank's own block
    operands = q, *blocks.keys_values(own), ring.own_ranges, ring.spec
    block, (out, lse) = _receive(block, ring.kernel, "forward", *operands)
    out_lse = out.astype(jnp.float32), lse

    def loop_body(step, carry):
        block, out_lse = carry
        return ring.forward_step(
            step, q, *blocks.keys_values(block), out_lse, in_flight=ring.send(block)
        )

    block, out_lse = lax.fori_loop(1, num_steps - 1, loop_body, (block, out_lse), unroll=2)
    if num_steps > 1:  # the last block is not sent on
        _, out_lse = ring.forward_step(num_steps - 1, q, *blocks.keys_values(block), out_lse)
    return out_lse


def _backward_steps(results: QueryResults, qkv: ShardedQKV, ring: "RingState", num_steps: int):
    q = qkv.q_btnH
    blocks = _blocks(qkv)
    own = blocks.packed()
    block = ring.send(own)
    operands = q, *blocks.keys_values(own), ring.own_ranges, ring.spec, results
    block, (dq, dk, dv) = _receive(block, ring.kernel, "backward", *operands)
    dq = dq.astype(jnp.float32)
    dblock, dweights = blocks.gradient(own, dk, dv)

    def loop_body(step, carry):
        block, dblock, dq, dweights = carry
        in_flight = ring.send(block), ring.send(dblock)
        (following, dblock), dq, dk, dv = ring.backward_step(
            step, q, *blocks.keys_values(block), results, dq, in_flight
        )
        added, dweights_added = blocks.gradient(block, dk, dv)
        return following, dblock + added, dq, _sum(dweights, dweights_added)

    carry = lax.fori_loop(1, num_steps - 1, loop_body, (block, dblock, dq, dweights), unroll=2)
    block, dblock, dq, dweights = carry
    if num_steps > 1:
        last = num_steps - 1
        dblock, dq, dk, dv = ring.backward_step(
            last, q, *blocks.keys_values(block), results, dq, ring.send(dblock)
        )
        added, dweights_added = blocks.gradient(block, dk, dv)
        dblock = ring.send(dblock + added, -last)  # send the gradient back to the owner rank
        dweights = _sum(dweights, dweights_added)
    return dq, *blocks.gradients(dblock, dweights)


def _sum(a, b):
    return jax.tree.map(jnp.add, a, b)


attend = attention_vjp(_forward, _backward, inline=True)


class RingState(NamedTuple):
    """The state of one rank of the ring: its neighbor, and the kernel calls of each ring step."""

    kernel: Kernel
    spec: AttentionSpec
    ranks: Ranks
    rank: jax.Array | int  # this rank's index on the axis
    ranges: Any  # from `prepare`; None: an implicit mask

    @property
    def own_ranges(self):
        """Over the rank's own KV block."""
        return _ranges_of_step(self.ranges, 0)

    @property
    def computes_whole_blocks(self) -> bool:
        """Whether a ring step computes the product of whole blocks instead of half-blocks in zigzag
        order.
        """
        return self.ranges is not None or not self.spec.causal

    @jax.named_scope(scopes.RING_SEND)
    def send(self, x: jax.Array, distance: int = 1) -> jax.Array:
        """Sends x to the rank that is `distance` further; returns the x of the rank that is as far
        before.
        """
        if self.ranks.size == 1:
            return x
        size = self.ranks.size
        return lax.ppermute(
            x, self.ranks.axis, [(rank, (rank + distance) % size) for rank in range(size)]
        )

    @jax.named_scope(scopes.RING_STEP)
    def forward_step(self, step, q, k, v, out_lse, in_flight=()):
        """Merges attention over the KV block of rank - step into out_lse.

        Args:
          out_lse: (out_btnH, lse_bnt) over the KV blocks of the earlier steps, float32.
          in_flight: arrays being received, whose transfer overlaps with the kernel.
        Returns:
          in_flight, and the new (out_btnH, lse_bnt).
        """
        ranges, spec = self._block_masks(step)
        if self.computes_whole_blocks:
            in_flight, results = _receive(in_flight, self.kernel, "forward", q, k, v, ranges, spec)
            return in_flight, merge(*out_lse, *results)
        halves = self._select_halves(step)
        operands = *halves.operands(q, k, v), ranges, spec
        in_flight, results = _receive(in_flight, self.kernel, "forward", *operands)
        out, lse = out_lse
        for half, *partial in zip(halves.query_halves, *(jnp.split(x, 2) for x in results)):
            out_half, lse_half = merge(half_of(out, half), half_of(lse, half, axis=2), *partial)
            out = update_half(out, half, out_half)
            lse = update_half(lse, half, lse_half, axis=2)
        return in_flight, (out, lse)

    @jax.named_scope(scopes.RING_STEP)
    def backward_step(self, step, q, k, v, results: QueryResults, dq, in_flight=()):
        """Gradients with respect to the KV block of rank - step.

        Returns:
          in_flight, dq with this block's contribution added, and this rank's contribution to the block's dk and dv.
        """
        ranges, spec = self._block_masks(step)
        if self.computes_whole_blocks:
            in_flight, (dq_block, dk, dv) = _receive(
                in_flight, self.kernel, "backward", q, k, v, ranges, spec, results
            )
            return in_flight, dq + dq_block, dk, dv
        halves = self._select_halves(step)
        operands = *halves.operands(q, k, v), ranges, spec, halves.results(results)
        in_flight, (dq_pair, *dkv_pairs) = _receive(in_flight, self.kernel, "backward", *operands)
        dq = add_to_halves(dq, halves.query_halves, dq_pair)
        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (k, v))
        dk, dv = (
            add_to_halves(zero, halves.key_halves, pair) for zero, pair in zip(zeros, dkv_pairs)
        )
        return in_flight, dq, dk, dv

    def _block_masks(self, step):
        """The ranges of this rank's queries over the block of a ring step, and the spec of the
        step.

        The spec is not causal: a query attends to all keys of a half-block or to none, or the
        ranges are the mask.
        """
        return _ranges_of_step(self.ranges, step), self.spec.not_causal

    def _select_halves(self, step) -> "ZigzagPair":
        source = (self.rank - step) % self.ranks.size
        return ZigzagPair.select(source < self.rank)


def _ranges_of_step(ranges, step):
    """The ranges of a ring step; step 0 is static."""
    if isinstance(ranges, PreparedSteps):
        ranges, step = (
            (ranges.own_step, 0)
            if isinstance(step, int) and step == 0
            else (ranges.other_steps, step - 1)
        )
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, step, keepdims=False), ranges)


def _receive(in_flight, kernel: Kernel, *call):
    """in_flight and the values of `calls_of(kernel, *call)`, available once the transfer and the
    calls are done.

    Results are in the dtype that the kernel writes; those after the barrier are joined and cast by
    the kernels that sum them. So the compiler cannot overlap the transfer with operations after the
    calls instead of with the calls.
    """
    calls = calls_of(kernel, *call)
    in_flight, results = lax.optimization_barrier((in_flight, calls.results))
    return in_flight, calls.joined(results)


def _pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """K and V, whose head dims may differ, as one contiguous 1D array."""
    return jnp.concatenate([k.reshape(-1), v.reshape(-1)])


def _unpack(block: jax.Array, k_like: jax.Array, v_like: jax.Array) -> KeysValues:
    return block[: k_like.size].reshape(k_like.shape), block[k_like.size :].reshape(v_like.shape)
