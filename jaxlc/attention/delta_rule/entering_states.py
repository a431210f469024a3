"""The states that enter the fragments of a sequence that is split over ranks; for code inside `shard_map`.

All that ranks exchange is the affine map of each fragment, whose size does not depend on the number
of tokens: in each of the two directions at most log2(ranks) + 1 collective permutes, and one sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.delta_rule.chunk_rule import Affine, identity, product
from jaxlc.attention.strategies.fragments import is_last, shifted
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


@jax.named_scope(scopes.DELTA_STATES)
def entering_states(maps: list[Affine], ranks: Ranks) -> list[jax.Array]:
    """The state [B, H, K, V] that enters each fragment of this rank, whose maps are `maps`. Sequences start with 0.

    Rematerialization knows the states as "delta_states"; where they are saved, the exchange is not repeated.
    """
    return _entering(maps, ranks, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _entering(maps: list[Affine], ranks: Ranks, direction: int) -> list[jax.Array]:
    """As `entering_states`; the first fragments are in the order of the ranks if `direction` is 1, or else -1."""
    first, *second = maps
    entering = [_before(first, ranks, direction).U]
    for fragment in second:  # of zigzag order, from the last rank to the first
        turn = jnp.where(is_last(ranks), first(entering[0]), 0)
        if ranks.size > 1:
            turn = lax.psum(turn, ranks.axis)
        entering.append(_before(fragment, ranks, -direction)(turn))
    return entering


def _entering_forward(maps, ranks, direction):
    # Named inside the rule: see strategies/ring.py.
    entering = checkpoint_name(_entering(maps, ranks, direction), "delta_states")
    return entering, ([fragment.M for fragment in maps], entering)


def _entering_backward(ranks, direction, residuals, gradients):
    """S' = M S + U backwards: the gradient of S is M^T dS' plus that of its uses, an affine map as well."""
    matrices, entering = residuals
    maps = [Affine(M.mT, dS) for M, dS in zip(matrices, gradients)]
    # Backwards, the second fragments of zigzag order are the first, again in the order of the ranks.
    leaving = _entering(maps[::-1], ranks, direction if len(maps) == 2 else -direction)[::-1]
    return ([Affine(product("...iv,...jv->...ij", dS, S), dS) for dS, S in zip(leaving, entering)],)


_entering.defvjp(_entering_forward, _entering_backward)


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


def continued_states(own: Affine, initial_BHKV: jax.Array, ranks: Ranks) -> jax.Array:
    """The state that enters this rank's only fragment, of a sequence that starts with `initial_BHKV`."""
    return _before(own, ranks, 1)(initial_BHKV)
