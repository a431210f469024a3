"""The lookup of token embeddings in a table that is sharded over the vocabulary."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models.chunks import over_chunks
from jaxlc.sharding.rules import Sharder

_DIMS = ("vocab", "model")
_VOCAB_SPLIT = PartitionSpec(TENSOR, None)
_LOOKUP_CHUNK_TOKENS = 8192  # per device: 128 MiB of float32 gradients at D = 4096


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(embedding_VD: jax.Array, tokens_BT: jax.Array, shard: Sharder, dtype) -> jax.Array:
    """Token embeddings from the float32 table, as the residual stream x_BTD in `dtype`; B may be preceded by others.

    Each rank looks up the ids in its shard of the vocabulary, and the results are summed over tensor (Megatron-LM,
    Shoeybi et al. 2019, section 3). It uses `shard_map` because XLA's partitioner would gather the whole table, and in
    the backward pass the whole sequence. Embeddings are sent in `dtype`, but their gradients are summed in float32: a
    common token occurs thousands of times in a long sequence, and a bfloat16 sum stops growing after 256 equal terms.
    Both passes run over chunks of tokens, so that neither the partial embeddings nor the float32 gradients exist at
    full sequence length.
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

    table_VD = shard.of_node(shard.weight(embedding_VD, _DIMS, dtype), _DIMS)
    tokens, residual = _token_specs(tokens_BT)
    specs = dict(in_specs=(_VOCAB_SPLIT, tokens), out_specs=residual, check_vma=False)
    return jax.shard_map(local, mesh=shard.mesh, **specs)(table_VD, tokens_BT)


def _lookup_forward(embedding_VD, tokens_BT, shard, dtype):
    return lookup(embedding_VD, tokens_BT, shard, dtype), (embedding_VD, tokens_BT)


def _lookup_backward(shard, _dtype, residuals, dx_BTD):
    embedding_VD, tokens_BT = residuals
    num_rows = embedding_VD.shape[-2] // shard.mesh.shape[TENSOR]
    is_copy = embedding_VD.ndim > len(_DIMS)
    mesh, sum_axes, specs, out_spec = shard.mesh, (*BATCH_AXES, CONTEXT), _token_specs(tokens_BT), _VOCAB_SPLIT
    if is_copy:  # each node sums over its own tokens
        mesh, sum_axes, specs = shard.nodes.mesh, shard.nodes.inner, tuple(map(shard.nodes.spec, specs))
        out_spec = PartitionSpec(shard.nodes.outer, *_VOCAB_SPLIT)

    @jax.named_scope(scopes.EMBEDDING)
    def local(tokens_bt, dx_btD):
        tokens_t, dx_tD = tokens_bt.reshape(-1), dx_btD.reshape(-1, dx_btD.shape[-1])

        def add_chunk(gradient_vD, start, size):
            dx_cD = jax.lax.dynamic_slice_in_dim(dx_tD, start, size)
            dx_cD = jax.lax.all_gather(dx_cD, TENSOR, axis=0, tiled=True).astype(jnp.float32)
            ids_c = _local_ids(tokens_t, start, size, num_rows)
            return gradient_vD.at[ids_c].add(dx_cD, mode="drop"), None

        gradient_vD = jnp.zeros((num_rows, dx_tD.shape[-1]), jnp.float32)
        gradient_vD, _ = over_chunks(add_chunk, gradient_vD, len(tokens_t), _own_chunk_tokens(shard))
        gradient_vD = jax.lax.psum(gradient_vD, sum_axes)
        return gradient_vD[None] if is_copy else gradient_vD

    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=False)
    return split(tokens_BT, dx_BTD), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def _token_specs(tokens_BT: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """The sharding of tokens and of the residual stream; dimensions before B are replicated."""
    tokens = (*(None,) * (tokens_BT.ndim - 2), BATCH_AXES, (CONTEXT, TENSOR))
    return PartitionSpec(*tokens), PartitionSpec(*tokens, None)


def _own_chunk_tokens(shard: Sharder) -> int:
    """Tokens per chunk of one rank, before the gather over tensor."""
    return max(1, _LOOKUP_CHUNK_TOKENS // shard.mesh.shape[TENSOR])


def _local_ids(tokens_t: jax.Array, start: jax.Array, size: int, num_rows: int) -> jax.Array:
    """Row indices in this rank's shard of the vocabulary, for a chunk's tokens of all tensor ranks; num_rows, which is
    out of range, for ids of other shards."""
    tokens_c = jax.lax.all_gather(jax.lax.dynamic_slice_in_dim(tokens_t, start, size), TENSOR, axis=0, tiled=True)
    ids_c = tokens_c - jax.lax.axis_index(TENSOR) * num_rows
    return jnp.where((ids_c >= 0) & (ids_c < num_rows), ids_c, num_rows)
