"""The parts of a Llama (Touvron et al. 2023, arXiv:2302.13971): RMSNorm, grouped-query attention, SwiGLU.

A parameter is declared once, by `matrix` or in RMSNorm: its shape, the names of its dimensions, its first value.
Everything else (abstract tree, shardings, byte counts, table) is derived. Values are float32; a layer computes in
the dtype of its input.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxlc.config import ModelConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models.rope import RopeTables, apply_rope
from jaxlc.sharding.rules import Sharder

_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT)
_RESIDUAL = PartitionSpec(BATCH_AXES, (CONTEXT, TENSOR), None)
_VOCAB_SPLIT = PartitionSpec(TENSOR, None)
_TRUNCATED_STD = 0.87962566  # of a standard normal cut at -2 and 2


def matrix(rngs: nnx.Rngs, *, fan_in: int, depth_scale: float = 1.0, **dims: int) -> nnx.Param:
    """Declares a weight with its dimensions, e.g. `matrix(rngs, fan_in=D, model=D, heads=N, head_dim=H)`.

    The first value is a normal of standard deviation 1/sqrt(fan_in), cut at two deviations: a unit input gives a
    unit output at every width. At D = 4096 that is 0.016, near the 0.02 that Llama-sized models start from, and for
    a D of 128 it is still right, which a constant is not. `depth_scale` multiplies it.
    """
    std = depth_scale / fan_in**0.5
    unit_variance = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, tuple(dims.values())) / _TRUNCATED_STD
    return nnx.Param(std * unit_variance, dims=tuple(dims))


def residual_depth_scale(model: ModelConfig) -> float:
    """Scale of the two matrices a layer that write to the residual stream, so that the sum of 2L of them stays of
    the size of one (GPT-2, Radford et al. 2019, section 2.3)."""
    return (2 * model.num_layers) ** -0.5


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension; float32 inside, x's dtype outside."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), dims=("norm",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse_rms * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023): N query heads share K key/value heads."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        D, N, K, H = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
        self.wq = matrix(rngs, fan_in=D, model=D, heads=N, head_dim=H)
        self.wk = matrix(rngs, fan_in=D, model=D, kv_heads=K, head_dim=H)
        self.wv = matrix(rngs, fan_in=D, model=D, kv_heads=K, head_dim=H)
        self.wo = matrix(rngs, fan_in=N * H, depth_scale=residual_depth_scale(model), heads=N, head_dim=H, model=D)
        self.q_norm = RMSNorm(H, model.norm_epsilon) if model.qk_norm else None
        self.k_norm = RMSNorm(H, model.norm_epsilon) if model.qk_norm else None

    def queries(self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables) -> jax.Array:
        """q_BTNH. `x_BTD` is normed and gathered over tensor, here and below."""
        q_BTNH = shard.heads(jnp.einsum("BTD,DNH->BTNH", x_BTD, in_use(self.wq, shard, x_BTD.dtype)))
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        return checkpoint_name(apply_rope(q_BTNH, positions_BT, tables), "query")

    def keys_values(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables
    ) -> tuple[jax.Array, jax.Array]:
        """(k_BTKH, v_BTKH)."""
        k_BTKH = shard.heads(jnp.einsum("BTD,DKH->BTKH", x_BTD, in_use(self.wk, shard, x_BTD.dtype)))
        v_BTKH = shard.heads(jnp.einsum("BTD,DKH->BTKH", x_BTD, in_use(self.wv, shard, x_BTD.dtype)))
        if self.k_norm is not None:
            k_BTKH = self.k_norm(k_BTKH)
        return checkpoint_name(apply_rope(k_BTKH, positions_BT, tables), "key"), checkpoint_name(v_BTKH, "value")

    def projected(self, out_BTNH: jax.Array, *, shard: Sharder) -> jax.Array:
        """What attention adds to the residual stream: out_BTD."""
        out_BTNH = shard.heads(out_BTNH)
        out_BTD = jnp.einsum("BTNH,NHD->BTD", out_BTNH, in_use(self.wo, shard, out_BTNH.dtype))
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(x w_gate) * (x w_up), times w_down."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        D, F = model.model_dim, model.ffn_dim
        self.w_gate = matrix(rngs, fan_in=D, model=D, ffn=F)
        self.w_up = matrix(rngs, fan_in=D, model=D, ffn=F)
        self.w_down = matrix(rngs, fan_in=F, depth_scale=residual_depth_scale(model), ffn=F, model=D)

    def __call__(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """`x_BTD` is normed and gathered over tensor."""
        gate_BTF = shard.ffn(jnp.einsum("BTD,DF->BTF", x_BTD, in_use(self.w_gate, shard, x_BTD.dtype)))
        up_BTF = shard.ffn(jnp.einsum("BTD,DF->BTF", x_BTD, in_use(self.w_up, shard, x_BTD.dtype)))
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
        hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
        return shard.residual(jnp.einsum("BTF,FD->BTD", hidden_BTF, in_use(self.w_down, shard, x_BTD.dtype)))


class DecoderLayer(nnx.Module):
    """One block of attention and one of MLP, each normed before and added to the residual stream."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(model.model_dim, model.norm_epsilon)
        self.attention = Attention(model, rngs)
        self.mlp_norm = RMSNorm(model.model_dim, model.norm_epsilon)
        self.mlp = MLP(model, rngs)

    def __call__(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, attend: Callable, shard: Sharder, tables: RopeTables
    ) -> jax.Array:
        """x_BTD lies split over context and tensor along T; each block gathers its normed input over tensor once."""
        x_BTD = checkpoint_name(x_BTD, "residual")
        normed_BTD = self.attention_input(x_BTD, shard=shard)
        q_BTNH = self.attention.queries(normed_BTD, positions_BT, shard=shard, tables=tables)
        k_BTKH, v_BTKH = self.attention.keys_values(normed_BTD, positions_BT, shard=shard, tables=tables)
        return self.after_attention(x_BTD, attend(q_BTNH, k_BTKH, v_BTKH), shard=shard)

    def attention_input(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """x_BTD normed, and gathered over tensor."""
        return shard.gathered(self.attention_norm(x_BTD))

    def after_attention(self, x_BTD: jax.Array, out_BTNH: jax.Array, *, shard: Sharder) -> jax.Array:
        """The rest of the layer: x_BTD with attention's out and the MLP's added."""
        x_BTD += self.attention.projected(out_BTNH, shard=shard)
        normed_BTD = shard.gathered(self.mlp_norm(x_BTD))
        return x_BTD + self.mlp(normed_BTD, shard=shard)


def in_use(param: nnx.Param, shard: Sharder, dtype) -> jax.Array:
    """A declared weight, cast and gathered for the matmul that reads it."""
    return shard.weight(param[...], param.dims, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(embedding_VD: jax.Array, tokens_BT: jax.Array, shard: Sharder, dtype) -> jax.Array:
    """Rows of the float32 embedding as the residual stream x_BTD, in `dtype`.

    Each rank looks up the ids in its piece of the vocabulary, and the pieces are summed over tensor (Megatron-LM,
    Shoeybi et al. 2019, section 3). Written out in `shard_map`, because the compiler left alone gathers the whole
    table, and in the backward the whole sequence. Rows move in `dtype`, but their gradients are summed in float32: in
    a long sequence a common token occurs thousands of times, and a bfloat16 sum stands still after 256 equal terms.
    """

    def local(table_vD, tokens_bt):
        ids_bt = _local_ids(tokens_bt, len(table_vD))
        rows_btD = table_vD.at[ids_bt].get(mode="fill", fill_value=0)
        return jax.lax.psum_scatter(rows_btD, TENSOR, scatter_dimension=1, tiled=True)

    table_VD = shard.weight(embedding_VD, ("vocab", "model"), dtype)
    specs = dict(in_specs=(_VOCAB_SPLIT, _TOKENS), out_specs=_RESIDUAL, check_vma=False)
    return jax.shard_map(local, mesh=shard.mesh, **specs)(table_VD, tokens_BT)


def _lookup_forward(embedding_VD, tokens_BT, shard, dtype):
    return lookup(embedding_VD, tokens_BT, shard, dtype), (embedding_VD, tokens_BT)


def _lookup_backward(shard, _dtype, residuals, dx_BTD):
    embedding_VD, tokens_BT = residuals
    num_rows = len(embedding_VD) // shard.mesh.shape[TENSOR]

    def local(tokens_bt, dx_btD):
        dx_btD = jax.lax.all_gather(dx_btD, TENSOR, axis=1, tiled=True).astype(jnp.float32)
        zeros_vD = jnp.zeros((num_rows, dx_btD.shape[-1]), jnp.float32)
        gradient_vD = zeros_vD.at[_local_ids(tokens_bt, num_rows)].add(dx_btD, mode="drop")
        return jax.lax.psum(gradient_vD, (*BATCH_AXES, CONTEXT))

    specs = dict(in_specs=(_TOKENS, _RESIDUAL), out_specs=_VOCAB_SPLIT, check_vma=False)
    return jax.shard_map(local, mesh=shard.mesh, **specs)(tokens_BT, dx_BTD), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def _local_ids(tokens_bt: jax.Array, num_rows: int) -> jax.Array:
    """Row numbers in this rank's piece of the vocabulary; num_rows, which is none, for ids in another's."""
    ids_bt = tokens_bt - jax.lax.axis_index(TENSOR) * num_rows
    return jnp.where((ids_bt >= 0) & (ids_bt < num_rows), ids_bt, num_rows)
