"""Layers whose weights are stored in host memory: each layer's weights are prefetched while its neighbor computes.

    forward    fetch(0); for each layer i: fetch(i + 1), overlapped with the attention of layer i
    backward   fetch(L - 1); for each layer i, from the last: fetch(i - 1), overlapped with the attention backward of i

If JAX differentiated the scan, a layer could only fetch its weights when it starts, and would wait for them: weights
that one iteration passes to the next would be residuals, stored once per layer. So both scans are written out, and the
weights are removed from the residuals of each layer (`_jax_internals.replace_argument_residuals`).

XLA's scheduler assumes that copies are cheap: it starts a copy that only the next iteration needs at the end of the
current one, where it is exposed. So each layer makes the results of its attention, the longest operation, depend on the
copy (`overlap_with_prefetch`); the scheduler then starts the copy before attention.

XLA makes the slice of a stack a copy of the copy engines only if its index is a known function of the number of loop
iterations; otherwise a kernel reads host memory, and no attention kernel runs at the same time. So both scans count
layers in their carry: an index that is an element of an array is unknown to XLA, and so is one that `jnp.clip` or the
wrap of negative indices changes (`layer_of`). The fetch before each scan is a kernel. The plan checks the compiled
program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc._jax_internals import replace_argument_residuals
from jaxlc.core import scopes


class LayerParams(NamedTuple):
    """The parameters of a layer, of a remat group, or of all layers."""

    trainable: Any
    frozen: Any  # not differentiated; empty if all parameters are trained

    def with_trainable(self, trainable) -> "LayerParams":
        """These frozen parameters with other trainable ones."""
        return LayerParams(trainable, self.frozen)

    def of(self, stack: str) -> "LayerParams":
        """The parameters of one stack, if both parts are dictionaries of stacks."""
        return LayerParams(self.trainable[stack], self.frozen[stack])


class Prefetch(NamedTuple):
    """Weights of the layers that follow, copied to the device while a layer runs."""

    in_forward: Any  # parameters of the next layer
    in_backward: Any  # parameters of the previous layer, which the backward pass runs next


def overlap_with_prefetch(work: Callable, operands: tuple, prefetch: Prefetch | None) -> tuple[Any, Any]:
    """Returns (`work(*operands)`, prefetch.in_forward), where the copy of the weights completes during `work`.

    In the backward pass, the copy of `prefetch.in_backward` completes during the backward of `work`, and these weights
    are returned as the "gradient" of `prefetch.in_backward`. If `prefetch` is None, this is `work` alone.
    """
    if prefetch is None:
        return work(*operands), None
    results = work(*_schedule_after_backward(operands, prefetch.in_backward))
    return schedule_after(results, prefetch.in_forward)


@jax.custom_vjp
def schedule_after(results, weights):
    """Returns both; operations on the results are scheduled after the copy of the weights. Weights have no gradient."""
    return lax.optimization_barrier((results, weights))


schedule_after.defvjp(lambda *both: (lax.optimization_barrier(both), None), lambda _, gradients: (gradients[0], None))


@jax.custom_vjp
def _schedule_after_backward(operands, weights):
    del weights
    return operands


_schedule_after_backward.defvjp(
    lambda operands, weights: (operands, weights),
    lambda weights, gradients: lax.optimization_barrier((gradients, weights)),
)


def run_layers(run: Callable, x_BTD: jax.Array, stacked: LayerParams, shared, fetch: Callable) -> jax.Array:
    """Runs all layers; returns the output of the last one.

    Args:
      run: `(x_BTD, weights, shared, prefetch) -> (x_BTD, prefetch.in_forward)`, one layer or one remat group, which
        calls `overlap_with_prefetch` around its attention. It applies `jax.checkpoint` itself, stops the gradient of
        weights.frozen within, and closes over no arrays of the sequence length: they would be stored once per layer.
      stacked: pytrees of weights with a leading dimension of layers, or of remat groups. Gradients are stored in the
        same memory as the weights.
      shared: pytree of arrays that are equal for all layers and not differentiated. None may be a constant of the
        traced program, since constants become its arguments.
      fetch: copies the weights of one layer to the device.
    """
    last = len(jax.tree.leaves(stacked)[0]) - 1

    @jax.named_scope(scopes.PREFETCH)
    def fetch_layer(stacked, layer):
        return fetch(jax.tree.map(lambda stack: layer_of(stack, layer), stacked))

    @jax.custom_vjp
    def through_layers(x_BTD, stacked, shared):
        def run_layer(layer, carry):
            x_BTD, weights = carry
            return run(x_BTD, weights, shared, Prefetch(fetch_layer(stacked, layer + 1), weights))

        return lax.fori_loop(0, last + 1, run_layer, (x_BTD, fetch_layer(stacked, 0)))[0]

    def forward(x_BTD, stacked, shared):
        def run_layer(carry, _):
            layer, x_BTD, weights = carry
            # An array of its own for the unused half: JAX recognizes argument residuals by the identity of the array.
            prefetch = Prefetch(fetch_layer(stacked, layer + 1), jax.tree.map(jnp.zeros_like, weights))
            y_BTD, backward, next_weights = jax.vjp(run, x_BTD, weights, shared, prefetch, has_aux=True)
            replace_argument_residuals(backward, 1, [None, None, None])  # the backward pass sets them again
            return (layer + 1, y_BTD, next_weights), backward

        first_carry = jnp.int32(0), x_BTD, fetch_layer(stacked, 0)
        (_, y_BTD, _), backwards = lax.scan(run_layer, first_carry, length=last + 1)
        return y_BTD, (backwards, stacked, shared)

    def backward(residuals, dy_BTD):
        backwards, stacked, shared = residuals

        def run_layer(carry, backward):
            layer, dx_BTD, weights = carry
            # A layer that is recomputed prefetches nothing in its forward: it is given its own weights.
            prefetch = Prefetch(weights, fetch_layer(stacked, layer - 1))
            replace_argument_residuals(backward, 1, [weights, shared, prefetch])
            dx_BTD, dweights, _, (_, next_weights) = backward(dx_BTD)
            return (layer - 1, dx_BTD, next_weights), jax.tree.map(_to_memory_of, stacked.trainable, dweights.trainable)

        first_carry = jnp.int32(last), dy_BTD, fetch_layer(stacked, last)
        (_, dx_BTD, _), dstacked = lax.scan(run_layer, first_carry, backwards, reverse=True)
        return dx_BTD, LayerParams(dstacked, None), None

    through_layers.defvjp(forward, backward)
    return through_layers(x_BTD, stacked, shared)


def layer_of(stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    """`stack[layer]`; of an index past either end, the layer at that end, as `lax.dynamic_slice` clamps it.

    Args:
      layer: int32 scalar; in a loop over stacks in host memory, a loop counter plus or minus a constant.
    """
    starts = (layer, *(0 for _ in stack.shape[1:]))
    return lax.dynamic_slice(stack, starts, (1, *stack.shape[1:]), allow_negative_indices=False)[0]


@jax.named_scope(scopes.OFFLOAD_GRADIENTS)
def _to_memory_of(stored: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient, in the memory in which the weights are stored."""
    return jax.device_put(gradient, jax.typeof(stored).memory_space)
