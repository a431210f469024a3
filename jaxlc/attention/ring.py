"""Ring attention: queries stay, K and V travel once around the context axis (Liu et al. 2023, arXiv:2310.01889).

Runs inside `shard_map`; each rank holds its piece of the sequence in zigzag order, two chunks (lo, hi) of equal
length. Causality then needs no control flow, and every rank does the same work at every step:

    step 0   the rank's own block: one plain causal call over (lo, hi)
    step s   the block of rank - s. Two half-by-half products are due, both without a causal mask: (q_hi, k_lo)
             always; (q_lo, k_lo) if the block comes from an earlier rank, else (q_hi, k_hi). The halves are
             taken by number and one kernel call does both, as a batch of two.

The backward goes round again with the global out and lse, and dK/dV travel with the block they belong to. All
running sums are float32. What overlaps, and why it is written in this order:

    - K and V are one array: XLA runs one collective at a time, so the second of two permutes would be exposed.
    - A hop starts before the attention that hides it, and `optimization_barrier` ties what it brought to that
      attention's result. Without it the compiler runs every hop first and holds all of K and V at once; with it after
      the merge, newer versions start the hop beside the merge, and both want the memory's bandwidth.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention import halo
from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.attention.merge import merge
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


def attend(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    masks: Masks,
    kernel: Kernel,
    spec: AttentionSpec,
    ranks: Ranks,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the whole sequence, this rank's piece of it; call inside `shard_map`.

    Args:
      q_btnH, k_bskH, v_bskH: this rank's queries, keys and values, zigzag order.
      masks: of this rank's piece against itself.
      kernel: does the blocks; a module that satisfies `contract.Kernel`.
      spec: with a window, only what it reaches is sent and computed (halo.py).
      ranks: the axis that splits the sequence, of any size from 1.
    Returns:
      out_btnH in q's dtype, lse_bnt float32.
    """
    if spec.window is not None:
        return halo.attend(q_btnH, k_bskH, v_bskH, masks, kernel, spec, ranks)
    return _attend(q_btnH, k_bskH, v_bskH, masks, kernel, spec, ranks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q, k, v, masks, kernel, spec, ranks):
    return _forward(q, k, v, masks, kernel, spec, ranks)


def _forward(q, k, v, masks, kernel, spec, ranks):
    ring = RingState.here(kernel, spec, ranks, masks)
    block = ring.send(_pack(k, v))  # while the rank's own block is computed
    out_lse = kernel.forward(q, k, v, masks, spec)
    block, out_lse = lax.optimization_barrier((block, out_lse))

    def step(s, carry):
        block, out_lse = carry
        return ring.forward_hop(s, q, *_unpack(block, k, v), out_lse, in_flight=ring.send(block))

    block, out_lse = lax.fori_loop(1, ranks.size - 1, step, (block, out_lse))
    if ranks.size > 1:  # the last block goes nowhere
        _, out_lse = ring.forward_hop(ranks.size - 1, q, *_unpack(block, k, v), out_lse)
    out, lse = out_lse
    return out.astype(q.dtype), lse


def _forward_rule(q, k, v, masks, kernel, spec, ranks):
    out, lse = _forward(q, k, v, masks, kernel, spec, ranks)
    # Named here, inside the rule: a remat policy that keeps both then has all that the backward asks of the
    # forward ring. Named outside, the residuals would be other values, and the ring would run again.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, masks, out, lse)


def _backward_rule(kernel, spec, ranks, residuals, cotangents):
    q, k, v, masks, out, lse = residuals
    rows = QueryResults(out, lse, *cotangents)
    ring = RingState.here(kernel, spec, ranks, masks)
    block = ring.send(_pack(k, v))
    dq, dk, dv = kernel.backward(q, k, v, masks, spec, *rows)
    block, dblock, dq = lax.optimization_barrier((block, _pack(dk, dv), dq))

    def step(s, carry):
        block, dblock, dq = carry
        in_flight = ring.send(block), ring.send(dblock)
        (block, dblock), dq, dk, dv = ring.backward_hop(s, q, *_unpack(block, k, v), rows, dq, in_flight)
        return block, dblock + _pack(dk, dv), dq

    block, dblock, dq = lax.fori_loop(1, ranks.size - 1, step, (block, dblock, dq))
    if ranks.size > 1:
        in_flight = ring.send(dblock)
        dblock, dq, dk, dv = ring.backward_hop(ranks.size - 1, q, *_unpack(block, k, v), rows, dq, in_flight)
        dblock = ring.send(dblock + _pack(dk, dv))  # home
    dk, dv = _unpack(dblock, k, v)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward_rule, _backward_rule)


class QueryResults(NamedTuple):
    """What the backward knows of each query row: over all keys on all ranks, not one block's."""

    out_btnH: jax.Array
    lse_bnt: jax.Array
    dout_btnH: jax.Array
    dlse_bnt: jax.Array


class RingState(NamedTuple):
    """One rank: to whom it sends, and what it computes with a block that has come `s` steps."""

    kernel: Kernel
    spec: AttentionSpec
    ranks: Ranks
    rank: jax.Array | int  # its number
    segments_rbs: jax.Array | None  # segment ids of every rank's piece

    @classmethod
    def here(cls, kernel: Kernel, spec: AttentionSpec, ranks: Ranks, masks: Masks) -> "RingState":
        """The rank that runs this; call inside `shard_map`."""
        return cls(kernel, spec, ranks, lax.axis_index(ranks.axis), _segments_of_ranks(masks, ranks))

    @jax.named_scope(scopes.RING_SEND)
    def send(self, x: jax.Array) -> jax.Array:
        if self.ranks.size == 1:
            return x
        size = self.ranks.size
        return lax.ppermute(x, self.ranks.axis, [(rank, (rank + 1) % size) for rank in range(size)])

    @jax.named_scope(scopes.RING_STEP)
    def forward_hop(self, s, q, k, v, out_lse, in_flight=()):
        """Returns `in_flight`, which arrives meanwhile, and (out_btnH, lse_bnt) with rank - s's block merged in."""
        source, masks, spec = self._block(s)
        if not self.spec.causal:
            in_flight, results = _arrived(in_flight, self.kernel.forward(q, k, v, masks, spec))
            return in_flight, merge(*out_lse, *results)
        halves = _ZigzagPair.due(source < self.rank)
        results = self.kernel.forward(*halves.operands(q, k, v), halves.masks(masks), spec)
        in_flight, results = _arrived(in_flight, results)
        out, lse = out_lse
        for half, *partial in zip(halves.of_queries, *(jnp.split(x, 2) for x in results)):
            out_half, lse_half = merge(_half(out, half), _half(lse, half, axis=2), *partial)
            out, lse = _with_half(out, half, out_half), _with_half(lse, half, lse_half, axis=2)
        return in_flight, (out, lse)

    @jax.named_scope(scopes.RING_STEP)
    def backward_hop(self, s, q, k, v, rows: QueryResults, dq, in_flight=()):
        """Returns `in_flight`, dq with this block's share added, and this rank's share of the block's dk and dv."""
        source, masks, spec = self._block(s)
        if not self.spec.causal:
            in_flight, (dq_share, dk, dv) = _arrived(in_flight, self.kernel.backward(q, k, v, masks, spec, *rows))
            return in_flight, dq + dq_share, dk, dv
        halves = _ZigzagPair.due(source < self.rank)
        operands, masks, rows = halves.operands(q, k, v), halves.masks(masks), halves.rows(rows)
        in_flight, (dq_2, *dkv_2) = _arrived(in_flight, self.kernel.backward(*operands, masks, spec, *rows))
        dq = _add_to_halves(dq, halves.of_queries, dq_2)
        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (k, v))
        dk, dv = (_add_to_halves(zero, halves.of_keys, x_2) for zero, x_2 in zip(zeros, dkv_2))
        return in_flight, dq, dk, dv

    def _block(self, s):
        """Where the block came from, its masks against this rank's queries, and the hop's spec: not causal, for
        whatever of a foreign block is visible at all is visible whole."""
        source = (self.rank - s) % self.ranks.size
        spec = AttentionSpec(**{**vars(self.spec), "causal": False})
        if self.segments_rbs is None:
            return source, Masks(None, None, None, None), spec
        own, theirs = (lax.dynamic_index_in_dim(self.segments_rbs, r, keepdims=False) for r in (self.rank, source))
        return source, Masks(None, None, own, theirs), spec


def _arrived(in_flight, results):
    """Both, once the hop is over and the kernel done: whatever comes after the kernel cannot be what hides the hop."""
    return lax.optimization_barrier((in_flight, results))


class _ZigzagPair(NamedTuple):
    """The zigzag choice at one step, without control flow: which half along the sequence, 0 (lo) or 1 (hi), each of the
    two products takes. In place: what of a sum a product does not concern is neither read nor written."""

    of_queries: tuple[int, jax.Array]
    of_keys: tuple[int, jax.Array]

    @classmethod
    def due(cls, is_earlier) -> "_ZigzagPair":
        """Of a block that comes from an earlier rank, or from a later one."""
        chosen = jnp.where(is_earlier, 0, 1)
        return cls((1, chosen), (0, chosen))

    def operands(self, q, k, v):
        return _pair(q, self.of_queries), _pair(k, self.of_keys), _pair(v, self.of_keys)

    def masks(self, masks: Masks) -> Masks:
        if masks.q_segments_BT is None:
            return masks
        return Masks(None, None, _pair(masks.q_segments_BT, self.of_queries), _pair(masks.k_segments_BS, self.of_keys))

    def rows(self, rows: QueryResults) -> QueryResults:
        return QueryResults(
            _pair(rows.out_btnH, self.of_queries),
            _pair(rows.lse_bnt, self.of_queries, axis=2),
            _pair(rows.dout_btnH, self.of_queries),
            _pair(rows.dlse_bnt, self.of_queries, axis=2),
        )


def _half(x, half, axis=1):
    size = x.shape[axis] // 2
    return lax.dynamic_slice_in_dim(x, half * size, size, axis)


def _with_half(x, half, new, axis=1):
    return lax.dynamic_update_slice_in_dim(x, new, half * (x.shape[axis] // 2), axis)


def _pair(x, halves, axis=1):
    """Two halves of x, one after the other along its batch."""
    return jnp.concatenate([_half(x, half, axis) for half in halves])


def _add_to_halves(x, halves, shares_2):
    """x with a pair added, each where it belongs: the two may be the same half."""
    for half, share in zip(halves, jnp.split(shares_2, 2)):
        x = _with_half(x, half, _half(x, half) + share)
    return x


def _segments_of_ranks(masks: Masks, ranks: Ranks) -> jax.Array | None:
    """Everybody's segment ids: a few bytes a token, gathered once instead of travelling with each hop."""
    if masks.q_segments_BT is None or ranks.size == 1:
        return None
    return lax.all_gather(masks.q_segments_BT, ranks.axis)


def _pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """K and V, whose head dims may differ, as one contiguous array."""
    return jnp.concatenate([k.reshape(-1), v.reshape(-1)])


def _unpack(block: jax.Array, k_like: jax.Array, v_like: jax.Array) -> tuple[jax.Array, jax.Array]:
    return block[: k_like.size].reshape(k_like.shape), block[k_like.size :].reshape(v_like.shape)
