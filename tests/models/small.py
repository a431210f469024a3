"""Small models for tests, and a reference Llama in numpy: float64, one token and one head at a
time.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import MeshConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.models import decoder
from jaxlc.models.block import rms_norm
from jaxlc.models.layer_stack import LayerContext, Remat, run_layer
from jaxlc.models.rope import rope_tables
from jaxlc.sharding.mesh import make_mesh
from jaxlc.sharding.rules import Sharder
from tests.models.plain_rope import plain_rope

B, T = 2, 16


def small_model(attention=None, **overrides):
    sizes = dict(vocab_size=32, num_layers=2, model_dim=16, ffn_dim=24)
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=6) | (attention or {})
    model = PRESETS["tiny"]
    return dataclasses.replace(
        model, attention=dataclasses.replace(model.attention, **heads), **{**sizes, **overrides}
    )


def small_inputs(model):
    """(tokens_BT, positions_BT); the positions of the second sequence restart, as in a packed
    sequence.
    """
    tokens_BT = np.random.default_rng(0).integers(0, model.vocab_size, (B, T), dtype=np.int32)
    positions_BT = np.stack([np.arange(T), np.r_[np.arange(5), np.arange(T - 5)]]).astype(np.int32)
    return tokens_BT, positions_BT


def small_params(model):
    """Numpy values of the size of initial values, but norm scales differ from 1, so that a missing
    one is detected.
    """
    rng = np.random.default_rng(0)

    def draw(path, x):
        if path[-1].key == "scale":
            return (rng.uniform(0.5, 1.5, x.shape) - model.zero_centered_norm).astype(np.float32)
        return (rng.standard_normal(x.shape) * 0.25).astype(np.float32)

    return jax.tree.map_with_path(draw, decoder.abstract_params(model, model.vocab_size))


def dense_attend(q_BTNH, k_BTKH, v_BTKH, sinks_N=None, *, ranges=None, window=None):
    """Causal attention over the whole sequence or a window, with the full T x T matrix."""
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH, v_BTNH = (jnp.repeat(x, groups, axis=2) for x in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH).astype(jnp.float32) / math.sqrt(
        q_BTNH.shape[-1]
    )
    num_tokens = q_BTNH.shape[1]
    is_visible = np.tri(num_tokens, dtype=bool) & ~np.tri(
        num_tokens, k=-(window or num_tokens), dtype=bool
    )
    scores_BNTS = jnp.where(is_visible, scores_BNTS, -jnp.inf)
    if sinks_N is not None:
        column_BNT1 = jnp.broadcast_to(sinks_N[:, None, None], (*scores_BNTS.shape[:3], 1))
        scores_BNTS = jnp.concatenate([scores_BNTS, column_BNT1], axis=-1)
    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)[..., :num_tokens].astype(v_BTNH.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BTNH)


def run_layer_of(model):
    """`run_layer` of each kind, with dense attention."""
    return {
        kind: functools.partial(
            run_layer,
            attends=[functools.partial(dense_attend, window=model.window_of(kind))],
            tables=rope_tables(model, kind, T),
        )
        for kind in model.used_kinds
    }


def small_mesh(**axes):
    config = MeshConfig(**axes)
    return make_mesh(config, jax.devices()[: config.num_devices])


def context_of(model, mesh=None, compute_dtype=jnp.float32, remat=lambda layer: layer):
    """Layers with dense attention."""
    return LayerContext(
        run_layer=run_layer_of(model),
        ranges=dict.fromkeys(model.used_kinds, [None]),
        shard=Sharder(small_mesh() if mesh is None else mesh),
        remat=Remat(
            wrap_layer=lambda layer, in_loop: remat(layer),
            wrap_group=lambda group: group,
            layers_per_group=1,
        ),
        compute_dtype=compute_dtype,
    )


def run(
    params,
    model,
    tokens_BT,
    positions_BT,
    *,
    mesh=None,
    compute_dtype=jnp.float32,
    remat=lambda layer: layer,
):
    """(normed x_BTD, head_DV) of the decoder; call under `jit`."""
    x_BTD, factor_D, head_DV, _ = decoder.apply(
        decoder.Params(params),
        model,
        tokens_BT,
        positions_BT,
        context_of(model, mesh, compute_dtype, remat),
    )
    return rms_norm(x_BTD, factor_D, model.norm_epsilon), head_DV


def plain_llama(params, model, tokens_BT, positions_BT):
    """(x_BTD, logits_BTV) in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x_BTD = np.stack([_plain_row(params, model, *row) for row in zip(tokens_BT, positions_BT)])
    head_DV = params["embedding"].T if model.tie_embeddings else params["head"]
    return x_BTD, x_BTD @ head_DV


def _plain_norm(x, scale, model):
    return (
        x
        / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.norm_epsilon)
        * (scale + model.zero_centered_norm)
    )


def _plain_row(params, model, tokens_T, positions_T):
    x_TD = params["embedding"][tokens_T] * (
        math.sqrt(model.model_dim) if model.scale_embeddings else model.embedding_multiplier
    )
    for layer, kind in enumerate(model.kinds_of_layers):
        path, layers = next(item for item in model.layer_stacks.items() if layer in item[1])
        stack = functools.reduce(operator.getitem, path, params)
        p = jax.tree.map(operator.itemgetter(layers.index(layer)), stack)
        for block, name in ((_plain_attention, "attention"), (_plain_mlp, "mlp")):
            out_TD = x_TD
            if model.norm_placement in ("pre", "pre_and_post"):
                out_TD = _plain_norm(out_TD, p[f"{name}_norm"]["scale"], model)
            out_TD = block(p[name], model.layer_config(kind), kind, out_TD, positions_T)
            if model.norm_placement in ("post", "pre_and_post"):
                out_TD = _plain_norm(out_TD, p[f"{name}_post_norm"]["scale"], model)
            x_TD = x_TD + model.residual_multiplier * out_TD
    return _plain_norm(x_TD, params["final_norm"]["scale"], model) / model.logits_scaling


def _plain_mlp(p, model, kind, x_TD, positions_T):
    zero = dict(b_gate=0, b_up=0, b_down=0)
    p = p if model.mlp_bias else p | zero
    gate_TF = x_TD @ p["w_gate"] + p["b_gate"]
    if model.activation == "silu":
        gate_TF = gate_TF / (1 + np.exp(-gate_TF))
    else:  # the tanh approximation of GELU
        inner_TF = math.sqrt(2 / math.pi) * (gate_TF + 0.044715 * gate_TF**3)
        gate_TF = gate_TF * (1 + np.tanh(inner_TF)) / 2
    return (gate_TF * (x_TD @ p["w_up"] + p["b_up"])) @ p["w_down"] + p["b_down"]


def _plain_projections(p, model, x_TD):
    """q_TNH, k_TKH and v_TKH before RoPE, and the factor of the output."""
    projections = {}
    for name in "qkv":
        projections[name] = np.einsum("TD,DNH->TNH", x_TD, p[f"w{name}"])
        if model.attention.qkv_bias:
            projections[name] += p[f"b{name}"]
    factor_TNH = np.ones_like(projections["q"])
    if model.attention.gate:
        projections["q"], gate_TNH = (
            projections["q"][..., : model.attention.head_dim],
            projections["q"][..., model.attention.head_dim :],
        )
        factor_TNH = 1 / (1 + np.exp(-gate_TNH))
    for name in "qk" if model.attention.qk_norm != "none" else "":
        x_TNH, scale = projections[name], p[f"{name}_norm"]["scale"]
        if model.attention.qk_norm == "projection":
            x_TNH, scale = x_TNH.reshape(len(x_TNH), 1, -1), scale.reshape(-1)
        projections[name] = _plain_norm(x_TNH, scale, model).reshape(projections[name].shape)
    return *projections.values(), factor_TNH


def _plain_attention(p, model, kind, x_TD, positions_T):
    out_TD = np.zeros_like(x_TD)
    q_TNH, k_TKH, v_TKH, gate_TNH = _plain_projections(p, model, x_TD)
    for n in range(model.attention.num_heads):
        k_head = n // (model.attention.num_heads // model.attention.num_kv_heads)
        q_TH, k_TH = (
            plain_rope(x_TH, positions_T, model, kind=kind)
            for x_TH in (q_TNH[:, n], k_TKH[:, k_head])
        )
        for t in range(len(x_TD)):
            visible = slice(max(0, t + 1 - (model.window_of(kind) or t + 1)), t + 1)
            scores = (
                k_TH[visible]
                @ q_TH[t]
                / math.sqrt(model.attention.query_scale_dim or model.attention.head_dim)
            )
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(p["sinks"][n]) if model.attention.sinks else 0)
            out_TD[t] += gate_TNH[t, n] * (weights / total @ v_TKH[visible, k_head]) @ p["wo"][n]
    return out_TD + (p["bo"] if model.attention.out_bias else 0)
