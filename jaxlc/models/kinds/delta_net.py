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

from jaxlc.config import ModelConfig
from jaxlc.models.block import Init, RMSNorm
from jaxlc.models.recurrent import RecurrentMixer, initial_decays
from jaxlc.sharding.rules import Sharder


class GatedDeltaNet(RecurrentMixer):
    """See the top of the file. Gates and states are float32."""

    def add_own(self, model: ModelConfig, init: Init) -> None:
        sizes = model.delta_net
        self.log_decay, self.decay_bias = initial_decays(init, sizes.value_heads)
        epsilon = sizes.norm_epsilon or model.norm_epsilon
        self.out_norm = RMSNorm(epsilon=epsilon, norm=sizes.value_dim)
        self.largest_step = 2.0 if sizes.negative_eigenvalues else 1.0

    def changes(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple:
        a_BTH = self.numbers("delta_decay", x_BTD, shard=shard)
        b_BTH = self.numbers("delta_step", x_BTD, shard=shard)
        g_BTH = -jnp.exp(self.log_decay[...]) * jax.nn.softplus(a_BTH + self.decay_bias[...])
        return g_BTH, self.largest_step * jax.nn.sigmoid(b_BTH), None
