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

from jaxlc.attention.recurrence.sharded_recurrence import Operands
from jaxlc.config import ModelConfig
from jaxlc.core import scopes
from jaxlc.models.block import InitKeys, RMSNorm, rms_norm
from jaxlc.models.recurrent import RecurrentMixer, initial_decays
from jaxlc.sharding.rules import Sharder


class KimiDeltaAttention(RecurrentMixer):
    """See the top of the file. Gates and states are float32."""

    wf_down: nnx.Param
    wf_up: nnx.Param
    wz_down: nnx.Param
    wz_up: nnx.Param

    def add_own(self, model: ModelConfig, keys: InitKeys) -> None:
        sizes = model.kda
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
        q_BTHK, k_BTHK, v_BTHK = self.queries_keys_values(x_BTD, shard=shard)
        z_BTHK = self._low_rank("gate", x_BTD, self.wz_down, self.wz_up, shard=shard)
        y_BTHK = self._low_rank("decay", x_BTD, self.wf_down, self.wf_up, shard=shard)
        b_BTH = self.numbers("delta_step", x_BTD, self.wb, shard=shard)
        operands = Operands(
            q_BTGK=q_BTHK,
            k_BTGK=k_BTHK,
            v_BTHV=v_BTHK,
            g_BTH=self._log_decays(y_BTHK),
            beta_BTH=jax.nn.sigmoid(b_BTH),
            skip_BTH=None,
            filters=self.filters(shard),
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

    def gated(self, out_BTHK: jax.Array, gate_BTHK: jax.Array) -> jax.Array:
        normed_BTHK = rms_norm(out_BTHK, self.out_norm.factor, self.out_norm.epsilon)
        return normed_BTHK * jax.nn.sigmoid(gate_BTHK)
