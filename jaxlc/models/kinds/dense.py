"""The feed-forward block of all tokens: the one of dense layers, or the shared expert of a
layer with experts.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import ModelConfig
from jaxlc.config.kinds.dense import DenseKind, ffn_matrices
from jaxlc.core import scopes
from jaxlc.models.block import Block, Init, add_bias, bias_vector
from jaxlc.sharding.rules import Sharder

_GATE_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# transformers, models/gpt_oss: both are bounded, the gate only above.
_LIMIT, _SHARPNESS = 7.0, 1.702


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: str, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """activation(gate) * up, computed in float32 or wider and rounded to their dtype once, as are its gradients;
    `activation` as in `ModelConfig`. Without a gate (relu2), the square of what is above 0 in up.
    """
    return _gated_rounded(activation, gate, up)


def _gated_forward(activation: str, *operands: jax.Array | None):
    return _gated_rounded(activation, *operands), operands


def _gated_backward(activation: str, operands, dhidden: jax.Array):
    return jax.vjp(functools.partial(_gated_rounded, activation), *operands)[1](dhidden)


gated.defvjp(_gated_forward, _gated_backward)


def _gated_rounded(activation: str, *operands: jax.Array | None) -> jax.Array:
    dtype = operands[-1].dtype
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(dtype, jnp.float32)), operands)
    return _gated(activation, *wide).astype(dtype)


def _gated(activation: str, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    if gate is None:
        return jnp.square(jax.nn.relu(up))
    if activation != "clamped_swiglu":
        return _GATE_FUNCTIONS[activation](gate) * up
    gate = jnp.minimum(gate, _LIMIT)
    up = jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(_SHARPNESS * gate)


class MLP(Block):
    """A gated block (Shazeer 2020, arXiv:2002.05202): activation(x w_gate) * (x w_up), times
    w_down. Or one without a gate: relu(x w_up)^2, times w_down.
    """

    w_gate: nnx.Param | None = None

    def __init__(self, model: ModelConfig, init: Init):
        weights = ffn_matrices(model, model.ffn_dim)
        super().__init__(model, init, weights, DenseKind.projections)
        factors = model.mlp_gate_multiplier, model.mlp_output_multiplier
        self.multipliers = tuple(zip(("mlp_gate", "mlp_down"), factors))
        D = model.model_dim
        F = model.ffn_dim
        has_bias = model.mlp_bias
        self.b_gate = bias_vector(has_bias and "w_gate" in weights, ffn_bias=F)
        self.b_up = bias_vector(has_bias, ffn_bias=F)
        self.b_down = bias_vector(has_bias, bias=D)
        self.activation = model.activation

    @jax.named_scope(scopes.MLP)
    def __call__(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """Returns out_BTD; `x_BTD` is the input of the block, gathered over tensor."""

        def projected(name, bias):
            out_BTF = shard.ffn(self.project(name, "BTD,DF->BTF", x_BTD, shard=shard))
            return checkpoint_name(add_bias(out_BTF, bias), name)

        gate_BTF = None
        if self.w_gate is not None:
            gate_BTF = projected("mlp_gate", self.b_gate)
        up_BTF = projected("mlp_up", self.b_up)
        hidden_BTF = gated(self.activation, gate_BTF, up_BTF)
        down_BTD = self.project("mlp_down", "BTF,FD->BTD", hidden_BTF, shard=shard)
        return add_bias(shard.residual(down_BTD), self.b_down)
