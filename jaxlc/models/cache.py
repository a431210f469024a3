"""The cache of generation: keys and values of past tokens, sharded over the context and tensor axes, or states.

Layers that attend to all earlier tokens store token i on the context rank (i // block) % context, so that at every
length the ranks have equal work up to one block. A rank stores its tokens in ascending order. So the keys that a query
attends to are a prefix of each rank's keys. Sliding layers store the last `window` tokens only, on all context ranks:
token i in slot i % window.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlc.core.axes import CONTEXT, TENSOR

BLOCK_TOKENS = 64  # consecutive tokens on one rank


Cache = dict[
    str, tuple[Any, ...]
]  # for each of LAYER_STACKS: what `Mixer.abstract_cache` describes, by the place in the period


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
