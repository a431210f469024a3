"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060), as in Granite 4 and
Nemotron-H.

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
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.recurrence.chunks import Rule
from jaxlc.attention.recurrence.sharded_recurrence import Filter, Operands
from jaxlc.attention.state_passing import product
from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.config.kinds import MIXERS, mixer_matrices
from jaxlc.core import scopes
from jaxlc.models.block import (
    InitKeys,
    RMSNorm,
    bias_vector,
    matrix,
    residual_depth_scale,
    weight,
)
from jaxlc.models.matmuls import Fp8, in_use
from jaxlc.models.recurrent import RecurrentMixer, RecurrentSizes, initial_decays
from jaxlc.sharding.rules import Sharder


class Mamba2(RecurrentMixer):
    """See the top of the file. Step sizes and states are float32."""

    def __init__(
        self,
        model: ModelConfig,
        keys: InitKeys,
        fp8: Fp8 | None = None,
        lora: LoraConfig | None = None,
    ):
        super().__init__(model, keys, fp8, lora, tuple(MIXERS["mamba2"].projections))
        weights, sizes = mixer_matrices(model), model.mamba2
        self.wz, self.wv, self.wk, self.wq, self.wb = (
            weight(keys, weights[f"w{x}"]) for x in "zvkqb"
        )
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        convolved = [weights[f"w{x}"].outputs for x in "qkv"]
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(keys, fan_in=sizes.conv_taps, taps=sizes.conv_taps, **dims) for dims in convolved
        )
        self.bias_q, self.bias_k, self.bias_v = (
            bias_vector(heads=dims["heads"], bias=dims["head_dim"]) if sizes.conv_bias else None
            for dims in convolved
        )
        self.log_decay, self.decay_bias = initial_decays(keys, sizes.heads)
        self.skip = nnx.Param(jnp.ones(sizes.heads), dims=("decay",))
        norm = functools.partial(RMSNorm, heads=sizes.heads, norm=sizes.head_dim)
        self.out_norm = None if sizes.norm == "none" else norm(epsilon=model.norm_epsilon)
        self.norm, self.num_groups = sizes.norm, sizes.groups
        self.step_limits = sizes.smallest_step, sizes.largest_step or None

    @classmethod
    def sizes(cls, model: ModelConfig) -> RecurrentSizes:
        sizes = model.mamba2
        return RecurrentSizes(
            key=(sizes.groups, sizes.state_dim),
            value=(sizes.heads, sizes.head_dim),
            conv_taps=sizes.conv_taps,
            rule=Rule(scale=1.0, corrects=False, unit_length=False),
        )

    @jax.named_scope(scopes.ATTENTION)
    def operands(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple[Operands, jax.Array]:
        """Returns the operands, and the z_BTHP of `projected`. `x_BTD` is the input of the block,
        gathered over tensor."""

        def projected(name, weight):
            out = self.project(name, "BTD,DHP->BTHP", x_BTD, weight, shard=shard)
            return shard.heads(out)

        def convolution(taps, bias):
            return Filter(in_use(taps, shard, jnp.float32), None if bias is None else bias[...])

        b_BTH = self.project("delta_step", "BTD,DH->BTH", x_BTD, self.wb, shard=shard)
        b_BTH = shard.ffn(b_BTH).astype(jnp.float32)
        step_BTH = jnp.clip(jax.nn.softplus(b_BTH + self.decay_bias[...]), *self.step_limits)
        operands = Operands(
            q_BTGK=checkpoint_name(projected("query", self.wq), "query"),
            k_BTGK=checkpoint_name(projected("key", self.wk), "key"),
            v_BTHV=checkpoint_name(projected("value", self.wv), "value"),
            g_BTH=-jnp.exp(self.log_decay[...]) * step_BTH,
            beta_BTH=step_BTH,
            skip_BTH=jnp.broadcast_to(self.skip[...], step_BTH.shape),
            filters=(
                convolution(self.conv_q, self.bias_q),
                convolution(self.conv_k, self.bias_k),
                convolution(self.conv_v, self.bias_v),
            ),
        )
        return operands, checkpoint_name(projected("delta_gate", self.wz), "query")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHP: jax.Array, z_BTHP: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        y_BTHP, gate_BTHP = (shard.heads(x).astype(jnp.float32) for x in (out_BTHP, z_BTHP))
        gate_BTHP = jax.nn.silu(gate_BTHP)
        if self.norm == "before_gate":
            y_BTHP = self._normed(y_BTHP) * gate_BTHP
        else:
            y_BTHP = y_BTHP * gate_BTHP
            y_BTHP = y_BTHP if self.norm == "none" else self._normed(y_BTHP)
        out_BTD = self.project(
            "attention_projected",
            "BTHP,HPD->BTD",
            y_BTHP.astype(out_BTHP.dtype),
            self.wo,
            shard=shard,
        )
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

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
