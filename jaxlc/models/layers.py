"""The modules of a Llama decoder (Touvron et al. 2023, arXiv:2302.13971): RMSNorm, grouped-query attention, SwiGLU.

A parameter is declared once, by `matrix` or in RMSNorm: its shape, the names of its dimensions, its initial value. The
abstract tree, shardings, byte counts and the sharding table are derived. Parameters are float32; a layer computes in
the dtype of its input.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxlc.config import ModelConfig
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models.chunks import over_chunks
from jaxlc.models.matmuls import Fp8, Matmuls
from jaxlc.models.offloaded_layers import Prefetch, overlap_with_prefetch
from jaxlc.models.rope import RopeTables, apply_rope
from jaxlc.sharding.rules import Sharder

_VOCAB_SPLIT = PartitionSpec(TENSOR, None)
_LOOKUP_CHUNK_TOKENS = 8192  # per device: 128 MiB of float32 gradients at D = 4096
_TRUNCATED_STD = 0.87962566  # of a standard normal cut at -2 and 2


def matrix(rngs: nnx.Rngs, *, fan_in: int, depth_scale: float = 1.0, **dims: int) -> nnx.Param:
    """Declares a weight with its dimensions, e.g. `matrix(rngs, fan_in=D, model=D, heads=N, head_dim=H)`.

    The initial value is a normal with standard deviation `depth_scale`/sqrt(fan_in), truncated at two deviations, so
    that an input of unit variance gives an output of unit variance at every width. At D = 4096 the deviation is 0.016,
    close to the constant 0.02 of many models of that size; a constant would be wrong at other widths.
    """
    std = depth_scale / fan_in**0.5
    unit_variance = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, tuple(dims.values())) / _TRUNCATED_STD
    return nnx.Param(std * unit_variance, dims=tuple(dims))


def residual_depth_scale(model: ModelConfig) -> float:
    """Scale of the two matrices per layer whose results are added to the residual stream, so that the sum of all 2L
    results has the size of one of them (GPT-2, Radford et al. 2019, section 2.3)."""
    return (2 * model.num_layers) ** -0.5


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension; computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), dims=("norm",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.epsilon)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """The function of `RMSNorm`; the loss applies it to chunks of hidden states."""
    wide = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse_rms * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023): N query heads share K key/value heads."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, fp8: Fp8 | None = None):
        D, N, K, H = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
        self.wq = matrix(rngs, fan_in=D, model=D, heads=N, head_dim=H)
        self.wk = matrix(rngs, fan_in=D, model=D, kv_heads=K, head_dim=H)
        self.wv = matrix(rngs, fan_in=D, model=D, kv_heads=K, head_dim=H)
        self.wo = matrix(rngs, fan_in=N * H, depth_scale=residual_depth_scale(model), heads=N, head_dim=H, model=D)
        self.q_norm = RMSNorm(H, model.norm_epsilon) if model.qk_norm else None
        self.k_norm = RMSNorm(H, model.norm_epsilon) if model.qk_norm else None
        self.matmul = Matmuls(fp8, "query", "key", "value", "attention_projected")

    @jax.named_scope(scopes.ATTENTION)
    def queries(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> jax.Array:
        """Returns q_BTNH, with RoPE. `x_BTD` is normed and gathered over tensor."""
        q_BTNH = shard.heads(self.matmul("query", "BTD,DNH->BTNH", x_BTD, in_use(self.wq, shard, x_BTD.dtype)))
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        return checkpoint_name(apply_rope(q_BTNH, positions_BT, tables), "query")

    @jax.named_scope(scopes.ATTENTION)
    def keys_values(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (k_BTKH, v_BTKH), K with RoPE. `x_BTD` is normed and gathered over tensor."""
        k_BTKH = shard.heads(self.matmul("key", "BTD,DKH->BTKH", x_BTD, in_use(self.wk, shard, x_BTD.dtype)))
        v_BTKH = shard.heads(self.matmul("value", "BTD,DKH->BTKH", x_BTD, in_use(self.wv, shard, x_BTD.dtype)))
        if self.k_norm is not None:
            k_BTKH = self.k_norm(k_BTKH)
        return checkpoint_name(apply_rope(k_BTKH, positions_BT, tables), "key"), checkpoint_name(v_BTKH, "value")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTNH: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection: out_BTD, which is added to the residual stream."""
        out_BTNH = shard.heads(out_BTNH)
        out_BTD = self.matmul("attention_projected", "BTNH,NHD->BTD", out_BTNH, in_use(self.wo, shard, out_BTNH.dtype))
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(x w_gate) * (x w_up), times w_down."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, fp8: Fp8 | None = None):
        D, F = model.model_dim, model.ffn_dim
        self.w_gate = matrix(rngs, fan_in=D, model=D, ffn=F)
        self.w_up = matrix(rngs, fan_in=D, model=D, ffn=F)
        self.w_down = matrix(rngs, fan_in=F, depth_scale=residual_depth_scale(model), ffn=F, model=D)
        self.matmul = Matmuls(fp8, "mlp_gate", "mlp_up", "mlp_down")

    @jax.named_scope(scopes.MLP)
    def __call__(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """`x_BTD` is normed and gathered over tensor."""
        gate_BTF = shard.ffn(self.matmul("mlp_gate", "BTD,DF->BTF", x_BTD, in_use(self.w_gate, shard, x_BTD.dtype)))
        up_BTF = shard.ffn(self.matmul("mlp_up", "BTD,DF->BTF", x_BTD, in_use(self.w_up, shard, x_BTD.dtype)))
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
        hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
        down_BTD = self.matmul("mlp_down", "BTF,FD->BTD", hidden_BTF, in_use(self.w_down, shard, x_BTD.dtype))
        return shard.residual(down_BTD)


class DecoderLayer(nnx.Module):
    """An attention block and an MLP block, each with a norm before it and added to the residual stream."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs, fp8: Fp8 | None = None):
        self.attention_norm = RMSNorm(model.model_dim, model.norm_epsilon)
        self.attention = Attention(model, rngs, fp8)
        self.mlp_norm = RMSNorm(model.model_dim, model.norm_epsilon)
        self.mlp = MLP(model, rngs, fp8)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        prefetch: Prefetch | None = None,
        *,
        attend: Callable,
        shard: Sharder,
        tables: RopeTables | None,
    ) -> tuple[jax.Array, Any]:
        """Returns (x_BTD, the prefetched weights, None without `prefetch`).

        T of x_BTD is sharded over context and tensor; each block gathers its normed input over tensor once.

        Args:
          attend: `(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH`.
        """
        x_BTD = checkpoint_name(x_BTD, "residual")
        normed_BTD = self.attention_input(x_BTD, shard=shard)
        q_BTNH = self.attention.queries(normed_BTD, positions_BT, shard=shard, tables=tables)
        k_BTKH, v_BTKH = self.attention.keys_values(normed_BTD, positions_BT, shard=shard, tables=tables)
        out_BTNH, next_weights = overlap_with_prefetch(attend, (q_BTNH, k_BTKH, v_BTKH), prefetch)
        return self.after_attention(x_BTD, out_BTNH, shard=shard), next_weights

    @jax.named_scope(scopes.ATTENTION)
    def attention_input(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """Returns x_BTD, normed and gathered over tensor."""
        return shard.gathered(self.attention_norm(x_BTD))

    def after_attention(self, x_BTD: jax.Array, out_BTNH: jax.Array, *, shard: Sharder) -> jax.Array:
        """The layer after attention: returns x_BTD plus the projected attention output plus the MLP output."""
        x_BTD += self.attention.projected(out_BTNH, shard=shard)
        with jax.named_scope(scopes.MLP):
            normed_BTD = shard.gathered(self.mlp_norm(x_BTD))
        return x_BTD + self.mlp(normed_BTD, shard=shard)


def run_layer(
    layer_def: nnx.GraphDef,
    params: nnx.State,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    masks: tuple,
    prefetch: Prefetch | None = None,
    *,
    attend: Callable,
    shard: Sharder,
    tables: RopeTables | None,
) -> tuple[jax.Array, Any]:
    """Runs the layer `nnx.merge(layer_def, params)` on whole sequences; `decoder.RunLayer` once `attend` is bound.

    Args:
      attend: `(q_BTNH, k_BTKH, v_BTKH, *masks) -> out_BTNH`.
    """

    def attend_masked(*qkv):
        return attend(*qkv, *masks)

    layer: DecoderLayer = nnx.merge(layer_def, params)
    return layer(x_BTD, positions_BT, prefetch, attend=attend_masked, shard=shard, tables=tables)


@jax.named_scope(scopes.GATHER_WEIGHTS)
def in_use(param: nnx.Param, shard: Sharder, dtype) -> jax.Array:
    """A declared weight, cast to `dtype` and gathered, as a matrix product reads it."""
    return shard.weight(param[...], param.dims, dtype)


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

    table_VD = shard.weight(embedding_VD, ("vocab", "model"), dtype)
    tokens, residual = _token_specs(tokens_BT)
    specs = dict(in_specs=(_VOCAB_SPLIT, tokens), out_specs=residual, check_vma=False)
    return jax.shard_map(local, mesh=shard.mesh, **specs)(table_VD, tokens_BT)


def _lookup_forward(embedding_VD, tokens_BT, shard, dtype):
    return lookup(embedding_VD, tokens_BT, shard, dtype), (embedding_VD, tokens_BT)


def _lookup_backward(shard, _dtype, residuals, dx_BTD):
    embedding_VD, tokens_BT = residuals
    num_rows = len(embedding_VD) // shard.mesh.shape[TENSOR]

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
        return jax.lax.psum(gradient_vD, (*BATCH_AXES, CONTEXT))

    specs = dict(in_specs=_token_specs(tokens_BT), out_specs=_VOCAB_SPLIT, check_vma=False)
    return jax.shard_map(local, mesh=shard.mesh, **specs)(tokens_BT, dx_BTD), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def _token_specs(tokens_BT: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """Of tokens and of the residual stream; dimensions before B are replicated."""
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
