"""The kinds of blocks of a layer, described without JAX: a module for each with its settings,
checks, weights with their Hugging Face names, FLOPs, and bytes of what can be saved.

`register` adds a kind from outside the package; `jaxlc.models.kinds.register` adds its computation.
"""

from collections.abc import Collection

from jaxlc.config.kinds.attention import AttentionKind
from jaxlc.config.kinds.contract import (
    Block,
    FeedForward,
    HasRope,
    Layer,
    Matrix,
    Mixer,
    MixingFlops,
)
from jaxlc.config.kinds.delta_net import DeltaNetKind
from jaxlc.config.kinds.dense import DenseKind
from jaxlc.config.kinds.experts import ExpertsKind
from jaxlc.config.kinds.kda import KdaKind
from jaxlc.config.kinds.latent import LatentKind
from jaxlc.config.kinds.mamba2 import Mamba2Kind

MIXERS: dict[str, Mixer] = {}
FEED_FORWARDS: dict[str, FeedForward] = {}
# names of the mixers and of the feed-forward block in the parameter tree
_MIXER, _FEED_FORWARD = "attention", "mlp"
# Kinds of layers without one mixer: with none, or with several of the same input, whose outputs are added.
_MIXERS_OF_KINDS: dict[str, tuple[str, ...]] = dict(full_mamba2=("attention", "mamba2"), none=())


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


def blocks() -> tuple[Block, ...]:
    """All kinds."""
    return (*MIXERS.values(), *FEED_FORWARDS.values())


def mixers_by_layer_kind() -> dict[str, tuple[str, ...]]:
    """The mixers of each name that model.layer_kinds may have without an entry in model.kinds."""
    alone = {name: (mixer.name,) for mixer in MIXERS.values() for name in mixer.layer_kinds}
    return alone | _MIXERS_OF_KINDS


def scaled_kinds() -> set[str]:
    """The layer kinds that model.rope.scaling applies to."""
    return {kind for x in MIXERS.values() if isinstance(x, HasRope) for kind in x.scaled_kinds}


def unrotated_kinds() -> set[str]:
    """The layer kinds of mixers with position embeddings that have none."""
    return {kind for x in MIXERS.values() if isinstance(x, HasRope) for kind in x.unrotated_kinds}


def tensor_names() -> tuple[str, ...]:
    """Tensors of a layer that memory.save and memory.offload may name: its input, and those of its
    blocks.
    """
    return tuple(dict.fromkeys(("residual", *(name for block in blocks() for name in block.saved))))


def mixer_path(name: str, mixers: Collection[str]) -> str:
    """The path of a mixer in the parameter tree of a layer with these mixers."""
    return _MIXER if len(mixers) == 1 else f"{_MIXER}/{name}"


def mixers_of(layer: Layer) -> dict[str, Mixer]:
    """The mixers of a layer, by their paths in the parameter tree."""
    return {mixer_path(name, layer.mixers): MIXERS[name] for name in layer.mixers}


def blocks_of(layer: Layer) -> tuple[Block, ...]:
    """The mixers and the feed-forward block of a layer, if it has one."""
    return tuple(branches_of(layer).values())


def mixer_matrices(layer: Layer) -> dict[str, Matrix]:
    """The weight matrices of the mixer of a layer, by name; none without a mixer."""
    return {
        name: matrix
        for x in mixers_of(layer).values()
        for name, matrix in x.matrices(layer).items()
    }


def mixing_flops(layer: Layer) -> MixingFlops:
    """The FLOPs of all mixers of a layer."""
    each = [mixer.mixing_flops(layer) for mixer in mixers_of(layer).values()]
    return MixingFlops(sum(x.per_pair for x in each), sum(x.per_token for x in each))


def branches_of(layer: Layer) -> dict[str, Block]:
    """The blocks that a layer has, by their paths in the parameter tree."""
    blocks = {**mixers_of(layer), _FEED_FORWARD: FEED_FORWARDS.get(layer.feed_forward)}
    return {path: block for path, block in blocks.items() if block is not None}


def norms_of(layer: Layer) -> set[str]:
    """The beginnings of the names of the norms of a layer."""
    return {path.partition("/")[0] for path in branches_of(layer)}


def layer_matrices(layer: Layer) -> dict[str, Matrix]:
    """All weight matrices of a layer, by their paths within the layer."""
    return {
        f"{part}/{name}": matrix
        for part, block in branches_of(layer).items()
        for name, matrix in block.matrices(layer).items()
    }


def param_names(layer: Layer) -> set[str]:
    """The names of all parameters that a layer may have, without adapters."""
    norms = {f"{part}{place}_norm/scale" for part in norms_of(layer) for place in ("", "_post")}
    own = {
        f"{part}/{tensor.param}"
        for part, block in branches_of(layer).items()
        for tensor in block.tensors
    }
    return norms | own | layer_matrices(layer).keys()


def projection_paths() -> dict[str, tuple[str, ...]]:
    """Names in lora.projections -> the paths that the matrices that they stand for may have within a
    layer, where a mixer is alone or one of several.
    """
    paths: dict[str, tuple[str, ...]] = {}
    for part, kinds in ((_MIXER, MIXERS.values()), (_FEED_FORWARD, FEED_FORWARDS.values())):
        for kind in kinds:
            for name, matrix in kind.projections.items():
                own = f"{part}/{matrix}", f"{part}/{kind.name}/{matrix}"
                paths[name] = tuple(dict.fromkeys((*paths.get(name, ()), *own)))
    return paths


def active_ffn_dim(layer: Layer) -> int:
    """The width of the feed-forward block of a token."""
    block = FEED_FORWARDS.get(layer.feed_forward)
    return block.active_ffn_dim(layer) if block else 0
