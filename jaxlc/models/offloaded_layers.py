"""Layers whose weights rest in host memory: each layer's are fetched while the one before it computes.

    forward    fetch(0); for each layer i: fetch(i + 1) beside layer i's attention
    backward   fetch(L - 1); for each layer i, from the last: fetch(i - 1) beside the backward of layer i's attention

A scan that is differentiated by JAX could only fetch at a layer's own beginning, where the layer waits for it: weights
that a round hands on to the next would be residuals, kept for every layer. So the two scans are written out, and
weights are taken out of what a layer keeps for its backward (`jax.vjp` tells them apart: `args_res`).

A copy that is wanted in the next round only is started by XLA's scheduler at the end of this one, where it is waited
for: it takes copies for cheap. So a layer ties what comes from the host to its attention, which takes longest: the copy
is over when attention is (`beside`), and the scheduler starts it before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc._jax_internals import replace_argument_residuals
from jaxlc.core import scopes


class Prefetch(NamedTuple):
    """Weights on their way while a layer runs: those of the layer after it, and in the backward of the one before."""

    in_forward: Any
    in_backward: Any


def beside(work: Callable, operands: tuple, ahead: Prefetch | None) -> tuple[Any, Any]:
    """(`work(*operands)`, weights that are there when it is done).

    In the backward `ahead.in_backward` is there when the gradients of `operands` are, and is handed out as the gradient
    of itself. Without `ahead` the work alone.
    """
    if ahead is None:
        return work(*operands), None
    results = work(*_there_after_backward(operands, ahead.in_backward))
    return schedule_after(results, ahead.in_forward)


@jax.custom_vjp
def schedule_after(results, weights):
    """Both; whatever uses the results finds the weights fetched. Weights have no gradient."""
    return lax.optimization_barrier((results, weights))


schedule_after.defvjp(lambda *both: (lax.optimization_barrier(both), None), lambda _, gradients: (gradients[0], None))


@jax.custom_vjp
def _there_after_backward(operands, weights):
    del weights
    return operands


_there_after_backward.defvjp(
    lambda operands, weights: (operands, weights),
    lambda weights, gradients: lax.optimization_barrier((gradients, weights)),
)


def run_layers(run: Callable, x_BTD: jax.Array, stacked, shared, fetch: Callable) -> jax.Array:
    """x_BTD through all layers.

    Args:
      run: `(x_BTD, weights, shared, ahead) -> (x_BTD, ahead.in_forward)`, one layer, or a group of them, that runs
        something long `beside` what is ahead. It decides what it keeps for its backward (`jax.checkpoint`), and closes
        over no arrays of the row's length: they would be kept once a layer.
      stacked: a tree of arrays with a leading dimension of layers, or of groups of them; their gradients come to lie in
        the same memory.
      shared: a tree of arrays that are the same for all layers, and are not differentiated; none that is a constant,
        which would be an argument of the whole program.
      fetch: a layer's weights -> the same on the device.
    """
    last = len(jax.tree.leaves(stacked)[0]) - 1

    @jax.named_scope(scopes.PREFETCH)
    def fetched(stacked, layer):
        layer = jnp.clip(layer, 0, last)  # beyond the ends: once more what is there
        return fetch(jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, layer, keepdims=False), stacked))

    @jax.custom_vjp
    def through(x_BTD, stacked, shared):
        def run_layer(carry, layer):
            x_BTD, weights = carry
            return run(x_BTD, weights, shared, Prefetch(fetched(stacked, layer + 1), weights)), None

        return lax.scan(run_layer, (x_BTD, fetched(stacked, 0)), jnp.arange(last + 1))[0][0]

    def forward(x_BTD, stacked, shared):
        def run_layer(carry, layer):
            x_BTD, weights = carry
            # What is of no use here has to be an array of its own: `args_res` knows residuals by their identity.
            ahead = Prefetch(fetched(stacked, layer + 1), jax.tree.map(jnp.zeros_like, weights))
            y_BTD, backward, ahead = jax.vjp(run, x_BTD, weights, shared, ahead, has_aux=True)
            replace_argument_residuals(
                backward, 1, [None, None, None]
            )  # weights are fetched again, and what is shared is there
            return (y_BTD, ahead), backward

        (y_BTD, _), backwards = lax.scan(run_layer, (x_BTD, fetched(stacked, 0)), jnp.arange(last + 1))
        return y_BTD, (backwards, stacked, shared)

    def backward(residuals, dy_BTD):
        backwards, stacked, shared = residuals

        def run_layer(carry, operands):
            dx_BTD, weights = carry
            layer, backward = operands
            # A layer that is computed again has nothing to wait for in its forward but its own weights.
            replace_argument_residuals(backward, 1, [weights, shared, Prefetch(weights, fetched(stacked, layer - 1))])
            dx_BTD, dweights, _, (_, ahead) = backward(dx_BTD)
            with jax.named_scope(scopes.OFFLOAD_GRADIENTS):
                home = jax.tree.map(
                    lambda d, stack: jax.device_put(d, jax.typeof(stack).memory_space), dweights, stacked
                )
            return (dx_BTD, ahead), home

        layers = jnp.arange(last + 1)
        (dx_BTD, _), dstacked = lax.scan(run_layer, (dy_BTD, fetched(stacked, last)), (layers, backwards), reverse=True)
        return dx_BTD, dstacked, None

    through.defvjp(forward, backward)
    return through(x_BTD, stacked, shared)
