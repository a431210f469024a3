"""Passes recurrent states along a sequence that is split over ranks; for code inside `shard_map`.

A kind of layers describes what consecutive tokens do to a state S [K, V] as an affine map, S -> M S
+ U. All that ranks exchange is the map of each of their fragments, whose size does not depend on
the number of tokens: in each of the two directions at most log2(ranks) + 1 collective permutes. A
rank has one fragment, or two in zigzag order: the first fragments are in the order of the ranks,
and the second ones in reverse order.

    entering_states    the states that enter all groups of tokens of a rank
    tile_states        the same, of layers that run in tiles
    continued_states   the same, and the last state, of a sequence that starts with a state: generation
    predecessors       the last tokens of the fragments before a rank's fragments
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


def fragments_of(tree: Any, num_fragments: int, axis: int = 1) -> list[Any]:
    """The part of each fragment of this rank, of a tree of arrays with tokens, or groups, in `axis`."""
    return [
        jax.tree.map(lambda x, i=i: jnp.split(x, num_fragments, axis)[i], tree)
        for i in range(num_fragments)
    ]


def predecessors(fragments: Sequence[jax.Array], ranks: Ranks) -> list[jax.Array]:
    """What the fragment before each of this rank's fragments has in its place; zeros before the
    sequence.

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


class Affine(NamedTuple):
    """The map of a state that enters tokens to the state that leaves them: S -> M S + U. With
    prefixes, K counts the rows of all states.

    M may be smaller, [..., n, n], if each of n parts of S becomes a sum of all parts with factors.
    """

    M: jax.Array  # [..., K, K]
    U: jax.Array  # [..., K, V]

    def __call__(self, S: jax.Array) -> jax.Array:
        moved = product("...ij,...jv->...iv", self.M, self.parts(S))
        return moved.reshape(S.shape) + self.U

    def after(self, first: "Affine") -> "Affine":
        """The map of `first`, and then of this one."""
        return Affine(product("...ij,...jk->...ik", self.M, first.M), self(first.U))

    def parts(self, S: jax.Array) -> jax.Array:
        """S [..., K, V] as the rows that M mixes, [..., n, K V / n]."""
        return S.reshape(*S.shape[:-2], self.M.shape[-1], -1)

    def gradient(self, S: jax.Array, dS: jax.Array) -> "Affine":
        """From a state that enters and the gradient of the state that leaves."""
        return Affine(product("...iv,...jv->...ij", self.parts(dS), self.parts(S)), dS)


def product(subscripts: str, a: jax.Array, b: jax.Array, dtype=None) -> jax.Array:
    """An einsum that accumulates in float32 or wider, and returns that.

    Args:
      dtype: of the factors. None, float32, float64: exact products; bfloat16: products of tensor cores.
    """
    result = jnp.promote_types(jnp.float32, jnp.promote_types(a.dtype, b.dtype))
    if dtype is not None and jnp.finfo(dtype).bits < 32:
        return jnp.einsum(
            subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=result
        )
    return jnp.einsum(
        subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=result
    )


@jax.named_scope(scopes.DELTA_STATES)
def entering_states(
    maps: Affine, ranks: Ranks, num_fragments: int, fragment_GB: jax.Array | None = None
) -> jax.Array:
    """The state that enters each group of tokens, [G, B, H, K, V]. Sequences start with 0.

    Rematerialization knows the states that enter fragments as "delta_states"; where they are saved,
    the exchange is not repeated.

    Args:
      maps: of all groups of this rank, arrays [G, B, ...], one fragment after the other.
      num_fragments: of each rank; 1: the ranks have consecutive parts of the sequence. 2: zigzag order. More: of
        several chains, which are independent of each other; the fragments 2 i and 2 i + 1 are the two of chain i.
      fragment_GB: of `sharded_recurrence.GroupTable`. None: all fragments have equal numbers of groups.
    """
    return _entering(maps, fragment_GB, ranks, num_fragments, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _entering(
    maps: Affine, fragment_GB: jax.Array | None, ranks: Ranks, num_fragments: int, direction: int
) -> jax.Array:
    """As `entering_states`; the first fragments are in the order of the ranks if `direction` is 1,
    or else -1.
    """
    return _entering_forward(maps, fragment_GB, ranks, num_fragments, direction)[0]


def _entering_forward(maps, fragment_GB, ranks, num_fragments, direction):
    totals = _totals(maps, fragment_GB, num_fragments)
    # Named inside the rule: see strategies/ring.py.
    fragment_states = checkpoint_name(_exchanged(totals, ranks, direction), "delta_states")
    return _spread(maps, fragment_GB, fragment_states), (maps, fragment_GB, fragment_states)


def _entering_backward(ranks, num_fragments, direction, residuals, dS):
    """S' = M S + U backwards: the gradient of S is M^T dS' plus the gradient of its uses, an affine
    map as well.
    """
    maps, fragment_GB, fragment_states = residuals
    transposed = Affine(maps.M.mT[::-1], dS[::-1])
    reverse_GB = None
    if fragment_GB is not None:
        reverse_GB = jnp.where(fragment_GB < num_fragments, fragment_GB ^ 1, fragment_GB)[::-1]
    # Backwards, the second fragment of each chain is the first, again in the order of the ranks.
    backwards = -direction if num_fragments == 1 else direction
    leaving = _entering(transposed, reverse_GB, ranks, num_fragments, backwards)[::-1]
    entering = _spread(maps, fragment_GB, fragment_states)
    return maps.gradient(entering, leaving), None


_entering.defvjp(_entering_forward, _entering_backward)


def _exchanged(totals: Affine, ranks: Ranks, direction: int) -> jax.Array:
    """The state that enters each fragment, [F, B, H, K, V], from the maps of the fragments."""
    shape = totals.U.shape
    # the first and the second fragments, [chains x B, ...]
    halves = [
        jax.tree.map(lambda x, i=i: x[i::2].reshape(-1, *x.shape[2:]), totals)
        for i in range(min(shape[0], 2))
    ]
    entering = _fragment_states(halves, ranks, direction)
    return jnp.stack([S.reshape(-1, *shape[1:]) for S in entering], axis=1).reshape(shape)


def _totals(maps: Affine, fragment_GB: jax.Array | None, num_fragments: int) -> Affine:
    """The map of all groups of each fragment, arrays [F, B, ...]; without groups, the map of no
    tokens.
    """
    if fragment_GB is None:
        each = map(total, fragments_of(maps, num_fragments, 0))
        return jax.tree.map(lambda *parts: jnp.stack(parts), *each)
    empty = _empty(jax.tree.map(lambda x: x[0], maps))

    def step(before, group):
        group_map, is_first_B = group
        after = group_map.after(where(is_first_B, empty, before))
        return after, after

    _, until = lax.scan(step, empty, (maps, _is_first(fragment_GB)))
    is_group_FGB = fragment_GB == jnp.arange(num_fragments)[:, None, None]
    last_FB = jnp.max(jnp.where(is_group_FGB, jnp.arange(len(fragment_GB))[:, None], -1), axis=1)
    index_FB = jnp.maximum(last_FB, 0)[..., None, None, None]
    last = jax.tree.map(
        lambda x: jnp.take_along_axis(x, index_FB, axis=0, mode="promise_in_bounds"), until
    )
    return where(last_FB >= 0, last, empty)


def _spread(maps: Affine, fragment_GB: jax.Array | None, fragment_states: jax.Array) -> jax.Array:
    """The state that enters each group, [G, B, ...], from those that enter the fragments, [F, B,
    ...].
    """
    if fragment_GB is None:
        each = zip(fragments_of(maps, len(fragment_states), 0), fragment_states)
        return jnp.concatenate([_states(*pair) for pair in each])

    def step(S, group):
        group_map, fragment_B, is_first_B = group
        index_B = jnp.minimum(fragment_B, len(fragment_states) - 1)[None, :, None, None, None]
        start = jnp.take_along_axis(fragment_states, index_B, axis=0, mode="promise_in_bounds")[0]
        S = where(is_first_B, start, S)
        return group_map(S), S

    return lax.scan(step, fragment_states[0], (maps, fragment_GB, _is_first(fragment_GB)))[1]


def _is_first(fragment_GB: jax.Array) -> jax.Array:
    """Whether each group is the first of its fragment."""
    previous_GB = jnp.pad(fragment_GB[:-1], [(1, 0), (0, 0)], constant_values=-1)
    return fragment_GB != previous_GB


def _fragment_states(totals: list[Affine], ranks: Ranks, direction: int) -> list[jax.Array]:
    """The state that enters each fragment."""
    first, *second = totals
    entering = [_before(first, ranks, direction).U]
    # of zigzag order, from the last rank, where it follows the first one, to the first rank
    for fragment in second:
        turn = first(entering[0])
        is_turn = is_last(ranks)
        fragment = fragment._replace(U=jnp.where(is_turn, fragment(turn), fragment.U))
        entering.append(jnp.where(is_turn, turn, _before(fragment, ranks, -direction).U))
    return entering


def _states(maps: Affine, S: jax.Array) -> jax.Array:
    return lax.scan(lambda S, group: (group(S), S), S, maps)[1]


def total(maps: Affine) -> Affine:
    """The map of all groups of a fragment, [groups, B, ...] -> [B, ...]."""
    first, rest = (jax.tree.map(lambda x, part=part: x[part], maps) for part in (0, slice(1, None)))
    return lax.scan(lambda before, group: (group.after(before), None), first, rest)[0]


def _before(own: Affine, ranks: Ranks, direction: int) -> Affine:
    """The map of the fragments of all earlier ranks, or of the later ranks if direction is -1.

    By recursive doubling: Hillis and Steele, "Data Parallel Algorithms" (1986).
    """
    if ranks.size == 1:
        return _empty(own)

    def shift(maps: Affine, step: int) -> Affine:
        return jax.tree.map(lambda x: shifted(x, ranks, direction * step), maps)

    index = lax.axis_index(ranks.axis)
    distance = index if direction == 1 else ranks.size - 1 - index  # from the start
    before = where(distance >= 1, shift(own, 1), _empty(own))
    step = 1
    while step < ranks.size - 1:
        before = where(distance > step, before.after(shift(before, step)), before)
        step *= 2
    return before


def _empty(like: Affine) -> Affine:
    """The map of no tokens."""
    eye = jnp.eye(like.M.shape[-1], dtype=like.M.dtype)
    return Affine(jnp.broadcast_to(eye, like.M.shape), jnp.zeros_like(like.U))


def where(condition: jax.Array, a: Any, b: Any) -> Any:
    """Selects between trees of arrays, which start with the dimensions of `condition`."""
    return jax.tree.map(lambda x, y: jnp.where(like(condition, x), x, y), a, b)


def like(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags with the number of dimensions of x."""
    return flags.reshape(*flags.shape, *[1] * (x.ndim - flags.ndim))


def continued_states(
    maps: Affine, initial_BHKV: jax.Array, ranks: Ranks
) -> tuple[jax.Array, jax.Array]:
    """The state that enters each group of this rank's only fragment, of a sequence that starts with
    `initial_BHKV`; and the state after the last token of all ranks."""
    states = _states(maps, _before(total(maps), ranks, 1)(initial_BHKV))
    last = jax.tree.map(lambda x: x[-1], maps)(states[-1])
    if ranks.size > 1:
        last = lax.psum(jnp.where(is_last(ranks), last, 0), ranks.axis)
    return states, last


def tile_states(maps: Affine, ranks: Ranks) -> jax.Array:
    """The states that enter both pieces of all tiles of a rank, [tiles, 2, B, H, K, V], from their
    maps, [tiles, 2, ...]. The pieces of the second fragment are in reverse order
    (`attention/query_tiles.py`)."""
    in_order = jax.tree.map(lambda x: jnp.concatenate([x[:, 0], x[::-1, 1]]), maps)
    first, second = jnp.split(entering_states(in_order, ranks, 2), 2)
    return jnp.stack([first, second[::-1]], axis=1)
