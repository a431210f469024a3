"""Recurrent layers for layers that scan over tiles of tokens: maps of states by tile, one exchange,
outputs by tile.

    tiled = TiledRecurrence(mesh, rule, tiles=n, num_taps=P)
    segments = tiled.prepare(segments_BT)                       once per training step, of all tiles
    before = tiled.before(project, x_nBtD)                      what the convolutions of all tiles read of other tiles
    maps = tiled.maps(operands, before, segments)               for each tile
    states = tiled.states(maps)                                 of all tiles: the exchange between ranks
    out_BtHV = tiled.outputs(operands, before, states, segments)   for each tile

Arrays are global, for use under `jit`, and JAX differentiates all of these functions. A rank's tile
has two pieces, one of each of its fragments (`attention/query_tiles.py`). The pieces of the second
fragment are in reverse order, so the states of all pieces follow from stored maps, [tiles, 2 x
ranks, B, H, K, K + V]: of a tile with 32 heads of dimension 128, a rank stores 8 MiB of float32
maps.
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
from jaxlc.attention.recurrence import chunks
from jaxlc.attention.recurrence.chunks import Rule, Tokens, affine_map, outputs
from jaxlc.attention.recurrence.convolution import convolved
from jaxlc.attention.recurrence.sharded_recurrence import (
    HEADS,
    Operands,
    activated,
    unit_lengths,
)
from jaxlc.attention.recurrence.sharded_rule import groups_of
from jaxlc.attention.state_passing import Affine, predecessors, tile_states, total
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.sharding.mesh import Ranks

_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT)
_TILES = PartitionSpec(None, BATCH_AXES, CONTEXT)
# [2 x ranks, B, H, ...]: of both pieces of each rank
_PIECES = PartitionSpec(CONTEXT, BATCH_AXES, TENSOR)
_TOKENS_AT_ONCE = 8192  # as many as `sharded_rule` computes at once


class TileSegments(NamedTuple):
    """int32 segments of a tile, or of all tiles with a leading dimension."""

    own_Bt: jax.Array
    before_Bt: jax.Array  # [B, ranks x 2 x tokens before a piece]; 0: no token


class TiledRecurrence(NamedTuple):
    """See the docstring of the module."""

    mesh: Mesh
    rule: Rule
    tiles: int
    num_taps: int  # of the convolutions

    def prepare(self, segments_BT: jax.Array) -> TileSegments:
        """The segments of all tiles."""
        segments_nBt = tiles_of(segments_BT, self.mesh.shape[CONTEXT], self.tiles)
        before = functools.partial(_before_pieces, ranks=self._ranks, num_tokens=self._num_before)
        return TileSegments(segments_nBt, self._split(before, (_TILES,), _TILES)(segments_nBt))

    def tokens_before(self, x_nBtD: jax.Array) -> jax.Array:
        """The tokens before the two pieces of each rank's tile, [B, ranks x n x 2 x tokens, D];
        zeros before the sequence.

        Args:
          x_nBtD: the residual stream, whose tokens are split over context and tensor.
        """
        num_tokens, num_tensor_ranks = self._num_before, self.mesh.shape[TENSOR]

        def local(x_nbtD):
            ends = _ends_of_pieces(x_nbtD, num_tokens, num_tensor_ranks)
            before_bntD = _before_pieces(ends, ranks=self._ranks, num_tokens=num_tokens).swapaxes(
                0, 1
            )
            return before_bntD.reshape(len(before_bntD), -1, before_bntD.shape[-1])

        return self._split(local, (PartitionSpec(None, BATCH_AXES, (CONTEXT, TENSOR)),), _TOKENS)(
            x_nBtD
        )

    def before_tiles(self, x_BtHV: jax.Array) -> jax.Array:
        """Projections of `tokens_before`, [n, B, ranks x 2 x tokens, H, V]."""

        def local(x_bthV):
            return x_bthV.reshape(len(x_bthV), self.tiles, -1, *x_bthV.shape[2:]).swapaxes(0, 1)

        return self._split(local, (HEADS,), PartitionSpec(None, *HEADS))(x_BtHV)

    def before(self, operands: Callable[[jax.Array], tuple], x_nBtD: jax.Array) -> tuple:
        """q, k and v of the tokens that the convolutions read before each tile, [n, B, ...].

        Args:
          operands: from tokens of the residual stream to the operands of `ShardedRecurrence.__call__`.
        """
        tokens = self._split_over(operands(self.tokens_before(x_nBtD)))
        return tuple(map(self.before_tiles, tokens[:3]))

    def maps(self, operands: tuple, before: tuple, segments: TileSegments) -> Affine:
        """The maps of the states over the pieces of a tile, arrays [2 x ranks, B, H, K, K or V].

        Args:
          operands: the fields of `Operands`, for the tokens of a tile.
          before: of this tile.
        """
        call = self._call(_maps, Affine(_PIECES, _PIECES))
        return call(self._split_over(operands), before, segments)

    def states(self, maps: Affine) -> jax.Array:
        """The states that enter the pieces, [n, 2 x ranks, B, H, K, V], from the maps of all tiles,
        [n, ...].
        """

        pieces = PartitionSpec(None, *_PIECES)
        local = functools.partial(tile_states, ranks=self._ranks)
        return self._split(local, (Affine(pieces, pieces),), pieces)(maps)

    def outputs(
        self, operands: tuple, before: tuple, states: jax.Array, segments: TileSegments
    ) -> jax.Array:
        """out_BtHV in the dtype of q, from the states that enter the pieces. Arguments as of
        `maps`.
        """
        call = self._call(_outputs, HEADS, states)
        return call(self._split_over(operands), before, segments, states)

    def _split_over(self, operands: tuple) -> Operands:
        return Operands(*operands).split_over(self.mesh.shape[TENSOR])

    def _call(self, local, out_specs, *states):
        local = functools.partial(local, rule=self.rule)

        def call(operands: Operands, before, segments, *states):
            segment_specs = TileSegments(_TOKENS, _TOKENS)
            in_specs = (operands.specs, (HEADS,) * 3, segment_specs, *(_PIECES for _ in states))
            return self._split(local, in_specs, out_specs)(operands, before, segments, *states)

        return call

    @property
    def _num_before(self) -> int:
        return max(1, self.num_taps - 1)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(CONTEXT, self.mesh.shape[CONTEXT])

    def _split(self, local, in_specs, out_specs):
        # check_vma: as in `sharded_rule._split`.
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _maps(operands: Operands, before: tuple, segments: TileSegments, *, rule: Rule) -> Affine:
    k, v = _filtered(operands[1:3], before[1:], operands.filters[1:], segments)
    # the map does not depend on q
    groups = _groups(operands, unit_lengths(rule, k, k, v), segments)
    run_group = jax.checkpoint(functools.partial(affine_map, rule=rule))
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        maps = total(lax.map(run_group, groups))
    return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), maps)


def _outputs(
    operands: Operands, before: tuple, segments: TileSegments, states: jax.Array, *, rule: Rule
) -> jax.Array:
    num_tokens = operands.q_BTGK.shape[1] // 2
    q_k_v = _filtered(operands[:3], before, operands.filters, segments)
    groups = _groups(operands, unit_lengths(rule, *q_k_v), segments)
    run_group = jax.checkpoint(lambda S, tokens: outputs(tokens, S, rule)[::-1])
    with jax.named_scope(scopes.LINEAR_ATTENTION):
        _, out = lax.scan(run_group, states.reshape(-1, *states.shape[2:]), groups)
    out = out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :num_tokens]
    return jnp.concatenate(jnp.split(out, 2), axis=1)


def _groups(operands: Operands, q_k_v: tuple, segments: TileSegments) -> Tokens:
    """The groups of tokens that are computed at once, [groups, 2 x b, ...].

    Args:
      q_k_v: after their convolutions, [2 x b, tokens, ...].
    """
    gates = jax.tree.map(_pieces, operands[3:6])
    tokens = Tokens(*q_k_v, *gates, _pieces(segments.own_Bt), None)
    num_sequences, num_tokens = tokens.segments_BL.shape
    num_groups = math.ceil(num_sequences * num_tokens / _TOKENS_AT_ONCE)
    group_tokens = math.ceil(num_tokens / (num_groups * chunks.CHUNK_TOKENS)) * chunks.CHUNK_TOKENS
    return groups_of(tokens, _pieces(segments.before_Bt)[:, -1], num_groups, group_tokens)


def _pieces(x_bt: jax.Array) -> jax.Array:
    """[b, 2 x tokens, ...] -> [2 x b, tokens, ...]"""
    return jnp.concatenate(jnp.split(x_bt, 2, axis=1))


@jax.checkpoint  # see `sharded_recurrence`
def _filtered(arrays: tuple, before: tuple, filters: tuple, segments: TileSegments) -> list:
    """silu of the convolution of each channel, arrays [2 x b, tokens, h, W]."""
    segments_BL = jnp.concatenate([_pieces(segments.before_Bt), _pieces(segments.own_Bt)], axis=1)

    def filtered(x_bthW, before_bthW, conv):
        num_taps = len(conv.taps_PhW)
        unused = segments.before_Bt.shape[1] // 2 - (num_taps - 1)
        x_BLhW = jnp.concatenate([_pieces(before_bthW), _pieces(x_bthW)], axis=1)[:, unused:]
        flat_BLW = x_BLhW.reshape(*x_BLhW.shape[:2], -1)
        with jax.named_scope(scopes.CONVOLUTION):
            out_BLW = convolved(
                flat_BLW, segments_BL[:, unused:], conv.taps_PhW.reshape(num_taps, -1)
            )
        return activated(out_BLW, conv).reshape(*out_BLW.shape[:2], *x_bthW.shape[2:])

    return list(map(filtered, arrays, before, filters))


def _ends_of_pieces(x_nbtD: jax.Array, num_tokens: int, num_tensor_ranks: int) -> jax.Array:
    """The last tokens of both pieces of a rank's tiles, [n, b, 2 x tokens, D], of tokens that are
    split over tensor.
    """
    rank_tokens = x_nbtD.shape[2]
    piece_tokens = rank_tokens * num_tensor_ranks // 2
    ends = [piece * piece_tokens - num_tokens + i for piece in (1, 2) for i in range(num_tokens)]
    parts = [x_nbtD[:, :, end % rank_tokens] for end in ends]
    if num_tensor_ranks == 1:
        return jnp.stack(parts, axis=2)
    rank = lax.axis_index(TENSOR)
    owned = [jnp.where(rank == end // rank_tokens, part, 0) for end, part in zip(ends, parts)]
    return lax.psum(jnp.stack(owned, axis=2), TENSOR)


def _before_pieces(x_nbt: jax.Array, *, ranks: Ranks, num_tokens: int) -> jax.Array:
    """The tokens before both pieces of a rank's tiles, [n, b, 2 x num_tokens, ...], from arrays
    with their ends.
    """
    first, second = (piece[:, :, -num_tokens:] for piece in jnp.split(x_nbt, 2, axis=2))
    fragments = first, second[::-1]
    before_fragments = predecessors([fragment[-1] for fragment in fragments], ranks)
    first, second = (
        jnp.concatenate([x[None], pieces[:-1]]) for x, pieces in zip(before_fragments, fragments)
    )
    return jnp.concatenate([first, second[::-1]], axis=2)
