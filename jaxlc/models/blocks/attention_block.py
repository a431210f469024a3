"""Grouped-query attention: projections, norms of queries and keys, RoPE, sinks and the output gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core import scopes
from jaxlc.core.mixers import mixer_matrices
from jaxlc.models.block import Block, add_bias, bias_vector, residual_depth_scale, weight
from jaxlc.models.init_keys import InitKeys
from jaxlc.models.matmuls import Fp8
from jaxlc.models.norms import RMSNorm
from jaxlc.models.rope import RopeTables, apply_rope
from jaxlc.sharding.rules import Sharder


class Attention(Block):
    """Grouped-query attention (Ainslie et al. 2023): N query heads share K key/value heads."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        super().__init__(model, keys, fp8, lora, ("query", "key", "value", "attention_projected"))
        D, N, K, H = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
        weights = mixer_matrices(model)
        self.wq = weight(keys, weights["wq"])  # with a gate: first q, then the gate
        self.wk = weight(keys, weights["wk"])
        self.wv = weight(keys, weights["wv"])
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
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

    def operands(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> tuple[tuple, jax.Array | None]:
        """Returns (q_BTNH, k_BTKH, v_BTKH, sinks_N or None), and the gate_BTNH of `projected`, or None."""
        q_BTNH, gate_BTNH = self.queries(x_BTD, positions_BT, shard=shard, tables=tables)
        k_BTKH, v_BTKH = self.keys_values(x_BTD, positions_BT, shard=shard, tables=tables)
        return (q_BTNH, k_BTKH, v_BTKH, self.sinks_N), gate_BTNH

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
