"""The states that enter the fragments of a sequence that is split over ranks; for code inside `shard_map`.

All that ranks exchange is the affine map of each fragment, whose size does not depend on the number
of tokens: in each of the two directions at most log2(ranks) + 1 collective permutes, and one sum.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.delta_rule.chunk_rule import Affine, identity
from jaxlc.attention.strategies.fragments import is_last, shifted
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


@jax.named_scope(scopes.DELTA_STATES)
def entering_states(maps: list[Affine], ranks: Ranks) -> list[jax.Array]:
    """The state [B, H, K, V] that enters each fragment of this rank, whose maps are `maps`. Sequences start with 0."""
    lo, *hi = maps
    entering = [_before(lo, ranks, 1).U]
    for fragment in hi:  # from the last rank to the first
        turn = jnp.where(is_last(ranks), lo(entering[0]), 0)
        if ranks.size > 1:
            turn = lax.psum(turn, ranks.axis)
        entering.append(_before(fragment, ranks, -1)(turn))
    return entering


def _before(own: Affine, ranks: Ranks, direction: int) -> Affine:
    """The map of the fragments of all earlier ranks, by recursive doubling; of the later ranks if direction is -1.

    Hillis and Steele, "Data Parallel Algorithms" (1986).
    """
    empty = identity(*own.M.shape[:3], own.U.shape[-1], own.U.dtype)
    if ranks.size == 1:
        return empty
    index = lax.axis_index(ranks.axis)
    distance_from_start = index if direction == 1 else ranks.size - 1 - index
    total, step = own, 1
    while step < ranks.size:
        received = jax.tree.map(lambda x, hop=direction * step: shifted(x, ranks, hop), total)
        total = _where(distance_from_start >= step, total.after(received), total)
        step *= 2
    received = jax.tree.map(lambda x: shifted(x, ranks, direction), total)
    return _where(distance_from_start >= 1, received, empty)


def _where(condition: jax.Array, a: Affine, b: Affine) -> Affine:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
