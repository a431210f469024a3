"""Gated DeltaNet: linear attention with a recurrent state (Yang et al. 2024, "Gated Delta Networks"), as in Qwen 3.5.

G key heads of dimension K serve H value heads of dimension V. Queries, keys and values pass a short causal convolution
and SiLU, queries and keys are then scaled to length 1. The state decays by exp(-exp(log_decay) softplus(x wa +
decay_bias)) per token, and sigmoid(x wb) is the step size of its correction; twice that if the state may change its
sign (`ModelConfig.delta_negative_eigenvalues`; Grazzi et al. 2024, arXiv:2411.12537). The output is normed per head and
multiplied by silu(x wz).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.config.schema import DELTA_PROJECTIONS
from jaxlc.core import scopes
from jaxlc.core.mixers import mixer_matrices
from jaxlc.models.block import Block, matrix, residual_depth_scale, weight
from jaxlc.models.init_keys import InitKeys
from jaxlc.models.matmuls import Fp8, in_use
from jaxlc.models.norms import RMSNorm, rms_norm
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.rules import Sharder

# Initial decay: A uniform in the first range, step sizes log-uniform in the second (Mamba-2, Dao and Gu 2024).
_DECAYS, _STEP_SIZES = (1.0, 16.0), (1e-3, 0.1)


class GatedDeltaNet(Block):
    """The block that mixes tokens; see the top of the file. Gates and states are float32."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        names = ("query", "key", "value", "attention_projected", *DELTA_PROJECTIONS)
        super().__init__(model, keys, fp8, lora, names)
        weights, num_taps, num_heads = mixer_matrices(model), model.delta_conv_taps, model.delta_value_heads
        self.wq, self.wk, self.wv = (weight(keys, weights[name]) for name in ("wq", "wk", "wv"))
        self.wz, self.wb, self.wa = (weight(keys, weights[name]) for name in ("wz", "wb", "wa"))
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(keys, fan_in=num_taps, taps=num_taps, **weights[name].outputs) for name in ("wq", "wk", "wv")
        )
        decay = jax.random.uniform(keys.params(), (num_heads,), minval=_DECAYS[0], maxval=_DECAYS[1])
        logs = [math.log(size) for size in _STEP_SIZES]
        step_size = jnp.exp(jax.random.uniform(keys.params(), (num_heads,), minval=logs[0], maxval=logs[1]))
        self.log_decay = nnx.Param(jnp.log(decay), dims=("decay",))
        self.decay_bias = nnx.Param(jnp.log(jnp.expm1(step_size)), dims=("decay",))  # the inverse of softplus
        self.out_norm = RMSNorm(epsilon=model.delta_norm_epsilon or model.norm_epsilon, norm=model.delta_value_dim)
        self.largest_step = 2.0 if model.delta_negative_eigenvalues else 1.0

    @jax.named_scope(scopes.ATTENTION)
    def operands(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> tuple[tuple, jax.Array]:
        """Returns the operands of `jaxlc.attention.delta_rule.sharded_delta_net.ShardedDeltaNet`, and the z_BTHV of
        `projected`. `x_BTD` is the input of the block, gathered over tensor."""
        del positions_BT, tables
        q_BTGK = shard.heads(self.project("query", "BTD,DGK->BTGK", x_BTD, self.wq, shard=shard))
        k_BTGK = shard.heads(self.project("key", "BTD,DGK->BTGK", x_BTD, self.wk, shard=shard))
        v_BTHV = shard.heads(self.project("value", "BTD,DHV->BTHV", x_BTD, self.wv, shard=shard))
        z_BTHV = shard.heads(self.project("delta_gate", "BTD,DHV->BTHV", x_BTD, self.wz, shard=shard))
        a_BTH, b_BTH = (
            shard.ffn(self.project(name, "BTD,DH->BTH", x_BTD, w, shard=shard)).astype(jnp.float32)
            for name, w in (("delta_decay", self.wa), ("delta_step", self.wb))
        )
        g_BTH = -jnp.exp(self.log_decay[...]) * jax.nn.softplus(a_BTH + self.decay_bias[...])
        filters = (in_use(w, shard, jnp.float32) for w in (self.conv_q, self.conv_k, self.conv_v))
        qkv = checkpoint_name(q_BTGK, "query"), checkpoint_name(k_BTGK, "key"), checkpoint_name(v_BTHV, "value")
        return (*qkv, g_BTH, self.largest_step * jax.nn.sigmoid(b_BTH), *filters), checkpoint_name(z_BTHV, "query")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHV: jax.Array, z_BTHV: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        out_BTHV, z_BTHV = shard.heads(out_BTHV), shard.heads(z_BTHV)
        normed_BTHV = rms_norm(out_BTHV.astype(jnp.float32), self.out_norm.factor, self.out_norm.epsilon)
        gated_BTHV = (normed_BTHV * jax.nn.silu(z_BTHV.astype(jnp.float32))).astype(out_BTHV.dtype)
        out_BTD = self.project("attention_projected", "BTHV,HVD->BTD", gated_BTHV, self.wo, shard=shard)
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")
