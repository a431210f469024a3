"""Loops over chunks of a long array. The last chunk may be shorter: padding the array would copy it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def over_chunks(body: Callable, carry, num_tokens: int, chunk_tokens: int):
    """Calls `body(carry, start, size) -> (carry, out)` for each chunk of tokens, in order; `size` is static.

    An array of the carry that `body` reads with `dynamic_slice_in_dim` and writes with `dynamic_update_slice_in_dim` is
    updated in place.

    Returns:
      The carry, and the outs of all chunks, stacked.
    """
    chunk_tokens = min(chunk_tokens, num_tokens)
    num_whole, rest = divmod(num_tokens, chunk_tokens)
    starts = chunk_tokens * jnp.arange(num_whole)
    carry, outs = lax.scan(lambda carry, start: body(carry, start, chunk_tokens), carry, starts)
    if rest:
        carry, last = body(carry, num_whole * chunk_tokens, rest)
        outs = jax.tree.map(lambda stacked, out: jnp.concatenate([stacked, out[None]]), outs, last)
    return carry, outs
