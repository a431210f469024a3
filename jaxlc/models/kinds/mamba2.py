"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060), as in Granite 4, Nemotron-H
and Falcon-H1.

H heads of P channels x write to states [N, P], and G groups of heads share the vectors B and C:

    S = exp(-exp(log_decay) dt) S + B (dt x)^T;  y = S^T C + skip x

with the step size dt = softplus(x_t wb + decay_bias). x, B and C pass a short causal convolution
and SiLU first. y is multiplied by silu(z), and normed in groups of heads.

This is the recurrence of `jaxlc.attention.recurrence` without correction: C, B and x are its
queries, keys and values, and parameters have these names. Generation is in `jaxlc.models.recurrent`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlc.attention.recurrence.chunks import Rule
from jaxlc.attention.state_passing import product
from jaxlc.config import ModelConfig
from jaxlc.models.block import Init, RMSNorm
from jaxlc.models.contract import KindOnMesh
from jaxlc.models.recurrent import RecurrentMixer, initial_decays
from jaxlc.sharding.rules import Sharder


class Mamba2(RecurrentMixer):
    """See the top of the file. Step sizes and states are float32."""

    def add_own(self, model: ModelConfig, init: Init) -> None:
        sizes = model.mamba2
        self.multipliers = (
            ("delta_gate", sizes.gate_multiplier),
            ("value", sizes.value_multiplier),
            ("key", sizes.key_multiplier),
            ("query", sizes.query_multiplier),
            ("delta_step", sizes.step_multiplier),
            ("attention_projected", sizes.output_multiplier),
        )
        self.log_decay, self.decay_bias = initial_decays(init, sizes.heads)
        self.skip = nnx.Param(jnp.ones(sizes.heads), dims=("decay",))
        norm = functools.partial(RMSNorm, heads=sizes.heads, norm=sizes.head_dim)
        self.out_norm = None if sizes.norm == "none" else norm(epsilon=model.norm_epsilon)
        self.norm = sizes.norm
        self.num_groups = sizes.groups
        self.step_limits = sizes.smallest_step, sizes.largest_step or None

    @classmethod
    def rule(cls, on: KindOnMesh) -> Rule:
        return Rule(scale=1.0, corrects=False)

    def changes(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple:
        t_BTH = self.numbers("delta_step", x_BTD, shard=shard)
        step_BTH = jnp.clip(jax.nn.softplus(t_BTH + self.decay_bias[...]), *self.step_limits)
        g_BTH = -jnp.exp(self.log_decay[...]) * step_BTH
        return g_BTH, step_BTH, jnp.broadcast_to(self.skip[...], step_BTH.shape)

    def gated(self, out_BTHP: jax.Array, gate_BTHP: jax.Array) -> jax.Array:
        gate_BTHP = jax.nn.silu(gate_BTHP)
        if self.norm == "before_gate":
            return self._normed(out_BTHP) * gate_BTHP
        gated_BTHP = out_BTHP * gate_BTHP
        return gated_BTHP if self.norm == "none" else self._normed(gated_BTHP)

    def _normed(self, y_BTHP: jax.Array) -> jax.Array:
        """RMSNorm of the channels of each group of heads. A group may be split over tensor ranks, so
        the sums of its heads are added by a product with a matrix of 0 and 1.
        """
        num_heads, width = y_BTHP.shape[2:]
        heads_of_group = num_heads // self.num_groups
        is_in_group_HG = jnp.repeat(jnp.eye(self.num_groups), heads_of_group, axis=0)
        squares_BTH = (y_BTHP**2).sum(-1)
        mean_BTG = product("BTH,HG->BTG", squares_BTH, is_in_group_HG) / (heads_of_group * width)
        factor_BTG = jax.lax.rsqrt(mean_BTG + self.out_norm.epsilon)
        factor_BTH = product("BTG,HG->BTH", factor_BTG, is_in_group_HG)
        return y_BTHP * factor_BTH[..., None] * self.out_norm.factor
