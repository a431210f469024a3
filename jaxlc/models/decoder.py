"""The decoder as pure functions; parameters are a nested dict of arrays.

    init(model, vocab_size_padded, key) -> params        dims_of(model) -> the same tree of dimension names
    apply(params, model, tokens, positions, context) -> final hidden states, factor of the final norm, output head

It computes no logits: the loss computes them chunk by chunk. The decoder is independent of attention strategies and
tiling, which are inside `LayerContext.run_layer`, and of the mesh, which is inside its `Sharder`.

The kinds of layers (model.layer_kinds) repeat with a period. Their parameters are stacked in "layers", or in
"layers"/KIND for each kind if the shapes of kinds differ (`ModelConfig.layer_stacks`). A scan runs one period per
iteration (`layer_stack`). If the period does not divide the number of layers, the rest is in "last_layers" and runs
after the scan. Layers of model.first_layer_kinds are in "first_layers" and run before it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core import scopes
from jaxlc.core.axes import LAYER_STACKS
from jaxlc.models.block import matrix
from jaxlc.models.embedding import lookup
from jaxlc.models.freezing import join, paths_in_layer
from jaxlc.models.init_keys import InitKeys
from jaxlc.models.layer_stack import IsFrozen, LayerContext, run_stack
from jaxlc.models.layers import DecoderLayer, LayerOutput
from jaxlc.models.matmuls import Fp8, History, IsBf16
from jaxlc.models.norms import RMSNorm
from jaxlc.sharding.rules import Sharder

_LAYERS = "layers"  # name of the leading dimension of every parameter in LAYER_STACKS


class Decoder(nnx.Module):
    """Embedding, L layers stored as one to three stacked layers, final norm, and an output head unless it is tied."""

    def __init__(
        self,
        model: ModelConfig,
        vocab_size_padded: int,
        keys: InitKeys,
        fp8: Fp8 | None = None,
        lora: LoraConfig | None = None,
    ):
        D, V = model.model_dim, model.vocab_size
        padding = vocab_size_padded - V
        self.embedding = _pad_vocab(matrix(keys, fan_in=D, vocab=V, model=D), padding)
        self.head = None if model.tie_embeddings else _pad_vocab(matrix(keys, fan_in=D, model=D, vocab=V), padding)
        layer_keys = jax.random.split(keys.params(), model.num_layers)

        def stacked(layers: Sequence[int]) -> DecoderLayer:
            shape = model.of_kind(model.kinds_of_layers[layers[0]])
            return nnx.vmap(lambda key: DecoderLayer(shape, InitKeys(key), fp8, lora))(layer_keys[jnp.array(layers)])

        stacks: dict[str, Any] = dict.fromkeys(LAYER_STACKS)
        for (stack, *kind), layers in model.layer_stacks.items():
            if kind:
                stacks[stack] = nnx.Dict({**(stacks[stack] or {}), kind[0]: stacked(layers)})
            else:
                stacks[stack] = stacked(layers)
        self.first_layers, self.layers, self.last_layers = stacks.values()
        self.final_norm = RMSNorm(epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, norm=D)
        self.embedding_multiplier = D**0.5 if model.scale_embeddings else 1.0

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        model: ModelConfig,
        context: LayerContext,
        is_frozen: IsFrozen,
    ) -> LayerOutput:
        """Returns the final hidden states x_BTD, before the final norm, and the sums of the layers; see `apply`."""
        output = LayerOutput(self.embedded(tokens_BT, context.shard, context.compute_dtype), {})
        for name in LAYER_STACKS:
            layers = getattr(self, name)
            if layers is not None:
                kinds = model.kinds_of_iteration(name)
                x_BTD, sums = run_stack(layers, output.x_BTD, positions_BT, kinds, context, is_frozen)
                both = {name: jnp.concatenate([output.sums[name], sums[name]]) for name in output.sums.keys() & sums}
                output = LayerOutput(x_BTD, {**output.sums, **sums, **both})
        return output

    def embedded(self, tokens_BT: jax.Array, shard: Sharder, compute_dtype) -> jax.Array:
        """The input of the first layer, x_BTD in compute_dtype, T sharded over context and tensor."""
        x_BTD = lookup(self.embedding[...], tokens_BT, shard, compute_dtype)
        if self.embedding_multiplier != 1:
            x_BTD *= jnp.asarray(self.embedding_multiplier, compute_dtype)
        return x_BTD

    def head_DV(self, shard: Sharder, compute_dtype) -> jax.Array:
        """The output head, sharded over tensor along V; of the copy of a node with a first dimension of nodes."""
        stored = self.embedding if self.head is None else self.head
        with jax.named_scope(scopes.GATHER_WEIGHTS):
            weight = shard.head(stored[...], stored.dims, compute_dtype)
        return jnp.swapaxes(weight, -1, -2) if self.head is None else weight


def init(model: ModelConfig, vocab_size_padded: int, key: jax.Array, lora: LoraConfig | None = None) -> dict:
    """Initial parameters, float32; call it under `jit` with out_shardings.

    The values depend only on `key`, not on the mesh or on the vocabulary padding, which is 0. Those of the model do not
    depend on `lora`, which adds adapters.
    """
    return nnx.to_pure_dict(nnx.state(Decoder(model, vocab_size_padded, InitKeys(key), lora=lora)))


def abstract_params(model: ModelConfig, vocab_size_padded: int, lora: LoraConfig | None = None) -> dict:
    """Shapes and dtypes of the result of `init`; nothing is computed."""
    return jax.eval_shape(lambda: init(model, vocab_size_padded, jax.random.key(0), lora))


def first_histories(model: ModelConfig, fp8: Fp8) -> dict:
    """Amax histories of delayed scaling before the first step: zeros."""
    _, state = _abstract_decoder(model, model.vocab_size, fp8)
    return nnx.to_pure_dict(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.filter_state(state, History)))


def dims_of(model: ModelConfig, lora: LoraConfig | None = None) -> dict:
    """The parameter tree with a tuple of dimension names per leaf, e.g. ("layers", "model", "heads", "head_dim")."""
    _, state = _abstract_decoder(model, model.vocab_size, lora=lora)
    declared = {path: param.dims for path, param in nnx.to_flat_state(state)}
    stacked = {path: (_LAYERS, *dims) if path[0] in LAYER_STACKS else dims for path, dims in declared.items()}
    return nnx.traversals.unflatten_mapping(stacked)


class Params(NamedTuple):
    """The parameters of a decoder: the tree that `init` returns, in two parts, and the state of FP8."""

    trainable: dict
    frozen: dict = {}  # parameters that are not differentiated
    # amax histories of delayed scaling, the tree that `first_histories` returns; their gradients are their next values
    histories: dict | None = None


def apply(
    params: Params,
    model: ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    context: LayerContext,
    *,
    fp8: Fp8 | None = None,
    lora: LoraConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Runs the decoder, under `jit`.

    Args:
      tokens_BT, positions_BT: int32, both in the same sequence order, which may be any; T is a multiple of context x
        tensor. If `context.run_layer` runs tiles, they are [n, B, t], and so is the x that is returned.
      fp8: which matrix products are in FP8; None: none.
      lora: the adapters that `params` contains.
    Returns:
      x_BTD, the final hidden states in compute_dtype, T sharded over context and tensor; factor_D of the final norm,
      float32, which the loss applies chunk by chunk; head_DV in compute_dtype, V padded and sharded over tensor; sums
      over the tokens that layers return, float32 [layers that return it] by name.
    """
    shard, frozen_in_layer = context.shard, paths_in_layer(params.frozen)
    joined = join(params.trainable, params.frozen)
    joined = {name: part if name in LAYER_STACKS else shard.fetched(part) for name, part in joined.items()}
    vocab_size_padded = joined["embedding"].shape[-2]
    graph_def, state = _abstract_decoder(model, vocab_size_padded, fp8, lora)
    decoder = nnx.merge(graph_def, joined, params.histories or {}, _bf16_flags(model, state, fp8))
    output = decoder(tokens_BT, positions_BT, model, context, lambda path, _: path in frozen_in_layer)
    return output.x_BTD, decoder.final_norm.factor, decoder.head_DV(shard, context.compute_dtype), output.sums


def bind(params: dict, model: ModelConfig, lora: LoraConfig | None = None) -> Decoder:
    """The decoder with these parameters, the tree that `init` returns, in any dtype. FP8 is off."""
    graph_def, _ = _abstract_decoder(model, params["embedding"].shape[0], lora=lora)
    return nnx.merge(graph_def, params)


@functools.cache
def _abstract_decoder(
    model: ModelConfig, vocab_size_padded: int, fp8: Fp8 | None = None, lora: LoraConfig | None = None
):
    """(graph definition, abstract state) of the decoder; nothing is computed."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, vocab_size_padded, InitKeys(jax.random.key(0)), fp8, lora)))


def _bf16_flags(model: ModelConfig, state, fp8: Fp8 | None) -> dict:
    """The values of all `IsBf16` variables of the decoder, float32, one per layer of each stack."""

    layer_stacks = model.layer_stacks

    def flags(path, like):
        stack, kind = (key.key for key in path[:2])
        layers = layer_stacks.get((stack,)) or layer_stacks[stack, kind]
        is_bf16_L = jnp.zeros(model.num_layers, like.dtype).at[jnp.array(fp8.bf16_layers)].set(1)
        is_consecutive = layers[-1] - layers[0] == len(layers) - 1
        return is_bf16_L[layers[0] : layers[-1] + 1] if is_consecutive else is_bf16_L[jnp.array(layers)]

    return nnx.to_pure_dict(jax.tree.map_with_path(flags, nnx.filter_state(state, IsBf16)))


def _pad_vocab(param: nnx.Param, padding: int) -> nnx.Param:
    """Appends zeros to the vocabulary dimension, so that the other values do not depend on the padding."""
    widths = [(0, padding if name == "vocab" else 0) for name in param.dims]
    return param.replace(jnp.pad(param[...], widths))
