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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.models.contract import LayerOutput, TiledLayer
from jaxlc.models.matmuls import in_use
from jaxlc.models.offloaded_layers import LayerParams, Prefetch
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
    layer_type: type[TiledLayer],
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
