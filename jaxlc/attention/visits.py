"""The engine of tiled.py, inside `shard_map`: a tile's queries visit the keys of their own block and of all others.

Dimensions of its own: P pieces of a tile, of which piece 2 i is of rank i's chunk lo and 2 i + 1 of its hi; J pieces of
a group's block, in natural order; O groups; t tokens of a piece of queries, s of keys; C = 2 for K and V, which are one
array, so that a hop is one permute.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.attention.merge import merge
from jaxlc.sharding.mesh import Ranks


class Rows(NamedTuple):
    """What the backward knows of a tile's queries; out and lse over all keys."""

    q_PbtNH: jax.Array
    out_PbtNH: jax.Array
    lse_PbNt: jax.Array
    dout_PbtNH: jax.Array


class Group(NamedTuple):
    """One group of ranks and one tile: where its pieces are, and what they do."""

    kernel: Kernel | None  # None: to move pieces only
    spec: AttentionSpec  # causal
    outer: Ranks
    inner: Ranks
    tiles: int
    tile: jax.Array
    segments_OJbs: jax.Array | None

    @classmethod
    def here(cls, kernel, spec, outer: Ranks, inner: Ranks, tiles: int, tile, segments_bt) -> "Group":
        """The group of the rank that runs this."""
        segments_OJbs = None if segments_bt is None else _segments_of_groups(segments_bt, outer, inner, tiles)
        return cls(kernel, spec, outer, inner, tiles, tile, segments_OJbs)

    @property
    def num_places(self) -> int:
        """J"""
        return 2 * self.inner.size * self.tiles

    def place(self, piece):
        """Where a piece of the tile stands in the block."""
        place = piece // 2 * self.tiles + self.tile
        return jnp.where(piece % 2 == 0, place, self.num_places - 1 - place)

    def pieces_of(self, x_btNH: jax.Array, tokens_dim: int = 1) -> jax.Array:
        """A rank's tokens of the tile, [..., t, N, ...], to its group's pieces, [P, ..., t, N / ranks, ...]."""
        if self.inner.size > 1:
            heads_dim = tokens_dim + 1
            x_btNH = lax.all_to_all(x_btNH, self.inner.axis, split_axis=heads_dim, concat_axis=tokens_dim, tiled=True)
        before, after = x_btNH.shape[:tokens_dim], x_btNH.shape[tokens_dim + 1 :]
        return jnp.moveaxis(x_btNH.reshape(*before, 2 * self.inner.size, -1, *after), tokens_dim, 0)

    def tokens_of(self, x_PbsNH: jax.Array, tokens_dim: int = 1) -> jax.Array:
        """The inverse of `pieces_of`."""
        x_bPsNH = jnp.moveaxis(x_PbsNH, 0, tokens_dim)
        x_bTNH = x_bPsNH.reshape(*x_bPsNH.shape[:tokens_dim], -1, *x_bPsNH.shape[tokens_dim + 2 :])
        if self.inner.size == 1:
            return x_bTNH
        heads_dim = tokens_dim + 1
        return lax.all_to_all(x_bTNH, self.inner.axis, split_axis=tokens_dim, concat_axis=heads_dim, tiled=True)

    def forward(self, q_PbtNH: jax.Array, kv_JCbsKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(out_PbtNH, lse_PbNt), float32, over the keys of all groups."""
        block = self._send(kv_JCbsKH)  # while the group's own block is visited
        results = lax.map(
            lambda piece: self._attend(0, piece_at(q_PbtNH, piece), piece, kv_JCbsKH, self.place(piece), self.spec),
            jnp.arange(len(q_PbtNH)),
        )
        results = self._forward_visits(0, q_PbtNH, kv_JCbsKH, results)
        if self.outer.size == 1:
            return results

        def hop(step, carry):
            block, results = carry
            in_flight = self._send(block)
            return lax.optimization_barrier((in_flight, self._forward_visits(step, q_PbtNH, block, results)))

        carry = lax.optimization_barrier((block, results))
        block, results = lax.fori_loop(1, self.outer.size - 1, hop, carry)
        return self._forward_visits(self.outer.size - 1, q_PbtNH, block, results)

    def backward(self, rows: Rows, kv_JCbsKH: jax.Array, dkv_JCbsKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(dq_PbtNH float32, dkv_JCbsKH with the shares of these queries added on every group)."""
        block = self._send(kv_JCbsKH)

        def diagonal(dkv_JCbsKH, piece):
            dq_btNH, dkv_JCbsKH = self._gradients(0, rows, piece, kv_JCbsKH, dkv_JCbsKH, self.place(piece), self.spec)
            return dkv_JCbsKH, dq_btNH

        dkv_JCbsKH, dq_PbtNH = lax.scan(diagonal, dkv_JCbsKH, jnp.arange(len(rows.q_PbtNH)))
        gradients = self._backward_visits(0, rows, kv_JCbsKH, (dq_PbtNH, dkv_JCbsKH))
        if self.outer.size == 1:
            return gradients

        def hop(step, carry):
            block, (dq_PbtNH, dkv_JCbsKH) = carry
            in_flight = self._send(block)
            gradients = dq_PbtNH, self._send_in_place(dkv_JCbsKH)
            return lax.optimization_barrier((in_flight, self._backward_visits(step, rows, block, gradients)))

        carry = lax.optimization_barrier((block, gradients))
        block, gradients = lax.fori_loop(1, self.outer.size - 1, hop, carry)
        dq_PbtNH, dkv_JCbsKH = gradients
        gradients = dq_PbtNH, self._send_in_place(dkv_JCbsKH)
        dq_PbtNH, dkv_JCbsKH = self._backward_visits(self.outer.size - 1, rows, block, gradients)
        return dq_PbtNH, self._send_in_place(dkv_JCbsKH)  # home

    def _forward_visits(self, step, q_PbtNH, block_JCbsKH, results):
        """`results` with the keys of the block merged in that has come `step` hops."""
        spec = _not_causal(self.spec)

        def visit(piece, place, results):
            found = self._attend(step, piece_at(q_PbtNH, piece), piece, block_JCbsKH, place, spec)
            out_PbtNH, lse_PbNt = results
            out_btNH, lse_bNt = merge(piece_at(out_PbtNH, piece), piece_at(lse_PbNt, piece), *found)
            return with_piece(out_PbtNH, out_btNH, piece), with_piece(lse_PbNt, lse_bNt, piece)

        return self._visits(step, visit, results)

    def _backward_visits(self, step, rows: Rows, block_JCbsKH, gradients):
        spec = _not_causal(self.spec)

        def visit(piece, place, gradients):
            dq_PbtNH, dblock_JCbsKH = gradients
            dq_btNH, dblock_JCbsKH = self._gradients(step, rows, piece, block_JCbsKH, dblock_JCbsKH, place, spec)
            return with_piece(dq_PbtNH, piece_at(dq_PbtNH, piece) + dq_btNH, piece), dblock_JCbsKH

        return self._visits(step, visit, gradients)

    def _visits(self, step, visit: Callable, carry):
        """`carry = visit(piece, place, carry)` for every piece of the tile and every place of the block that it sees
        whole: first of lo and its mirror image of rank 0, then of rank 1, ... As many whatever rank, tile and block."""
        is_own = isinstance(step, int) and step == 0
        per_pair = self.num_places - 1 if is_own else self.num_places
        is_earlier = lax.axis_index(self.outer.axis) >= step

        def one(number, carry):
            rank, number = number // per_pair, number % per_pair
            seen_by_lo = self.place(2 * rank) if is_own else jnp.where(is_earlier, self.num_places // 2, 0)
            is_hi = number >= seen_by_lo
            place = jnp.where(is_hi, number - seen_by_lo, number)
            return visit(2 * rank + is_hi, place, carry)

        return lax.fori_loop(0, self.inner.size * per_pair, one, carry)

    def _attend(self, step, q_btNH, piece, block_JCbsKH, place, spec: AttentionSpec):
        """(out_btNH, lse_bNt) of one visit."""
        k_bsKH, v_bsKH = piece_at(block_JCbsKH, place)
        return self.kernel.forward(q_btNH, k_bsKH, v_bsKH, self._masks(step, piece, place), spec)

    def _gradients(self, step, rows: Rows, piece, block_JCbsKH, dblock_JCbsKH, place, spec: AttentionSpec):
        """dq_btNH of one visit, and dblock with its dk and dv added."""
        k_bsKH, v_bsKH = piece_at(block_JCbsKH, place)
        q, out, lse, dout = (piece_at(x, piece) for x in rows)
        masks, dlse = self._masks(step, piece, place), jnp.zeros_like(lse)
        dq, dk, dv = self.kernel.backward(q, k_bsKH, v_bsKH, masks, spec, out, lse, dout, dlse)
        return dq, with_piece(dblock_JCbsKH, piece_at(dblock_JCbsKH, place) + jnp.stack([dk, dv]), place)

    def _masks(self, step, piece, place) -> Masks:
        if self.segments_OJbs is None:
            return Masks(None, None, None, None)
        group = lax.axis_index(self.outer.axis)
        source = (group - step) % self.outer.size
        return Masks(None, None, self.segments_OJbs[group, self.place(piece)], self.segments_OJbs[source, place])

    def _send(self, x: jax.Array) -> jax.Array:
        if self.outer.size == 1:
            return x
        size = self.outer.size
        return lax.ppermute(x, self.outer.axis, [(group, (group + 1) % size) for group in range(size)])

    def _send_in_place(self, x_JCbsKH: jax.Array) -> jax.Array:
        """`_send` with one piece in flight, not the whole."""
        return lax.fori_loop(
            0, len(x_JCbsKH), lambda place, x: with_piece(x, self._send(piece_at(x, place)), place), x_JCbsKH
        )


def piece_at(x_P: jax.Array, at) -> jax.Array:
    return lax.dynamic_index_in_dim(x_P, at, keepdims=False)


def with_piece(x_P: jax.Array, piece: jax.Array, at) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_P, piece, at, 0)


def _not_causal(spec: AttentionSpec) -> AttentionSpec:
    """Of what is visible at all outside the diagonal, everything is visible."""
    return AttentionSpec(**{**vars(spec), "causal": False})


def _segments_of_groups(segments_bt: jax.Array, outer: Ranks, inner: Ranks, tiles: int) -> jax.Array:
    """Segment ids of every group's block, [O, J, b, s]: a few bytes a token, gathered instead of exchanged and sent."""
    segments_Rbt = lax.all_gather(segments_bt, (outer.axis, inner.axis))
    batch = segments_bt.shape[0]
    chunks_OIb2ns = segments_Rbt.reshape(outer.size, inner.size, batch, 2, tiles, -1)
    lo_OIbns, hi_OIbns = chunks_OIb2ns[:, :, :, 0], chunks_OIb2ns[:, ::-1, :, 1]  # hi chunks run from the last rank
    runs = (jnp.swapaxes(x, 2, 3).reshape(outer.size, inner.size * tiles, batch, -1) for x in (lo_OIbns, hi_OIbns))
    return jnp.concatenate(list(runs), axis=1)
