"""What a kind of layers implements, and what a layer returns.

A kind mixes the tokens of a residual branch. It is a subclass of `Mixer`, which
`jaxlc.models.kinds` registers, and has a description without JAX with its settings, weights and
costs. What a kind does not have is an interface of its own: `Rotary`, `OnTiles`, `OnTrees`,
`ChoosesKernel`, `PassesStates` and `ReadsBefore` for mixers, `Routed` for feed-forward blocks.

The cache of generation: keys and values of past tokens, sharded over the context and tensor axes,
or states.

Layers that attend to all earlier tokens store token i on the context rank (i // block) % context,
so that at every length the ranks have equal work up to one block. A rank stores its tokens in
ascending order. So the keys that a query attends to are a prefix of each rank's keys. Sliding
layers store the last `window` tokens only, on all context ranks: token i in slot i % window.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.config import Config, ModelConfig
from jaxlc.config.kinds import MIXERS
from jaxlc.config.models.model_schema import LayerConfig
from jaxlc.core import CONTEXT, TENSOR
from jaxlc.models.block import Block, Init
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder

BLOCK_TOKENS = 64  # consecutive tokens on one rank


Cache = dict[
    str, tuple[Any, ...]
]  # for each segment: what `Mixer.abstract_cache` describes, by the place in an iteration


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Where token i of a sequence is stored; functions of arrays of any shape."""

    num_ranks: int  # size of the context axis
    max_tokens: int  # per sequence; a multiple of num_ranks * BLOCK_TOKENS

    @property
    def tokens_per_rank(self) -> int:
        return self.max_tokens // self.num_ranks

    def num_stored(self, rank: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """How many of the first `num_tokens` tokens `rank` stores; also the index of its next token
        on that rank.
        """
        rounds = num_tokens // self._round_tokens
        rest = num_tokens % self._round_tokens
        return rounds * BLOCK_TOKENS + jnp.clip(rest - rank * BLOCK_TOKENS, 0, BLOCK_TOKENS)

    def is_stored_on(self, rank: jax.Array, token: jax.Array) -> jax.Array:
        """Whether `rank` stores the token with this index."""
        return token // BLOCK_TOKENS % self.num_ranks == rank

    @property
    def _round_tokens(self) -> int:
        return self.num_ranks * BLOCK_TOKENS


def layout_for(num_tokens: int, mesh: Mesh) -> CacheLayout:
    """A layout for at least `num_tokens` tokens per sequence. There are 16 lengths per power of
    two, so that similar lengths use the same compiled programs, and at most 1/16 of the cache is
    unused."""
    ranks = mesh.shape[CONTEXT]
    num_blocks = -(-num_tokens // (ranks * BLOCK_TOKENS))
    granularity = max(1, 2 ** (num_blocks.bit_length() - 5))
    num_blocks = -(-num_blocks // granularity) * granularity
    return CacheLayout(num_ranks=ranks, max_tokens=num_blocks * ranks * BLOCK_TOKENS)


def decode_tokens(mesh: Mesh) -> int:
    """Tokens of a decoding step per sequence: one new token, and padding to the ranks that split
    them.
    """
    return mesh.shape[CONTEXT] * mesh.shape[TENSOR]


def empty_cache(abstract: Cache) -> Cache:
    """A cache without tokens: zeros with the shapes and shardings of `abstract_cache`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)


class NewTokens(NamedTuple):
    """The new tokens of each sequence, which may be fewer than the chunk has: the rest is padding."""

    num_past_B: jax.Array  # int32: tokens in the cache
    # int32, in 0 .. C; at most 1 in a decoding step, a chunk of `decode_tokens`
    num_new_B: jax.Array

    def positions_BC(self, chunk_tokens: int) -> jax.Array:
        return self.num_past_B[:, None] + jnp.arange(chunk_tokens, dtype=jnp.int32)

    def is_new_BC(self, chunk_tokens: int) -> jax.Array:
        return jnp.arange(chunk_tokens) < self.num_new_B[:, None]


# checkpoint name of the chosen experts, which a recomputation must not change
CHOICE = "expert_choice"


class LayerOutput(NamedTuple):
    """The results of a layer."""

    x_BTD: jax.Array  # the residual stream
    # Sums over the tokens by name, float32, for terms of the loss; dense layers have none. They add up over tiles, and
    # are global arrays, so that XLA adds those of the ranks.
    sums: dict[str, jax.Array]


class LayerTokens(NamedTuple):
    """What a layer reads of its tokens, besides the residual stream."""

    positions_BT: jax.Array  # int32; of padding, a negative number if a layer has experts
    # Recorded experts of each token in each of the L layers with experts, unsigned; the largest
    # value: there is no record. None: routers choose.
    experts_LBTk: jax.Array | None = None


class BatchTokens(NamedTuple):
    """What is known of the tokens of a microbatch, int32 [B, T], in the order of the batch."""

    positions_BT: jax.Array
    segments_BT: jax.Array | None  # 0: padding. None: each sequence is one document
    # [B, T, D]: the segments that a token's segment continues; see `key_ranges.TokenInfo`. None: no
    # segment continues another one
    prefixes_BTD: jax.Array | None = None
    # of per-document sharding with chains; see `sharded_recurrence.group_table`
    fragments_BT: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindOnMesh:
    """The layers of one kind of a run, on a mesh."""

    config: Config
    model: ModelConfig  # the sizes of the layers: `ModelConfig.layer_config`
    window: int | None  # `ModelConfig.window_of`
    mesh: Mesh
    compute_dtype: Any
    num_tiles: int = 0  # tiles per sequence; 0: layers run on whole sequences
    # The order of tokens in the batch; see `step.batch.SequenceOrder`.
    few_documents: bool = False
    skips_ring_steps: bool = False
    num_chains: int = 0


class Sequences(NamedTuple):
    """What layers of a kind compute between their projections, for whole sequences."""

    # -> `ranges`, a tree of arrays that all layers of a training step share
    prepare: Callable[[BatchTokens], Any]
    # (*operands of the mixer, ranges=ranges) -> the input of `Mixer.projected`
    attend: Callable[..., jax.Array]


class Tiles(NamedTuple):
    """The same for layers that run as scans over tiles; see `layer_tiles`."""

    prepare: Callable[[BatchTokens], Any]
    mixer: Any  # a `layer_tiles.TileMixer`


class Cached(Protocol):
    """What layers of a kind compute between their projections in generation."""

    def bind(self, new: NewTokens) -> Callable:
        """`(*operands, cache, layer) -> (the input of Mixer.projected, cache)`: appends the new
        tokens to layer `layer` of the cache. What all layers share is computed here."""


class CachedKernels:
    """A `Cached` that computes with attention kernels."""

    @property
    def kernels(self) -> dict[str, KernelSelection]:
        """The kernels of the calls, by what they attend to."""
        raise NotImplementedError


class Mixer(Block):
    """Mixes the tokens of a layer: its parameters, and the projections before and after what
    crosses ranks.
    """

    def __init__(self, model: LayerConfig, init: Init):
        """Declares the matrices of the kind: `model` has this mixer alone."""
        kind = MIXERS[model.mixers[0]]
        super().__init__(model, init, kind.matrices(model), kind.projections)

    def operands(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple[tuple, Any]:
        """Returns the operands of `Sequences.attend`, and what `projected` needs besides its
        result. `x_BTD` is the input of the block, gathered over tensor. `Rotary` mixers have one
        more argument."""
        raise NotImplementedError

    def projected(self, out: jax.Array, kept: Any, *, shard: Sharder) -> jax.Array:
        """The output of the block, out_BTD."""
        raise NotImplementedError

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        """Binds the layers of a kind to a mesh."""
        raise NotImplementedError

    @classmethod
    def abstract_cache(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, num_layers: int, dtype
    ) -> Any:
        """Shapes, dtypes and shardings of the cache of layers with the same place in the period: a
        tree of arrays [B, layers, ...]."""
        raise NotImplementedError

    @classmethod
    def cached(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, chunk_tokens: int
    ) -> Cached:
        """Binds the layers of a kind to a mesh and a cache, for calls with `chunk_tokens` tokens of
        each sequence.
        """
        raise NotImplementedError


class Rotation(NamedTuple):
    """Where tokens are, for rotary position embeddings."""

    positions_BT: jax.Array  # int32; of padding, any number
    tables: RopeTables | None  # None: the layer has no position embedding


class Rotary:
    """A mixer whose second operand is a `Rotation`: `operands(x_BTD, rotation, shard=shard)`."""


class OnTiles:
    """A mixer whose layers run in tiles."""

    @classmethod
    def on_tiles(cls, on: KindOnMesh) -> Tiles:
        """As `Mixer.on_sequences`, in `on.num_tiles` tiles."""
        raise NotImplementedError


class OnTrees:
    """A mixer whose segments may continue another one: it reads `BatchTokens.prefixes_BTD`."""


class ChoosesKernel:
    """A mixer that computes with one of several attention kernels."""

    @classmethod
    def kernel(cls, on: KindOnMesh) -> KernelSelection:
        """The kernel in training, and why it was selected.

        Raises:
          UserError: the kernel that the config names does not support the layers.
        """
        raise NotImplementedError


class PassesStates:
    """A mixer that passes a state along the sequence. Without `PerDocumentOrder`, batches are in
    zigzag order.
    """


class PerDocumentOrder(PassesStates):
    """A mixer that passes states along the chains of fragments of per-document sharding
    (`KindOnMesh.num_chains`).
    """


class ReadsBefore:
    """A mixer that reads the tokens directly before a token, as a short convolution does."""

    @classmethod
    def reach(cls, model: ModelConfig) -> int:
        """How many tokens. A fragment receives them from one other fragment, which has as many."""
        raise NotImplementedError


class Routed:
    """A feed-forward block whose tokens choose parts of it. It is called with the arguments of
    `routed`; other blocks are called with `(x_BTD, shard=shard)` and return out_BTD."""


class RoutedOutput(NamedTuple):
    """The results of a `Routed` block."""

    out_BTD: jax.Array
    sums: dict[str, jax.Array]  # see `LayerOutput`
    chosen_BTk: jax.Array  # int32: what each token chose
