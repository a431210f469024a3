"""A layer of Gated DeltaNet as scans over tiles of tokens: only x and one map of states per tile are stored.

    forward    for each tile: the maps of its states
               the states that enter all tiles, with the exchange between ranks
               for each tile: the outputs of the recurrence, and the rest of the layer; y overwrites x
    backward   recompute maps and states
               for each tile: recompute the outputs, unless they were saved; gradients of x, of the weights, and of the
                              states that enter the tile; dx overwrites dy
               the gradients of the maps, with the exchange backwards
               for each tile: add the gradients that those of its maps give to dx and to the weights

The tokens that the convolutions read before a tile are projected once for all tiles, before x is overwritten. See
layer_tiles.py.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.delta_rule.tiled_delta_net import TiledDeltaNet
from jaxlc.models.layer_tiles import TiledLayer, add, at, put_at, tile_indices
from jaxlc.models.layers import LayerOutput
from jaxlc.models.offloaded_layers import LayerParams, Prefetch, schedule_after


class DeltaNetLayer(TiledLayer):
    """A layer with Gated DeltaNet."""

    attention: TiledDeltaNet

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch):
        before = self._before(weights, x_nBtD)
        states = self.attention.states(self._maps(weights, x_nBtD, positions_nBt, before, ranges))

        def run_tile(x_nBtD, operands):
            tile, positions_Bt, before, segments, states = operands
            x_BtD = at(x_nBtD, tile)
            mixed, gate_BtHV = self._operands(weights, x_BtD, positions_Bt)
            out_BtHV = self.attention.outputs(mixed, before, states, segments)
            (y_BtD, sums), chosen_Btk = self.after_attention(weights, x_BtD, out_BtHV, gate_BtHV, positions_Bt)
            saved = (out_BtHV,) if self.saves_attention else None
            return put_at(x_nBtD, y_BtD, tile), (saved, sums, chosen_Btk)

        operands = positions_nBt, before, ranges, states
        output, saved, chosen_nBtk, next_weights = self.scan_tiles(run_tile, x_nBtD, operands, prefetch)
        return (output, next_weights), (weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        trainable, all_of = weights.trainable, weights.with_trainable
        x_nBtD, dy_nBtD = lax.optimization_barrier((x_nBtD, dy_nBtD))  # as in layer_tiles.py
        before, before_vjp = jax.vjp(lambda w, x: self._before(all_of(w), x), trainable, x_nBtD)
        maps = self._maps(weights, x_nBtD, positions_nBt, before, ranges)
        states, states_vjp = jax.vjp(self.attention.states, maps)

        def tile_backward(carry, operands):
            dx_nBtD, dweights = carry
            (tile, x_BtD, positions_Bt, before, segments), states, saved, chosen_Btk = operands
            (mixed, gate_BtHV), operands_vjp = jax.vjp(
                lambda w, x: self._operands(all_of(w), x, positions_Bt), trainable, x_BtD
            )
            out_BtHV, outputs_vjp = jax.vjp(
                lambda *arrays: self.attention.outputs(*arrays, segments), mixed, before, states
            )
            _, rest_vjp = jax.vjp(
                lambda w, *x: self.after_attention(all_of(w), *x, positions_Bt, chosen_Btk)[0],
                *(trainable, x_BtD, out_BtHV if saved is None else saved[0], gate_BtHV),
            )
            dweights_rest, dx_rest, dout_BtHV, dgate_BtHV = rest_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            dmixed, dbefore, dstates = outputs_vjp(dout_BtHV)
            dweights_operands, dx_operands = operands_vjp((dmixed, dgate_BtHV))
            dweights = add(add(dweights, dweights_rest), dweights_operands)
            return (put_at(dx_nBtD, dx_rest + dx_operands, tile), dweights), (dbefore, dstates)

        def maps_backward(carry, operands):
            dx_nBtD, dweights = carry
            (tile, x_BtD, positions_Bt, before, segments), dmaps = operands
            _, maps_vjp = jax.vjp(
                lambda w, x, before: self._tile_maps(all_of(w), x, positions_Bt, before, segments),
                *(trainable, x_BtD, before),
            )
            dweights_tile, dx_BtD, dbefore = maps_vjp(dmaps)
            return (put_at(dx_nBtD, at(dx_nBtD, tile) + dx_BtD, tile), add(dweights, dweights_tile)), dbefore

        of_tiles = tile_indices(x_nBtD), x_nBtD, positions_nBt, before, ranges
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        carry, (dbefore, dstates) = lax.scan(tile_backward, (dy_nBtD, dweights), (of_tiles, states, saved, chosen_nBtk))
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        (dmaps,) = states_vjp(dstates)
        (dx_nBtD, dweights), dbefore_maps = lax.scan(maps_backward, carry, (of_tiles, dmaps))
        dweights_before, dx_before = before_vjp(add(dbefore, dbefore_maps))
        dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), add(dweights, dweights_before), trainable)
        return LayerParams(dweights, None), dx_nBtD + dx_before, None, None, prefetch

    def _before(self, weights, x_nBtD) -> tuple:
        """q, k and v of the tokens that the convolutions read before each tile, [n, B, ...]."""
        before_BtD = self.attention.tokens_before(x_nBtD)
        (q, k, v, *_), _ = self._operands(weights, before_BtD, None)
        return tuple(map(self.attention.before_tiles, (q, k, v)))

    def _maps(self, weights, x_nBtD, positions_nBt, before, ranges):
        """The maps of the states over the pieces of all tiles."""
        return lax.map(lambda tile: self._tile_maps(weights, *tile), (x_nBtD, positions_nBt, before, ranges))

    def _tile_maps(self, weights, x_BtD, positions_Bt, before, segments):
        return self.attention.maps(self._operands(weights, x_BtD, positions_Bt)[0], before, segments)

    def _operands(self, weights, x_BtD, positions_Bt):
        layer = self.layer(weights)
        input_BtD = layer.attention_input(x_BtD, shard=self.shard)
        return layer.attention.operands(input_BtD, positions_Bt, shard=self.shard, tables=self.tables)
