"""A long array visited in chunks of tokens, the last of which may be shorter: nothing is padded, so nothing copied."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def over_chunks(visit: Callable, carry, num_tokens: int, chunk_tokens: int):
    """Calls `visit(carry, start, size) -> (carry, out)` for each chunk in turn; `size` is static.

    An array of the carry that `visit` reads and writes by `dynamic_slice_in_dim` and `dynamic_update_slice_in_dim`
    stays where it is.

    Returns:
      carry, and the out of all chunks, stacked.
    """
    chunk_tokens = min(chunk_tokens, num_tokens)
    num_whole, rest = divmod(num_tokens, chunk_tokens)
    starts = chunk_tokens * jnp.arange(num_whole)
    carry, outs = lax.scan(lambda carry, start: visit(carry, start, chunk_tokens), carry, starts)
    if rest:
        carry, last = visit(carry, num_whole * chunk_tokens, rest)
        outs = jax.tree.map(lambda stacked, out: jnp.concatenate([stacked, out[None]]), outs, last)
    return carry, outs
