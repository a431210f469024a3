"""A mixture of experts: a router, gated feed-forward blocks of which each token uses some, and a
shared one.

Routers are computed in float32: a rounded logit changes the choice of experts. Weights of experts
are gathered as those of other layers, and every rank computes the experts of its own tokens: no
token is sent, and none is dropped.

The products with their weights are in `models.expert_products`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config.kinds.contract import Matrix
from jaxlc.config.kinds.dense import is_gated
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.models.model_schema import LayerConfig
from jaxlc.core import TENSOR, scopes
from jaxlc.models.block import Block, Init, bias_vector, matrix, residual_depth_scale
from jaxlc.models.contract import CHOICE, Routed, RoutedOutput
from jaxlc.models.expert_products import ExpertWeights, LowRank, expert_outputs
from jaxlc.models.kinds.dense import MLP, gated
from jaxlc.models.lora import make_adapters
from jaxlc.models.matmuls import in_use
from jaxlc.sharding.rules import Sharder, is_vector

_TINY = 1e-20  # added to a sum of sigmoids, as in transformers


class Routing(NamedTuple):
    """The experts of each token."""

    chosen_BTk: jax.Array  # int32
    weights_BTk: jax.Array  # float32: factors of their outputs
    # float32: softmax of all logits, or their sigmoids divided by the sum of these
    probs_BTE: jax.Array
    logits_BTE: jax.Array  # float32


class ExpertsLatent(Block):
    """The projections of tokens to the latent of experts, and back."""

    def __init__(self, model: LayerConfig, init: Init):
        width = dict(model=model.model_dim)
        latent = dict(latent=model.experts.latent_dim)
        weights = dict(w_down=Matrix(width, latent), w_up=Matrix(latent, width))
        super().__init__(model, init, weights, dict(latent_down="w_down", latent_up="w_up"))

    def down(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """The latents, gathered over tensor, of `x_BTD`, which is too."""
        latent_BTL = self.project("latent_down", "BTD,DL->BTL", x_BTD, shard=shard)
        return shard.gathered(latent_BTL)

    def up(self, out_BTL: jax.Array, *, shard: Sharder) -> jax.Array:
        """out_BTD of the outputs of experts."""
        out_BTD = self.project("latent_up", "BTL,LD->BTD", out_BTL, shard=shard)
        return shard.residual(out_BTD)


class Experts(nnx.Module, Routed):
    """The router [D, E] and the weights of E experts; see `config/kinds/experts.py`."""

    def __init__(self, model: LayerConfig, init: Init):
        sizes = model.experts
        D = model.model_dim
        E = sizes.num_experts
        F = sizes.ffn_dim
        depth_scale = residual_depth_scale(model)
        self.router = matrix(init, fan_in=D, model=D, experts=E)
        has_gate = is_gated(model)
        projections = EXPERT_PROJECTIONS if has_gate else ("expert_up", "expert_down")
        L = sizes.latent_dim or D
        self.expert_gate = matrix(init, fan_in=L, experts=E, model=L, ffn=F) if has_gate else None
        self.expert_up = matrix(init, fan_in=L, experts=E, model=L, ffn=F)
        self.expert_down = matrix(
            init, fan_in=F, depth_scale=depth_scale, experts=E, ffn=F, model=L
        )
        has_bias = sizes.bias
        self.choice_bias = bias_vector(sizes.choice_bias, bias=E)
        self.router_bias = bias_vector(has_bias, bias=E)
        self.gate_bias = bias_vector(has_bias and has_gate, experts=E, ffn_bias=F)
        self.up_bias = bias_vector(has_bias, experts=E, ffn_bias=F)
        self.down_bias = bias_vector(has_bias, experts=E, bias=L)
        self.latent = ExpertsLatent(model, init) if sizes.latent_dim else None
        self.lora = make_adapters(model, init.lora, projections, init.adapter_key)
        fp8_names = () if init.fp8 is None else init.fp8.matmuls
        self.fp8_names = tuple(name for name in projections if name in fp8_names)
        shared = dataclasses.replace(
            model, ffn_dim=sizes.shared_ffn_dim, feed_forward="dense", mlp_bias=False
        )
        self.shared = MLP(shared, init) if sizes.shared_ffn_dim else None
        self.shared_gate = matrix(init, fan_in=D, model=D, experts=1) if sizes.shared_gate else None
        self.num_chosen = sizes.experts_per_token
        self.router_kind = sizes.router
        self.renormalizes = sizes.renormalize
        self.scale = sizes.scale
        self.groups = sizes.groups, sizes.groups_per_token
        self.activation = model.activation

    @jax.named_scope(scopes.MLP)
    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        chosen_BTk: jax.Array | None = None,
        *,
        shard: Sharder,
    ) -> RoutedOutput:
        """`x_BTD` is the input of the block, gathered over tensor; sums are over the tokens with a
        position >= 0.

        Args:
          chosen_BTk: the experts of each token, instead of those that the router chooses: int32, of an earlier call; or
            unsigned, as recorded, where the router chooses for a token with the largest value.
        """
        routing = self.route(x_BTD, chosen_BTk, shard=shard)
        inputs = x_BTD if self.latent is None else self.latent.down(x_BTD, shard=shard)
        tokens = inputs, routing.chosen_BTk, routing.weights_BTk
        params = self._params()

        def by_weight(function) -> ExpertWeights:
            return jax.tree.map(function, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))

        weights = by_weight(
            lambda param: param[...] if is_vector(param.dims) else in_use(param, shard, x_BTD.dtype)
        )
        dims = by_weight(lambda param: param.dims)
        scale = 1.0 if self.lora is None else self.lora.scale
        settings = dict(activation=self.activation, adapter_scale=scale, fp8_names=self.fp8_names)
        compute = functools.partial(_local_outputs, **settings, kernel=shard.expert_kernel)
        with jax.named_scope(scopes.EXPERTS):
            out_BTD = shard.residual(shard.by_rank(compute, tokens, weights, dims))
            if self.latent is not None:
                out_BTD = self.latent.up(out_BTD, shard=shard)
        if self.shared is not None:
            out_BTD += self.shared_output(x_BTD, shard=shard)
        return RoutedOutput(out_BTD, _sums(routing, positions_BT >= 0), routing.chosen_BTk)

    def _params(self) -> ExpertWeights:
        """The parameters of all experts in the places of their values."""
        adapters = dict.fromkeys(EXPERT_PROJECTIONS)
        if self.lora is not None:
            adapters |= {
                name: LowRank(self.lora.of(name).a, self.lora.of(name).b)
                for name in self.lora.names
            }
        return ExpertWeights(
            *(self.expert_gate, self.expert_up, self.expert_down),
            *(self.gate_bias, self.up_bias, self.down_bias),
            *(adapters[name] for name in EXPERT_PROJECTIONS),
        )

    def shared_output(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """out_BTD of the shared expert, times the sigmoid of its gate, which is computed in
        float32.
        """
        out_BTD = self.shared(x_BTD, shard=shard)
        if self.shared_gate is None:
            return out_BTD
        gate_BT1 = shard.residual(jax.nn.sigmoid(_logits(x_BTD, self.shared_gate, shard=shard)))
        return (out_BTD.astype(jnp.float32) * gate_BT1).astype(out_BTD.dtype)

    @jax.named_scope(scopes.ROUTER)
    def route(self, x_BTD: jax.Array, chosen_BTk: jax.Array | None, *, shard: Sharder) -> Routing:
        """Chooses the experts of each token, unless they are given. Gradients reach the logits
        through the weights.
        """
        logits_BTE = _logits(x_BTD, self.router, shard=shard)
        if self.router_bias is not None:
            logits_BTE += self.router_bias[...]
        is_sigmoid = self.router_kind == "sigmoid"
        scores_BTE = (
            jax.nn.sigmoid(logits_BTE) if is_sigmoid else jax.nn.softmax(logits_BTE, axis=-1)
        )
        if chosen_BTk is None or jnp.issubdtype(chosen_BTk.dtype, jnp.unsignedinteger):
            recorded_BTk = chosen_BTk
            # Of logits, if no bias is added to probabilities: the softmax of float32 logits may have equal results.
            has_scores = is_sigmoid or self.choice_bias is not None
            chosen_BTk = self.choose(
                jax.lax.stop_gradient(scores_BTE if has_scores else logits_BTE)
            )
            if recorded_BTk is not None:
                is_missing_BTk = recorded_BTk == jnp.iinfo(recorded_BTk.dtype).max
                is_missing_BT1 = is_missing_BTk.any(-1, keepdims=True)
                chosen_BTk = jnp.where(is_missing_BT1, chosen_BTk, recorded_BTk.astype(jnp.int32))
            chosen_BTk = checkpoint_name(chosen_BTk, CHOICE)
        if self.router_kind == "topk_softmax":
            weights_BTk = jax.nn.softmax(
                jnp.take_along_axis(logits_BTE, chosen_BTk, axis=-1), axis=-1
            )
        else:
            weights_BTk = jnp.take_along_axis(scores_BTE, chosen_BTk, axis=-1)
            if self.renormalizes:  # sigmoids may all be 0
                weights_BTk /= weights_BTk.sum(-1, keepdims=True) + (_TINY if is_sigmoid else 0)
        probs_BTE = (
            scores_BTE / (scores_BTE.sum(-1, keepdims=True) + _TINY) if is_sigmoid else scores_BTE
        )
        return Routing(chosen_BTk, self.scale * weights_BTk, probs_BTE, logits_BTE)

    def choose(self, scores_BTE: jax.Array) -> jax.Array:
        """The experts with the largest scores plus biases, of the chosen groups: int32 [B, T, k]."""
        if self.choice_bias is not None:
            scores_BTE += jax.lax.stop_gradient(self.choice_bias[...])
        num_groups, num_chosen_groups = self.groups
        if num_groups > 1:
            scores_BTGe = scores_BTE.reshape(*scores_BTE.shape[:2], num_groups, -1)
            num_best = 2 if self.router_kind == "sigmoid" else 1
            group_scores_BTG = jax.lax.top_k(scores_BTGe, num_best)[0].sum(-1)
            groups_BTg = jax.lax.top_k(group_scores_BTG, num_chosen_groups)[1]
            is_chosen_BTG = (groups_BTg[..., None] == jnp.arange(num_groups)).any(-2)
            scores_BTE = jnp.where(is_chosen_BTG[..., None], scores_BTGe, -jnp.inf).reshape(
                scores_BTE.shape
            )
        return jax.lax.top_k(scores_BTE, self.num_chosen)[1]


def _logits(x_BTD: jax.Array, weight: nnx.Param, *, shard: Sharder) -> jax.Array:
    """The products with a router or gate [D, E], float32."""
    weight_DE = in_use(weight, shard, x_BTD.dtype).astype(jnp.float32)
    multiply = functools.partial(jnp.einsum, "BTD,DE->BTE", precision=jax.lax.Precision.HIGHEST)
    return shard.product(multiply, x_BTD.astype(jnp.float32), weight_DE, weight.dims)


def _local_outputs(
    tokens,
    experts: ExpertWeights,
    *,
    activation: str,
    adapter_scale: float,
    fp8_names: tuple[str, ...],
    kernel: str,
) -> jax.Array:
    """out_btD of the tokens and the weights of one rank."""
    x_btD, chosen_btk, weights_btk = tokens
    if experts.down_bias_ED is not None:  # outputs are summed over tensor
        is_first = jax.lax.axis_index(TENSOR) == 0
        experts = experts._replace(down_bias_ED=jnp.where(is_first, experts.down_bias_ED, 0))
    x_TD, chosen_Tk, weights_Tk = (
        x.reshape(-1, x.shape[-1]) for x in (x_btD, chosen_btk, weights_btk)
    )
    activate = functools.partial(gated, activation)
    out_TD = expert_outputs(
        x_TD, chosen_Tk, weights_Tk, experts, activate, adapter_scale, fp8_names, kernel
    )
    return out_TD.reshape(x_btD.shape)


def _sums(routing: Routing, is_text_BT: jax.Array) -> dict[str, jax.Array]:
    """Sums over the tokens that are no padding, float32: for the losses and metrics of `step.loss`."""
    weights_BT = is_text_BT.astype(jnp.float32)
    num_experts = routing.probs_BTE.shape[-1]
    is_chosen_BTkE = routing.chosen_BTk[..., None] == jnp.arange(num_experts)
    log_z_BT = jax.nn.logsumexp(routing.logits_BTE, axis=-1)
    return dict(
        expert_counts=jnp.where(is_chosen_BTkE, weights_BT[..., None, None], 0).sum((0, 1, 2)),
        expert_probs=(routing.probs_BTE * weights_BT[..., None]).sum((0, 1)),
        router_z=(log_z_BT**2 * weights_BT).sum(),
    )
