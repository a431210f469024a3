"""Decoder layers as scans over tiles of tokens: only x, and what tiles need of each other, exist at
full length.

Arrays are tiled throughout, [n, B, t, ...], where t counts a tile's tokens on all ranks: changing
the order of the residual stream would copy it. The backward is written out: differentiating the
scans would store both x and y, and both dx and dy, and would sum the gradients of the weights in
the compute dtype; here the sums are float32. Extends ALST's tiled MLP (Bekman et al. 2025,
arXiv:2506.13996, section 3.1) to whole layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.kv_blocks import at, put_at
from jaxlc.models.contract import CHOICE, LayerOutput, LayerTokens
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
    tokens_n: LayerTokens,
    ranges: Any,
    prefetch: Prefetch | None = None,
    *,
    mixers: Sequence["TileMixer"],
    saves_attention: bool,
    shard: Sharder,
    tables: RopeTables | None,
) -> tuple[LayerOutput, Any]:
    """Runs the layer `nnx.merge(layer_def, *params)` on tiles; equal to `layer_stack.run_layer` on the whole sequences.

    Weights are cast and gathered once, for all tiles. Remat policies apply to the names residual, attention_out and
    attention_lse.

    Args:
      ranges: what `contract.Tiles.prepare` of each mixer returned.
      mixers: what the mixers of the layer compute between their projections; see `contract.Tiles`.
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
    layer = TiledLayer(
        layer_def=layer_def,
        shard=dataclasses.replace(shard, weights_are_gathered=True),
        tables=tables,
        mixers=mixers,
        saves_attention=saves_attention,
    )

    @jax.custom_vjp
    def run(*operands):
        return layer.forward(*operands)[0]

    run.defvjp(layer.forward, layer.backward)
    return run(weights, x_nBtD, tokens_n, ranges, prefetch)


class Mixing(NamedTuple):
    """What the tiles of a layer need of each other, and the functions that use it."""

    by_tile: Any  # a tree of arrays [n, ...], of which each tile gets its own
    # an array of all tokens whose gradient, float32, is a sum over the tiles; a tree of such arrays
    summed: Any
    # (x_BtD, positions_Bt, tile, for_tile, saved) -> ((out, lse), kept, gradients). out and kept: the arguments of
    # `Mixer.projected`. lse: what else the backward pass needs of attention, or None. saved: (out, lse) of an earlier
    # call, or None. gradients: (dout, dkept, dsummed) -> (gradients of the weights and of x_BtD, dsummed, dfor_tile),
    # in the backward pass only.
    run: Callable
    # ((dx_nBtD, dweights), dsummed, dby_tile) -> (dx_nBtD, dweights), after all tiles of the backward pass
    finish: Callable


def _value(function: Callable, *operands) -> tuple[Any, None]:
    """As `jax.vjp`, without a function for the gradients."""
    return function(*operands), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerOfLayer:
    """A mixer of a layer with its weights."""

    layer: "TiledLayer"
    index: int  # among the mixers of the layer
    weights: LayerParams
    vjp: Callable = _value  # `jax.vjp` in the backward pass

    def call(self, function: Callable, trainable: Any, x_BtD: jax.Array, *operands) -> Any:
        """`function(mixer, input of the mixer, *operands)`, with other trained weights."""
        layer = self.layer.layer(self.weights.with_trainable(trainable))
        input_BtD = layer.attention_input(x_BtD, shard=self.layer.shard)
        return function(layer.mixers[self.index], input_BtD, *operands)

    def run(self, function: Callable, *operands) -> tuple[Any, Any]:
        """`function` of tokens x_BtD and further operands, as of `call`; in the backward pass also a
        function from its gradient to those of the trained weights and of the operands.
        """
        return self.vjp(functools.partial(self.call, function), self.weights.trainable, *operands)


class TileMixer(Protocol):
    """What a mixer computes between its projections, in tiles."""

    def start(
        self, mixer: MixerOfLayer, x_nBtD: jax.Array, positions_nBt: jax.Array, ranges: Any
    ) -> Mixing:
        """Computes what the tiles need of each other; the backward pass calls it again."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledLayer:
    """A layer on tiles; see `run_layer` for the fields.

    forward    what tiles need of each other, and its exchange between ranks
               for each tile: the outputs of the mixers, and the rest of the layer; y overwrites x
    backward   recompute what tiles need of each other
               for each tile: recompute the outputs of the mixers, unless they were saved; gradients of x, of the
                              weights, and of what the tile needs of others; dx overwrites dy
               add the gradients that those of what tiles need of each other give to dx and to the weights
    """

    layer_def: nnx.GraphDef  # definition of a DecoderLayer
    shard: Sharder
    tables: RopeTables | None
    mixers: Sequence[TileMixer]
    saves_attention: bool

    def layer(self, weights: LayerParams) -> Any:
        return nnx.merge(self.layer_def, *weights)

    def forward(self, weights, x_nBtD, tokens_n, ranges, prefetch) -> tuple:
        """Returns (the output with y_nBtD, the prefetched weights), and the residuals of the
        backward pass.
        """
        mixings = self._start(weights, x_nBtD, tokens_n.positions_BT, ranges)

        def run_tile(x_nBtD, operands):
            tile, tokens, for_tile = operands
            x_BtD = at(x_nBtD, tile)
            each = zip(mixings, for_tile)
            runs = [mixing.run(x_BtD, tokens.positions_BT, tile, own, None) for mixing, own in each]
            results = [own for own, _, _ in runs]
            outs = [out for out, _ in results]
            kept = [kept for _, kept, _ in runs]
            (y_BtD, sums), chosen_Btk = self._after_attention(weights, x_BtD, outs, kept, tokens)
            saved = results if self.saves_attention else None
            return put_at(x_nBtD, y_BtD, tile), (saved, sums, chosen_Btk)

        def run_tiles(x_nBtD):
            by_tile = [mixing.by_tile for mixing in mixings]
            return lax.scan(run_tile, x_nBtD, (tile_indices(x_nBtD), tokens_n, by_tile))

        (y_nBtD, (saved, sums, chosen_nBtk)), next_weights = overlap_with_prefetch(
            run_tiles, (x_nBtD,), prefetch
        )
        if saved is not None:  # named inside the custom_vjp rule: see attention/strategies/ring.py
            names = "attention_out", "attention_lse"
            saved = [tuple(map(checkpoint_name, own, names)) for own in saved]
        if chosen_nBtk is not None:
            chosen_nBtk = checkpoint_name(chosen_nBtk, CHOICE)
        sums = {name: x if name == CHOICE else x.sum(0) for name, x in sums.items()}
        output = LayerOutput(y_nBtD, sums)
        residuals = weights, x_nBtD, tokens_n, ranges, saved, chosen_nBtk, prefetch
        return (output, next_weights), residuals

    def backward(self, residuals, gradients) -> tuple:
        """The gradients of the operands of `forward`."""
        weights, x_nBtD, tokens_n, ranges, saved, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        trainable = weights.trainable
        all_of = weights.with_trainable
        # The barrier makes this layer wait for dy; otherwise its arrays and those of the next layer would be live at
        # the same time.
        x_nBtD, dy_nBtD, zero = lax.optimization_barrier((x_nBtD, dy_nBtD, jnp.float32(0)))
        mixings = self._start(weights, x_nBtD, tokens_n.positions_BT, ranges, jax.vjp)
        unsaved = [None] * len(mixings)

        def tile_backward(carry, operands):
            dx_nBtD, dsummed, dweights = carry
            tile, x_BtD, tokens, for_tile, saved, chosen_Btk = operands
            own_tokens = x_BtD, tokens.positions_BT, tile
            each = zip(mixings, for_tile, saved or unsaved)
            runs = [mixing.run(*own_tokens, *own) for mixing, *own in each]
            outs = [own[0] for own, _, _ in runs]
            kept = [kept for _, kept, _ in runs]
            _, rest_vjp = jax.vjp(
                lambda w, *x: self._after_attention(all_of(w), *x, tokens, chosen_Btk)[0],
                *(trainable, x_BtD, outs, kept),
            )
            dweights_rest, dx_BtD, douts, dkept = rest_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            dweights = add(dweights, dweights_rest)
            dfor_tile = []
            for i, ((_, _, gradients), *own) in enumerate(zip(runs, douts, dkept, dsummed)):
                (dweights_mixer, dx_mixer), dsummed[i], dmixing = gradients(*own)
                dweights = add(dweights, dweights_mixer)
                dx_BtD = dx_BtD + dx_mixer
                dfor_tile.append(dmixing)
            return (put_at(dx_nBtD, dx_BtD, tile), dsummed, dweights), dfor_tile

        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        dsummed = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32) + zero, [mixing.summed for mixing in mixings]
        )
        by_tile = [mixing.by_tile for mixing in mixings]
        tiles = tile_indices(x_nBtD), x_nBtD, tokens_n, by_tile, saved, chosen_nBtk
        carry, dby_tile = lax.scan(tile_backward, (dy_nBtD, dsummed, dweights), tiles)
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        dx_nBtD, dsummed, dweights = carry
        for mixing, *own in zip(mixings, dsummed, dby_tile):
            dx_nBtD, dweights = mixing.finish((dx_nBtD, dweights), *own)
        dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, trainable)
        return LayerParams(dweights, None), dx_nBtD, None, None, prefetch

    def _start(
        self, weights, x_nBtD, positions_nBt, ranges, vjp: Callable = _value
    ) -> list[Mixing]:
        """`TileMixer.start` of each mixer."""
        return [
            mixer.start(
                MixerOfLayer(layer=self, index=index, weights=weights, vjp=vjp),
                *(x_nBtD, positions_nBt, own),
            )
            for index, (mixer, own) in enumerate(zip(self.mixers, ranges))
        ]

    def _after_attention(self, weights, x_BtD, outs, kept, tokens, chosen_Btk=None):
        """(output, chosen_Btk or None)"""
        operands = x_BtD, outs, kept, tokens, chosen_Btk
        return self.layer(weights).after_attention(*operands, shard=self.shard)


class TileRecurrence(Protocol):
    """What a `RecurrentTiles` computes between its projections, implemented in `jaxlc.attention`.
    JAX differentiates all of these functions. `ranges` are those of a tile, but in `before`."""

    def before(self, operands: Callable[[jax.Array], tuple], x_nBtD: jax.Array, ranges: Any) -> Any:
        """What each tile reads of the tokens before it, a tree of arrays [n, ...], from
        `Mixer.operands` of tokens and the ranges of all tiles.
        """

    def maps(self, operands: tuple, before: Any, ranges: Any) -> Any:
        """The maps of the states over the tokens of a tile."""

    def states(self, maps: Any) -> Any:
        """The states that enter all tiles, from the maps of all tiles, both with a leading
        dimension n.
        """

    def outputs(self, operands: tuple, before: Any, states: Any, ranges: Any) -> jax.Array:
        """The input of `Mixer.projected`."""


class RecurrentTiles(NamedTuple):
    """The `TileMixer` of a recurrent state: only x and one map of states per tile are stored.

    Before the tiles, the maps of their states are computed, and the states that enter them. The
    backward pass recomputes both; after the tiles, it adds the gradients of the maps.
    """

    recurrence: TileRecurrence

    def start(self, mixer, x_nBtD, positions_nBt, ranges) -> Mixing:
        recurrence = self.recurrence
        shard = mixer.layer.shard

        def operands(own, input_BtD):
            return own.operands(input_BtD, shard=shard)

        def tokens_before(trainable, x_nBtD):
            return recurrence.before(
                lambda x_BtD: mixer.call(operands, trainable, x_BtD)[0], x_nBtD, ranges
            )

        def maps_of(x_BtD, before, ranges):
            def maps(own, input_BtD, before):
                return recurrence.maps(operands(own, input_BtD)[0], before, ranges)

            return mixer.run(maps, x_BtD, before)

        before, before_vjp = mixer.vjp(tokens_before, mixer.weights.trainable, x_nBtD)
        tiles = x_nBtD, before, ranges
        states, states_vjp = mixer.vjp(
            recurrence.states, lax.map(lambda tile: maps_of(*tile)[0], tiles)
        )

        def run(x_BtD, positions_Bt, tile, for_tile, saved):
            before, states, ranges = for_tile
            (mixed, kept), operands_vjp = mixer.run(operands, x_BtD)
            out, outputs_vjp = mixer.vjp(
                lambda *arrays: recurrence.outputs(*arrays, ranges), mixed, before, states
            )

            def gradients(dout, dkept, dsummed):
                dmixed, *dfor_tile = outputs_vjp(dout)
                return operands_vjp((dmixed, dkept)), dsummed, dfor_tile

            return saved or (out, None), kept, gradients

        def finish(gradients, dsummed, dby_tile):
            def maps_backward(_, own, dmaps):
                return maps_of(*own)[1](dmaps)

            dbefore, dstates = dby_tile
            (dmaps,) = states_vjp(dstates)
            (dx_nBtD, dweights), (dbefore_maps,) = add_of_tiles(
                maps_backward, gradients, tiles, dmaps
            )
            dweights_before, dx_before = before_vjp(add(dbefore, dbefore_maps))
            return dx_nBtD + dx_before, add(dweights, dweights_before)

        return Mixing((before, states, ranges), None, run, finish)


def tile_indices(x_nBtD: jax.Array) -> jax.Array:
    return jnp.arange(len(x_nBtD), dtype=jnp.int32)


def add_of_tiles(backward: Callable, gradients: tuple, *operands) -> tuple[tuple, list]:
    """(dx_nBtD, dweights) with the gradients of all tiles added, and the other gradients [n, ...].

    Args:
      backward: `(tile, *operands of the tile) -> (dweights, dx_BtD, *others)`.
    """

    def step(carry, operands):
        dx_nBtD, dweights = carry
        dweights_tile, dx_BtD, *others = backward(*operands)
        tile, *_ = operands
        dx_nBtD = put_at(dx_nBtD, at(dx_nBtD, tile) + dx_BtD, tile)
        return (dx_nBtD, add(dweights, dweights_tile)), others

    return lax.scan(step, gradients, (tile_indices(gradients[0]), *operands))


def add(total, more):
    """Adds gradients, in the dtype of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
