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

from jaxlc.attention.delta_rule.affine import Affine, identity, product
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


@jax.named_scope(scopes.DELTA_STATES)
def states_of_groups(maps: Affine, fragment_GB: jax.Array, ranks: Ranks, num_fragments: int) -> jax.Array:
    """As `entering_states`, [G, B, H, K, V], of fragments with any numbers of groups.

    Args:
      maps: of all groups of this rank, arrays [G, B, ...].
      fragment_GB: of `document_fragments.GroupTable`: the fragments 2 i and 2 i + 1 are the two of chain i.
    """
    return _states_of_groups(maps, fragment_GB, ranks, num_fragments)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _states_of_groups(maps: Affine, fragment_GB: jax.Array, ranks: Ranks, num_fragments: int) -> jax.Array:
    return _spread(maps, fragment_GB, _of_chains(maps, fragment_GB, ranks, num_fragments))


def _groups_forward(maps, fragment_GB, ranks, num_fragments):
    of_fragments = checkpoint_name(_of_chains(maps, fragment_GB, ranks, num_fragments), "delta_states")
    return _spread(maps, fragment_GB, of_fragments), (maps, fragment_GB, of_fragments)


def _groups_backward(ranks, num_fragments, residuals, dS):
    """As `_entering_backward`: the second fragment of each chain is the first."""
    maps, fragment_GB, of_fragments = residuals
    reverse_GB = jnp.where(fragment_GB < num_fragments, fragment_GB ^ 1, fragment_GB)[::-1]
    transposed = Affine(maps.M.mT[::-1], dS[::-1])
    leaving = _states_of_groups(transposed, reverse_GB, ranks, num_fragments)[::-1]
    entering = _spread(maps, fragment_GB, of_fragments)
    return Affine(product("...iv,...jv->...ij", leaving, entering), leaving), None


_states_of_groups.defvjp(_groups_forward, _groups_backward)


def _of_chains(maps: Affine, fragment_GB: jax.Array, ranks: Ranks, num_fragments: int) -> jax.Array:
    """The state that enters each fragment, [F, B, H, K, V]. Chains are independent of each other."""
    totals = _totals(maps, fragment_GB, num_fragments)

    def of_chains(x, i):  # [F, B, ...] -> [chains x B, ...]
        return x[i::2].reshape(-1, *x.shape[2:])

    halves = [jax.tree.map(lambda x, i=i: of_chains(x, i), totals) for i in range(2)]
    entering = [S.reshape(-1, *totals.U.shape[1:]) for S in _of_fragments(halves, ranks, 1)]
    return jnp.stack(entering, axis=1).reshape(totals.U.shape)


def _totals(maps: Affine, fragment_GB: jax.Array, num_fragments: int) -> Affine:
    """The map of all groups of each fragment, arrays [F, B, ...]; that of no tokens for fragments without groups."""
    empty = _empty(jax.tree.map(lambda x: x[0], maps))

    def step(before, group):
        of_group, is_first_B = group
        after = of_group.after(_where(_like_maps(is_first_B), empty, before))
        return after, after

    _, until = lax.scan(step, empty, (maps, _is_first(fragment_GB)))
    is_group_FGB = fragment_GB == jnp.arange(num_fragments)[:, None, None]
    last_FB = jnp.max(jnp.where(is_group_FGB, jnp.arange(len(fragment_GB))[:, None], -1), axis=1)
    index_FB = jnp.maximum(last_FB, 0)[..., None, None, None]
    last = jax.tree.map(lambda x: jnp.take_along_axis(x, index_FB, axis=0, mode="promise_in_bounds"), until)
    return _where(_like_maps(last_FB >= 0), last, empty)


def _spread(maps: Affine, fragment_GB: jax.Array, of_fragments: jax.Array) -> jax.Array:
    """The state that enters each group, [G, B, ...], from those that enter the fragments, [F, B, ...]."""

    def step(S, group):
        of_group, fragment_B, is_first_B = group
        index_B = jnp.minimum(fragment_B, len(of_fragments) - 1)[None, :, None, None, None]
        start = jnp.take_along_axis(of_fragments, index_B, axis=0, mode="promise_in_bounds")[0]
        S = jnp.where(_like_maps(is_first_B), start, S)
        return of_group(S), S

    return lax.scan(step, of_fragments[0], (maps, fragment_GB, _is_first(fragment_GB)))[1]


def _is_first(fragment_GB: jax.Array) -> jax.Array:
    """Whether each group is the first of its fragment."""
    previous_GB = jnp.pad(fragment_GB[:-1], [(1, 0), (0, 0)], constant_values=-1)
    return fragment_GB != previous_GB


def _like_maps(flags: jax.Array) -> jax.Array:
    """Flags [..., B] with the dimensions of maps, [..., B, H, K, K]."""
    return flags[..., None, None, None]


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
      shift: (array, steps) -> the array of the member `steps` before this one.
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
