"""What a kind of layers provides: mixers, and layers that run as scans over tiles of tokens."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.models.offloaded_layers import overlap_with_prefetch
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder

CHOICE = "expert_choice"  # checkpoint name of the chosen experts, which a recomputation must not change


class LayerOutput(NamedTuple):
    """The results of a layer."""

    x_BTD: jax.Array  # the residual stream
    # Sums over the tokens by name, float32, for terms of the loss; dense layers have none. They add up over tiles, and
    # are global arrays, so that XLA adds those of the ranks.
    sums: dict[str, jax.Array]


class FeedForwardOutput(NamedTuple):
    """The results of a feed-forward block."""

    out_BTD: jax.Array
    sums: dict[str, jax.Array]  # see `layers.LayerOutput`
    chosen_BTk: jax.Array | None = None  # int32: the experts of each token; None: the block has no experts


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

    def layer(self, weights) -> Any:
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


def tile_indices(x_nBtD: jax.Array) -> jax.Array:
    return jnp.arange(len(x_nBtD), dtype=jnp.int32)


def at(x_nBtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x_nBtD, tile, keepdims=False)


def put_at(x_nBtD: jax.Array, x_BtD: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_nBtD, x_BtD, tile, 0)


def add(total, more):
    """Adds gradients, in the dtype of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
