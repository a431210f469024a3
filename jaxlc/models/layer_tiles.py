"""A decoder layer as scans over tiles of tokens: only x, K and V exist at full sequence length.

    forward    for each tile: K and V
               for each tile: queries, attention to all K and V, and the rest of the layer; y overwrites x
    backward   for each tile: recompute K and V
               for each tile: recompute queries, and attention unless it was saved; gradients of x, of the weights, and
                              of all K and V that the tile attends to; dx overwrites dy
               for each tile: add the gradients that its dK and dV give to dx and to the weights

Arrays are tiled throughout, [n, B, t, ...], where t counts a tile's tokens on all ranks: changing the order of the
residual stream would copy it. The backward is written out: differentiating the scans would store both x and y, and both
dx and dy, and would sum the gradients of K, V and the weights in the compute dtype; here the sums are float32.
Extends ALST's tiled MLP (Bekman et al. 2025, arXiv:2506.13996, section 3.1) to attention.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.models.blocks.experts import CHOICE
from jaxlc.models.layers import DecoderLayer, LayerOutput
from jaxlc.models.matmuls import in_use
from jaxlc.models.offloaded_layers import LayerParams, Prefetch, overlap_with_prefetch, schedule_after
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder, is_vector


class TileAttention(Protocol):
    """Attention of one tile's queries to all keys, implemented in `jaxlc.attention`. `tile` is an int32 index, possibly
    traced; `kv` holds K and V of the whole sequence in a layout of the implementation."""

    def empty(self, batch: int, num_tokens: int, head_dim: int, dtype) -> jax.Array: ...

    def put(self, kv: jax.Array, k_BtKH: jax.Array, v_BtKH: jax.Array, tile) -> jax.Array: ...

    def exchange(self, kv: jax.Array, ranges) -> jax.Array: ...

    def add_exchanged(self, dkv: jax.Array, ranges) -> jax.Array: ...

    def take(self, kv: jax.Array, tile) -> tuple[jax.Array, jax.Array]: ...

    def forward(self, q_BtNH: jax.Array, kv: jax.Array, tile, ranges, sinks_N) -> tuple[jax.Array, jax.Array]: ...

    def backward(
        self, q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, ranges, sinks_N
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]: ...


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
    """Runs the layer `nnx.merge(layer_def, *params)` on tiles; equal to `layers.run_layer` on the whole sequences.

    Weights are cast and gathered once, for all tiles. Remat policies apply to the names residual, attention_out and
    attention_lse.

    Args:
      ranges: of `attention.prepare`: the mask as key ranges, None if each sequence is one document; or segments.
      layer_type, attention: how the layer computes: `AttentionLayer` and a `TileAttention`, or those of `delta_tiles`.
      saves_attention: whether the remat policy saves attention_out and attention_lse; otherwise the backward pass
        recomputes attention.
    Returns:
      The output with x_nBtD, and the prefetched weights (None without `prefetch`).
    """
    x_nBtD = checkpoint_name(x_nBtD, "residual")

    def weight(param: nnx.Variable) -> nnx.Variable:
        if is_vector(param.dims):
            return param
        # As `delta_net` does, convolutions are in float32.
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
    """A layer of which subclasses define the forward and backward rules; see `run_layer` for the fields."""

    layer_def: nnx.GraphDef  # definition of a DecoderLayer
    shard: Sharder
    tables: RopeTables | None
    attention: Any
    saves_attention: bool

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch) -> tuple:
        """Returns (the output with y_nBtD, the prefetched weights), and the residuals of the backward pass."""
        raise NotImplementedError

    def backward(self, residuals, gradients) -> tuple:
        """The gradients of the operands of `forward`."""
        raise NotImplementedError

    def layer(self, weights) -> DecoderLayer:
        return nnx.merge(self.layer_def, *weights)

    def after_attention(self, weights, x_BtD, out_BtNH, gate_BtNH, positions_Bt, chosen_Btk=None):
        """(output, chosen_Btk or None)"""
        operands = x_BtD, out_BtNH, gate_BtNH, positions_Bt, chosen_Btk
        return self.layer(weights).after_attention(*operands, shard=self.shard)

    def scan_tiles(self, run_tile, x_nBtD, operands, prefetch) -> tuple:
        """The last scan of the forward pass, in which y overwrites x.

        Args:
          run_tile: (x_nBtD, (tile, *operands)) -> (x_nBtD with y of the tile, (saved, sums, chosen_Btk or None)). saved
            is (out,) or (out, lse) of attention, or None.
          operands: arrays with one entry per tile.
        Returns:
          (the output, saved, chosen_nBtk, the prefetched weights)
        """

        def run_tiles(x_nBtD):
            return lax.scan(run_tile, x_nBtD, (tile_indices(x_nBtD), *operands))

        (y_nBtD, (saved, sums, chosen_nBtk)), next_weights = overlap_with_prefetch(run_tiles, (x_nBtD,), prefetch)
        if saved is not None:  # named inside the custom_vjp rule: see attention/strategies/ring.py
            saved = tuple(map(checkpoint_name, saved, ("attention_out", "attention_lse")))
        if chosen_nBtk is not None:
            chosen_nBtk = checkpoint_name(chosen_nBtk, CHOICE)
        output = LayerOutput(y_nBtD, jax.tree.map(lambda sums_n: sums_n.sum(0), sums))
        return output, saved, chosen_nBtk, next_weights


class AttentionLayer(TiledLayer):
    """A layer with attention."""

    attention: TileAttention

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch):
        attention = self.attention
        kv = self._keys_values(weights, x_nBtD, positions_nBt, ranges)

        def run_tile(x_nBtD, operands):
            tile, positions_Bt = operands
            x_BtD = at(x_nBtD, tile)
            q_BtNH, gate_BtNH, sinks_N = self._queries(weights, x_BtD, positions_Bt)
            results = attention.forward(q_BtNH, kv, tile, ranges, sinks_N)
            (y_BtD, sums), chosen_Btk = self.after_attention(weights, x_BtD, results[0], gate_BtNH, positions_Bt)
            return put_at(x_nBtD, y_BtD, tile), (results if self.saves_attention else None, sums, chosen_Btk)

        output, saved, chosen_nBtk, next_weights = self.scan_tiles(run_tile, x_nBtD, (positions_nBt,), prefetch)
        return (output, next_weights), (weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        attention, trainable, all_of = self.attention, weights.trainable, weights.with_trainable
        # The barrier makes this layer wait for dy; otherwise its arrays and those of the next layer would be live at
        # the same time.
        x_nBtD, dy_nBtD, zero = lax.optimization_barrier((x_nBtD, dy_nBtD, jnp.float32(0)))
        kv = self._keys_values(weights, x_nBtD, positions_nBt, ranges)

        def tile_backward(carry, operands):
            dx_nBtD, dkv, dweights = carry
            tile, x_BtD, positions_Bt, saved, chosen_Btk = operands
            (q_BtNH, gate_BtNH, sinks_N), queries_vjp = jax.vjp(
                lambda w, x: self._queries(all_of(w), x, positions_Bt), trainable, x_BtD
            )
            results = saved or attention.forward(q_BtNH, kv, tile, ranges, sinks_N)
            _, rest_vjp = jax.vjp(
                lambda w, *x: self.after_attention(all_of(w), *x, positions_Bt, chosen_Btk)[0],
                *(trainable, x_BtD, results[0], gate_BtNH),
            )
            dweights_rest, dx_rest, dout_BtNH, dgate_BtNH = rest_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            dq_BtNH, dkv, dsinks_N = attention.backward(q_BtNH, kv, dkv, tile, *results, dout_BtNH, ranges, sinks_N)
            dweights_queries, dx_queries = queries_vjp((dq_BtNH.astype(q_BtNH.dtype), dgate_BtNH, dsinks_N))
            dweights = add(add(dweights, dweights_rest), dweights_queries)
            return (put_at(dx_nBtD, dx_rest + dx_queries, tile), dkv, dweights), None

        def keys_values_backward(carry, operands):
            dx_nBtD, dweights = carry
            tile, x_BtD, positions_Bt = operands
            k_v, keys_values_vjp = jax.vjp(
                lambda w, x: self._tile_keys_values(all_of(w), x, positions_Bt), trainable, x_BtD
            )
            dk_dv = jax.tree.map(lambda d, like: d.astype(like.dtype), attention.take(dkv, tile), k_v)
            dweights_tile, dx_BtD = keys_values_vjp(dk_dv)
            return (put_at(dx_nBtD, at(dx_nBtD, tile) + dx_BtD, tile), add(dweights, dweights_tile)), None

        tiles = tile_indices(x_nBtD)
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        carry = dy_nBtD, jnp.zeros(kv.shape, jnp.float32) + zero, dweights
        carry, _ = lax.scan(tile_backward, carry, (tiles, x_nBtD, positions_nBt, saved, chosen_nBtk))
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        dx_nBtD, dkv, dweights = carry
        dkv = attention.add_exchanged(dkv, ranges)
        carry, _ = lax.scan(keys_values_backward, (dx_nBtD, dweights), (tiles, x_nBtD, positions_nBt))
        dx_nBtD, dweights = carry
        dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, trainable)
        return LayerParams(dweights, None), dx_nBtD, None, None, prefetch

    def _keys_values(self, weights, x_nBtD, positions_nBt, ranges) -> jax.Array:
        """K and V of all tokens, in the layout of the tile attention, after its exchange."""
        attention = self.attention
        abstract_tile = jax.eval_shape(self._tile_keys_values, weights, x_nBtD[0], positions_nBt[0])

        def put(kv, operands):
            tile, x_BtD, positions_Bt = operands
            return attention.put(kv, *self._tile_keys_values(weights, x_BtD, positions_Bt), tile), None

        batch, tile_tokens, _, head_dim = abstract_tile[0].shape
        empty = attention.empty(batch, len(x_nBtD) * tile_tokens, head_dim, x_nBtD.dtype)
        # The zeros depend on x, so that they are not allocated before it.
        x_nBtD, zero = lax.optimization_barrier((x_nBtD, jnp.zeros((), empty.dtype)))
        kv, _ = lax.scan(put, empty + zero, (tile_indices(x_nBtD), x_nBtD, positions_nBt))
        return attention.exchange(kv, ranges)

    def _tile_keys_values(self, weights, x_BtD, positions_Bt):
        layer = self.layer(weights)
        input_BtD = layer.attention_input(x_BtD, shard=self.shard)
        return layer.attention.keys_values(input_BtD, positions_Bt, shard=self.shard, tables=self.tables)

    def _queries(self, weights, x_BtD, positions_Bt):
        """(q_BtNH, gate_BtNH or None, sinks_N or None)"""
        layer = self.layer(weights)
        input_BtD = layer.attention_input(x_BtD, shard=self.shard)
        queries = layer.attention.queries(input_BtD, positions_Bt, shard=self.shard, tables=self.tables)
        return *queries, layer.attention.sinks_N


def tile_indices(x_nBtD: jax.Array) -> jax.Array:
    return jnp.arange(len(x_nBtD), dtype=jnp.int32)


def at(x_nBtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x_nBtD, tile, keepdims=False)


def put_at(x_nBtD: jax.Array, x_BtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_nBtD, x_BtD, tile, 0)


def add(total, more):
    """Adds gradients, in the dtype of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
