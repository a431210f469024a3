"""The decoder as pure functions; parameters are a nested dict of arrays.

    init(model, vocab_size_padded, key) -> params        dims_of(model) -> the same tree of dimension names
    apply(params, model, tokens, positions, context) -> final hidden states, factor of the final norm, output head

It computes no logits: the loss computes them chunk by chunk. The decoder is independent of
attention strategies and tiling, which are inside `LayerContext.run_layer`, and of the mesh, which
is inside its `Sharder`.

The layers are segments, in each of which a group of kinds repeats (`ModelConfig.segments`): most
models have one, "layers", whose group is model.layer_kinds. Its parameters are stacked in "layers",
or in "layers"/KIND for each kind if the shapes of kinds differ (`ModelConfig.layer_stacks`). A scan
runs one group per iteration (`layer_stack`).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, is_layers, scopes
from jaxlc.models.block import Init, RMSNorm, matrix, over_chunks, scaled
from jaxlc.models.contract import LayerOutput
from jaxlc.models.layer_stack import (
    DecoderLayer,
    ExpertsIndex,
    IsFrozen,
    LayerContext,
    Routing,
    run_stack,
)
from jaxlc.models.lora import join, paths_in_layer
from jaxlc.models.matmuls import Fp8, History, IsBf16
from jaxlc.sharding.mesh import shard_map
from jaxlc.sharding.rules import Sharder

_DIMS = ("vocab", "model")
_VOCAB_SPLIT = PartitionSpec(TENSOR, None)
_LOOKUP_CHUNK_TOKENS = 8192  # per device: 128 MiB of float32 gradients at D = 4096


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(embedding_VD: jax.Array, tokens_BT: jax.Array, shard: Sharder, dtype) -> jax.Array:
    """Token embeddings from the float32 table, as the residual stream x_BTD in `dtype`; B may be
    preceded by others.

    Each rank looks up the ids in its shard of the vocabulary, and the results are summed over
    tensor (Megatron-LM, Shoeybi et al. 2019, section 3). It uses `shard_map` because XLA's
    partitioner would gather the whole table, and in the backward pass the whole sequence.
    Embeddings are sent in `dtype`, but their gradients are summed in float32: a common token occurs
    thousands of times in a long sequence, and a bfloat16 sum stops growing after 256 equal terms.
    Both passes run over chunks of tokens, so that neither the partial embeddings nor the float32
    gradients exist at full sequence length.
    """

    @jax.named_scope(scopes.EMBEDDING)
    def local(table_vD, tokens_bt):
        tokens_t = tokens_bt.reshape(-1)

        def look_up_chunk(x_tD, start, size):
            ids_c = _local_ids(tokens_t, start, size, len(table_vD))
            rows_cD = table_vD.at[ids_c].get(mode="fill", fill_value=0)
            rows_cD = jax.lax.psum_scatter(rows_cD, TENSOR, scatter_dimension=0, tiled=True)
            return jax.lax.dynamic_update_slice_in_dim(x_tD, rows_cD, start, 0), None

        x_tD = jnp.zeros((len(tokens_t), table_vD.shape[1]), dtype)
        x_tD, _ = over_chunks(look_up_chunk, x_tD, len(tokens_t), _own_chunk_tokens(shard))
        return x_tD.reshape(*tokens_bt.shape, -1)

    table_VD = shard.gathered_over_node(shard.weight(embedding_VD, _DIMS, dtype), _DIMS)
    tokens, residual = _token_specs(tokens_BT)
    return shard_map(local, shard.mesh, (_VOCAB_SPLIT, tokens), residual)(table_VD, tokens_BT)


def _lookup_forward(embedding_VD, tokens_BT, shard, dtype):
    return lookup(embedding_VD, tokens_BT, shard, dtype), (embedding_VD, tokens_BT)


def _lookup_backward(shard, _dtype, residuals, dx_BTD):
    embedding_VD, tokens_BT = residuals
    num_rows = embedding_VD.shape[-2] // shard.mesh.shape[TENSOR]
    is_copy = embedding_VD.ndim > len(_DIMS)
    mesh = shard.mesh
    sum_axes = (*BATCH_AXES, CONTEXT)
    specs = _token_specs(tokens_BT)
    out_spec = _VOCAB_SPLIT
    if is_copy:  # each node sums over its own tokens
        mesh = shard.nodes.mesh
        sum_axes = shard.nodes.inner
        specs = tuple(map(shard.nodes.spec, specs))
        out_spec = PartitionSpec(shard.nodes.outer, *_VOCAB_SPLIT)

    @jax.named_scope(scopes.EMBEDDING)
    def local(tokens_bt, dx_btD):
        tokens_t = tokens_bt.reshape(-1)
        dx_tD = dx_btD.reshape(-1, dx_btD.shape[-1])

        def add_chunk(gradient_vD, start, size):
            dx_cD = jax.lax.dynamic_slice_in_dim(dx_tD, start, size)
            dx_cD = jax.lax.all_gather(dx_cD, TENSOR, axis=0, tiled=True).astype(jnp.float32)
            ids_c = _local_ids(tokens_t, start, size, num_rows)
            return gradient_vD.at[ids_c].add(dx_cD, mode="drop"), None

        gradient_vD = jnp.zeros((num_rows, dx_tD.shape[-1]), jnp.float32)
        gradient_vD, _ = over_chunks(
            add_chunk, gradient_vD, len(tokens_t), _own_chunk_tokens(shard)
        )
        gradient_vD = jax.lax.psum(gradient_vD, sum_axes)
        return gradient_vD[None] if is_copy else gradient_vD

    return shard_map(local, mesh, specs, out_spec)(tokens_BT, dx_BTD), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def _token_specs(tokens_BT: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """The sharding of tokens and of the residual stream; dimensions before B are replicated."""
    tokens = (*(None,) * (tokens_BT.ndim - 2), BATCH_AXES, (CONTEXT, TENSOR))
    return PartitionSpec(*tokens), PartitionSpec(*tokens, None)


def _own_chunk_tokens(shard: Sharder) -> int:
    """Tokens per chunk of one rank, before the gather over tensor."""
    return max(1, _LOOKUP_CHUNK_TOKENS // shard.mesh.shape[TENSOR])


def _local_ids(tokens_t: jax.Array, start: jax.Array, size: int, num_rows: int) -> jax.Array:
    """Row indices in this rank's shard of the vocabulary, for a chunk's tokens of all tensor ranks;
    num_rows, which is out of range, for ids of other shards."""
    tokens_c = jax.lax.all_gather(
        jax.lax.dynamic_slice_in_dim(tokens_t, start, size), TENSOR, axis=0, tiled=True
    )
    ids_c = tokens_c - jax.lax.axis_index(TENSOR) * num_rows
    return jnp.where((ids_c >= 0) & (ids_c < num_rows), ids_c, num_rows)


_LAYERS = "layers"  # name of the leading dimension of every parameter of the layers


class Decoder(nnx.Module):
    """Embedding, L layers stored as stacked layers of segments, final norm, and an output head
    unless it is tied.
    """

    def __init__(self, model: ModelConfig, vocab_size_padded: int, init: Init):
        D = model.model_dim
        V = model.vocab_size
        padding = vocab_size_padded - V
        self.embedding = _pad_vocab(matrix(init, fan_in=D, vocab=V, model=D), padding)
        self.head = (
            None
            if model.tie_embeddings
            else _pad_vocab(matrix(init, fan_in=D, model=D, vocab=V), padding)
        )
        layer_keys = jax.random.split(init.param_key(), model.num_layers)

        def stacked(layers: Sequence[int]) -> DecoderLayer:
            shape = model.layer_config(model.kinds_of_layers[layers[0]])
            settings = init.fp8, init.lora, init.routing
            make = nnx.vmap(lambda key: DecoderLayer(shape, Init(key, *settings)))
            return make(layer_keys[jnp.array(layers)])

        stacks: dict[str, Any] = {}
        for (segment, *kind), layers in model.layer_stacks.items():
            stack = stacked(layers)
            stacks[segment] = {**stacks.get(segment, {}), kind[0]: stack} if kind else stack
        for segment, stack in stacks.items():
            setattr(self, segment, nnx.Dict(stack) if isinstance(stack, dict) else stack)
        self.final_norm = RMSNorm(
            epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, norm=D
        )
        self.embedding_scale = D**0.5 if model.scale_embeddings else 1.0
        self.embedding_multiplier = model.embedding_multiplier
        self.logits_scaling = model.logits_scaling

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        model: ModelConfig,
        context: LayerContext,
        is_frozen: IsFrozen,
    ) -> LayerOutput:
        """Returns the final hidden states x_BTD, before the final norm, and the sums of the layers;
        see `apply`.
        """
        output = LayerOutput(self.embedded(tokens_BT, context.shard, context.compute_dtype), {})
        for segment in model.segments:
            layers = getattr(self, segment.name)
            x_BTD, sums = run_stack(layers, output.x_BTD, positions_BT, segment, context, is_frozen)
            both = {
                name: jnp.concatenate([output.sums[name], sums[name]])
                for name in output.sums.keys() & sums
            }
            output = LayerOutput(x_BTD, {**output.sums, **sums, **both})
        return output

    def embedded(self, tokens_BT: jax.Array, shard: Sharder, compute_dtype) -> jax.Array:
        """The input of the first layer, x_BTD in compute_dtype, T sharded over context and tensor."""
        x_BTD = lookup(self.embedding[...], tokens_BT, shard, compute_dtype)
        if self.embedding_scale != 1:
            x_BTD *= jnp.asarray(self.embedding_scale, compute_dtype)
        return scaled(x_BTD, self.embedding_multiplier)

    @property
    def final_factor(self) -> jax.Array:
        """The factor of the final norm, divided by `logits_scaling`: so the product of the normed
        states and the head is the logits wherever it is computed. float32 [D].
        """
        return self.final_norm.factor / self.logits_scaling

    def head_DV(self, shard: Sharder, compute_dtype) -> jax.Array:
        """The output head, sharded over tensor along V; of the copy of a node with a first
        dimension of nodes.
        """
        stored = self.embedding if self.head is None else self.head
        with jax.named_scope(scopes.GATHER_WEIGHTS):
            weight = shard.head(stored[...], stored.dims, compute_dtype)
        return jnp.swapaxes(weight, -1, -2) if self.head is None else weight


def init(
    model: ModelConfig, vocab_size_padded: int, key: jax.Array, lora: LoraConfig | None = None
) -> dict:
    """Initial parameters, float32; call it under `jit` with out_shardings.

    The values depend only on `key`, not on the mesh or on the vocabulary padding, which is 0. Those
    of the model do not depend on `lora`, which adds adapters.
    """
    return nnx.to_pure_dict(nnx.state(Decoder(model, vocab_size_padded, Init(key, lora=lora))))


def abstract_params(
    model: ModelConfig, vocab_size_padded: int, lora: LoraConfig | None = None
) -> dict:
    """Shapes and dtypes of the result of `init`; nothing is computed."""
    _, state = _abstract_decoder(model, vocab_size_padded, None, lora, "")
    return nnx.to_pure_dict(state)


def first_histories(model: ModelConfig, fp8: Fp8) -> dict:
    """Amax histories of delayed scaling before the first step: zeros."""
    _, state = _abstract_decoder(model, model.vocab_size, fp8, None, "")
    return nnx.to_pure_dict(jax.tree.map(jnp.zeros_like, nnx.filter_state(state, History)))


def dims_of(model: ModelConfig, lora: LoraConfig | None = None) -> dict:
    """The parameter tree with a tuple of dimension names per leaf, e.g. ("layers", "model",
    "heads", "head_dim").
    """
    _, state = _abstract_decoder(model, model.vocab_size, None, lora, "")
    declared = {path: param.dims for path, param in nnx.to_flat_state(state)}
    stacked = {
        path: (_LAYERS, *dims) if is_layers(path[0]) else dims for path, dims in declared.items()
    }
    return nnx.traversals.unflatten_mapping(stacked)


class Params(NamedTuple):
    """The parameters of a decoder: the tree that `init` returns, in two parts, and the state of
    FP8.
    """

    trainable: dict
    frozen: dict = {}  # parameters that are not differentiated
    # amax histories of delayed scaling, the tree that `first_histories` returns; their gradients
    # are their next values
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
      divided by model.logits_scaling, float32, which the loss applies chunk by chunk; head_DV in compute_dtype, V
      padded and sharded over tensor; sums over the tokens that layers return, float32 [layers that return it] by name.
    """
    shard = context.shard
    frozen_in_layer = paths_in_layer(params.frozen)
    joined = join(params.trainable, params.frozen)
    joined = {
        name: part if is_layers(name) else shard.fetched(part) for name, part in joined.items()
    }
    vocab_size_padded = joined["embedding"].shape[-2]
    graph_def, state = _abstract_decoder(model, vocab_size_padded, fp8, lora, context.routing)
    decoder = nnx.merge(graph_def, joined, params.histories or {}, *_values(model, state, fp8))
    output = decoder(
        tokens_BT, positions_BT, model, context, lambda path, _: path in frozen_in_layer
    )
    return (
        output.x_BTD,
        decoder.final_factor,
        decoder.head_DV(shard, context.compute_dtype),
        output.sums,
    )


def bind(params: dict, model: ModelConfig, lora: LoraConfig | None = None) -> Decoder:
    """The decoder with these parameters, the tree that `init` returns, in any dtype. FP8 is off."""
    graph_def, _ = _abstract_decoder(model, params["embedding"].shape[0], None, lora, "")
    return nnx.merge(graph_def, params)


@functools.cache
def _abstract_decoder(
    model: ModelConfig,
    vocab_size_padded: int,
    fp8: Fp8 | None,
    lora: LoraConfig | None,
    routing: Routing,  # without a default: a call that leaves it out has another key in the cache
):
    """(graph definition, abstract state) of the decoder; nothing is computed."""
    init = Init(jax.random.key(0), fp8, lora, routing)
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, vocab_size_padded, init)))


def _values(model: ModelConfig, state, fp8: Fp8 | None) -> Iterator[dict]:
    """Yields the values of all `IsBf16` and `ExpertsIndex` variables of the decoder, float32, one
    per layer of each stack.
    """
    layer_stacks = model.layer_stacks
    layers_L = np.arange(model.num_layers)
    bf16_layers = () if fp8 is None else fp8.bf16_layers
    for variable, values_L in (
        (IsBf16, np.isin(layers_L, layers_L[[*bf16_layers]])),  # negative ones count from the end
        (ExpertsIndex, np.searchsorted(model.layers_with_experts, layers_L)),
    ):

        def for_stack(path, like, values_L=values_L):
            stack, kind = (key.key for key in path[:2])
            layers = layer_stacks.get((stack,)) or layer_stacks[stack, kind]
            return jnp.asarray(values_L[layers], like.dtype)

        yield nnx.to_pure_dict(jax.tree.map_with_path(for_stack, nnx.filter_state(state, variable)))


def _pad_vocab(param: nnx.Param, padding: int) -> nnx.Param:
    """Appends zeros to the vocabulary dimension, so that the other values do not depend on the
    padding.
    """
    widths = [(0, padding if name == "vocab" else 0) for name in param.dims]
    return param.replace(jnp.pad(param[...], widths))
