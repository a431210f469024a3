"""The decoder, and the pure functions around it: parameters are a plain nested dict.

    init(model, vocab_size_padded, key) -> params        dims_of(model) -> the same tree, of dimension names
    apply(params, model, tokens, positions, ...) -> final hidden states, scale of their norm, output head

There are no logits here: they exist in chunks only, in the loss. The decoder is given `attend` and knows no
strategy, and is given a `Sharder` and knows no mesh.
"""

import functools
import operator
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlc.config import ModelConfig
from jaxlc.models import layer_tiles, offloaded_layers
from jaxlc.models.layer_tiles import Tiling
from jaxlc.models.layers import DecoderLayer, RMSNorm, in_use, lookup, matrix
from jaxlc.models.matmuls import Fp8, History, IsBf16
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder

_LAYERS = "layers"  # Decoder.layers: every parameter under it has a leading dimension L


class Remat(Protocol):
    """What a layer keeps for its backward; `jaxlc.train.remat.Remat` is one."""

    of_layer: Callable[[Callable], Callable]
    of_group: Callable[[Callable], Callable]
    layers_per_group: int


class Decoder(nnx.Module):
    """Embedding, L equal layers stored as one stacked layer, final norm, and a head unless it is the embedding."""

    def __init__(self, model: ModelConfig, vocab_size_padded: int, rngs: nnx.Rngs, fp8: Fp8 | None = None):
        D, V = model.model_dim, model.vocab_size
        padding = vocab_size_padded - V
        self.embedding = _pad_vocab(matrix(rngs, fan_in=D, vocab=V, model=D), padding)
        self.head = None if model.tie_embeddings else _pad_vocab(matrix(rngs, fan_in=D, model=D, vocab=V), padding)
        self.layers = nnx.vmap(lambda key: DecoderLayer(model, nnx.Rngs(key), fp8))(
            jax.random.split(rngs.params(), model.num_layers)
        )
        self.final_norm = RMSNorm(D, model.norm_epsilon)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        attend: Callable | Tiling,
        masks: tuple,
        shard: Sharder,
        remat: Remat,
        compute_dtype,
        tables: RopeTables,
    ) -> jax.Array:
        """Final hidden states x_BTD, before the final norm; see `apply`."""
        layer_def, stacked = nnx.split(self.layers)
        shared = positions_BT, masks  # arrays that are the same in every layer

        def run_layer(x_BTD, params, shared, ahead=None):
            positions_BT, masks = shared
            if isinstance(attend, Tiling):
                _, segments_BT = masks
                operands = x_BTD, positions_BT, segments_BT, ahead
                return layer_tiles.run_layer(layer_def, params, *operands, tiling=attend, shard=shard, tables=tables)

            def attend_masked(*qkv):
                return attend(*qkv, *masks)

            layer = nnx.merge(layer_def, params)
            return layer(x_BTD, positions_BT, ahead, attend=attend_masked, shard=shard, tables=tables)

        def run_group(x_BTD, params, shared, ahead=None):
            # No scan: of a group that is recomputed the last layer's output is of no use, and is left out like this.
            x_BTD, fetched = remat.of_layer(run_layer)(x_BTD, _of(params, 0), shared, ahead)
            for place in range(1, remat.layers_per_group):
                x_BTD, _ = remat.of_layer(run_layer)(x_BTD, _of(params, place), shared)
            return x_BTD, fetched

        if remat.layers_per_group == 1:
            run = remat.of_layer(run_layer)
        else:
            run = remat.of_group(run_group)
            stacked = jax.tree.map(lambda x: x.reshape(-1, remat.layers_per_group, *x.shape[1:]), stacked)
        x_BTD = lookup(self.embedding[...], tokens_BT, shard, compute_dtype)
        if shard.weights_on_host:
            return offloaded_layers.run_layers(run, x_BTD, stacked, shared, shard.fetched)
        return jax.lax.scan(lambda x_BTD, params: run(x_BTD, params, shared), x_BTD, stacked)[0]

    def head_DV(self, shard: Sharder, compute_dtype) -> jax.Array:
        """The output head, split over tensor along V."""
        if self.head is None:
            return in_use(self.embedding, shard, compute_dtype).T
        return in_use(self.head, shard, compute_dtype)


def init(model: ModelConfig, vocab_size_padded: int, key: jax.Array) -> dict:
    """First parameters, float32; run it under `jit` with out_shardings.

    Values depend on the key alone: not on the mesh, and not on the padding of the vocabulary, which is 0.
    """
    return nnx.to_pure_dict(nnx.state(Decoder(model, vocab_size_padded, nnx.Rngs(key))))


def abstract_params(model: ModelConfig, vocab_size_padded: int) -> dict:
    """Shapes and dtypes of `init`'s result; nothing is computed."""
    return jax.eval_shape(lambda: init(model, vocab_size_padded, jax.random.key(0)))


def first_histories(model: ModelConfig, fp8: Fp8) -> dict:
    """What delayed scaling has seen before the first step: nothing, in zeros."""
    _, state = _abstract_decoder(model, model.vocab_size, fp8)
    return nnx.to_pure_dict(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.filter_state(state, History)))


def dims_of(model: ModelConfig) -> dict:
    """The parameters' tree, with a tuple of dimension names for each: ("layers", "model", "heads", "head_dim")."""
    _, state = _abstract_decoder(model, model.vocab_size)
    declared = {path: param.dims for path, param in nnx.to_flat_state(state)}
    stacked = {path: (_LAYERS, *dims) if path[0] == _LAYERS else dims for path, dims in declared.items()}
    return nnx.traversals.unflatten_mapping(stacked)


def apply(
    params: dict,
    model: ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    *,
    attend: Callable | Tiling,
    masks: tuple = (),
    shard: Sharder,
    remat: Remat,
    compute_dtype,
    tables: RopeTables,
    fp8: Fp8 | None = None,
    histories: dict | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the decoder, under `jit`.

    Args:
      params: as `init` makes them.
      tokens_BT, positions_BT: int32, in the same (any) sequence order; T a multiple of context x tensor. In tiles:
        [n, B, t], and so is what is returned.
      attend: `(q_BTNH, k_BTKH, v_BTKH, *masks) -> out_BTNH`, in the compute dtype; or how layers run in tiles.
      masks: what `attend` takes beside them: positions_BT and segment_ids_BT, int32, or None for each.
      remat: wraps the functions of layers, or of groups of them; `train.remat.Remat` is one.
      compute_dtype: of matmuls and of the residual stream.
      tables: of `rope_tables`.
      fp8: which products are in 8 bits; None: none of them.
      histories: as `first_histories` makes them, of delayed scaling; their gradients are their next values.
    Returns:
      x_BTD, final hidden states, split over context and tensor along T, in compute_dtype; scale_D, float32, of the
      final norm, which the loss does chunk by chunk; and head_DV, split over tensor along V, padded, in compute_dtype.
    """
    params = {name: part if name == _LAYERS else shard.fetched(part) for name, part in params.items()}
    vocab_size_padded = params["embedding"].shape[0]
    graph_def, state = _abstract_decoder(model, vocab_size_padded, fp8)
    decoder = nnx.merge(graph_def, params, histories or {}, _which_are_bf16(state, fp8))
    x_BTD = decoder(
        tokens_BT,
        positions_BT,
        attend=attend,
        masks=masks,
        shard=shard,
        remat=remat,
        compute_dtype=compute_dtype,
        tables=tables,
    )
    return x_BTD, decoder.final_norm.scale[...], decoder.head_DV(shard, compute_dtype)


@functools.cache
def _abstract_decoder(model: ModelConfig, vocab_size_padded: int, fp8: Fp8 | None = None):
    """(graph definition, state of shapes) of the decoder; nothing is computed."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, vocab_size_padded, nnx.Rngs(0), fp8)))


def _which_are_bf16(state, fp8: Fp8 | None) -> dict:
    """Every `IsBf16` of the decoder, float32 [L]."""

    def flags_L(like):
        return jnp.zeros(like.shape, like.dtype).at[jnp.array(fp8.bf16_layers)].set(1)

    return nnx.to_pure_dict(jax.tree.map(flags_L, nnx.filter_state(state, IsBf16)))


def _of(stacked, place: int):
    return jax.tree.map(operator.itemgetter(place), stacked)


def _pad_vocab(param: nnx.Param, padding: int) -> nnx.Param:
    """Appends zeros to the vocabulary: the values before them do not depend on how many."""
    widths = [(0, padding if name == "vocab" else 0) for name in param.dims]
    return param.replace(jnp.pad(param[...], widths))
