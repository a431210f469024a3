"""Layers whose weights are stored in host memory: each layer's weights are prefetched while its
neighbor computes.

    forward    fetch(0); for each layer i: fetch(i + 1), overlapped with the attention of layer i
    backward   fetch(L - 1); for each layer i, from the last: fetch(i - 1), overlapped with the attention backward of i

If JAX differentiated the scan, a layer could only fetch its weights when it starts, and would wait
for them: weights that one iteration passes to the next would be residuals, stored once per layer.
So both scans are written out, and the weights are removed from the residuals of each layer
(`_jax_internals.replace_argument_residuals`).

XLA's scheduler assumes that copies are cheap: it starts a copy that only the next iteration needs
at the end of the current one, where it is exposed. So each layer makes the results of its
attention, the longest operation, depend on the copy (`overlap_with_prefetch`); the scheduler then
starts the copy before attention.

XLA makes the slice of a stack a copy of the copy engines only if its index is a known function of
the number of loop iterations; otherwise a kernel reads host memory, and no attention kernel runs at
the same time. So both scans count layers in their carry: an index that is an element of an array is
unknown to XLA, and so is one that `jnp.clip` or the wrap of negative indices changes (`layer_of`).
The fetch before each scan is a kernel. The plan checks the compiled program.
"""

import dataclasses
from collections.abc import Callable, Sequence
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


class Place(NamedTuple):
    """Where one layer of an iteration has its parameters."""

    kind: str
    stack: str  # key of both parts of `LayerParams`
    index: int  # among the layers of the stack in an iteration


class Prefetch(NamedTuple):
    """Weights of the layers that follow, copied to the device while a layer runs."""

    in_forward: Any  # parameters of the next layer
    in_backward: Any  # parameters of the previous layer, which the backward pass runs next


def overlap_with_prefetch(
    work: Callable, operands: tuple, prefetch: Prefetch | None
) -> tuple[Any, Any]:
    """Returns (`work(*operands)`, prefetch.in_forward), where the copy of the weights completes
    during `work`.

    In the backward pass, the copy of `prefetch.in_backward` completes during the backward of
    `work`, and these weights are returned as the "gradient" of `prefetch.in_backward`. If
    `prefetch` is None, this is `work` alone.
    """
    if prefetch is None:
        return work(*operands), None
    results = work(*_schedule_after_backward(operands, prefetch.in_backward))
    return schedule_after(results, prefetch.in_forward)


@jax.custom_vjp
def schedule_after(results, weights):
    """Returns both; operations on the results are scheduled after the copy of the weights. Weights
    have no gradient.
    """
    return lax.optimization_barrier((results, weights))


schedule_after.defvjp(
    lambda *both: (lax.optimization_barrier(both), None), lambda _, gradients: (gradients[0], None)
)


@jax.custom_vjp
def _schedule_after_backward(operands, weights):
    del weights
    return operands


_schedule_after_backward.defvjp(
    lambda operands, weights: (operands, weights),
    lambda weights, gradients: lax.optimization_barrier((gradients, weights)),
)


def run_layers(
    runs: Sequence[Callable],
    places: Sequence[Place] | None,
    x_BTD: jax.Array,
    stacked: LayerParams,
    shared,
    fetch,
) -> tuple[jax.Array, Any]:
    """Runs all layers; returns the x_BTD of the last one, and the sums of all of them: [iterations], in a list if an
    iteration has several layers.

    Args:
      runs: the functions of the layers, or of the remat group, of an iteration:
        `(x_BTD, weights, shared, prefetch) -> ((x_BTD, sums), prefetch.in_forward)`, which calls
        `overlap_with_prefetch` around its attention. It applies `jax.checkpoint` itself, stops the gradient of
        weights.frozen within, and closes over no arrays of the sequence length: they would be stored once per layer.
      places: of the weights of each function. None: `runs` has one function, which gets those of an iteration.
      stacked: pytrees of weights with a leading dimension of iterations; with `places`, dictionaries of stacks with a
        second dimension of the layers in an iteration. Gradients are stored in the same memory as the weights.
      shared: pytree of arrays that are equal for all layers and not differentiated. None may be a constant of the
        traced program, since constants become its arguments.
      fetch: the function that copies the weights of one layer to the device.
    """
    layers = _PrefetchedLayers(
        tuple(map(_with_tuple, runs)), places, fetch, len(jax.tree.leaves(stacked)[0])
    )

    @jax.custom_vjp
    def through_layers(*operands):
        # XLA removes the residuals, which nothing reads here
        results, _ = layers.forward(*operands)
        return results

    through_layers.defvjp(layers.forward, layers.backward)
    return through_layers(x_BTD, stacked, shared)


def _with_tuple(run: Callable) -> Callable:
    """`run`, whose output is a plain tuple, as its cotangent in the backward pass is."""

    def run_with_tuple(*operands):
        output, next_weights = run(*operands)
        return tuple(output), next_weights

    return run_with_tuple


@dataclasses.dataclass(frozen=True)
class _PrefetchedLayers:
    """All layers, and the forward and backward rules of their derivative; see `run_layers` for the
    first fields.
    """

    runs: tuple[Callable, ...]
    places: Sequence[Place] | None
    fetch: Callable
    num_iterations: int

    def forward(self, x_BTD, stacked, shared):
        def run_iteration(carry, _):
            iteration, x_BTD, weights = carry
            backwards = []
            all_sums = []
            for index, run in enumerate(self.runs):
                # An array of its own for the unused half: JAX recognizes argument residuals by
                # their identity.
                before = (index - 1) % len(self.runs)
                unused = jax.tree.map(
                    lambda x: jnp.zeros(x.shape, x.dtype),
                    jax.eval_shape(lambda i=before: self._fetched(stacked, 0, i)),
                )
                prefetch = Prefetch(self._fetched(stacked, iteration, index + 1), unused)
                (x_BTD, sums), backward, weights = jax.vjp(
                    run, x_BTD, weights, shared, prefetch, has_aux=True
                )
                # the backward pass sets them again
                replace_argument_residuals(backward, [None, None, None])
                backwards.append(backward)
                all_sums.append(sums)
            sums = all_sums[0] if self.places is None else all_sums
            return (iteration + 1, x_BTD, weights), (backwards, sums)

        first_carry = jnp.int32(0), x_BTD, self._fetched(stacked, 0, 0)
        (_, y_BTD, _), (backwards, sums) = lax.scan(
            run_iteration, first_carry, length=self.num_iterations
        )
        return (y_BTD, sums), (backwards, stacked, shared)

    def backward(self, residuals, gradients):
        backwards, stacked, shared = residuals
        dy_BTD, dsums = gradients
        last = self.num_iterations - 1
        is_one = self.places is None

        def run_iteration(carry, operands):
            iteration, dx_BTD, weights, following = carry
            backwards, dsums = operands
            dweights = []
            dsums = [dsums] if is_one else dsums
            for index in reversed(range(len(self.runs))):
                # A layer that is recomputed prefetches nothing in its forward: it is given weights of the same shapes,
                # its own or those of the layer that the backward pass ran before it.
                in_forward = weights if is_one else following
                prefetch = Prefetch(in_forward, self._fetched(stacked, iteration, index - 1))
                replace_argument_residuals(backwards[index], [weights, shared, prefetch])
                dx_BTD, gradient, _, (_, previous) = backwards[index]((dx_BTD, dsums[index]))
                dweights.insert(0, gradient.trainable)
                weights, following = previous, None if is_one else weights
            dweights = dweights[0] if is_one else _by_stack(dweights, self.places)
            dweights = jax.tree.map(_to_memory_of, stacked.trainable, dweights)
            return (iteration - 1, dx_BTD, weights, following), dweights

        following = None if is_one else self._fetched(stacked, last, 0)
        first_carry = (
            jnp.int32(last),
            dy_BTD,
            self._fetched(stacked, last, len(self.runs) - 1),
            following,
        )
        (_, dx_BTD, *_), dstacked = lax.scan(
            run_iteration, first_carry, (backwards, dsums), reverse=True
        )
        return dx_BTD, LayerParams(dstacked, None), None

    @jax.named_scope(scopes.PREFETCH)
    def _fetched(self, stacked, iteration, index):
        """The weights of `runs[index]`, which may be of the next or of the previous iteration, on
        the device.
        """
        iteration = iteration + index // len(self.runs)
        index = index % len(self.runs)
        if self.places is None:
            return self.fetch(jax.tree.map(lambda stack: layer_of(stack, iteration), stacked))
        place = self.places[index]
        return self.fetch(
            jax.tree.map(
                lambda stack: layer_of(stack, iteration, place.index), stacked.of(place.stack)
            )
        )


def _by_stack(trees: Sequence[Any], places: Sequence[Place]) -> dict[str, Any]:
    """[layers of the stack in an iteration, ...] by stack, from the tree of each layer."""
    by_stack: dict[str, list] = {}
    for tree, place in zip(trees, places, strict=True):
        by_stack.setdefault(place.stack, []).append(tree)
    return {
        stack: jax.tree.map(lambda *layers: jnp.stack(layers), *layers_of_stack)
        for stack, layers_of_stack in by_stack.items()
    }


def layer_of(stack: jax.Array, *indices: jax.Array | int) -> jax.Array:
    """`stack[indices]`; of an index past either end, the layer at that end, as `lax.dynamic_slice` clamps it.

    Args:
      indices: int32 scalars; in a loop over stacks in host memory, loop counters plus or minus a constant, or
        constants.
    """
    starts = (*indices, *(0 for _ in stack.shape[len(indices) :]))
    sizes = (*(1 for _ in indices), *stack.shape[len(indices) :])
    return lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)[
        (0,) * len(indices)
    ]


@jax.named_scope(scopes.OFFLOAD_GRADIENTS)
def _to_memory_of(stored: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient, in the memory in which the weights are stored."""
    return jax.device_put(gradient, jax.typeof(stored).memory_space)
