"""Recurrent layers for layers that scan over tiles of tokens: maps of states by tile, one exchange,
outputs by tile.

    tiled = TiledRecurrence(mesh, rule, tiles=n, num_taps=P)
    segments = tiled.prepare(segments_BT, prefixes_BTD)         once per training step, of all tiles
    before = tiled.before(project, x_nBtD, segments)            what the convolutions of all tiles read of other tiles
    maps = tiled.maps(operands, before, segments)               for each tile
    states = tiled.states(maps)                                 of all tiles: the exchange between ranks
    out_BtHV = tiled.outputs(operands, before, states, segments)   for each tile

Arrays are global, for use under `jit`, and JAX differentiates all of these functions. A rank's tile
has two pieces, one of each of its fragments (`attention/query_tiles.py`). The pieces of the second
fragment are in reverse order, so the states of all pieces follow from stored maps, [tiles, 2 x
ranks, B, H, K, K + V]: of a tile with 32 heads of dimension 128, a rank stores 8 MiB of float32
maps. With prefixes, K counts the rows of all states, and convolutions also read the tails of all
levels before a piece (`convolution`).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.query_tiles import tiles_of
from jaxlc.attention.recurrence.chunks import Rule, Tokens, map_and_reads, outputs, sum_map
from jaxlc.attention.recurrence.convolution import Tail, tails_before
from jaxlc.attention.recurrence.sharded_recurrence import (
    HEADS,
    Operands,
    filtered,
    rows_at,
    unit_lengths,
)
from jaxlc.attention.recurrence.sharded_rule import groups_of, kernel_tokens
from jaxlc.attention.state_passing import Affine, predecessors, tile_states, total
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, scopes
from jaxlc.sharding.mesh import Ranks, ranks_of, shard_map

_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT)
_TILES = PartitionSpec(None, BATCH_AXES, CONTEXT)
_SPLIT_TILES = PartitionSpec(None, BATCH_AXES, (CONTEXT, TENSOR))
# [2 x ranks, B, H, ...]: of both pieces of each rank
_PIECES = PartitionSpec(CONTEXT, BATCH_AXES, TENSOR)
_TOKENS_AT_ONCE = 8192  # of the XLA form, see `sharded_rule`


class TileSegments(NamedTuple):
    """int32 segments of a tile, or of all tiles with a leading dimension."""

    own_Bt: jax.Array
    # [B, ranks x 2 x tokens of `TiledRecurrence.tokens_before`]; 0: no token
    before_Bt: jax.Array
    prefixes_BtD: jax.Array | None  # see `sharded_recurrence.Documents`


class TiledRecurrence(NamedTuple):
    """See the docstring of the module."""

    mesh: Mesh
    rule: Rule
    tiles: int
    num_taps: int  # of the convolutions

    def prepare(
        self, segments_BT: jax.Array, prefixes_BTD: jax.Array | None = None
    ) -> TileSegments:
        """The segments of all tiles."""
        own = jax.tree.map(
            lambda x: tiles_of(x, self.mesh.shape[CONTEXT], self.tiles), (segments_BT, prefixes_BTD)
        )
        before = shard_map(self._before_pieces, self.mesh, (_SPLIT_TILES, _TILES), _TILES)(*own)
        return TileSegments(own[0], before, own[1])

    def tokens_before(self, x_nBtD: jax.Array, prefixes_nBtD: jax.Array | None) -> jax.Array:
        """The tokens before the two pieces of each rank's tile, [B, ranks x n x 2 x tokens, D];
        zeros before the sequence. With prefixes, first the tails before each piece, of level 0 first.

        Args:
          x_nBtD: the residual stream, whose tokens are split over context and tensor.
        """

        def local(*tiles):
            before_bntD = self._before_pieces(*tiles).swapaxes(0, 1)
            return before_bntD.reshape(len(before_bntD), -1, before_bntD.shape[-1])

        return shard_map(local, self.mesh, (_SPLIT_TILES, _TILES), _TOKENS)(x_nBtD, prefixes_nBtD)

    def before_tiles(self, x_BtHV: jax.Array) -> jax.Array:
        """Projections of `tokens_before`, [n, B, ranks x 2 x tokens, H, V]."""

        def local(x_bthV):
            return x_bthV.reshape(len(x_bthV), self.tiles, -1, *x_bthV.shape[2:]).swapaxes(0, 1)

        return shard_map(local, self.mesh, (HEADS,), PartitionSpec(None, *HEADS))(x_BtHV)

    def before(
        self, operands: Callable[[jax.Array], tuple], x_nBtD: jax.Array, segments: TileSegments
    ) -> tuple:
        """q, k and v of the tokens that the convolutions read before each tile, [n, B, ...].

        Args:
          operands: from tokens of the residual stream to the operands of `ShardedRecurrence.__call__`.
          segments: of all tiles.
        """
        tokens = self._split_over(operands(self.tokens_before(x_nBtD, segments.prefixes_BtD)))
        return tuple(map(self.before_tiles, tokens[:3]))

    def maps(self, operands: tuple, before: tuple, segments: TileSegments) -> Affine:
        """The maps of the states over the pieces of a tile, arrays [2 x ranks, B, H, K, K or V].

        Args:
          operands: the fields of `Operands`, for the tokens of a tile.
          before: of this tile.
        """
        return self._call(_maps, _PIECES, operands, before, segments)

    def states(self, maps: Affine) -> jax.Array:
        """The states that enter the pieces, [n, 2 x ranks, B, H, K, V], from the maps of all tiles,
        [n, ...].
        """

        pieces = PartitionSpec(None, *_PIECES)
        local = functools.partial(tile_states, ranks=ranks_of(self.mesh))
        return shard_map(local, self.mesh, (pieces,), pieces)(maps)

    def outputs(
        self, operands: tuple, before: tuple, states: jax.Array, segments: TileSegments
    ) -> jax.Array:
        """out_BtHV in the dtype of q, from the states that enter the pieces. Arguments as of
        `maps`.
        """
        return self._call(_outputs, HEADS, operands, before, segments, states)

    def _split_over(self, operands: tuple) -> Operands:
        return Operands(*operands).split_over(self.mesh.shape[TENSOR])

    def _call(self, local: Callable, out_specs, operands: tuple, before, segments, *states):
        operands = self._split_over(operands)
        local = functools.partial(local, rule=self.rule)
        in_specs = operands.specs, HEADS, _TOKENS, *(_PIECES for _ in states)
        return shard_map(local, self.mesh, in_specs, out_specs)(operands, before, segments, *states)

    @property
    def _before_pieces(self) -> Callable:
        return functools.partial(
            _before_pieces,
            ranks=ranks_of(self.mesh),
            num_tokens=max(1, self.num_taps - 1),
            num_tensor_ranks=self.mesh.shape[TENSOR],
        )


def _maps(operands: Operands, before: tuple, segments: TileSegments, *, rule: Rule) -> Affine:
    k, v = _filtered(operands[1:3], before[1:], operands.filters[1:], segments)
    # the map does not depend on q
    groups = _groups(operands, unit_lengths(rule, k, k, v), segments, rule)
    run_group = jax.checkpoint(
        lambda tokens: map_and_reads(tokens, rule)[0] if rule.corrects else sum_map(tokens, rule)
    )
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        maps = total(lax.map(run_group, groups))
    return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), maps)


def _outputs(
    operands: Operands, before: tuple, segments: TileSegments, states: jax.Array, *, rule: Rule
) -> jax.Array:
    num_tokens = operands.q_BTGK.shape[1] // 2
    q_k_v = _filtered(operands[:3], before, operands.filters, segments)
    groups = _groups(operands, unit_lengths(rule, *q_k_v), segments, rule)
    run_group = jax.checkpoint(lambda S, tokens: outputs(tokens, S, rule)[::-1])
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        _, out = lax.scan(run_group, states.reshape(-1, *states.shape[2:]), groups)
    out = out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :num_tokens]
    return jnp.concatenate(jnp.split(out, 2), axis=1)


def _groups(operands: Operands, q_k_v: tuple, segments: TileSegments, rule: Rule) -> Tokens:
    """The groups of tokens that are computed at once, [groups, 2 x b, ...].

    Args:
      q_k_v: after their convolutions, [2 x b, tokens, ...].
    """
    gates = jax.tree.map(_pieces, operands[3:6])
    own, prefixes = jax.tree.map(_pieces, (segments.own_Bt, segments.prefixes_BtD))
    tokens = Tokens(*q_k_v, *gates, own, None, prefixes)
    num_sequences, num_tokens = tokens.segments_BL.shape
    at_once = kernel_tokens(tokens, rule) or _TOKENS_AT_ONCE
    num_groups = math.ceil(num_sequences * num_tokens / at_once)
    return groups_of(tokens, _pieces(segments.before_Bt)[:, -1], num_groups)


def _pieces(x_bt: jax.Array) -> jax.Array:
    """[b, 2 x tokens, ...] -> [2 x b, tokens, ...]"""
    return jnp.concatenate(jnp.split(x_bt, 2, axis=1))


@jax.checkpoint  # see `sharded_recurrence`
def _filtered(arrays: tuple, before: tuple, filters: tuple, segments: TileSegments) -> list:
    """silu of the convolution of each channel, arrays [2 x b, tokens, h, W]."""

    def with_before(x_bt, before_bt):
        return jnp.concatenate([_pieces(before_bt), _pieces(x_bt)], axis=1)

    segments_BL = with_before(segments.own_Bt, segments.before_Bt)
    prefixes_BLD = None
    num_before = segments.before_Bt.shape[1] // 2
    if segments.prefixes_BtD is not None:
        own = _pieces(segments.prefixes_BtD)
        num_levels = own.shape[2]
        # tails of all levels, each of which ends at its own level only, and then tokens before the
        # piece, which are not the end of a prefix
        levels = jnp.eye(num_levels + 1, num_levels, dtype=own.dtype) - 1
        missing = jnp.repeat(levels, num_before // len(levels), axis=0)
        missing = jnp.broadcast_to(missing, (len(own), *missing.shape))
        prefixes_BLD = jnp.concatenate([missing, own], axis=1)
    return [
        filtered(with_before(x, x_before), conv, segments_BL, prefixes_BLD)[:, num_before:]
        for x, x_before, conv in zip(arrays, before, filters)
    ]


def _before_pieces(
    x_nbt: jax.Array,
    prefixes_nbtD: jax.Array | None,
    *,
    ranks: Ranks,
    num_tokens: int,
    num_tensor_ranks: int,
) -> jax.Array:
    """See `TiledRecurrence.tokens_before`, [n, b, 2 x tokens, ...].

    Args:
      x_nbt: split over tensor, unlike `prefixes_nbtD`.
    """
    num_tiles, batch, rank_tokens = x_nbt.shape[:3]
    piece_tokens = rank_tokens * num_tensor_ranks // 2

    def until(end_nb2):
        """The P places up to one of each piece, negative before it, and the tokens of x."""
        place = end_nb2[..., None] + jnp.arange(1 - num_tokens, 1)
        index = jnp.where(place < 0, -1, place + piece_tokens * jnp.arange(2)[:, None])
        return place, _tokens_at(x_nbt, index, num_tensor_ranks)

    _, ends = until(jnp.full((num_tiles, batch, 2), piece_tokens - 1))
    fragments = _fragments(ends)
    before = predecessors([fragment[-1] for fragment in fragments], ranks)
    before = [jnp.concatenate([x[None], pieces[:-1]]) for x, pieces in zip(before, fragments)]

    @functools.partial(jax.vmap, in_axes=-1, out_axes=2)
    def tails_of_level(prefixes_nbt):
        is_end = prefixes_nbt.reshape(num_tiles, batch, 2, -1) == 0
        end_nb2 = jnp.where(is_end, jnp.arange(piece_tokens), -1).max(-1)
        place, x = until(end_nb2)
        index = jnp.where(place < 0, place + num_tokens * jnp.arange(1, 3)[:, None], -1)
        x += _tokens_at(_tiles(before), index, 1)
        last = [
            Tail(x.swapaxes(0, 1), None, end[..., 0].T >= 0)
            for x, end in zip(_fragments(x), _fragments(end_nb2))
        ]
        return [tail.x.swapaxes(0, 1) for tail in tails_before(last, ranks)]

    if prefixes_nbtD is not None:
        tails = (
            x.reshape(num_tiles, batch, -1, *x.shape[4:]) for x in tails_of_level(prefixes_nbtD)
        )
        before = [jnp.concatenate(pair, axis=2) for pair in zip(tails, before)]
    return _tiles(before)


def _fragments(x_nbt: jax.Array) -> list[jax.Array]:
    """[n, b, tokens of a piece, ...] of both fragments, in the order of the sequence."""
    first, second = jnp.split(x_nbt, 2, axis=2)
    return [first, second[::-1]]


def _tiles(fragments: list[jax.Array]) -> jax.Array:
    """The inverse of `_fragments`."""
    first, second = fragments
    return jnp.concatenate([first, second[::-1]], axis=2)


def _tokens_at(x_nbt: jax.Array, index_nb2P: jax.Array, num_tensor_ranks: int) -> jax.Array:
    """The tokens at places of tiles, zeros where they are negative, [n, b, 2 x P, ...]; of tokens
    that are split over tensor.
    """
    index_nbi = index_nb2P.reshape(*x_nbt.shape[:2], -1)
    if num_tensor_ranks == 1:
        return jax.vmap(rows_at)(x_nbt, index_nbi)
    index_nbi -= lax.axis_index(TENSOR) * x_nbt.shape[2]
    is_here = index_nbi < x_nbt.shape[2]
    return lax.psum(jax.vmap(rows_at)(x_nbt, jnp.where(is_here, index_nbi, -1)), TENSOR)
