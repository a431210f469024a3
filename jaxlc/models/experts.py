"""A mixture of experts: a router, and gated feed-forward blocks of which each token uses some.

Routers are computed in float32: a rounded logit changes the choice of experts. Weights of experts are gathered as those
of other layers, and every rank computes the experts of its own tokens: no token is sent, and none is dropped.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core import scopes
from jaxlc.core.axes import TENSOR
from jaxlc.models.activations import gated
from jaxlc.models.block import bias_vector, matrix, residual_depth_scale
from jaxlc.models.expert_blocks import ExpertWeights, expert_outputs
from jaxlc.models.init_keys import InitKeys
from jaxlc.models.matmuls import Fp8, in_use
from jaxlc.sharding.rules import Sharder

CHOICE = "expert_choice"  # checkpoint name of the chosen experts, which a recomputation must not change


class FeedForwardOutput(NamedTuple):
    """The results of a feed-forward block."""

    out_BTD: jax.Array
    sums: dict[str, jax.Array]  # see `LayerOutput`
    chosen_BTk: jax.Array | None = None  # int32: the experts of each token; None: the block has no experts


class Routing(NamedTuple):
    """The experts of each token."""

    chosen_BTk: jax.Array  # int32
    weights_BTk: jax.Array  # float32: factors of their outputs
    probs_BTE: jax.Array  # float32: softmax of all logits
    logits_BTE: jax.Array  # float32


class Experts(nnx.Module):
    """The router [D, E] and the weights of E experts; see `core/mixers/expert_feed_forward.py`."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        del fp8, lora  # the config has neither for experts: `checks/expert_checks.py`
        D, E, F = model.model_dim, model.num_experts, model.expert_ffn_dim
        depth_scale = residual_depth_scale(model)
        self.router = matrix(keys, fan_in=D, model=D, experts=E)
        self.expert_gate = matrix(keys, fan_in=D, experts=E, model=D, ffn=F)
        self.expert_up = matrix(keys, fan_in=D, experts=E, model=D, ffn=F)
        self.expert_down = matrix(keys, fan_in=F, depth_scale=depth_scale, experts=E, ffn=F, model=D)
        has_bias = model.expert_bias
        self.router_bias = bias_vector(bias=E) if has_bias else None
        self.gate_bias = bias_vector(experts=E, ffn_bias=F) if has_bias else None
        self.up_bias = bias_vector(experts=E, ffn_bias=F) if has_bias else None
        self.down_bias = bias_vector(experts=E, bias=D) if has_bias else None
        self.num_chosen = model.experts_per_token
        self.router_kind, self.renormalizes = model.router, model.renormalize_router
        self.activation = model.activation

    @jax.named_scope(scopes.MLP)
    def __call__(
        self, x_BTD: jax.Array, positions_BT: jax.Array, chosen_BTk: jax.Array | None = None, *, shard: Sharder
    ) -> FeedForwardOutput:
        """`x_BTD` is the input of the block, gathered over tensor; sums are over the tokens with a position >= 0.

        Args:
          chosen_BTk: the experts of each token, instead of those that the router chooses.
        """
        routing = self.route(x_BTD, chosen_BTk, shard=shard)
        tokens = x_BTD, routing.chosen_BTk, routing.weights_BTk
        params = self.expert_gate, self.expert_up, self.expert_down
        weights = [in_use(param, shard, x_BTD.dtype) for param in params]
        dims = [param.dims for param in params]
        biases = [bias for bias in (self.gate_bias, self.up_bias, self.down_bias) if bias is not None]
        weights += [bias[...] for bias in biases]
        dims += [bias.dims for bias in biases]
        compute = functools.partial(_local_outputs, activation=self.activation)
        with jax.named_scope(scopes.EXPERTS):
            out_BTD = shard.residual(shard.by_rank(compute, tokens, weights, dims))
        return FeedForwardOutput(out_BTD, _sums(routing, positions_BT >= 0), routing.chosen_BTk)

    @jax.named_scope(scopes.ROUTER)
    def route(self, x_BTD: jax.Array, chosen_BTk: jax.Array | None = None, *, shard: Sharder) -> Routing:
        """Chooses the experts of each token, unless they are given. Gradients reach the logits through the weights."""
        router_DE = in_use(self.router, shard, x_BTD.dtype).astype(jnp.float32)
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE", x_BTD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST
        )
        if self.router_bias is not None:
            logits_BTE += self.router_bias[...]
        probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        if chosen_BTk is None:
            # Of logits: the softmax of float32 logits may have equal results.
            chosen_BTk = jax.lax.top_k(jax.lax.stop_gradient(logits_BTE), self.num_chosen)[1]
            chosen_BTk = checkpoint_name(chosen_BTk, CHOICE)
        if self.router_kind == "topk_softmax":
            weights_BTk = jax.nn.softmax(jnp.take_along_axis(logits_BTE, chosen_BTk, axis=-1), axis=-1)
        else:
            weights_BTk = jnp.take_along_axis(probs_BTE, chosen_BTk, axis=-1)
            if self.renormalizes:
                weights_BTk /= weights_BTk.sum(-1, keepdims=True)
        return Routing(chosen_BTk, weights_BTk, probs_BTE, logits_BTE)


def _local_outputs(tokens, weights, *, activation: str) -> jax.Array:
    """out_btD of the tokens and the weights of one rank."""
    x_btD, chosen_btk, weights_btk = tokens
    experts = ExpertWeights(*weights)
    if experts.down_bias_ED is not None:  # outputs are summed over tensor
        is_first = jax.lax.axis_index(TENSOR) == 0
        experts = experts._replace(down_bias_ED=jnp.where(is_first, experts.down_bias_ED, 0))
    x_TD, chosen_Tk, weights_Tk = (x.reshape(-1, x.shape[-1]) for x in (x_btD, chosen_btk, weights_btk))
    out_TD = expert_outputs(x_TD, chosen_Tk, weights_Tk, experts, functools.partial(gated, activation))
    return out_TD.reshape(x_btD.shape)


def _sums(routing: Routing, is_text_BT: jax.Array) -> dict[str, jax.Array]:
    """Sums over the tokens that are no padding, float32: for the losses and metrics of `step/expert_balance.py`."""
    weights_BT = is_text_BT.astype(jnp.float32)
    num_experts = routing.probs_BTE.shape[-1]
    is_chosen_BTkE = routing.chosen_BTk[..., None] == jnp.arange(num_experts)
    log_z_BT = jax.nn.logsumexp(routing.logits_BTE, axis=-1)
    return dict(
        expert_counts=jnp.where(is_chosen_BTkE, weights_BT[..., None, None], 0).sum((0, 1, 2)),
        expert_probs=(routing.probs_BTE * weights_BT[..., None]).sum((0, 1)),
        router_z=(log_z_BT**2 * weights_BT).sum(),
    )
