"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """x / rms(x) * factor over the last dimensions; computed in float32, returned in the dtype of x.

    The factor is the parameter `scale`, or 1 + scale if `zero_centered`; initially it is 1.
    """

    def __init__(self, *, epsilon: float, zero_centered: bool = False, **dims: int):
        """
        Args:
          dims: names and sizes of the dimensions to norm, the last one "norm": `norm=D`, or `heads=N, norm=H` for all
            heads together.
        """
        self.scale = nnx.Param(jnp.full(tuple(dims.values()), 0.0 if zero_centered else 1.0), dims=tuple(dims))
        self.epsilon, self.zero_centered = epsilon, zero_centered

    @property
    def factor(self) -> jax.Array:
        """float32, of the shape of the dimensions."""
        return 1 + self.scale[...] if self.zero_centered else self.scale[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.factor, self.epsilon)


def rms_norm(x: jax.Array, factor: jax.Array, epsilon: float) -> jax.Array:
    """The function of `RMSNorm`, over the dimensions of `factor`; the loss applies it to chunks of hidden states."""
    wide = x.astype(jnp.float32)
    normed_dims = tuple(range(-factor.ndim, 0))
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide**2, axis=normed_dims, keepdims=True) + epsilon)
    return (wide * inverse_rms * factor).astype(x.dtype)
