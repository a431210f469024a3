"""Decoder layers as scans over tiles of tokens: only x, and what tiles need of each other, exist at
full length.

Arrays are tiled throughout, [n, B, t, ...], where t counts a tile's tokens on all ranks: changing
the order of the residual stream would copy it. The backward is written out: differentiating the
scans would store both x and y, and both dx and dy, and would sum the gradients of the weights in
the compute dtype; here the sums are float32. Extends ALST's tiled MLP (Bekman et al. 2025,
arXiv:2506.13996, section 3.1) to whole layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.models.contract import CHOICE, LayerOutput
from jaxlc.models.matmuls import in_use
from jaxlc.models.offloaded_layers import (
    LayerParams,
    Prefetch,
    overlap_with_prefetch,
    schedule_after,
)
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder, is_vector


def run_layer(
    layer_def: nnx.GraphDef,
    params: LayerParams,
    x_nBtD: jax.Array,
    positions_nBt: jax.Array,
    ranges: Any,
    prefetch: Prefetch | None = None,
    *,
    layer_type: type["TiledLayer"],
    attention: Any,
    saves_attention: bool,
    shard: Sharder,
    tables: RopeTables | None,
) -> tuple[LayerOutput, Any]:
    """Runs the layer `nnx.merge(layer_def, *params)` on tiles; equal to `layer_stack.run_layer` on the whole sequences.

    Weights are cast and gathered once, for all tiles. Remat policies apply to the names residual, attention_out and
    attention_lse.

    Args:
      ranges: what `contract.Tiles.prepare` of the kind returned.
      layer_type, attention: how the layer computes; see `contract.Tiles`.
      saves_attention: whether the remat policy saves attention_out and attention_lse; otherwise the backward pass
        recomputes attention.
    Returns:
      The output with x_nBtD, and the prefetched weights (None without `prefetch`).
    """
    x_nBtD = checkpoint_name(x_nBtD, "residual")

    def weight(param: nnx.Variable) -> nnx.Variable:
        if is_vector(param.dims):
            return param
        # Short convolutions are computed in float32.
        dtype = jnp.float32 if "taps" in param.dims else x_nBtD.dtype
        return param.replace(in_use(param, shard, dtype))

    weights = jax.tree.map(weight, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    layer = layer_type(
        layer_def=layer_def,
        shard=dataclasses.replace(shard, weights_are_gathered=True),
        tables=tables,
        attention=attention,
        saves_attention=saves_attention,
    )

    @jax.custom_vjp
    def run(*operands):
        return layer.forward(*operands)[0]

    run.defvjp(layer.forward, layer.backward)
    return run(weights, x_nBtD, positions_nBt, ranges, prefetch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledLayer:
    """A layer of which subclasses define the forward and backward rules; see `run_layer` for the
    fields.
    """

    layer_def: nnx.GraphDef  # definition of a DecoderLayer
    shard: Sharder
    tables: RopeTables | None
    attention: Any
    saves_attention: bool

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch) -> tuple:
        """Returns (the output with y_nBtD, the prefetched weights), and the residuals of the
        backward pass.
        """
        raise NotImplementedError

    def backward(self, residuals, gradients) -> tuple:
        """The gradients of the operands of `forward`."""
        raise NotImplementedError

    def layer(self, weights) -> Any:
        return nnx.merge(self.layer_def, *weights)

    def after_attention(self, weights, x_BtD, out, kept, positions_Bt, chosen_Btk=None):
        """(output, chosen_Btk or None)"""
        operands = x_BtD, out, kept, positions_Bt, chosen_Btk
        return self.layer(weights).after_attention(*operands, shard=self.shard)

    def scan_tiles(self, run_tile, x_nBtD, operands, prefetch) -> tuple:
        """The last scan of the forward pass, in which y overwrites x.

        Args:
          run_tile: (x_nBtD, (tile, *operands)) -> (x_nBtD with y of the tile, (saved, sums, chosen_Btk or None)). saved
            is (out,) or (out, lse) of attention, or None.
          operands: arrays with one entry per tile.
        Returns:
          ((the output, the prefetched weights), saved, chosen_nBtk)
        """

        def run_tiles(x_nBtD):
            return lax.scan(run_tile, x_nBtD, (tile_indices(x_nBtD), *operands))

        (y_nBtD, (saved, sums, chosen_nBtk)), next_weights = overlap_with_prefetch(
            run_tiles, (x_nBtD,), prefetch
        )
        if saved is not None:  # named inside the custom_vjp rule: see attention/strategies/ring.py
            saved = tuple(map(checkpoint_name, saved, ("attention_out", "attention_lse")))
        if chosen_nBtk is not None:
            chosen_nBtk = checkpoint_name(chosen_nBtk, CHOICE)
        output = LayerOutput(y_nBtD, jax.tree.map(lambda sums_n: sums_n.sum(0), sums))
        return (output, next_weights), saved, chosen_nBtk


class TokenwiseLayer(TiledLayer):
    """A layer without a mixer: each tile is computed by itself; y overwrites x, and dx overwrites
    dy.
    """

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch):
        def run_tile(x_nBtD, operands):
            tile, positions_Bt = operands
            (y_BtD, sums), chosen_Btk = self.after_attention(
                weights, at(x_nBtD, tile), None, None, positions_Bt
            )
            return put_at(x_nBtD, y_BtD, tile), (None, sums, chosen_Btk)

        output, _, chosen_nBtk = self.scan_tiles(run_tile, x_nBtD, (positions_nBt,), prefetch)
        return output, (weights, x_nBtD, positions_nBt, chosen_nBtk, prefetch)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        trainable, all_of = weights.trainable, weights.with_trainable
        # as in `kinds.attention.AttentionLayer`
        x_nBtD, dy_nBtD = lax.optimization_barrier((x_nBtD, dy_nBtD))

        def tile_backward(carry, operands):
            dx_nBtD, dweights = carry
            tile, x_BtD, *rest = operands
            _, tile_vjp = jax.vjp(
                lambda w, x: self.after_attention(all_of(w), x, None, None, *rest)[0],
                *(trainable, x_BtD),
            )
            dweights_tile, dx_BtD = tile_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            return (put_at(dx_nBtD, dx_BtD, tile), add(dweights, dweights_tile)), None

        tiles = tile_indices(x_nBtD), x_nBtD, positions_nBt, chosen_nBtk
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        carry, _ = lax.scan(tile_backward, (dy_nBtD, dweights), tiles)
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        dx_nBtD, dweights = carry
        dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, trainable)
        return LayerParams(dweights, None), dx_nBtD, None, None, prefetch


class TileRecurrence(Protocol):
    """What a `RecurrentLayer` computes between its projections, implemented in `jaxlc.attention`.
    JAX differentiates all of these functions. `ranges` are those of a tile."""

    def before(self, operands: Callable[[jax.Array], tuple], x_nBtD: jax.Array) -> Any:
        """What each tile reads of the tokens before it, a tree of arrays [n, ...], from
        `Mixer.operands` of tokens.
        """

    def maps(self, operands: tuple, before: Any, ranges: Any) -> Any:
        """The maps of the states over the tokens of a tile."""

    def states(self, maps: Any) -> Any:
        """The states that enter all tiles, from the maps of all tiles, both with a leading
        dimension n.
        """

    def outputs(self, operands: tuple, before: Any, states: Any, ranges: Any) -> jax.Array:
        """The input of `Mixer.projected`."""


class RecurrentLayer(TiledLayer):
    """A layer with a recurrent state: only x and one map of states per tile are stored.

    forward    for each tile: the maps of its states
               the states that enter all tiles, with the exchange between ranks
               for each tile: the outputs of the recurrence, and the rest of the layer; y overwrites x
    backward   recompute maps and states
               for each tile: recompute the outputs, unless they were saved; gradients of x, of the weights, and of
                              the states that enter the tile; dx overwrites dy
               the gradients of the maps, with the exchange backwards
               for each tile: add the gradients that those of its maps give to dx and to the weights
    """

    attention: TileRecurrence

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch):
        before = self._before(weights, x_nBtD)
        states = self.attention.states(self._maps(weights, x_nBtD, before, ranges))

        def run_tile(x_nBtD, operands):
            tile, positions_Bt, before, ranges, states = operands
            x_BtD = at(x_nBtD, tile)
            mixed, kept = self._operands(weights, x_BtD)
            out = self.attention.outputs(mixed, before, states, ranges)
            (y_BtD, sums), chosen_Btk = self.after_attention(
                weights, x_BtD, out, kept, positions_Bt
            )
            saved = (out,) if self.saves_attention else None
            return put_at(x_nBtD, y_BtD, tile), (saved, sums, chosen_Btk)

        operands = positions_nBt, before, ranges, states
        output, saved, chosen_nBtk = self.scan_tiles(run_tile, x_nBtD, operands, prefetch)
        return output, (weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        trainable, all_of = weights.trainable, weights.with_trainable
        # as in `kinds.attention.AttentionLayer`
        x_nBtD, dy_nBtD = lax.optimization_barrier((x_nBtD, dy_nBtD))
        before, before_vjp = jax.vjp(lambda w, x: self._before(all_of(w), x), trainable, x_nBtD)
        maps = self._maps(weights, x_nBtD, before, ranges)
        states, states_vjp = jax.vjp(self.attention.states, maps)

        def tile_backward(carry, operands):
            dx_nBtD, dweights = carry
            (tile, x_BtD, positions_Bt, before, ranges), states, saved, chosen_Btk = operands
            (mixed, kept), operands_vjp = jax.vjp(
                lambda w, x: self._operands(all_of(w), x), trainable, x_BtD
            )
            out, outputs_vjp = jax.vjp(
                lambda *arrays: self.attention.outputs(*arrays, ranges), mixed, before, states
            )
            _, rest_vjp = jax.vjp(
                lambda w, *x: self.after_attention(all_of(w), *x, positions_Bt, chosen_Btk)[0],
                *(trainable, x_BtD, out if saved is None else saved[0], kept),
            )
            dweights_rest, dx_rest, dout, dkept = rest_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            dmixed, dbefore, dstates = outputs_vjp(dout)
            dweights_operands, dx_operands = operands_vjp((dmixed, dkept))
            dweights = add(add(dweights, dweights_rest), dweights_operands)
            return (put_at(dx_nBtD, dx_rest + dx_operands, tile), dweights), (dbefore, dstates)

        def maps_backward(carry, operands):
            dx_nBtD, dweights = carry
            (tile, x_BtD, _, before, ranges), dmaps = operands
            _, maps_vjp = jax.vjp(
                lambda w, x, before: self._tile_maps(all_of(w), x, before, ranges),
                *(trainable, x_BtD, before),
            )
            dweights_tile, dx_BtD, dbefore = maps_vjp(dmaps)
            return (
                put_at(dx_nBtD, at(dx_nBtD, tile) + dx_BtD, tile),
                add(dweights, dweights_tile),
            ), dbefore

        tiles = tile_indices(x_nBtD), x_nBtD, positions_nBt, before, ranges
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        carry, (dbefore, dstates) = lax.scan(
            tile_backward, (dy_nBtD, dweights), (tiles, states, saved, chosen_nBtk)
        )
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        (dmaps,) = states_vjp(dstates)
        (dx_nBtD, dweights), dbefore_maps = lax.scan(maps_backward, carry, (tiles, dmaps))
        dweights_before, dx_before = before_vjp(add(dbefore, dbefore_maps))
        dweights = jax.tree.map(
            lambda d, w: d.astype(w.dtype), add(dweights, dweights_before), trainable
        )
        return LayerParams(dweights, None), dx_nBtD + dx_before, None, None, prefetch

    def _before(self, weights, x_nBtD):
        return self.attention.before(lambda x_BtD: self._operands(weights, x_BtD)[0], x_nBtD)

    def _maps(self, weights, x_nBtD, before, ranges):
        """The maps of the states over the pieces of all tiles."""
        return lax.map(lambda tile: self._tile_maps(weights, *tile), (x_nBtD, before, ranges))

    def _tile_maps(self, weights, x_BtD, before, ranges):
        return self.attention.maps(self._operands(weights, x_BtD)[0], before, ranges)

    def _operands(self, weights, x_BtD):
        layer = self.layer(weights)
        return layer.attention.operands(
            layer.attention_input(x_BtD, shard=self.shard), shard=self.shard
        )


def tile_indices(x_nBtD: jax.Array) -> jax.Array:
    return jnp.arange(len(x_nBtD), dtype=jnp.int32)


def at(x_nBtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x_nBtD, tile, keepdims=False)


def put_at(x_nBtD: jax.Array, x_BtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_nBtD, x_BtD, tile, 0)


def add(total, more):
    """Adds gradients, in the dtype of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
