"""The half-blocks that a ring step computes in zigzag order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import QueryResults


class ZigzagPair(NamedTuple):
    """The two products of half-blocks in one ring step: for each, the index of its half, 0 (lo) or 1 (hi).

    Sums are updated in place: halves that a product does not use are neither read nor written.
    """

    of_queries: tuple[int, jax.Array]
    of_keys: tuple[int, jax.Array]

    @classmethod
    def select(cls, is_earlier) -> "ZigzagPair":
        """The halves for a block from an earlier rank, or from a later one."""
        second = jnp.where(is_earlier, 0, 1)
        return cls((1, second), (0, second))

    def operands(self, q, k, v):
        return _pair(q, self.of_queries), _pair(k, self.of_keys), _pair(v, self.of_keys)

    def results(self, results: QueryResults) -> QueryResults:
        return QueryResults(*(_pair(x, self.of_queries, axis) for x, axis in zip(results, (1, 2, 1, 2))))


def half_of(x, half, axis=1):
    """Half 0 or 1 of the tokens of x."""
    size = x.shape[axis] // 2
    return lax.dynamic_slice_in_dim(x, half * size, size, axis)


def update_half(x, half, new, axis=1):
    """x with `new` in place of one half."""
    return lax.dynamic_update_slice_in_dim(x, new, half * (x.shape[axis] // 2), axis)


def _pair(x, halves, axis=1):
    """Two halves of x, stacked along the batch."""
    return jnp.concatenate([half_of(x, half, axis) for half in halves])


def add_to_halves(x, halves, pair):
    """x with each element of the pair added to its half; both halves may be the same one."""
    for half, addend in zip(halves, jnp.split(pair, 2)):
        x = update_half(x, half, half_of(x, half) + addend)
    return x
