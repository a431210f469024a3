"""Runs the layers of a segment: a scan over a group of layer kinds, with rematerialization of
layers and of groups.

In a segment, a group of kinds repeats. The parameters are stacked: in one stack if all kinds have
equal shapes, and otherwise in one for each kind. An iteration of the scan runs one group of kinds,
or one remat group, which is whole groups of kinds, so each iteration has the same number of layers
of every stack.

A decoder layer: a block that mixes tokens, a feed-forward block, dense or of experts, and the
RMSNorms around them.

The layer of Llama (Touvron et al. 2023, arXiv:2302.13971), with the variations of other families
that `ModelConfig` describes.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config.models.model_schema import LayerConfig, Segment
from jaxlc.core import scopes
from jaxlc.models import offloaded_layers
from jaxlc.models.block import Init, RMSNorm, Routing, scaled
from jaxlc.models.contract import CHOICE, LayerOutput, LayerTokens, Mixer, Rotary, Rotation, Routed
from jaxlc.models.kinds import FEED_FORWARDS, mixers_alone
from jaxlc.models.offloaded_layers import LayerParams, Place, Prefetch, overlap_with_prefetch
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder

_WIDTH = 128  # of `_widened`


class ExpertsIndex(nnx.Variable):
    """float32 scalar: the index of a layer among those with experts. An input like the parameters;
    a float, so that it can be among the differentiated arguments. Tiles cast it to the compute
    dtype, in which integers up to 256 are exact."""


class DecoderLayer(nnx.Module):
    """A block that mixes tokens, called attention, and a feed-forward block, called mlp, whose
    outputs are added to the residual stream. One of them may be absent. The first one may have
    several mixers.

    Each has a norm of its input, of its output, or of both: `ModelConfig.norm_placement`.
    """

    def __init__(self, model: LayerConfig, init: Init):
        def norm(block: nnx.Module | None, *placements: str) -> RMSNorm | None:
            if block is None or model.norm_placement not in placements:
                return None
            return RMSNorm(
                epsilon=model.norm_epsilon,
                zero_centered=model.zero_centered_norm,
                norm=model.model_dim,
            )

        mixers = {layer.mixers[0]: mixer(layer, init) for mixer, layer in mixers_alone(model)}
        self.attention = nnx.Dict(mixers) if len(mixers) > 1 else next(iter(mixers.values()), None)
        self.mixer_names = model.mixers
        feed_forward = FEED_FORWARDS.get(model.feed_forward)
        # pyrefly: ignore[missing-argument]
        self.mlp = feed_forward(model, init) if feed_forward else None
        self.attention_norm = norm(self.attention, "pre", "pre_and_post")
        self.attention_post_norm = norm(self.attention, "post", "pre_and_post")
        self.mlp_norm = norm(self.mlp, "pre", "pre_and_post")
        self.mlp_post_norm = norm(self.mlp, "post", "pre_and_post")
        self.residual_multiplier = model.residual_multiplier
        self.routing = init.routing if isinstance(self.mlp, Routed) else ""
        self.experts_index = (
            ExpertsIndex(jnp.zeros(()), dims=()) if self.routing == "replay" else None
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        tokens: LayerTokens,
        prefetch: Prefetch | None = None,
        *,
        attend: Callable,
        shard: Sharder,
        tables: RopeTables | None,
    ) -> tuple[LayerOutput, Any]:
        """Returns the output, and the prefetched weights (None without `prefetch`).

        T of x_BTD is sharded over context and tensor; each block gathers its input over tensor once.

        Args:
          attend: from the first result of `operands` to the first arguments of `Mixer.projected`.
        """
        x_BTD = checkpoint_name(x_BTD, "residual")

        def after(*mixed) -> LayerOutput:
            return self.after_attention(*mixed, tokens, shard=shard)[0]

        if self.attention is None:
            return overlap_with_prefetch(after, (x_BTD, [], []), prefetch)
        positions_BT = tokens.positions_BT
        mixed, kept = self.operands(x_BTD, positions_BT, tables=tables, shard=shard)
        outs, next_weights = overlap_with_prefetch(attend, (mixed,), prefetch)
        return after(x_BTD, outs, kept), next_weights

    @property
    def mixers(self) -> list[Mixer]:
        """In their order."""
        if isinstance(self.attention, Mixer):
            return [self.attention]
        return [self.attention[name] for name in self.mixer_names]

    def operands(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        tables: RopeTables | None,
        shard: Sharder,
    ) -> tuple[list[tuple], list]:
        """The two results of `Mixer.operands` of each mixer."""
        input_BTD = self.attention_input(x_BTD, shard=shard)
        alone = (input_BTD,)
        rotated = (input_BTD, Rotation(positions_BT, tables))
        both = [
            mixer.operands(*(rotated if isinstance(mixer, Rotary) else alone), shard=shard)
            for mixer in self.mixers
        ]
        return [mixed for mixed, _ in both], [kept for _, kept in both]

    @jax.named_scope(scopes.ATTENTION)
    def attention_input(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """Returns x_BTD, normed if there is a norm before attention, and gathered over tensor."""
        return shard.gathered(_normed(x_BTD, self.attention_norm))

    def after_attention(
        self,
        x_BTD: jax.Array,
        outs: list[jax.Array],
        kept: list,
        tokens: LayerTokens,
        chosen_BTk: jax.Array | None = None,
        *,
        shard: Sharder,
    ) -> tuple[LayerOutput, jax.Array | None]:
        """The layer after attention: x_BTD plus the projected attention output plus the output of
        the feed-forward block; and the experts of each token, int32 [B, T, k], which `layer_tiles`
        saves. None: the layer has none.

        Args:
          outs, kept: the arguments of `Mixer.projected` of each mixer.
          chosen_BTk: the experts of each token, of an earlier call; None: those of `tokens`, or the router chooses.
        """
        mixers = zip(self.mixers, outs, kept)
        projected = [mixer.projected(*own, shard=shard) for mixer, *own in mixers]
        if projected:
            with jax.named_scope(scopes.ATTENTION):
                projected_BTD = functools.reduce(operator.add, projected)
                x_BTD = self._added(x_BTD, projected_BTD, self.attention_post_norm)
        if self.mlp is None:
            return LayerOutput(x_BTD, {}), None
        with jax.named_scope(scopes.MLP):
            input_BTD = shard.gathered(_normed(x_BTD, self.mlp_norm))
        if isinstance(self.mlp, Routed):
            if chosen_BTk is None and self.experts_index is not None:
                index = self.experts_index[...].astype(jnp.int32)
                chosen_BTk = jax.lax.dynamic_index_in_dim(
                    tokens.experts_LBTk, index, keepdims=False
                )
            operands = input_BTD, tokens.positions_BT, chosen_BTk
            out_BTD, sums, chosen_BTk = self.mlp(*operands, shard=shard)
            if self.routing == "record":
                sums = {**sums, CHOICE: chosen_BTk}
        else:
            out_BTD = self.mlp(input_BTD, shard=shard)
            sums = {}
        with jax.named_scope(scopes.MLP):
            return LayerOutput(self._added(x_BTD, out_BTD, self.mlp_post_norm), sums), chosen_BTk

    def _added(self, x_BTD: jax.Array, out_BTD: jax.Array, norm: RMSNorm | None) -> jax.Array:
        """The residual stream plus the output of a block."""
        return x_BTD + scaled(_normed(out_BTD, norm), self.residual_multiplier)


def _normed(x_BTD: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)


def run_layer(
    layer_def: nnx.GraphDef,
    params: LayerParams,
    x_BTD: jax.Array,
    tokens: LayerTokens,
    ranges: Any,
    prefetch: Prefetch | None = None,
    *,
    attends: Sequence[Callable],
    shard: Sharder,
    tables: RopeTables | None,
) -> tuple[LayerOutput, Any]:
    """Runs the layer `nnx.merge(layer_def, *params)` on whole sequences. With `attends` and `tables`
    bound, it is a `layer_stack.RunLayer`.

    Args:
      attends: of each mixer, `(*operands, ranges=ranges) -> out_BTNH`, with its operands.
    """
    layer: DecoderLayer = nnx.merge(layer_def, *params)

    def attend(mixed: list[tuple]) -> list[jax.Array]:
        calls = zip(attends, mixed, ranges)
        return [attend(*operands, ranges=own) for attend, operands, own in calls]

    return layer(x_BTD, tokens, prefetch, attend=attend, shard=shard, tables=tables)


IsFrozen = Callable[[tuple[str, ...], Any], bool]  # (path within a layer, parameter), an nnx filter


# Runs a decoder layer of one kind: `run_layer` and `layer_tiles.run_layer`, with their attention and RoPE tables bound.
# It returns the output, and the weights that were prefetched meanwhile (None without `prefetch`).
RunLayer = Callable[..., tuple[LayerOutput, Any]]


class Remat(NamedTuple):
    """How the decoder wraps its layers in `jax.checkpoint`; `step.remat.make_remat` returns it."""

    # Wraps the function of one layer; with `in_loop=True`, of the only layer of an iteration of a loop.
    wrap_layer: Callable[..., Callable]
    # wraps the function of `layers_per_group` layers, if that is not 1
    wrap_group: Callable[[Callable], Callable]
    layers_per_group: int


class LayerContext(NamedTuple):
    """What all layers of a decoder share, besides the positions."""

    # runs one layer, attention included; by the kind of the layer
    run_layer: Mapping[str, RunLayer]
    # Passed to `run_layer` of the kind: the mask as key ranges, which attention prepares. None: each sequence is one
    # document.
    ranges: Mapping[str, Any]
    shard: Sharder
    remat: Remat
    compute_dtype: Any  # the dtype of matrix products and of the residual stream
    routing: Routing = ""
    experts_LBTk: jax.Array | None = None  # to replay; see `LayerTokens`


class Stacks(NamedTuple):
    """The layers of a segment: a stack for each kind, or one with the key "" for all kinds."""

    defs: dict[str, nnx.GraphDef]
    params: LayerParams  # both parts are dictionaries of stacks, with arrays [layers, ...]

    @classmethod
    def split(
        cls, layers: DecoderLayer | nnx.Dict, is_frozen: IsFrozen = lambda *_: False
    ) -> "Stacks":
        """The stacks of a segment of a decoder, such as `layers`."""
        by_key = {"": layers} if isinstance(layers, DecoderLayer) else dict(layers)
        defs = {}
        trainable = {}
        frozen = {}
        for key, layer in by_key.items():
            prefix = (key,) if key else ()
            parts = nnx.split(
                layer, lambda path, leaf, prefix=prefix: is_frozen((*prefix, *path), leaf), ...
            )
            defs[key], frozen[key], trainable[key] = parts
        return cls(defs, LayerParams(trainable, frozen))

    def places(self, kinds: Sequence[str]) -> list[Place]:
        """The places of an iteration with layers of these kinds."""
        stacks = [kind if kind in self.defs else "" for kind in kinds]
        return [
            Place(kind, stack, stacks[:i].count(stack))
            for i, (kind, stack) in enumerate(zip(kinds, stacks))
        ]

    def grouped(self, places: Sequence[Place]) -> LayerParams:
        """The parameters as [iterations, layers of the stack in an iteration, ...]."""
        sizes = Counter(place.stack for place in places)

        def grouped(stacks: dict) -> dict:
            return {
                key: jax.tree.map(
                    lambda x, size=sizes[key]: x.reshape(-1, size, *x.shape[1:]), stack
                )
                for key, stack in stacks.items()
            }

        return LayerParams(*map(grouped, self.params))


def run_stack(
    layers: DecoderLayer | nnx.Dict,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment: Segment,
    context: LayerContext,
    is_frozen: IsFrozen,
) -> LayerOutput:
    """Runs the layers of a segment.

    Args:
      is_frozen: selects the parameters that are not differentiated.
    Returns:
      x_BTD, and the sums of the layers [layers that return it], in their order.
    """
    stacks = Stacks.split(layers, is_frozen)
    all_frozen = stacks.params.frozen
    if not context.shard.weights_on_host:
        params = LayerParams(stacks.params.trainable, jax.tree.map(_widened, all_frozen))
        stacks = stacks._replace(params=params)
    places = stacks.places(segment.kinds)
    run_layer = context.run_layer
    shard = context.shard
    remat = context.remat
    # arrays that are equal for all layers
    shared = LayerTokens(positions_BT, context.experts_LBTk), context.ranges

    def run_one(place, x_BTD, params, shared, prefetch=None):
        tokens, ranges = shared
        # for `offloaded_layers`
        frozen = jax.lax.stop_gradient(params.frozen)
        frozen = jax.tree.map(_narrowed, frozen, all_frozen[place.stack])
        params = LayerParams(params.trainable, frozen)
        layer_def = stacks.defs[place.stack]
        return run_layer[place.kind](
            layer_def, params, x_BTD, tokens, ranges[place.kind], prefetch, shard=shard
        )

    is_loop_of_one = len(places) == 1 and segment.num_layers > 1
    wrap_layer = functools.partial(
        remat.wrap_layer, in_loop=is_loop_of_one and remat.layers_per_group == 1
    )
    run_kind = {place.kind: wrap_layer(functools.partial(run_one, place)) for place in places}
    if not is_loop_of_one:
        run_kind = {kind: _in_backward_order(run) for kind, run in run_kind.items()}
    if remat.layers_per_group > 1:
        size = segment.remat_group(remat.layers_per_group)
        places = stacks.places(segment.kinds * (size // len(places)))
        runs = [remat.wrap_group(_group_of(run_kind, places))]
        params = stacks.grouped(places)
        places = None
    elif len(places) == 1:
        runs = [run_kind[places[0].kind]]
        params = stacks.params.of(places[0].stack)
        places = None
    elif shard.weights_on_host:
        runs = [run_kind[place.kind] for place in places]
        params = stacks.grouped(places)
    else:
        place_runs = [
            functools.partial(_run_at, functools.partial(run_one, place), place.index)
            for place in places
        ]
        runs = [_in_backward_order(wrap_layer(run)) for run in place_runs]
        params = stacks.grouped(places)
    if shard.weights_on_host:
        x_BTD, sums = offloaded_layers.run_layers(
            runs, places, x_BTD, params, shared, shard.fetched
        )
    else:
        run = runs[0] if places is None else _period_of(runs, places)
        x_BTD, sums = jax.lax.scan(
            lambda x_BTD, params: tuple(run(x_BTD, params, shared)[0]), x_BTD, params
        )
    return LayerOutput(x_BTD, _in_layer_order(sums if isinstance(sums, list) else [sums]))


def _widened(x: jax.Array) -> jax.Array:
    """`x` of all layers, with several equal entries for each layer if there is one, as in NF4.

    XLA computes a slice of one entry and the index of the iteration in one kernel, and then does
    not recognize slices of offloaded activations as copies for the copy engines.
    """
    return jnp.tile(x.reshape(-1, 1), _WIDTH) if x.size == len(x) else x


def _narrowed(x: jax.Array, stacked: jax.Array) -> jax.Array:
    """The array of one layer, from a slice of `stacked` or of `_widened(stacked)`."""
    shape = stacked.shape[1:]
    return x if x.shape == shape else x[0].reshape(shape)


def _in_layer_order(sums: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """[layers] of each name, from [iterations] of each layer of an iteration."""
    names = dict.fromkeys(name for layer_sums in sums for name in layer_sums)
    by_name = {
        name: [layer_sums[name] for layer_sums in sums if name in layer_sums] for name in names
    }
    return {
        name: jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
        for name, parts in by_name.items()
    }


def _in_backward_order(run: Callable) -> Callable:
    """`run`, whose weight gradients are complete before the backward pass continues with the layer
    before it.

    In a loop of one layer per iteration they are. If an iteration has several layers, or if the
    only iteration is inlined, XLA could compute the weight gradients of all of them last, and would
    keep all activations that these need.
    """

    @jax.custom_vjp
    def wait(x_BTD, trainable):
        return x_BTD, trainable

    wait.defvjp(
        lambda *both: (both, None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
    )

    def run_ordered(x_BTD, params, *operands):
        x_BTD, trainable = wait(x_BTD, params.trainable)
        return run(x_BTD, params.with_trainable(trainable), *operands)

    return run_ordered


def _group_of(run_kind: Mapping[str, Callable], places: Sequence[Place]) -> Callable:
    """A function that runs one remat group, layer by layer; its parameters are grouped."""

    def run_group(x_BTD, params, shared, prefetch=None):
        def run(place, x_BTD, *prefetch):
            layer = jax.tree.map(operator.itemgetter(place.index), params.of(place.stack))
            return run_kind[place.kind](x_BTD, layer, shared, *prefetch)

        # Not a scan: when the group is recomputed, the output of its last layer is unused and not
        # computed.
        output, next_weights = run(places[0], x_BTD, prefetch)
        sums = [output.sums]
        for place in places[1:]:
            output, _ = run(place, output.x_BTD)
            sums.append(output.sums)
        return (output.x_BTD, sums), next_weights

    return run_group


def _run_at(run: Callable, index: int, x_BTD: jax.Array, params: LayerParams, shared) -> tuple:
    """`run` with frozen parameters of all layers of the stack in an iteration, of which it takes
    its own: so a remat function saves those that it gets, which are the input of the loop, and no
    copy of its own."""
    return run(
        x_BTD,
        LayerParams(params.trainable, jax.tree.map(operator.itemgetter(index), params.frozen)),
        shared,
    )


def _period_of(runs: Sequence[Callable], places: Sequence[Place]) -> Callable:
    """A function that runs one period, layer by layer; its parameters are grouped."""

    def run_period(x_BTD, params, shared):
        stacks = [place.stack for place in places]
        layers = {x: _unstacked(params.trainable[x], stacks.count(x)) for x in params.trainable}
        all_sums = []
        for run, place in zip(runs, places, strict=True):
            own = LayerParams(layers[place.stack][place.index], params.frozen[place.stack])
            (x_BTD, sums), _ = run(x_BTD, own, shared)
            all_sums.append(sums)
        return (x_BTD, all_sums), None

    return run_period


def _unstacked(stacked, num_layers: int) -> list:
    """The tree of each layer, which may have no leaves. The transpose of `lax.split` is a
    concatenation; the transpose of indexing is a sum of arrays of the size of the stack.
    """
    leaves, treedef = jax.tree.flatten(stacked)
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * num_layers)] for leaf in leaves]
    layers = ([part[index] for part in parts] for index in range(num_layers))
    return [jax.tree.unflatten(treedef, layer) for layer in layers]
