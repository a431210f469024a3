"""Layers whose weights rest in host memory: each layer's are fetched while the one before it computes.

    forward    fetch(0); for each layer i: fetch(i + 1) beside layer i
    backward   fetch(L - 1); for each layer i, from the last: fetch(i - 1) beside layer i's backward

A scan that is differentiated by JAX could only fetch at a layer's own beginning, where the layer waits for it: weights
that a round hands on to the next would be residuals, kept for every layer. So the two scans are written out, and
weights are taken out of what a layer keeps for its backward (`jax.vjp` tells them apart: `args_res`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def run_layers(run: Callable, x_BTD: jax.Array, stacked, fetch: Callable) -> jax.Array:
    """x_BTD through `run(x_BTD, weights) -> x_BTD`, once for each entry of the stacked weights.

    Args:
      run: decides what it keeps for its backward (`jax.checkpoint`); closes over nothing that is differentiated.
      stacked: a tree of arrays with a leading dimension of layers, or of groups of them; their gradients come to lie in
        the same memory.
      fetch: a layer's weights -> the same on the device.
    """
    last = len(jax.tree.leaves(stacked)[0]) - 1

    def fetched(stacked, layer):
        layer = jnp.clip(layer, 0, last)  # beyond the ends: once more what is there
        return fetch(jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, layer, keepdims=False), stacked))

    @jax.custom_vjp
    def through(x_BTD, stacked):
        def run_layer(carry, layer):
            x_BTD, weights = carry
            return (run(x_BTD, weights), fetched(stacked, layer + 1)), None

        return lax.scan(run_layer, (x_BTD, fetched(stacked, 0)), jnp.arange(last + 1))[0][0]

    def forward(x_BTD, stacked):
        def run_layer(carry, layer):
            x_BTD, weights = carry
            ahead = fetched(stacked, layer + 1)
            y_BTD, backward = jax.vjp(run, x_BTD, weights)
            backward.args_res[1] = None  # the weights: fetched again
            return (y_BTD, ahead), backward

        (y_BTD, _), backwards = lax.scan(run_layer, (x_BTD, fetched(stacked, 0)), jnp.arange(last + 1))
        return y_BTD, (backwards, stacked)

    def backward(residuals, dy_BTD):
        backwards, stacked = residuals

        def run_layer(carry, operands):
            dx_BTD, weights = carry
            layer, backward = operands
            ahead = fetched(stacked, layer - 1)
            backward.args_res[1] = weights
            dx_BTD, dweights = backward(dx_BTD)
            home = jax.tree.map(lambda d, stack: jax.device_put(d, jax.typeof(stack).memory_space), dweights, stacked)
            return (dx_BTD, ahead), home

        layers = jnp.arange(last + 1)
        (dx_BTD, _), dstacked = lax.scan(run_layer, (dy_BTD, fetched(stacked, last)), (layers, backwards), reverse=True)
        return dx_BTD, dstacked

    through.defvjp(forward, backward)
    return through(x_BTD, stacked)
