"""The states that enter the fragments of a sequence that is split over ranks; for code inside `shard_map`.

All that ranks exchange is the affine map of each fragment, whose size does not depend on the number of tokens: in each
of the two directions at most log2(ranks) + 1 collective permutes.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.delta_rule.chunk_rule import Affine, identity, product
from jaxlc.attention.strategies.fragments import (
    gathered_in_node,
    is_last,
    shifted,
    shifted_in_node,
    sum_in_node,
)
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
    return _of_groups(maps, _of_fragments(list(map(total, maps)), ranks, direction))


def _entering_forward(maps, ranks, direction):
    # Named inside the rule: see strategies/ring.py.
    of_fragments = checkpoint_name(_of_fragments(list(map(total, maps)), ranks, direction), "delta_states")
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


def _of_fragments(totals: list[Affine], ranks: Ranks, direction: int) -> list[jax.Array]:
    """The state that enters each fragment."""
    first, *second = totals
    entering = [_before(first, ranks, direction).U]
    for fragment in second:  # of zigzag order, from the last rank, where it follows the first one, to the first rank
        turn, is_turn = first(entering[0]), is_last(ranks)
        fragment = fragment._replace(U=jnp.where(is_turn, fragment(turn), fragment.U))
        entering.append(jnp.where(is_turn, turn, _before(fragment, ranks, -direction).U))
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
    """The map of the fragments of all earlier ranks; of the later ranks if direction is -1.

    On several nodes, the ranks of a node first find the maps of its own earlier ranks.
    """
    if ranks.size == 1:
        return _empty(own)
    index = lax.axis_index(ranks.axis)
    distance = index if direction == 1 else ranks.size - 1 - index  # from the start
    per_node = ranks.per_node
    if per_node is None:
        return _prefix(own, lambda x, step: shifted(x, ranks, direction * step), distance, ranks.size)
    in_node = _prefix(own, lambda x, step: shifted_in_node(x, ranks, direction * step), distance % per_node, per_node)
    is_last_in_node = distance % per_node == per_node - 1
    of_node = _where(is_last_in_node, own.after(in_node), jax.tree.map(jnp.zeros_like, own))
    return in_node.after(_before_node(of_node, ranks, direction, distance // per_node))


def _before_node(of_node: Affine, ranks: Ranks, direction: int, distance: jax.Array) -> Affine:
    """The map of all earlier nodes, from that of a node, which its last rank has; the others have 0.

    Each rank of a node exchanges a part of the heads with the other nodes, so that each map crosses nodes once.

    Args:
      distance: of this node from the first one.
    """
    per_node = ranks.per_node

    def parts(x):  # [B, H, i, j] -> [1, rows, i, j], the rows of this rank
        rows = x.reshape(-1, *x.shape[2:])
        return sum_in_node(jnp.pad(rows, [(0, -len(rows) % per_node), (0, 0), (0, 0)]), ranks)[None]

    def whole(part, like):
        return gathered_in_node(part[0], ranks)[: math.prod(like.shape[:2])].reshape(like.shape)

    def shift(x, step):
        return shifted(x, ranks, direction * step * per_node)

    before = _prefix(jax.tree.map(parts, of_node), shift, distance, ranks.size // per_node)
    return jax.tree.map(whole, before, of_node)


def _prefix(own: Affine, shift: Callable, distance: jax.Array, size: int) -> Affine:
    """The map of all members before each of `size`, by recursive doubling.

    Hillis and Steele, "Data Parallel Algorithms" (1986).

    Args:
      shift: (array, steps) -> the array of the member so many steps before.
      distance: of this member from the first one.
    """
    total, step = jax.tree.map(lambda x: shift(x, 1), own), 1
    total = _where(distance >= 1, total, _empty(own))
    while step < size - 1:
        received = jax.tree.map(lambda x, step=step: shift(x, step), total)
        total = _where(distance > step, total.after(received), total)
        step *= 2
    return total


def _empty(like: Affine) -> Affine:
    """The map of no tokens."""
    return identity(*like.M.shape[:3], like.U.shape[-1], like.U.dtype)


def _where(condition: jax.Array, a: Affine, b: Affine) -> Affine:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def continued_states(maps: Affine, initial_BHKV: jax.Array, ranks: Ranks) -> jax.Array:
    """The state that enters each group of this rank's only fragment, of a sequence that starts with `initial_BHKV`."""
    return _states(maps, _before(total(maps), ranks, 1)(initial_BHKV))
