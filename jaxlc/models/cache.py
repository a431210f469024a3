"""The cache of generation: keys and values of past tokens, sharded over the context and tensor axes, and the states of
layers of Gated DeltaNet.

Layers that attend to all earlier tokens store token i on the context rank (i // block) % context, so that at every
length the ranks have equal work up to one block. A rank stores its tokens in ascending order. So the keys that a query
attends to are a prefix of each rank's keys. Sliding layers store the last `window` tokens only, on all context ranks:
token i in slot i % window.

The new tokens of a batch of sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import ModelConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT, FIRST_LAYERS, LAST_LAYERS, LAYERS, TENSOR

BLOCK_TOKENS = 64  # consecutive tokens on one rank


class KV(NamedTuple):
    """Keys and values of some layers that have the same place in the period of layer kinds.

    [B, layers, tokens, K, H]; K is repeated to the size of the tensor axis if that is larger. Layers that attend to all
    earlier tokens shard the tokens over context.
    """

    k: jax.Array
    v: jax.Array


class DeltaStates(NamedTuple):
    """What some layers of Gated DeltaNet that have the same place in the period remember: on all context ranks."""

    state: jax.Array  # float32 [B, layers, H, K, V]
    # The inputs of the convolutions of the last P - 1 tokens: [B, layers, P - 1, G, K] and [B, layers, P - 1, H, V].
    past_q: jax.Array
    past_k: jax.Array
    past_v: jax.Array


Cache = dict[str, tuple[KV | DeltaStates, ...]]  # for each of LAYER_STACKS, by the place in the period
STATE_SPEC = PartitionSpec(BATCH_AXES, None, TENSOR)
PAST_SPEC = PartitionSpec(BATCH_AXES, None, None, TENSOR)


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Where token i of a sequence is stored; functions of arrays of any shape."""

    num_ranks: int  # size of the context axis
    max_tokens: int  # per sequence; a multiple of num_ranks * block_tokens
    block_tokens: int = BLOCK_TOKENS

    @property
    def tokens_per_rank(self) -> int:
        return self.max_tokens // self.num_ranks

    def num_stored(self, rank: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """How many of the first `num_tokens` tokens `rank` stores; also the index of its next token on that rank."""
        rounds, rest = num_tokens // self._round_tokens, num_tokens % self._round_tokens
        return rounds * self.block_tokens + jnp.clip(rest - rank * self.block_tokens, 0, self.block_tokens)

    def is_stored_on(self, rank: jax.Array, token: jax.Array) -> jax.Array:
        """Whether `rank` stores the token with this index."""
        return token // self.block_tokens % self.num_ranks == rank

    @property
    def _round_tokens(self) -> int:
        return self.num_ranks * self.block_tokens


def layout_for(num_tokens: int, mesh: Mesh) -> CacheLayout:
    """A layout for at least `num_tokens` tokens per sequence. There are 16 lengths per power of two, so that similar
    lengths use the same compiled programs, and at most 1/16 of the cache is unused."""
    ranks = mesh.shape[CONTEXT]
    num_blocks = -(-num_tokens // (ranks * BLOCK_TOKENS))
    granularity = max(1, 2 ** (num_blocks.bit_length() - 5))
    num_blocks = -(-num_blocks // granularity) * granularity
    return CacheLayout(num_ranks=ranks, max_tokens=num_blocks * ranks * BLOCK_TOKENS)


def decode_tokens(mesh: Mesh) -> int:
    """Tokens of a decoding step per sequence: one new token, and padding to the ranks that split them."""
    return mesh.shape[CONTEXT] * mesh.shape[TENSOR]


def num_cached_heads(model: ModelConfig, mesh: Mesh) -> int:
    """Key/value heads in the cache of layers with the sizes of `model`: repeated if the tensor axis is larger."""
    return max(model.num_kv_heads, mesh.shape[TENSOR])


def kv_spec(window: int | None) -> PartitionSpec:
    """The sharding of the arrays of `KV`, for layers with this window."""
    return PartitionSpec(BATCH_AXES, None, None if window else CONTEXT, TENSOR, None)


def abstract_cache(model: ModelConfig, mesh: Mesh, layout: CacheLayout, *, batch_size: int, dtype) -> Cache:
    """Shapes, dtypes and shardings of the cache."""
    num_layers_of = {
        FIRST_LAYERS: len(model.first_layer_kinds),
        LAYERS: model.num_group_layers,
        LAST_LAYERS: model.num_last_layers,
    }

    def delta_states(sizes: ModelConfig, num_layers: int) -> DeltaStates:
        key, value = (sizes.delta_key_heads, sizes.delta_key_dim), (sizes.delta_value_heads, sizes.delta_value_dim)

        def past(shape: tuple[int, int]) -> jax.ShapeDtypeStruct:
            shape = (batch_size, num_layers, sizes.delta_conv_taps - 1, *shape)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PAST_SPEC))

        shape = (batch_size, num_layers, value[0], key[1], value[1])
        state = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, STATE_SPEC))
        return DeltaStates(state, past(key), past(key), past(value))

    def cache_of(kind: str, num_layers: int) -> KV | DeltaStates:
        window, sizes = model.window_of(kind), model.of_kind(kind)
        if sizes.mixer == "gated_delta_net":
            return delta_states(sizes, num_layers)
        shape = (batch_size, num_layers, window or layout.max_tokens, num_cached_heads(sizes, mesh), sizes.head_dim)
        array = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, kv_spec(window)))
        return KV(array, array)

    kinds_of = {stack: model.kinds_of_iteration(stack) for stack, num_layers in num_layers_of.items() if num_layers}
    return {
        stack: tuple(cache_of(kind, num_layers_of[stack] // len(kinds)) for kind in kinds)
        for stack, kinds in kinds_of.items()
    }


def empty_cache(abstract: Cache) -> Cache:
    """A cache without tokens: zeros with the shapes and shardings of `abstract_cache`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)


class NewTokens(NamedTuple):
    """The new tokens of each sequence, which may be fewer than the chunk has: the rest is padding."""

    num_past_B: jax.Array  # int32: tokens in the cache
    num_new_B: jax.Array  # int32, in 0 .. C; at most 1 in a decoding step, a chunk of `decode_tokens`

    def positions_BC(self, chunk_tokens: int) -> jax.Array:
        return self.num_past_B[:, None] + jnp.arange(chunk_tokens, dtype=jnp.int32)

    def is_new_BC(self, chunk_tokens: int) -> jax.Array:
        return jnp.arange(chunk_tokens) < self.num_new_B[:, None]
