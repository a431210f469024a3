"""The modules of a decoder layer: grouped-query attention, a gated feed-forward block, and the RMSNorms around them.

The layer of Llama (Touvron et al. 2023, arXiv:2302.13971), with the variations of other families that `ModelConfig`
describes. A parameter is declared once, by `matrix`, `bias_vector` or in RMSNorm: its shape, the names of its
dimensions, its initial value. The abstract tree, shardings, byte counts and the sharding table are derived. Parameters
are float32, or bf16 if they are frozen; a layer computes in the dtype of its input.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core import scopes
from jaxlc.models.init_keys import InitKeys
from jaxlc.models.lora import make_adapters
from jaxlc.models.matmuls import Fp8, Matmuls, in_use
from jaxlc.models.norms import RMSNorm
from jaxlc.models.offloaded_layers import LayerParams, Prefetch, overlap_with_prefetch
from jaxlc.models.rope import RopeTables, apply_rope
from jaxlc.sharding.rules import Sharder

_TRUNCATED_STD = 0.87962566  # standard deviation of a standard normal cut at -2 and 2


def matrix(keys: InitKeys, *, fan_in: int, depth_scale: float = 1.0, **dims: int) -> nnx.Param:
    """Declares a weight with its dimensions, e.g. `matrix(keys, fan_in=D, model=D, heads=N, head_dim=H)`.

    The initial value is a normal with standard deviation `depth_scale`/sqrt(fan_in), truncated at two deviations, so
    that an input of unit variance gives an output of unit variance at every width. At D = 4096 the deviation is 0.016,
    close to the constant 0.02 of many models of that size; a constant would be wrong at other widths.
    """
    std = depth_scale / fan_in**0.5
    unit_variance = jax.random.truncated_normal(keys.params(), -2.0, 2.0, tuple(dims.values())) / _TRUNCATED_STD
    return nnx.Param(std * unit_variance, dims=tuple(dims))


def bias_vector(**dims: int) -> nnx.Param:
    """Declares the bias of a projection, initially 0: `bias_vector(heads=N, bias=H)`; the last dimension is "bias"."""
    return nnx.Param(jnp.zeros(tuple(dims.values()), jnp.float32), dims=tuple(dims))


def residual_depth_scale(model: ModelConfig) -> float:
    """Scale of the two matrices per layer whose results are added to the residual stream, so that the sum of all 2L
    results has the size of one of them (GPT-2, Radford et al. 2019, section 2.3)."""
    return (2 * model.num_layers) ** -0.5


class _Block(nnx.Module):
    """The projections of a block, which may be in FP8, and their adapters, if it has any."""

    def __init__(
        self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None, lora: LoraConfig | None, projections: tuple[str, ...]
    ):
        self.matmul = Matmuls(fp8, *projections)
        self.lora = make_adapters(model, lora, projections, keys)

    def project(self, name: str, subscripts: str, x: jax.Array, weight: nnx.Param, *, shard: Sharder) -> jax.Array:
        """einsum(subscripts, x, weight), plus the output of the adapter."""
        out = self.matmul(name, subscripts, x, in_use(weight, shard, x.dtype))
        return out if self.lora is None else self.lora.add(name, subscripts, out, x, shard=shard)


class Attention(_Block):
    """Grouped-query attention (Ainslie et al. 2023): N query heads share K key/value heads."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        super().__init__(model, keys, fp8, lora, ("query", "key", "value", "attention_projected"))
        D, N, K, H = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
        self.wq = matrix(keys, fan_in=D, model=D, heads=N, head_dim=model.query_dim)  # with a gate: first q, then gate
        self.wk = matrix(keys, fan_in=D, model=D, kv_heads=K, head_dim=H)
        self.wv = matrix(keys, fan_in=D, model=D, kv_heads=K, head_dim=H)
        self.wo = matrix(keys, fan_in=N * H, depth_scale=residual_depth_scale(model), heads=N, head_dim=H, model=D)
        self.bq = bias_vector(heads=N, bias=model.query_dim) if model.qkv_bias else None
        self.bk = bias_vector(kv_heads=K, bias=H) if model.qkv_bias else None
        self.bv = bias_vector(kv_heads=K, bias=H) if model.qkv_bias else None
        self.bo = bias_vector(bias=D) if model.attention_out_bias else None
        self.sinks = nnx.Param(jnp.zeros(N, jnp.float32), dims=("sinks",)) if model.attention_sinks else None
        self.has_gate = model.attention_gate
        self.q_norm = _qk_norm(model, heads=N)
        self.k_norm = _qk_norm(model, kv_heads=K)
        # Attention divides its logits by sqrt(head_dim).
        self.query_multiplier = (H / model.query_scale_dim) ** 0.5 if model.query_scale_dim else 1.0

    @jax.named_scope(scopes.ATTENTION)
    def queries(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns q_BTNH, with RoPE, and the gate_BTNH of `projected`, or None. `x_BTD` is the input of the block,
        gathered over tensor."""
        q_BTNH = shard.heads(self.project("query", "BTD,DNH->BTNH", x_BTD, self.wq, shard=shard))
        q_BTNH, gate_BTNH = add_bias(q_BTNH, self.bq), None
        if self.has_gate:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
            gate_BTNH = checkpoint_name(gate_BTNH, "query")
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        if self.query_multiplier != 1:
            q_BTNH = (self.query_multiplier * q_BTNH.astype(jnp.float32)).astype(q_BTNH.dtype)
        return checkpoint_name(apply_rope(q_BTNH, positions_BT, tables), "query"), gate_BTNH

    @jax.named_scope(scopes.ATTENTION)
    def keys_values(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (k_BTKH, v_BTKH), K with RoPE. `x_BTD` is the input of the block, gathered over tensor."""
        k_BTKH = shard.heads(self.project("key", "BTD,DKH->BTKH", x_BTD, self.wk, shard=shard))
        v_BTKH = shard.heads(self.project("value", "BTD,DKH->BTKH", x_BTD, self.wv, shard=shard))
        k_BTKH, v_BTKH = add_bias(k_BTKH, self.bk), add_bias(v_BTKH, self.bv)
        if self.k_norm is not None:
            k_BTKH = self.k_norm(k_BTKH)
        return checkpoint_name(apply_rope(k_BTKH, positions_BT, tables), "key"), checkpoint_name(v_BTKH, "value")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTNH: jax.Array, gate_BTNH: jax.Array | None, *, shard: Sharder) -> jax.Array:
        """The output projection, out_BTD. With a gate, out_BTNH is multiplied by its sigmoid first."""
        out_BTNH = shard.heads(out_BTNH)
        if gate_BTNH is not None:
            gated_BTNH = out_BTNH.astype(jnp.float32) * jax.nn.sigmoid(gate_BTNH.astype(jnp.float32))
            out_BTNH = gated_BTNH.astype(out_BTNH.dtype)
        out_BTD = self.project("attention_projected", "BTNH,NHD->BTD", out_BTNH, self.wo, shard=shard)
        return checkpoint_name(add_bias(shard.residual(out_BTD), self.bo), "attention_projected")

    @property
    def sinks_N(self) -> jax.Array | None:
        """The attention sinks, float32; None: the layer has none."""
        return None if self.sinks is None else self.sinks[...]


def _qk_norm(model: ModelConfig, **heads: int) -> RMSNorm | None:
    """The norm of queries or keys; `heads` has the name and size of the dimension of heads."""
    if model.qk_norm == "none":
        return None
    dims = {"norm": model.head_dim} if model.qk_norm == "head" else {**heads, "norm": model.head_dim}
    return RMSNorm(epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, **dims)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class MLP(_Block):
    """A gated block (Shazeer 2020, arXiv:2002.05202): activation(x w_gate) * (x w_up), times w_down."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        super().__init__(model, keys, fp8, lora, ("mlp_gate", "mlp_up", "mlp_down"))
        D, F = model.model_dim, model.ffn_dim
        self.w_gate = matrix(keys, fan_in=D, model=D, ffn=F)
        self.w_up = matrix(keys, fan_in=D, model=D, ffn=F)
        self.w_down = matrix(keys, fan_in=F, depth_scale=residual_depth_scale(model), ffn=F, model=D)
        self.activation = model.activation

    @jax.named_scope(scopes.MLP)
    def __call__(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """`x_BTD` is the input of the block, gathered over tensor."""
        gate_BTF = shard.ffn(self.project("mlp_gate", "BTD,DF->BTF", x_BTD, self.w_gate, shard=shard))
        up_BTF = shard.ffn(self.project("mlp_up", "BTD,DF->BTF", x_BTD, self.w_up, shard=shard))
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
        hidden_BTF = _ACTIVATIONS[self.activation](gate_BTF) * up_BTF
        down_BTD = self.project("mlp_down", "BTF,FD->BTD", hidden_BTF, self.w_down, shard=shard)
        return shard.residual(down_BTD)


class LayerOutput(NamedTuple):
    """The results of a layer."""

    x_BTD: jax.Array  # the residual stream
    # Sums over the tokens by name, float32, for terms of the loss; dense layers have none. They add up over tiles, and
    # are global arrays, so that XLA adds those of the ranks.
    sums: dict[str, jax.Array]


class DecoderLayer(nnx.Module):
    """An attention block and an MLP block, whose outputs are added to the residual stream.

    Each has a norm of its input, of its output, or of both: `ModelConfig.norm_placement`.
    """

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        def norm(*placements: str) -> RMSNorm | None:
            if model.norm_placement not in placements:
                return None
            return RMSNorm(epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, norm=model.model_dim)

        self.attention_norm = norm("pre", "pre_and_post")
        self.attention = Attention(model, keys, fp8, lora)
        self.attention_post_norm = norm("post", "pre_and_post")
        self.mlp_norm = norm("pre", "pre_and_post")
        self.mlp = MLP(model, keys, fp8, lora)
        self.mlp_post_norm = norm("post", "pre_and_post")

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        prefetch: Prefetch | None = None,
        *,
        attend: Callable,
        shard: Sharder,
        tables: RopeTables | None,
    ) -> tuple[LayerOutput, Any]:
        """Returns the output, and the prefetched weights (None without `prefetch`).

        T of x_BTD is sharded over context and tensor; each block gathers its input over tensor once.

        Args:
          attend: `(q_BTNH, k_BTKH, v_BTKH, sinks_N or None) -> out_BTNH`.
        """
        x_BTD = checkpoint_name(x_BTD, "residual")
        input_BTD = self.attention_input(x_BTD, shard=shard)
        q_BTNH, gate_BTNH = self.attention.queries(input_BTD, positions_BT, shard=shard, tables=tables)
        k_BTKH, v_BTKH = self.attention.keys_values(input_BTD, positions_BT, shard=shard, tables=tables)
        operands = q_BTNH, k_BTKH, v_BTKH, self.attention.sinks_N
        out_BTNH, next_weights = overlap_with_prefetch(attend, operands, prefetch)
        return self.after_attention(x_BTD, out_BTNH, gate_BTNH, shard=shard), next_weights

    @jax.named_scope(scopes.ATTENTION)
    def attention_input(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """Returns x_BTD, normed if there is a norm before attention, and gathered over tensor."""
        return shard.gathered(_normed(x_BTD, self.attention_norm))

    def after_attention(
        self, x_BTD: jax.Array, out_BTNH: jax.Array, gate_BTNH: jax.Array | None, *, shard: Sharder
    ) -> LayerOutput:
        """The layer after attention: x_BTD plus the projected attention output plus the MLP output."""
        projected_BTD = self.attention.projected(out_BTNH, gate_BTNH, shard=shard)
        with jax.named_scope(scopes.ATTENTION):
            x_BTD += _normed(projected_BTD, self.attention_post_norm)
        with jax.named_scope(scopes.MLP):
            input_BTD = shard.gathered(_normed(x_BTD, self.mlp_norm))
        down_BTD = self.mlp(input_BTD, shard=shard)
        with jax.named_scope(scopes.MLP):
            return LayerOutput(x_BTD + _normed(down_BTD, self.mlp_post_norm), {})


def _normed(x_BTD: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)


def run_layer(
    layer_def: nnx.GraphDef,
    params: LayerParams,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    ranges: Any,
    prefetch: Prefetch | None = None,
    *,
    attend: Callable,
    shard: Sharder,
    tables: RopeTables | None,
) -> tuple[LayerOutput, Any]:
    """Runs the layer `nnx.merge(layer_def, *params)` on whole sequences. With `attend` and `tables` bound, it is a
    `layer_stack.RunLayer`.

    Args:
      attend: `(q_BTNH, k_BTKH, v_BTKH, ranges, sinks_N or None) -> out_BTNH`.
    """

    def attend_masked(q_BTNH, k_BTKH, v_BTKH, sinks_N):
        return attend(q_BTNH, k_BTKH, v_BTKH, ranges, sinks_N)

    layer: DecoderLayer = nnx.merge(layer_def, *params)
    return layer(x_BTD, positions_BT, prefetch, attend=attend_masked, shard=shard, tables=tables)


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x + bias, added in float32, so that the gradient of the bias is summed in float32; in the dtype of x."""
    return x if bias is None else (x.astype(jnp.float32) + bias[...]).astype(x.dtype)
