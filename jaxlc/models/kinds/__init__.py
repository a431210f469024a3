"""The kinds of layers: a module for each, with parameters, forward, tiles and cached generation.

`jaxlc.models.contract` has the interfaces that a kind implements, `jaxlc.attention` what crosses ranks. A kind outside
this package is registered with `register`.

A layer has a residual branch with a mixer or several, whose outputs are added, one with a feed-forward block, or both.
The interfaces admit, with these signatures:

    operands(x_BTD, *, shard, earlier=None) -> (operands, kept)    an interface `SharesOperands`, beside `Rotary`
        `operands` is opaque to a layer: those of an earlier layer, its keys or its state, can be handed to a later one.
    attend(*operands, ranges) -> out    projected(out, kept) -> out_BTD    abstract_cache(on, layout, ..) -> tree
        what is sent and cached is up to the kind: latent vectors that are expanded on arrival, keys and values of
        different dims, states. `out` has any shape, and the cache is any tree of arrays [B, layers, ...].
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlc.config import Config, ModelConfig
from jaxlc.config.models.model_schema import LayerConfig
from jaxlc.core import Unsupported
from jaxlc.models.block import Block
from jaxlc.models.contract import KindOnMesh, Mixer, OnTiles, OnTrees, ReadsBefore, Rotary
from jaxlc.models.kinds.attention import Attention
from jaxlc.models.kinds.delta_net import GatedDeltaNet
from jaxlc.models.kinds.dense import MLP
from jaxlc.models.kinds.experts import Experts
from jaxlc.models.kinds.kda import KimiDeltaAttention
from jaxlc.models.kinds.latent import LatentAttention
from jaxlc.models.kinds.mamba2 import Mamba2
from jaxlc.models.rope import TablesOfKinds, rope_tables

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "latent": LatentAttention,
    "gated_delta_net": GatedDeltaNet,
    "mamba2": Mamba2,
    "kimi_delta": KimiDeltaAttention,
}
FEED_FORWARDS: dict[str, type[Block]] = {"dense": MLP, "experts": Experts}


def register(name: str, mixer: type[Mixer]) -> None:
    """Adds a kind. Its description is registered under the same name."""
    MIXERS[name] = mixer


def mixers_alone(model: LayerConfig) -> list[tuple[type[Mixer], LayerConfig]]:
    """The mixers of layers, each with the settings of layers with this mixer alone."""
    return [(MIXERS[name], dataclasses.replace(model, mixers=(name,))) for name in model.mixers]


def mixers_on_mesh(on: KindOnMesh) -> list[tuple[type[Mixer], KindOnMesh]]:
    """The same of the layers of a kind on a mesh."""
    alone = mixers_alone(on.model)
    return [(mixer, dataclasses.replace(on, model=layer)) for mixer, layer in alone]


def kinds_on_mesh(config: Config, mesh: Mesh, compute_dtype, **settings) -> dict[str, KindOnMesh]:
    """The kinds of layers of a config on a mesh, by name; `settings` are further fields of
    `KindOnMesh`.

    Raises:
      Unsupported: a kind does not support tiles or trees, and the config has them.
    """
    model = config.model
    shared = dict(config=config, mesh=mesh, compute_dtype=compute_dtype, **settings)
    needs = {
        OnTiles: ("memory.tile_tokens", config.memory.tile_tokens),
        OnTrees: ("attention.shared_prefixes", config.attention.shared_prefixes),
    }
    for interface, (setting, value) in needs.items():
        lacking = [
            kind
            for kind in model.used_kinds
            if not all(issubclass(MIXERS[x], interface) for x in model.layer_config(kind).mixers)
        ]
        if value and lacking:
            off = type(value)(0)
            raise Unsupported(
                f"unsupported: config.{setting}={value} with {min(lacking)} layers; use --config.{setting}={off}"
            )
    return {
        kind: KindOnMesh(model=model.layer_config(kind), window=model.window_of(kind), **shared)
        for kind in model.used_kinds
    }


def kinds_with(interface: type, model: ModelConfig) -> list[str]:
    """The kinds of layers whose mixer or feed-forward block has an interface of `contract`."""
    layers = {kind: model.layer_config(kind) for kind in model.used_kinds}
    parts = {
        kind: (
            *(MIXERS[name] for name in layer.mixers),
            FEED_FORWARDS.get(layer.feed_forward, Block),
        )
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
    alone = (x for kind in model.used_kinds for x in mixers_alone(model.layer_config(kind)))
    reaches = (mixer.reach(layer) for mixer, layer in alone if issubclass(mixer, ReadsBefore))
    return max(reaches, default=0)


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
