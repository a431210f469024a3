"""Natural order to zigzag order and back, between ranks; for code inside `shard_map`.

In natural order rank r of n holds the neighboring chunks 2r and 2r + 1 of 2n, in zigzag order the chunks r and
2n - 1 - r. Of the two chunks that a rank holds in zigzag order, one is even and one is odd. So two collective permutes
suffice, one of all even chunks and one of all odd chunks: each rank sends its shard once. Indexing the global array
with `zigzag_order` would gather it on every rank instead.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


@jax.named_scope(scopes.REORDER)
def to_zigzag(x: jax.Array, ranks: Ranks, dim: int = 1) -> jax.Array:
    """Converts this rank's shard from natural to zigzag order; `dim` is the dimension of the tokens."""
    if ranks.size == 1:
        return x
    even, odd = (
        lax.ppermute(chunk, ranks.axis, [(rank, owner) for owner, rank in _owners(ranks.size, parity)])
        for parity, chunk in enumerate(jnp.split(x, 2, dim))
    )
    is_odd_rank = lax.axis_index(ranks.axis) % 2 == 1
    return jnp.concatenate([jnp.where(is_odd_rank, odd, even), jnp.where(is_odd_rank, even, odd)], dim)


@jax.named_scope(scopes.REORDER)
def to_natural(x: jax.Array, ranks: Ranks, dim: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`."""
    if ranks.size == 1:
        return x
    lo, hi = jnp.split(x, 2, dim)
    is_odd_rank = lax.axis_index(ranks.axis) % 2 == 1
    even, odd = jnp.where(is_odd_rank, hi, lo), jnp.where(is_odd_rank, lo, hi)
    chunks = (lax.ppermute(chunk, ranks.axis, _owners(ranks.size, parity)) for parity, chunk in enumerate((even, odd)))
    return jnp.concatenate(list(chunks), dim)


def _owners(num_ranks: int, parity: int) -> list[tuple[int, int]]:
    """(rank in zigzag order, rank in natural order) of each even (parity 0) or odd (parity 1) chunk."""
    chunks = range(parity, 2 * num_ranks, 2)
    return [(min(chunk, 2 * num_ranks - 1 - chunk), chunk // 2) for chunk in chunks]
