"""The engine of tiled.py, inside `shard_map`: a tile's queries visit the keys of their own block and of all others.

A block is cut into J places of one piece each. A visit is one kernel call, a piece of queries over the keys of one
place, or of m = `places_per_visit`: the more keys it sees, the less it costs to merge what it found. Of their own block
the tile's two pieces of a rank see p and J-1-p places whole. That makes J/m-1 visits of m places and m-1 of one for
every p, since the two remainders of a division by m add up to m-1.

Dimensions of its own: P pieces of a tile, of which piece 2 i is of rank i's chunk lo and 2 i + 1 of its hi; C = 2 for K
and V, which are one array, so that a hop is one permute; O groups; t tokens of a piece, s of a block, v of a visit's
keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.attention.merge import merge
from jaxlc.sharding.mesh import Ranks

_TOKENS = 2  # the dimension of a block [C, b, s, k, H] that counts tokens


class Rows(NamedTuple):
    """What the backward knows of a tile's queries; out and lse over all keys."""

    q_PbtnH: jax.Array
    out_PbtnH: jax.Array
    lse_Pbnt: jax.Array
    dout_PbtnH: jax.Array


class Visit(NamedTuple):
    """A piece of the tile and the places of a block whose keys it looks at."""

    piece: jax.Array
    place: jax.Array
    num_places: int
    hops: jax.Array | int  # how far the block has come
    spec: AttentionSpec


class Group(NamedTuple):
    """One group of ranks and one tile: where its pieces stand, and whom they visit."""

    kernel: Kernel | None  # None: to move pieces only
    spec: AttentionSpec  # causal, as on the diagonal
    outer: Ranks  # the ring of groups
    inner: Ranks  # a group
    tiles: int
    places_per_visit: int  # places; divides half a block
    tile: jax.Array | int
    segments_Obs: jax.Array | None  # segment ids of every group's block

    @property
    def num_pieces(self) -> int:
        """P"""
        return 2 * self.inner.size

    @property
    def num_places(self) -> int:
        """J"""
        return self.num_pieces * self.tiles

    def place_of(self, piece):
        """Where a piece of the tile stands in its block: hi pieces are the mirror image of lo pieces."""
        place = piece // 2 * self.tiles + self.tile
        return jnp.where(piece % 2 == 0, place, self.num_places - 1 - place)

    def pieces_of(self, x_btnH: jax.Array, tokens_dim: int = 1) -> jax.Array:
        """A rank's tokens of the tile, [..., t, n, ...], to its group's pieces, [P, ..., t, n / ranks, ...]."""
        if self.inner.size > 1:
            heads_dim = tokens_dim + 1
            x_btnH = lax.all_to_all(x_btnH, self.inner.axis, split_axis=heads_dim, concat_axis=tokens_dim, tiled=True)
        before, after = x_btnH.shape[:tokens_dim], x_btnH.shape[tokens_dim + 1 :]
        return jnp.moveaxis(x_btnH.reshape(*before, self.num_pieces, -1, *after), tokens_dim, 0)

    def tokens_of(self, x_PbtnH: jax.Array, tokens_dim: int = 1) -> jax.Array:
        """The inverse of `pieces_of`."""
        x_bPtnH = jnp.moveaxis(x_PbtnH, 0, tokens_dim)
        x_btnH = x_bPtnH.reshape(*x_bPtnH.shape[:tokens_dim], -1, *x_bPtnH.shape[tokens_dim + 2 :])
        if self.inner.size == 1:
            return x_btnH
        heads_dim = tokens_dim + 1
        return lax.all_to_all(x_btnH, self.inner.axis, split_axis=tokens_dim, concat_axis=heads_dim, tiled=True)

    def keys_at(self, block_CbskH: jax.Array, place, num_places: int = 1) -> jax.Array:
        tokens = block_CbskH.shape[_TOKENS] // self.num_places
        return lax.dynamic_slice_in_dim(block_CbskH, place * tokens, num_places * tokens, _TOKENS)

    def with_keys(self, block_CbskH: jax.Array, keys_CbvkH: jax.Array, place) -> jax.Array:
        tokens = block_CbskH.shape[_TOKENS] // self.num_places
        return lax.dynamic_update_slice_in_dim(block_CbskH, keys_CbvkH, place * tokens, _TOKENS)

    def forward(self, q_PbtnH: jax.Array, kv_CbskH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(out_PbtnH, lse_Pbnt), float32, over the keys of all groups."""
        block = self._send(kv_CbskH, after=q_PbtnH)  # while the group's own block is visited

        def attend(visit: Visit, block_CbskH):
            k_bvkH, v_bvkH = self.keys_at(block_CbskH, visit.place, visit.num_places)
            return self.kernel.forward(_at(q_PbtnH, visit.piece), k_bvkH, v_bvkH, self._masks(visit), visit.spec)

        def attend_more(visit: Visit, block_CbskH, results):
            found = merge(*(_at(x, visit.piece) for x in results), *attend(visit, block_CbskH))
            return tuple(_with(x, one, visit.piece) for x, one in zip(results, found, strict=True))

        results = lax.map(lambda piece: attend(self._diagonal(piece), kv_CbskH), jnp.arange(self.num_pieces))
        results = self._own_visits(lambda visit, carry: attend_more(visit, kv_CbskH, carry), results)
        if self.outer.size == 1:
            return results

        def visit_block(hops, block, results):
            return self._visits(hops, lambda visit, carry: attend_more(visit, block, carry), results)

        def hop(hops, carry):
            block, results = carry
            in_flight = self._send(block)
            return lax.optimization_barrier((in_flight, visit_block(hops, block, results)))

        carry = lax.optimization_barrier((block, results))
        block, results = lax.fori_loop(1, self.outer.size - 1, hop, carry)
        return visit_block(self.outer.size - 1, block, results)

    def backward(self, rows: Rows, kv_CbskH: jax.Array, dkv_CbskH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(dq_PbtnH float32, dkv_CbskH with what these queries add to it in every group)."""
        block = self._send(kv_CbskH, after=rows)

        def share(visit: Visit, block_CbskH, dblock_CbskH):
            """dq_btnH, and dblock with this visit's dk and dv added."""
            k_bvkH, v_bvkH = self.keys_at(block_CbskH, visit.place, visit.num_places)
            q, *results = (_at(x, visit.piece) for x in rows)
            masks, no_dlse = self._masks(visit), jnp.zeros_like(_at(rows.lse_Pbnt, visit.piece))
            dq, dk, dv = self.kernel.backward(q, k_bvkH, v_bvkH, masks, visit.spec, *results, no_dlse)
            total_CbvkH = self.keys_at(dblock_CbskH, visit.place, visit.num_places) + jnp.stack([dk, dv])
            return dq, self.with_keys(dblock_CbskH, total_CbvkH, visit.place)

        def add_share(visit: Visit, block_CbskH, gradients):
            dq_PbtnH, dblock_CbskH = gradients
            dq_btnH, dblock_CbskH = share(visit, block_CbskH, dblock_CbskH)
            return _with(dq_PbtnH, _at(dq_PbtnH, visit.piece) + dq_btnH, visit.piece), dblock_CbskH

        def diagonal(dkv_CbskH, piece):
            return share(self._diagonal(piece), kv_CbskH, dkv_CbskH)[::-1]

        dkv_CbskH, dq_PbtnH = lax.scan(diagonal, dkv_CbskH, jnp.arange(self.num_pieces))
        gradients = self._own_visits(lambda visit, carry: add_share(visit, kv_CbskH, carry), (dq_PbtnH, dkv_CbskH))
        if self.outer.size == 1:
            return gradients

        def visit_block(hops, block, gradients):
            return self._visits(hops, lambda visit, carry: add_share(visit, block, carry), gradients)

        def hop(hops, carry):
            block, (dq_PbtnH, dblock_CbskH) = carry
            dblock_CbskH = self._send_in_place(dblock_CbskH)
            in_flight = self._send(block, after=dblock_CbskH)
            return lax.optimization_barrier((in_flight, visit_block(hops, block, (dq_PbtnH, dblock_CbskH))))

        carry = lax.optimization_barrier((block, gradients))
        block, (dq_PbtnH, dblock_CbskH) = lax.fori_loop(1, self.outer.size - 1, hop, carry)
        gradients = dq_PbtnH, self._send_in_place(dblock_CbskH)
        dq_PbtnH, dblock_CbskH = visit_block(self.outer.size - 1, block, gradients)
        return dq_PbtnH, self._send_in_place(dblock_CbskH)  # home

    def _diagonal(self, piece) -> Visit:
        """A piece and itself."""
        return Visit(piece, self.place_of(piece), 1, 0, self.spec)

    def _own_visits(self, visit: Callable, carry):
        """All that the tile sees whole of its own block."""
        many, spec = self.places_per_visit, _not_causal(self.spec)

        def visit_many(piece, number, carry):
            return visit(Visit(piece, number * many, many, 0, spec), carry)

        def visit_one(piece, number, carry):
            first_left = self.place_of(piece) // many * many
            return visit(Visit(piece, first_left + number, 1, 0, spec), carry)

        carry = self._each(lambda rank: self.place_of(2 * rank) // many, self.num_places // many - 1, visit_many, carry)
        return self._each(lambda rank: self.place_of(2 * rank) % many, many - 1, visit_one, carry)

    def _visits(self, hops, visit: Callable, carry):
        """All that the tile sees of the block that has come `hops` groups: of an earlier group's block every piece sees
        the first half; of a later group's, hi pieces see everything. `where` tells which, as in ring.py."""
        many, spec = self.places_per_visit, _not_causal(self.spec)
        all_visits = self.num_places // many
        seen_by_lo = jnp.where(lax.axis_index(self.outer.axis) >= hops, all_visits // 2, 0)

        def visit_many(piece, number, carry):
            return visit(Visit(piece, number * many, many, hops, spec), carry)

        return self._each(lambda rank: seen_by_lo, all_visits, visit_many, carry)

    def _each(self, visits_of_lo: Callable, visits_of_pair: int, visit: Callable, carry):
        """`carry = visit(piece, number, carry)`, rank by rank of the group: first its lo piece, numbers from 0 up to
        `visits_of_lo(rank)`, then its hi piece, from 0 until the pair has made `visits_of_pair`."""

        def step(index, carry):
            rank, number = index // visits_of_pair, index % visits_of_pair
            of_lo = visits_of_lo(rank)
            is_hi = number >= of_lo
            return visit(2 * rank + is_hi, jnp.where(is_hi, number - of_lo, number), carry)

        return lax.fori_loop(0, self.inner.size * visits_of_pair, step, carry)

    def _masks(self, visit: Visit) -> Masks:
        if self.segments_Obs is None:
            return Masks(None, None, None, None)
        group = lax.axis_index(self.outer.axis)
        source = (group - visit.hops) % self.outer.size
        tokens = self.segments_Obs.shape[2] // self.num_places
        own_bs, theirs_bs = _at(self.segments_Obs, group), _at(self.segments_Obs, source)
        q_segments_bt = lax.dynamic_slice_in_dim(own_bs, self.place_of(visit.piece) * tokens, tokens, 1)
        k_segments_bv = lax.dynamic_slice_in_dim(theirs_bs, visit.place * tokens, visit.num_places * tokens, 1)
        return Masks(None, None, q_segments_bt, k_segments_bv)

    def _send(self, x: jax.Array, after=None) -> jax.Array:
        """x of the group before. It starts when `after` is there: transfers wait for each other, and one that hides
        behind the visits must not keep one waiting that the visits wait for."""
        size = self.outer.size
        if size == 1:
            return x
        if after is not None:
            x, _ = lax.optimization_barrier((x, after))
        return lax.ppermute(x, self.outer.axis, [(group, (group + 1) % size) for group in range(size)])

    def _send_in_place(self, block_CbskH: jax.Array) -> jax.Array:
        """`_send` with one place in flight, not the whole."""

        def send_place(place, block_CbskH):
            return self.with_keys(block_CbskH, self._send(self.keys_at(block_CbskH, place)), place)

        return lax.fori_loop(0, self.num_places, send_place, block_CbskH)


def segments_of_groups(segments_bt: jax.Array, outer: Ranks, inner: Ranks) -> jax.Array:
    """segments_Obs, from each rank's in layout order: a few bytes a token, gathered instead of exchanged and sent."""
    segments_Rbt = lax.all_gather(segments_bt, (outer.axis, inner.axis))
    batch, rank_tokens = segments_bt.shape
    chunks_OIb2c = segments_Rbt.reshape(outer.size, inner.size, batch, 2, rank_tokens // 2)
    lo_OIbc, hi_OIbc = chunks_OIb2c[:, :, :, 0], chunks_OIb2c[:, ::-1, :, 1]  # hi chunks run from the last rank down
    runs_OIbc = jnp.concatenate([lo_OIbc, hi_OIbc], axis=1)
    return runs_OIbc.swapaxes(1, 2).reshape(outer.size, batch, inner.size * rank_tokens)


def _not_causal(spec: AttentionSpec) -> AttentionSpec:
    """Off the diagonal, what is visible at all is visible whole."""
    return AttentionSpec(**{**vars(spec), "causal": False})


def _at(x_P: jax.Array, piece) -> jax.Array:
    return lax.dynamic_index_in_dim(x_P, piece, keepdims=False)


def _with(x_P: jax.Array, x: jax.Array, piece) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_P, x, piece, 0)
