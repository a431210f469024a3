"""Runs the layers of a stack: a scan over periods of layer kinds, with rematerialization of layers and of groups.

The kinds of layers (model.layer_kinds) repeat with a period. Their parameters have equal shapes and are stacked. An
iteration of the scan runs one period of them, or one remat group.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from jaxlc.models import offloaded_layers
from jaxlc.models.layers import DecoderLayer
from jaxlc.models.offloaded_layers import LayerParams, Prefetch
from jaxlc.sharding.rules import Sharder

IsFrozen = Callable[[tuple[str, ...], Any], bool]  # (path within a layer, parameter), an nnx filter


class RunLayer(Protocol):
    """Runs a decoder layer of one kind.

    `layers.run_layer` and `layer_tiles.run_layer` implement it, with their attention and RoPE tables bound.
    """

    def __call__(
        self,
        layer_def: nnx.GraphDef,
        params: LayerParams,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        ranges: Any,
        prefetch: Prefetch | None = None,
        *,
        shard: Sharder,
    ) -> tuple[jax.Array, Any]:
        """Returns x_BTD after the layer, and the weights that were prefetched meanwhile (None without `prefetch`)."""


class Remat(Protocol):
    """Rematerialization of layers and of groups of layers; implemented by `jaxlc.step.remat.Remat`."""

    wrap_layer: Callable[[Callable], Callable]  # wraps the function that runs one layer
    wrap_group: Callable[[Callable], Callable]  # wraps the function that runs `layers_per_group` layers
    layers_per_group: int


class LayerContext(NamedTuple):
    """What all layers of a decoder share, besides the positions."""

    run_layer: Mapping[str, RunLayer]  # runs one layer, attention included; by the kind of the layer
    # Passed to `run_layer` of the kind: the mask as key ranges, which attention prepares. None: each sequence is one
    # document.
    ranges: Mapping[str, Any]
    shard: Sharder
    remat: Remat
    compute_dtype: Any  # the dtype of matrix products and of the residual stream


def run_stack(
    layers: DecoderLayer,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    layer_kinds: Sequence[str],
    context: LayerContext,
    is_frozen: IsFrozen,
) -> jax.Array:
    """Returns x_BTD after the layers of one of LAYER_STACKS; the first one has the kind layer_kinds[0].

    Args:
      is_frozen: selects the parameters that are not differentiated.
    """
    layer_def, frozen, trainable = nnx.split(layers, is_frozen, ...)
    stacked = LayerParams(trainable, frozen)
    num_layers = len(jax.tree.leaves(stacked)[0])
    period = min(len(layer_kinds), num_layers)
    run_layer, shard, remat = context.run_layer, context.shard, context.remat
    shared = positions_BT, context.ranges  # arrays that are equal for all layers

    def run_one(kind, x_BTD, params, shared, prefetch=None):
        positions_BT, ranges = shared
        params = LayerParams(params.trainable, jax.lax.stop_gradient(params.frozen))  # for `offloaded_layers`
        return run_layer[kind](layer_def, params, x_BTD, positions_BT, ranges[kind], prefetch, shard=shard)

    run_kind = {kind: remat.wrap_layer(functools.partial(run_one, kind)) for kind in run_layer}
    runs = [run_kind[kind] for kind in layer_kinds[:period]]
    if len(layer_kinds) > 1:
        runs = [_in_backward_order(run) for run in runs]
    if remat.layers_per_group > 1:
        group_size = min(remat.layers_per_group, num_layers)
        runs = [remat.wrap_group(_group_of([runs[index % period] for index in range(group_size)]))]
        stacked = _grouped(stacked, group_size)
    if shard.weights_on_host:
        (run,) = runs  # `config.layer_checks` requires remat groups if layers differ
        return offloaded_layers.run_layers(run, x_BTD, stacked, shared, shard.fetched)
    if len(runs) == 1:
        return jax.lax.scan(lambda x_BTD, params: runs[0](x_BTD, params, shared), x_BTD, stacked)[0]

    def run_period(x_BTD, params):
        for run, layer_params in zip(runs, _unstacked(params), strict=True):
            x_BTD, _ = run(x_BTD, layer_params, shared)
        return x_BTD, None

    return jax.lax.scan(run_period, x_BTD, _grouped(stacked, period))[0]


def _in_backward_order(run: Callable) -> Callable:
    """`run`, whose weight gradients are complete before the backward pass continues with the layer before it.

    In a loop of one layer per iteration they are. If an iteration has several layers, XLA could compute the weight
    gradients of all of them last, and would keep all activations that these need.
    """

    @jax.custom_vjp
    def wait(x_BTD, trainable):
        return x_BTD, trainable

    wait.defvjp(lambda *both: (both, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))

    def run_ordered(x_BTD, params, *operands):
        x_BTD, trainable = wait(x_BTD, params.trainable)
        return run(x_BTD, params.with_trainable(trainable), *operands)

    return run_ordered


def _group_of(runs: Sequence[Callable]) -> Callable:
    """A function that runs one remat group, layer by layer; its parameters are stacked."""

    def run_group(x_BTD, params, shared, prefetch=None):
        # Not a scan: when the group is recomputed, the output of its last layer is unused and not computed.
        x_BTD, next_weights = runs[0](x_BTD, _layer_at(params, 0), shared, prefetch)
        for index, run in enumerate(runs[1:], 1):
            x_BTD, _ = run(x_BTD, _layer_at(params, index), shared)
        return x_BTD, next_weights

    return run_group


def _layer_at(stacked, index: int):
    return jax.tree.map(operator.itemgetter(index), stacked)


def _grouped(stacked, size: int):
    """[L, ...] as [L / size, size, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), stacked)


def _unstacked(stacked) -> list:
    """The tree of each layer. The transpose of `lax.split` is a concatenation; that of indexing would be a sum of
    arrays of the size of the stack."""
    leaves, treedef = jax.tree.flatten(stacked)
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * len(leaf))] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*parts, strict=True)]
