"""The kinds of blocks of a layer, described without JAX: a module for each with its settings,
checks, weights with their Hugging Face names, FLOPs, and bytes of what can be saved.

`register` adds a kind from outside the package; `jaxlc.models.kinds.register` adds its computation.
"""

import itertools
from collections.abc import Iterator

from jaxlc.config.kinds.attention import AttentionKind
from jaxlc.config.kinds.contract import (
    Absent,
    Block,
    FeedForward,
    HasRope,
    Layer,
    Matrix,
    Mixer,
)
from jaxlc.config.kinds.delta_net import DeltaNetKind
from jaxlc.config.kinds.dense import DenseKind
from jaxlc.config.kinds.experts import ExpertsKind
from jaxlc.config.kinds.kda import KdaKind
from jaxlc.config.kinds.latent import LatentKind
from jaxlc.config.kinds.mamba2 import Mamba2Kind

MIXERS: dict[str, Mixer] = {}
FEED_FORWARDS: dict[str, FeedForward] = {}
# names of the mixer and of the feed-forward block in the parameter tree
_PARTS = ("attention", "mlp")


def register(kind: Block) -> None:
    """Adds a kind under its name."""
    if isinstance(kind, Mixer):
        MIXERS[kind.name] = kind
    elif isinstance(kind, FeedForward):
        FEED_FORWARDS[kind.name] = kind
    else:
        raise TypeError(f"{kind!r} is neither a Mixer nor a FeedForward")


for _kind in (
    AttentionKind(),
    LatentKind(),
    DeltaNetKind(),
    Mamba2Kind(),
    KdaKind(),
    DenseKind(),
    ExpertsKind(),
):
    register(_kind)
MIXERS[Absent.name] = Absent("layers without a mixer")
FEED_FORWARDS[Absent.name] = Absent("layers without a feed-forward block")


def blocks() -> tuple[Block, ...]:
    """All kinds."""
    return (*MIXERS.values(), *FEED_FORWARDS.values())


def mixer_by_layer_kind() -> dict[str, Mixer]:
    """The mixer of each name that model.layer_kinds may have without an entry in model.kinds."""
    return {name: mixer for mixer in MIXERS.values() for name in mixer.layer_kinds}


def scaled_kinds() -> frozenset[str]:
    """The layer kinds that model.rope_scaling applies to."""
    return frozenset(itertools.chain.from_iterable(x.scaled_kinds for x in _with_rope()))


def unrotated_kinds() -> frozenset[str]:
    """The layer kinds of mixers with position embeddings that have none."""
    return frozenset(itertools.chain.from_iterable(x.unrotated_kinds for x in _with_rope()))


def _with_rope() -> Iterator[HasRope]:
    return (mixer for mixer in MIXERS.values() if isinstance(mixer, HasRope))


def tensor_names() -> tuple[str, ...]:
    """Tensors of a layer that memory.save and memory.offload may name: its input, and those of its
    blocks.
    """
    return tuple(dict.fromkeys(("residual", *(name for block in blocks() for name in block.saved))))


def blocks_of(layer: Layer) -> tuple[Block, Block]:
    """The mixer and the feed-forward block of a layer."""
    return MIXERS[layer.mixer], FEED_FORWARDS[layer.feed_forward]


def mixer_matrices(layer: Layer) -> dict[str, Matrix]:
    """The weight matrices of the mixer of a layer, by name."""
    return MIXERS[layer.mixer].matrices(layer)


def branches_of(layer: Layer) -> dict[str, Block]:
    """The blocks that a layer has, by their names in the parameter tree."""
    parts = zip(_PARTS, blocks_of(layer))
    return {part: block for part, block in parts if not isinstance(block, Absent)}


def layer_matrices(layer: Layer) -> dict[str, Matrix]:
    """All weight matrices of a layer, by their paths within the layer."""
    return {
        f"{part}/{name}": matrix
        for part, block in branches_of(layer).items()
        for name, matrix in block.matrices(layer).items()
    }


def param_names(layer: Layer) -> set[str]:
    """The names of all parameters that a layer may have, without adapters."""
    norms = {f"{part}{place}_norm/scale" for part in branches_of(layer) for place in ("", "_post")}
    tensors = (tensor for block in blocks_of(layer) for tensor in block.tensors)
    return (
        norms | {f"attention/{tensor.param}" for tensor in tensors} | layer_matrices(layer).keys()
    )


def projection_paths() -> dict[str, tuple[str, ...]]:
    """Names in lora.projections -> the paths within a layer of the matrices that they stand for."""
    paths: dict[str, tuple[str, ...]] = {}
    for part, kinds in zip(_PARTS, (MIXERS.values(), FEED_FORWARDS.values())):
        for kind in kinds:
            for name, matrix in kind.projections.items():
                paths[name] = tuple(dict.fromkeys((*paths.get(name, ()), f"{part}/{matrix}")))
    return paths


def active_ffn_dim(layer: Layer) -> int:
    """The width of the feed-forward block of a token."""
    return FEED_FORWARDS[layer.feed_forward].active_ffn_dim(layer)
