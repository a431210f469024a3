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

from jaxlc.config import ModelConfig
from jaxlc.models.block import Init, RMSNorm
from jaxlc.models.recurrent import RecurrentMixer, initial_decays
from jaxlc.sharding.rules import Sharder


class KimiDeltaAttention(RecurrentMixer):
    """See the top of the file. Gates and states are float32."""

    gate_function = staticmethod(jax.nn.sigmoid)

    def add_own(self, model: ModelConfig, init: Init) -> None:
        sizes = model.kda
        log_decay, self.decay_bias = initial_decays(init, sizes.key_heads, sizes.head_dim)
        # [1, 1, H, 1], as in files
        dims = ("unsharded", "unsharded", "decay", "unsharded")
        self.log_decay = nnx.Param(log_decay[...].reshape(1, 1, -1, 1), dims=dims)
        self.out_norm = RMSNorm(epsilon=model.norm_epsilon, norm=sizes.head_dim)
        self.gate_lower_bound = sizes.gate_lower_bound

    def gate(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        return self._low_rank("gate", x_BTD, shard=shard)

    def changes(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple:
        y_BTHK = self._low_rank("decay", x_BTD, shard=shard)
        b_BTH = self.numbers("delta_step", x_BTD, shard=shard)
        return self._log_decays(y_BTHK), jax.nn.sigmoid(b_BTH), None

    def _low_rank(self, name: str, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        rank_BTL = self.project(f"{name}_down", "BTD,DL->BTL", x_BTD, shard=shard)
        return shard.heads(
            self.project(f"{name}_up", "BTL,LHK->BTHK", shard.gathered(rank_BTL), shard=shard)
        )

    def _log_decays(self, y_BTHK: jax.Array) -> jax.Array:
        """The logarithms of the decays of a token, at most 0."""
        rates_11H1 = jnp.exp(self.log_decay[...])
        y_BTHK = y_BTHK.astype(jnp.float32) + self.decay_bias[...]
        if self.gate_lower_bound:
            return self.gate_lower_bound * jax.nn.sigmoid(rates_11H1 * y_BTHK)
        return -rates_11H1 * jax.nn.softplus(y_BTHK)
