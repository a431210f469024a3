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
    """The state that enters each group of tokens, [groups, B, H, K, V] for each fragment. Sequences start with 0.

    Rematerialization knows the states that enter fragments as "delta_states"; where they are saved, the exchange is not
    repeated.

    Args:
      maps: of the groups of each fragment of this rank, arrays [groups, B, ...].
    """
    return _entering(maps, ranks, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _entering(maps: list[Affine], ranks: Ranks, direction: int) -> list[jax.Array]:
    """As `entering_states`; the first fragments are in the order of the ranks if `direction` is 1, or else -1."""
    return _of_groups(maps, _of_fragments(maps, ranks, direction))


def _entering_forward(maps, ranks, direction):
    # Named inside the rule: see strategies/ring.py.
    of_fragments = checkpoint_name(_of_fragments(maps, ranks, direction), "delta_states")
    return _of_groups(maps, of_fragments), (maps, of_fragments)


def _entering_backward(ranks, direction, residuals, gradients):
    """S' = M S + U backwards: the gradient of S is M^T dS' plus that of its uses, an affine map as well."""
    maps, of_fragments = residuals
    # Backwards, the second fragments of zigzag order are the first, again in the order of the ranks.
    transposed = [Affine(fragment.M.mT[::-1], dS[::-1]) for fragment, dS in zip(maps, gradients)]
    reversed_states = _entering(transposed[::-1], ranks, direction if len(maps) == 2 else -direction)
    leaving = [states[::-1] for states in reversed_states[::-1]]
    entering = _of_groups(maps, of_fragments)
    return ([Affine(product("...iv,...jv->...ij", dS, S), dS) for dS, S in zip(leaving, entering)],)


_entering.defvjp(_entering_forward, _entering_backward)


def _of_fragments(maps: list[Affine], ranks: Ranks, direction: int) -> list[jax.Array]:
    """The state that enters each fragment."""
    first, *second = map(total, maps)
    entering = [_before(first, ranks, direction).U]
    for fragment in second:  # of zigzag order, from the last rank to the first
        turn = jnp.where(is_last(ranks), first(entering[0]), 0)
        if ranks.size > 1:
            turn = lax.psum(turn, ranks.axis)
        entering.append(_before(fragment, ranks, -direction)(turn))
    return entering


def _of_groups(maps: list[Affine], entering: list[jax.Array]) -> list[jax.Array]:
    """The state that enters each group, from those that enter the fragments."""
    return [_states(*pair) for pair in zip(maps, entering)]


def _states(maps: Affine, S: jax.Array) -> jax.Array:
    return lax.scan(lambda S, group: (group(S), S), S, maps)[1]


def total(maps: Affine) -> Affine:
    """The map of all groups of a fragment, [groups, B, ...] -> [B, ...]."""
    first, rest = (jax.tree.map(lambda x, part=part: x[part], maps) for part in (0, slice(1, None)))
    return lax.scan(lambda before, group: (group.after(before), None), first, rest)[0]


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


def continued_states(maps: Affine, initial_BHKV: jax.Array, ranks: Ranks) -> jax.Array:
    """The state that enters each group of this rank's only fragment, of a sequence that starts with `initial_BHKV`."""
    return _states(maps, _before(total(maps), ranks, 1)(initial_BHKV))
