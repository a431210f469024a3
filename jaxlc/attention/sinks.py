"""Attention sinks: each query head has a logit that joins the denominator of its softmax and has no value (gpt-oss).

    out' = out exp(lse - lse')        lse' = log(e^lse + e^sink)
    dsink = -sum over batch and tokens of exp(sink - lse') (dout' . out' - dlse')

out and lse are the results over all keys: a sink joins once, after the last merge over blocks, ring steps and ranks.
The probabilities with the sink are exp(score - lse'), which a kernel's backward computes from the lse that it is given.
So the backward calls the same kernels with out' and lse', and gives exact dq, dk and dv. Automatic differentiation of
the product above would be exact, too, but its gradient of the lse costs a second backward call of some kernels.
A fully masked row has out' 0, lse' equal to the sink, and gradient 0.
"""

import jax
import jax.numpy as jnp

from jaxlc.attention.contract import QueryResults


def join(out_BTNH: jax.Array, lse_BNT: jax.Array, sinks_N: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(out, lse) with the sinks in the denominator, in the dtypes of the arguments; without sinks, the arguments."""
    if sinks_N is None:
        return out_BTNH, lse_BNT
    joined_BNT = jnp.logaddexp(lse_BNT, sinks_N[:, None].astype(jnp.float32))
    weight_BTN1 = jnp.exp(lse_BNT - joined_BNT).swapaxes(1, 2)[..., None]
    return (out_BTNH * weight_BTN1).astype(out_BTNH.dtype), joined_BNT


def gradient(sinks_N: jax.Array, results: QueryResults) -> jax.Array:
    """The gradient of the sinks, [N] in their dtype.

    Args:
      results: with the sinks in the denominator.
    """
    out_BTNH, lse_BNT, dout_BTNH, dlse_BNT = results
    delta_BTN = jnp.sum(out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32), axis=-1)
    probability_BNT = jnp.exp(sinks_N[:, None].astype(jnp.float32) - lse_BNT)
    return -jnp.sum(probability_BNT * (delta_BTN.swapaxes(1, 2) - dlse_BNT), axis=(0, 2)).astype(sinks_N.dtype)
