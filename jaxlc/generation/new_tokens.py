"""The new tokens of a batch of sequences."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class NewTokens(NamedTuple):
    """The new tokens of each sequence, which may be fewer than the chunk has: the rest is padding."""

    num_past_B: jax.Array  # int32: tokens in the cache
    num_new_B: jax.Array  # int32, in 0 .. C; at most 1 in a decoding step, a chunk of `decode_tokens`

    def positions_BC(self, chunk_tokens: int) -> jax.Array:
        return self.num_past_B[:, None] + jnp.arange(chunk_tokens, dtype=jnp.int32)

    def is_new_BC(self, chunk_tokens: int) -> jax.Array:
        return jnp.arange(chunk_tokens) < self.num_new_B[:, None]
