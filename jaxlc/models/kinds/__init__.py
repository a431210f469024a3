"""The kinds of layers: a module for each, with parameters, forward, tiles and cached generation.

`jaxlc.models.contract` has the interfaces that a kind implements, `jaxlc.attention` what crosses ranks. A kind outside
this package is registered with `register`.

Today a layer has a residual branch with a mixer, one with a feed-forward block, or both. The interfaces admit, with
these signatures:

    Branch(mixers: tuple[Mixer, ...], input_norm, output_norm, multiplier)    branches(model) -> tuple[Branch, ...]
        one or more mixers in parallel, whose outputs `projected` are summed, as in Falcon-H1.
    operands(x_BTD, *, shard, earlier=None) -> (operands, kept)    an interface `SharesOperands`, beside `Rotary`
        `operands` is opaque to a layer: those of an earlier layer, its keys or its state, can be handed to a later one.
    attend(*operands, ranges) -> out    projected(out, kept) -> out_BTD    abstract_cache(on, layout, ..) -> tree
        what is sent and cached is up to the kind: latent vectors that are expanded on arrival, keys and values of
        different dims, states. `out` has any shape, and the cache is any tree of arrays [B, layers, ...].
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlc.config import Config, ModelConfig
from jaxlc.config.kinds.contract import Absent
from jaxlc.core.errors import Unsupported
from jaxlc.models.block import Block
from jaxlc.models.contract import (
    KindOnMesh,
    Mixer,
    OnTiles,
    OnTrees,
    ReadsBefore,
    Rotary,
    Sequences,
    Tiles,
)
from jaxlc.models.kinds.attention import Attention
from jaxlc.models.kinds.delta_net import GatedDeltaNet
from jaxlc.models.kinds.dense import MLP
from jaxlc.models.kinds.experts import Experts
from jaxlc.models.kinds.kda import KimiDeltaAttention
from jaxlc.models.kinds.latent import LatentAttention
from jaxlc.models.kinds.mamba2 import Mamba2
from jaxlc.models.layer_tiles import NoTileMixer
from jaxlc.models.rope import TablesOfKinds, rope_tables


class NoMixer(Mixer, OnTiles, OnTrees):
    """What layers without a mixer compute: nothing. `DecoderLayer` has None in its place."""

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        return Sequences(lambda tokens: None, lambda ranges: None)

    @classmethod
    def on_tiles(cls, on: KindOnMesh) -> Tiles:
        return Tiles(lambda tokens: None, NoTileMixer())

    @classmethod
    def abstract_cache(cls, on, layout, *, batch_size, num_layers, dtype) -> tuple:
        return ()

    @classmethod
    def cached(cls, on, layout, *, batch_size, chunk_tokens) -> type["NoMixer"]:
        return cls

    @classmethod
    def bind(cls, new) -> None:
        """As in `Cached`: there is nothing to call."""


MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "latent": LatentAttention,
    "gated_delta_net": GatedDeltaNet,
    "mamba2": Mamba2,
    "kimi_delta": KimiDeltaAttention,
    Absent.name: NoMixer,
}
FEED_FORWARDS: dict[str, type[Block]] = {"dense": MLP, "experts": Experts, Absent.name: Block}


def register(name: str, mixer: type[Mixer]) -> None:
    """Adds a kind. Its description is registered under the same name."""
    MIXERS[name] = mixer


def mixer_of(model: ModelConfig) -> type[Mixer]:
    """The mixer of layers with the sizes of `model`, the result of `ModelConfig.of_kind`."""
    return MIXERS[model.mixer]


def kinds_on_mesh(config: Config, mesh: Mesh, compute_dtype, **settings) -> dict[str, KindOnMesh]:
    """The kinds of layers of a config on a mesh, by name; `settings` are further fields of
    `KindOnMesh`.

    Raises:
      Unsupported: a kind does not support tiles or trees, and the config has them.
    """
    model, shared = (
        config.model,
        dict(config=config, mesh=mesh, compute_dtype=compute_dtype, **settings),
    )
    needs = {
        OnTiles: ("memory.tile_tokens", config.memory.tile_tokens),
        OnTrees: ("attention.shared_prefixes", config.attention.shared_prefixes),
    }
    for interface, (setting, value) in needs.items():
        lacking = {*model.used_kinds} - {*kinds_with(interface, model)}
        if value and lacking:
            off = type(value)(0)
            raise Unsupported(
                f"unsupported: config.{setting}={value} with {min(lacking)} layers; use --config.{setting}={off}"
            )
    return {
        kind: KindOnMesh(model=model.of_kind(kind), window=model.window_of(kind), **shared)
        for kind in model.used_kinds
    }


def kinds_with(interface: type, model: ModelConfig) -> list[str]:
    """The kinds of layers whose mixer or feed-forward block has an interface of `contract`."""
    layers = {kind: model.of_kind(kind) for kind in model.used_kinds}
    parts = {
        kind: (MIXERS[layer.mixer], FEED_FORWARDS[layer.feed_forward])
        for kind, layer in layers.items()
    }
    return [
        kind
        for kind, classes in parts.items()
        if any(issubclass(part, interface) for part in classes)
    ]


def reach(model: ModelConfig) -> int:
    """The largest `ReadsBefore.reach` of all layers; 0: no layer reads the tokens directly before a
    token.
    """
    layers = [model.of_kind(kind) for kind in kinds_with(ReadsBefore, model)]
    return max((mixer_of(layer).reach(layer) for layer in layers), default=0)


def tables_of_kinds(model: ModelConfig, max_tokens: int, rope_tokens: int) -> TablesOfKinds:
    """`rope_tables` of each kind of layers that is `Rotary`."""
    return {
        kind: rope_tables(model, kind, max_tokens, rope_tokens)
        for kind in kinds_with(Rotary, model)
    }


def stacked_tables(
    model: ModelConfig, max_tokens: int, rope_tokens_B: Sequence[int]
) -> TablesOfKinds:
    """As `tables_of_kinds`, with a leading dimension B: each sequence has its own `rope_tokens`."""
    tables = {number: tables_of_kinds(model, max_tokens, number) for number in set(rope_tokens_B)}
    return jax.tree.map(
        lambda *arrays: np.stack(arrays), *(tables[number] for number in rope_tokens_B)
    )
