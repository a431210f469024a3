"""Gated DeltaNet: linear attention with a recurrent state (Yang et al. 2024, "Gated Delta
Networks"), as in Qwen 3.5.

G key heads of dimension K serve H value heads of dimension V. Queries, keys and values pass a short
causal convolution and SiLU, queries and keys are then scaled to length 1. The state decays by
exp(-exp(log_decay) softplus(x wa + decay_bias)) per token, and sigmoid(x wb) is the step size of
its correction; twice that if the state may change its sign (`model.delta_net.negative_eigenvalues`;
Grazzi et al. 2024, arXiv:2411.12537). The output is normed per head and multiplied by silu(x wz).

What crosses ranks is in `jaxlc.attention.recurrence`, and generation in `jaxlc.models.recurrent`.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.recurrence.chunks import Rule
from jaxlc.attention.recurrence.sharded_recurrence import Filter, Operands
from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.config.kinds import MIXERS, mixer_matrices
from jaxlc.core import scopes
from jaxlc.models.block import InitKeys, RMSNorm, matrix, residual_depth_scale, rms_norm, weight
from jaxlc.models.matmuls import Fp8, in_use
from jaxlc.models.recurrent import RecurrentMixer, RecurrentSizes, initial_decays
from jaxlc.sharding.rules import Sharder


class GatedDeltaNet(RecurrentMixer):
    """See the top of the file. Gates and states are float32."""

    def __init__(
        self,
        model: ModelConfig,
        keys: InitKeys,
        fp8: Fp8 | None = None,
        lora: LoraConfig | None = None,
    ):
        super().__init__(model, keys, fp8, lora, tuple(MIXERS["gated_delta_net"].projections))
        weights, num_taps, num_heads = (
            mixer_matrices(model),
            model.delta_net.conv_taps,
            model.delta_net.value_heads,
        )
        self.wq, self.wk, self.wv = (weight(keys, weights[name]) for name in ("wq", "wk", "wv"))
        self.wz, self.wb, self.wa = (weight(keys, weights[name]) for name in ("wz", "wb", "wa"))
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(keys, fan_in=num_taps, taps=num_taps, **weights[name].outputs)
            for name in ("wq", "wk", "wv")
        )
        self.log_decay, self.decay_bias = initial_decays(keys, num_heads)
        self.out_norm = RMSNorm(
            epsilon=model.delta_net.norm_epsilon or model.norm_epsilon,
            norm=model.delta_net.value_dim,
        )
        self.largest_step = 2.0 if model.delta_net.negative_eigenvalues else 1.0

    @jax.named_scope(scopes.ATTENTION)
    def operands(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple[Operands, jax.Array]:
        """Returns the operands, and the z_BTHV of `projected`. `x_BTD` is the input of the block,
        gathered over tensor."""
        q_BTGK = shard.heads(self.project("query", "BTD,DGK->BTGK", x_BTD, self.wq, shard=shard))
        k_BTGK = shard.heads(self.project("key", "BTD,DGK->BTGK", x_BTD, self.wk, shard=shard))
        v_BTHV = shard.heads(self.project("value", "BTD,DHV->BTHV", x_BTD, self.wv, shard=shard))
        z_BTHV = shard.heads(
            self.project("delta_gate", "BTD,DHV->BTHV", x_BTD, self.wz, shard=shard)
        )
        a_BTH, b_BTH = (
            shard.ffn(self.project(name, "BTD,DH->BTH", x_BTD, w, shard=shard)).astype(jnp.float32)
            for name, w in (("delta_decay", self.wa), ("delta_step", self.wb))
        )
        filters = (in_use(w, shard, jnp.float32) for w in (self.conv_q, self.conv_k, self.conv_v))
        operands = Operands(
            q_BTGK=checkpoint_name(q_BTGK, "query"),
            k_BTGK=checkpoint_name(k_BTGK, "key"),
            v_BTHV=checkpoint_name(v_BTHV, "value"),
            g_BTH=-jnp.exp(self.log_decay[...]) * jax.nn.softplus(a_BTH + self.decay_bias[...]),
            beta_BTH=self.largest_step * jax.nn.sigmoid(b_BTH),
            skip_BTH=None,
            filters=tuple(map(Filter, filters)),
        )
        return operands, checkpoint_name(z_BTHV, "query")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHV: jax.Array, z_BTHV: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        out_BTHV, z_BTHV = shard.heads(out_BTHV), shard.heads(z_BTHV)
        normed_BTHV = rms_norm(
            out_BTHV.astype(jnp.float32), self.out_norm.factor, self.out_norm.epsilon
        )
        gated_BTHV = (normed_BTHV * jax.nn.silu(z_BTHV.astype(jnp.float32))).astype(out_BTHV.dtype)
        out_BTD = self.project(
            "attention_projected", "BTHV,HVD->BTD", gated_BTHV, self.wo, shard=shard
        )
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

    @classmethod
    def sizes(cls, model: ModelConfig) -> RecurrentSizes:
        sizes = model.delta_net
        return RecurrentSizes(
            key=(sizes.key_heads, sizes.key_dim),
            value=(sizes.value_heads, sizes.value_dim),
            conv_taps=sizes.conv_taps,
            rule=Rule(scale=sizes.key_dim**-0.5),
        )
