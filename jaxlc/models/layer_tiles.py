"""A decoder layer as scans over tiles of tokens: nothing but x, K and V exists at full length.

    forward    for each tile: K and V
               for each tile: queries, attention over all K and V, and the rest of the layer; y is written over x
    backward   for each tile: K and V again
               for each tile: queries and attention again, unless they were kept; the gradients of x, of the weights
                              and of all K and V that the tile has seen; dx is written over dy
               for each tile: what the gradients of its K and V add to dx and to the weights'

Arrays are tiles throughout, [n, B, t, ...] where t counts a tile's tokens on all ranks: putting the residual stream
into another order would cost a copy of it. The backward is written out, since differentiating the scans would keep y
beside x, dx beside dy, and would sum the gradients of K, V and weights in the compute dtype; here they are float32.
After ALST's tiled MLP (Bekman et al. 2025, arXiv:2506.13996, section 3.1), with attention inside the tile.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.models.layers import DecoderLayer, in_use
from jaxlc.models.offloaded_layers import Prefetch, beside, schedule_after
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder


class TileAttention(Protocol):
    """Attention of one tile's queries over all keys; `attention.tiled` makes it. `tile` is int32, possibly traced.

    kv is opaque here: K and V of the whole sequence, as that strategy holds them.
    """

    def empty(self, batch: int, num_tokens: int, head_dim: int, dtype) -> jax.Array: ...

    def put(self, kv: jax.Array, k_BtKH: jax.Array, v_BtKH: jax.Array, tile) -> jax.Array: ...

    def take(self, kv: jax.Array, tile) -> tuple[jax.Array, jax.Array]: ...

    def forward(self, q_BtNH: jax.Array, kv: jax.Array, tile, segments_BT) -> tuple[jax.Array, jax.Array]: ...

    def backward(
        self, q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, segments_BT
    ) -> tuple[jax.Array, jax.Array]: ...


class Tiling(NamedTuple):
    """How a step runs its layers in tiles."""

    attention: TileAttention
    keeps_attention: bool  # attention's out and lse are residuals of the backward, by their names; else made again


def run_layer(
    layer_def,
    params,
    x_nBtD: jax.Array,
    positions_nBt: jax.Array,
    segments_BT: jax.Array | None = None,
    ahead: Prefetch | None = None,
    *,
    tiling: Tiling,
    shard: Sharder,
    tables: RopeTables,
) -> tuple[jax.Array, Any]:
    """The layer `nnx.merge(layer_def, params)` on tiles; as DecoderLayer.__call__ on the sequence they make up.

    Returns x_nBtD and the weights that were fetched meanwhile. Weights are cast and gathered once, for all tiles. A
    remat policy finds the names residual, attention_out and attention_lse, the last two where they are kept.
    """
    x_nBtD = checkpoint_name(x_nBtD, "residual")
    weights = jax.tree.map(
        # Norm scales are used in float32 and lie whole on every rank.
        lambda param: param if "norm" in param.dims else param.replace(in_use(param, shard, x_nBtD.dtype)),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    layer = _TiledLayer(layer_def, dataclasses.replace(shard, weights_are_gathered=True), tables, tiling)

    @jax.custom_vjp
    def run(*operands):
        return layer.forward(*operands)[0]

    run.defvjp(layer.forward, layer.backward)
    return run(weights, x_nBtD, positions_nBt, segments_BT, ahead)


@dataclasses.dataclass(frozen=True)
class _TiledLayer:
    layer_def: object  # nnx.GraphDef of a DecoderLayer
    shard: Sharder
    tables: RopeTables
    tiling: Tiling

    def forward(self, weights, x_nBtD, positions_nBt, segments_BT, ahead):
        """(y_nBtD, the weights that were fetched meanwhile), and what the backward starts from."""
        attention = self.tiling.attention
        kv = self._keys_values(weights, x_nBtD, positions_nBt)

        def run_tile(x_nBtD, operands):
            tile, positions_Bt = operands
            x_BtD = _at(x_nBtD, tile)
            q_BtNH = self._queries(weights, x_BtD, positions_Bt)
            results = attention.forward(q_BtNH, kv, tile, segments_BT)
            y_BtD = self._after_attention(weights, x_BtD, results[0])
            return _put(x_nBtD, y_BtD, tile), results if self.tiling.keeps_attention else None

        def run_tiles(x_nBtD):
            return lax.scan(run_tile, x_nBtD, (_tiles(x_nBtD), positions_nBt))

        (y_nBtD, kept), fetched = beside(run_tiles, (x_nBtD,), ahead)
        if kept is not None:  # named here, inside the rule: see attention/ring.py
            kept = checkpoint_name(kept[0], "attention_out"), checkpoint_name(kept[1], "attention_lse")
        return (y_nBtD, fetched), (weights, x_nBtD, positions_nBt, segments_BT, kept, ahead)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, segments_BT, kept, ahead = residuals
        dy_nBtD, _ = gradients
        attention = self.tiling.attention
        # Nothing of this layer before the one after it is done: its arrays would lie beside that one's.
        x_nBtD, dy_nBtD, zero = lax.optimization_barrier((x_nBtD, dy_nBtD, jnp.float32(0)))
        kv = self._keys_values(weights, x_nBtD, positions_nBt)

        def through_tile(carry, operands):
            dx_nBtD, dkv, dweights = carry
            tile, x_BtD, positions_Bt, kept = operands
            q_BtNH, through_queries = jax.vjp(lambda w, x: self._queries(w, x, positions_Bt), weights, x_BtD)
            out_BtNH, lse_BNt = kept or attention.forward(q_BtNH, kv, tile, segments_BT)
            _, through_rest = jax.vjp(self._after_attention, weights, x_BtD, out_BtNH)
            dweights_rest, dx_rest, dout_BtNH = through_rest(_at(dx_nBtD, tile))
            dq_BtNH, dkv = attention.backward(q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, segments_BT)
            dweights_queries, dx_queries = through_queries(dq_BtNH.astype(q_BtNH.dtype))
            dweights = _add(_add(dweights, dweights_rest), dweights_queries)
            return (_put(dx_nBtD, dx_rest + dx_queries, tile), dkv, dweights), None

        def through_keys_values(carry, operands):
            dx_nBtD, dweights = carry
            tile, x_BtD, positions_Bt = operands
            k_v, through = jax.vjp(lambda w, x: self._keys_values_of_tile(w, x, positions_Bt), weights, x_BtD)
            dk_dv = jax.tree.map(lambda d, like: d.astype(like.dtype), attention.take(dkv, tile), k_v)
            dweights_tile, dx_BtD = through(dk_dv)
            return (_put(dx_nBtD, _at(dx_nBtD, tile) + dx_BtD, tile), _add(dweights, dweights_tile)), None

        tiles = _tiles(x_nBtD)
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        carry = dy_nBtD, jnp.zeros(kv.shape, jnp.float32) + zero, dweights
        carry, _ = lax.scan(through_tile, carry, (tiles, x_nBtD, positions_nBt, kept))
        if ahead is not None:
            carry, fetched = schedule_after(carry, ahead.in_backward)
            ahead = Prefetch(None, fetched)
        dx_nBtD, dkv, dweights = carry
        carry, _ = lax.scan(through_keys_values, (dx_nBtD, dweights), (tiles, x_nBtD, positions_nBt))
        dx_nBtD, dweights = carry
        return jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, weights), dx_nBtD, None, None, ahead

    def _keys_values(self, weights, x_nBtD, positions_nBt) -> jax.Array:
        """K and V of all tokens, as the tiles' attention holds them."""
        attention = self.tiling.attention
        of_tile = jax.eval_shape(self._keys_values_of_tile, weights, x_nBtD[0], positions_nBt[0])

        def put(kv, operands):
            tile, x_BtD, positions_Bt = operands
            return attention.put(kv, *self._keys_values_of_tile(weights, x_BtD, positions_Bt), tile), None

        batch, tile_tokens, _, head_dim = of_tile[0].shape
        empty = attention.empty(batch, len(x_nBtD) * tile_tokens, head_dim, x_nBtD.dtype)
        # Zeros that depend on x are not made before it.
        x_nBtD, zero = lax.optimization_barrier((x_nBtD, jnp.zeros((), empty.dtype)))
        return lax.scan(put, empty + zero, (_tiles(x_nBtD), x_nBtD, positions_nBt))[0]

    def _layer(self, weights) -> DecoderLayer:
        return nnx.merge(self.layer_def, weights)

    def _keys_values_of_tile(self, weights, x_BtD, positions_Bt):
        layer = self._layer(weights)
        normed_BtD = layer.attention_input(x_BtD, shard=self.shard)
        return layer.attention.keys_values(normed_BtD, positions_Bt, shard=self.shard, tables=self.tables)

    def _queries(self, weights, x_BtD, positions_Bt):
        layer = self._layer(weights)
        normed_BtD = layer.attention_input(x_BtD, shard=self.shard)
        return layer.attention.queries(normed_BtD, positions_Bt, shard=self.shard, tables=self.tables)

    def _after_attention(self, weights, x_BtD, out_BtNH):
        return self._layer(weights).after_attention(x_BtD, out_BtNH, shard=self.shard)


def _tiles(x_nBtD: jax.Array) -> jax.Array:
    return jnp.arange(len(x_nBtD), dtype=jnp.int32)


def _at(x_nBtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x_nBtD, tile, keepdims=False)


def _put(x_nBtD: jax.Array, x_BtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_nBtD, x_BtD, tile, 0)


def _add(total, more):
    """Sums of gradients, in the total's dtype."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
