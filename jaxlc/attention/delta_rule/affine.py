"""Affine maps of recurrent states, and the products of the delta rule."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Affine(NamedTuple):
    """The map of a state that enters tokens to the state that leaves them: S -> M S + U. With prefixes, K counts the
    rows of both states."""

    M: jax.Array  # [..., K, K]
    U: jax.Array  # [..., K, V]

    def __call__(self, S: jax.Array) -> jax.Array:
        return product("...ij,...jv->...iv", self.M, S) + self.U

    def after(self, first: "Affine") -> "Affine":
        """The map of `first`, and then of this one."""
        return Affine(product("...ij,...jk->...ik", self.M, first.M), self(first.U))


def identity(num_sequences: int, num_heads: int, key_dim: int, value_dim: int, dtype) -> Affine:
    """The map of no tokens."""
    shape = num_sequences, num_heads, key_dim
    return Affine(
        jnp.broadcast_to(jnp.eye(key_dim, dtype=dtype), (*shape, key_dim)), jnp.zeros((*shape, value_dim), dtype)
    )


def product(subscripts: str, a: jax.Array, b: jax.Array, dtype=None) -> jax.Array:
    """An einsum that accumulates in float32 or wider, and returns that.

    Args:
      dtype: of the factors. None, float32, float64: exact products; bfloat16: those of tensor cores.
    """
    result = jnp.promote_types(jnp.float32, jnp.promote_types(a.dtype, b.dtype))
    if dtype is not None and jnp.finfo(dtype).bits < 32:
        return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=result)
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=result)
