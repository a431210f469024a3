"""The functions of gated feed-forward blocks."""

import functools

import jax
import jax.numpy as jnp

_OF_GATE = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
# transformers, models/gpt_oss: both are bounded, the gate only above.
_LIMIT, _SHARPNESS = 7.0, 1.702


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up, in their dtype; `activation` as in `ModelConfig`."""
    if activation != "clamped_swiglu":
        return _OF_GATE[activation](gate) * up
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(_SHARPNESS * gate)
