"""Kimi Delta Attention: the delta rule with a decay of each channel (Kimi Linear,
arXiv:2510.26692).

Queries, keys and values have H heads of dimension K. Each passes a short causal convolution and
SiLU, queries and keys are then scaled to length 1. Channel c of the state of head h decays by
exp(-exp(log_decay_h) softplus(y_hc + decay_bias_hc)) per token, with y = x wf_down wf_up; or with
`model.kda.gate_lower_bound` by exp(bound sigmoid(exp(log_decay_h) (y_hc + decay_bias_hc))).
sigmoid(x wb) is the step size of the correction. The output is normed per head and multiplied by
sigmoid(x wz_down wz_up).
"""

import jax
import jax.numpy as jnp
from flax import nnx
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


class KimiDeltaAttention(RecurrentMixer):
    """See the top of the file. Gates and states are float32."""

    def __init__(
        self,
        model: ModelConfig,
        keys: InitKeys,
        fp8: Fp8 | None = None,
        lora: LoraConfig | None = None,
    ):
        super().__init__(model, keys, fp8, lora, tuple(MIXERS["kimi_delta"].projections))
        weights, sizes = mixer_matrices(model), model.kda
        self.wq, self.wk, self.wv = (weight(keys, weights[name]) for name in ("wq", "wk", "wv"))
        self.wb = weight(keys, weights["wb"])
        self.wf_down, self.wf_up = (weight(keys, weights[f"wf_{x}"]) for x in ("down", "up"))
        self.wz_down, self.wz_up = (weight(keys, weights[f"wz_{x}"]) for x in ("down", "up"))
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(keys, fan_in=sizes.conv_taps, taps=sizes.conv_taps, **weights["wq"].outputs)
            for _ in "qkv"
        )
        log_decay, self.decay_bias = initial_decays(keys, sizes.key_heads, sizes.head_dim)
        # [1, 1, H, 1], as in files
        dims = ("unsharded", "unsharded", "decay", "unsharded")
        self.log_decay = nnx.Param(log_decay[...].reshape(1, 1, -1, 1), dims=dims)
        self.out_norm = RMSNorm(epsilon=model.norm_epsilon, norm=sizes.head_dim)
        self.gate_lower_bound = sizes.gate_lower_bound

    @jax.named_scope(scopes.ATTENTION)
    def operands(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple[Operands, jax.Array]:
        """Returns the operands, and the z_BTHK of `projected`. `x_BTD` is the input of the block,
        gathered over tensor."""
        q_BTHK, k_BTHK, v_BTHK = (
            checkpoint_name(
                shard.heads(self.project(name, "BTD,DHK->BTHK", x_BTD, w, shard=shard)), name
            )
            for name, w in (("query", self.wq), ("key", self.wk), ("value", self.wv))
        )
        z_BTHK = self._low_rank("gate", x_BTD, self.wz_down, self.wz_up, shard=shard)
        y_BTHK = self._low_rank("decay", x_BTD, self.wf_down, self.wf_up, shard=shard)
        b_BTH = shard.ffn(self.project("delta_step", "BTD,DH->BTH", x_BTD, self.wb, shard=shard))
        filters = (in_use(w, shard, jnp.float32) for w in (self.conv_q, self.conv_k, self.conv_v))
        operands = Operands(
            q_BTGK=q_BTHK,
            k_BTGK=k_BTHK,
            v_BTHV=v_BTHK,
            g_BTH=self._log_decays(y_BTHK),
            beta_BTH=jax.nn.sigmoid(b_BTH.astype(jnp.float32)),
            skip_BTH=None,
            filters=tuple(map(Filter, filters)),
        )
        return operands, checkpoint_name(z_BTHK, "query")

    def _low_rank(self, name: str, x_BTD, down, up, *, shard: Sharder) -> jax.Array:
        rank_BTL = self.project(f"{name}_down", "BTD,DL->BTL", x_BTD, down, shard=shard)
        return shard.heads(
            self.project(f"{name}_up", "BTL,LHK->BTHK", shard.gathered(rank_BTL), up, shard=shard)
        )

    def _log_decays(self, y_BTHK: jax.Array) -> jax.Array:
        """The logarithms of the decays of a token, at most 0."""
        rates_11H1 = jnp.exp(self.log_decay[...])
        y_BTHK = y_BTHK.astype(jnp.float32) + self.decay_bias[...]
        if self.gate_lower_bound:
            return self.gate_lower_bound * jax.nn.sigmoid(rates_11H1 * y_BTHK)
        return -rates_11H1 * jax.nn.softplus(y_BTHK)

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHK: jax.Array, z_BTHK: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        out_BTHK, z_BTHK = shard.heads(out_BTHK), shard.heads(z_BTHK)
        normed_BTHK = rms_norm(
            out_BTHK.astype(jnp.float32), self.out_norm.factor, self.out_norm.epsilon
        )
        gate_BTHK = jax.nn.sigmoid(z_BTHK.astype(jnp.float32))
        gated_BTHK = (normed_BTHK * gate_BTHK).astype(out_BTHK.dtype)
        out_BTD = self.project(
            "attention_projected", "BTHK,HKD->BTD", gated_BTHK, self.wo, shard=shard
        )
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

    @classmethod
    def sizes(cls, model: ModelConfig) -> RecurrentSizes:
        sizes = model.kda
        heads = sizes.key_heads, sizes.head_dim
        rule = Rule(scale=sizes.head_dim**-0.5)
        return RecurrentSizes(key=heads, value=heads, conv_taps=sizes.conv_taps, rule=rule)
