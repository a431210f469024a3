"""The fragments of a rank: parts of its tokens that are contiguous in the sequence; for code inside `shard_map`.

In natural order a rank has one fragment. In zigzag order rank r of n has two, the chunks r and 2n - 1 - r. The chunk
before the first of these is on rank r - 1, the chunk before the second on rank r + 1; on the last rank, it is that
rank's own first chunk. So one shift along this folded line sends every fragment its predecessor.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.sharding.mesh import Ranks


def predecessors(fragments: Sequence[jax.Array], ranks: Ranks) -> list[jax.Array]:
    """What the fragment before each of this rank's fragments has in its place; zeros before the sequence.

    Args:
      fragments: one array for each fragment of this rank, in the order of the sequence.
    """
    first, *second = fragments
    before_second = [jnp.where(is_last(ranks), first, shifted(x, ranks, -1)) for x in second]
    return [shifted(first, ranks, 1), *before_second]


def shifted(x: jax.Array, ranks: Ranks, step: int) -> jax.Array:
    """The array of rank - step; zeros where there is no such rank."""
    pairs = [(r, r + step) for r in range(ranks.size) if 0 <= r + step < ranks.size]
    if not pairs:  # without collectives: XLA keeps a permute that sends nothing
        return jnp.zeros_like(x)
    return lax.ppermute(x, ranks.axis, pairs)


def is_last(ranks: Ranks) -> jax.Array | bool:
    """Whether this is the last rank, whose fragments of zigzag order are neighbors."""
    return ranks.size == 1 or lax.axis_index(ranks.axis) == ranks.size - 1


def is_first(ranks: Ranks) -> jax.Array | bool:
    """Whether this is the first rank, whose first fragment begins the sequence."""
    return ranks.size == 1 or lax.axis_index(ranks.axis) == 0
