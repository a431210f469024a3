"""Small models for tests, and a reference Llama in numpy: float64, one token and one head at a time."""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.config import MeshConfig
from jaxlc.config.presets import PRESETS
from jaxlc.models import decoder
from jaxlc.models.layers import rms_norm, run_layer
from jaxlc.models.rope import rope_tables
from jaxlc.sharding.mesh import make_mesh
from jaxlc.sharding.rules import Sharder
from jaxlc.train.remat import Remat
from tests.models.plain_rope import plain_rope

B, T = 2, 16


def small_model(**overrides):
    sizes = dict(vocab_size=32, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, ffn_dim=24)
    return dataclasses.replace(PRESETS["tiny"], **{**sizes, **overrides})


def small_inputs(model):
    """(tokens_BT, positions_BT); the positions of the second sequence restart, as in a packed sequence."""
    tokens_BT = np.random.default_rng(0).integers(0, model.vocab_size, (B, T), dtype=np.int32)
    positions_BT = np.stack([np.arange(T), np.r_[np.arange(5), np.arange(T - 5)]]).astype(np.int32)
    return tokens_BT, positions_BT


def small_params(model):
    """Numpy values of the size of initial values, but norm scales differ from 1, so that a missing one is detected."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        if path[-1].key == "scale":
            return rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
        return (rng.standard_normal(x.shape) * 0.25).astype(np.float32)

    return jax.tree.map_with_path(draw, decoder.abstract_params(model, model.vocab_size))


def dense_attend(q_BTNH, k_BTKH, v_BTKH):
    """Causal attention over the whole sequence, with the full T x T matrix."""
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH, v_BTNH = (jnp.repeat(x, groups, axis=2) for x in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH).astype(jnp.float32) / math.sqrt(q_BTNH.shape[-1])
    scores_BNTS = jnp.where(np.tri(q_BTNH.shape[1], dtype=bool), scores_BNTS, -jnp.inf)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS, axis=-1).astype(v_BTNH.dtype), v_BTNH)


def small_mesh(**axes):
    config = MeshConfig(**axes)
    return make_mesh(config, jax.devices()[: config.num_devices])


def run(params, model, tokens_BT, positions_BT, *, mesh=None, compute_dtype=jnp.float32, remat=lambda layer: layer):
    """(normed x_BTD, head_DV) of the decoder; call under `jit`."""
    x_BTD, scale_D, head_DV = decoder.apply(
        params,
        model,
        tokens_BT,
        positions_BT,
        run_layer=functools.partial(run_layer, attend=dense_attend),
        shard=Sharder(small_mesh() if mesh is None else mesh),
        remat=Remat(of_layer=remat, of_group=lambda group: group, layers_per_group=1),
        compute_dtype=compute_dtype,
        tables=rope_tables(model, "full", T),
    )
    return rms_norm(x_BTD, scale_D, model.norm_epsilon), head_DV


def plain_llama(params, model, tokens_BT, positions_BT):
    """(x_BTD, logits_BTV) in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x_BTD = np.stack([_plain_row(params, model, *row) for row in zip(tokens_BT, positions_BT)])
    head_DV = params["embedding"].T if model.tie_embeddings else params["head"]
    return x_BTD, x_BTD @ head_DV


def _plain_norm(x, scale, model):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.norm_epsilon) * scale


def _plain_row(params, model, tokens_T, positions_T):
    x_TD = params["embedding"][tokens_T]
    for layer in range(model.num_layers):
        p = jax.tree.map(operator.itemgetter(layer), params["layers"])
        normed_TD = _plain_norm(x_TD, p["attention_norm"]["scale"], model)
        x_TD = x_TD + _plain_attention(p["attention"], model, normed_TD, positions_T)
        normed_TD = _plain_norm(x_TD, p["mlp_norm"]["scale"], model)
        gate_TF = normed_TD @ p["mlp"]["w_gate"]
        x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * (normed_TD @ p["mlp"]["w_up"])) @ p["mlp"]["w_down"]
    return _plain_norm(x_TD, params["final_norm"]["scale"], model)


def _plain_attention(p, model, x_TD, positions_T):
    out_TD = np.zeros_like(x_TD)
    for n in range(model.num_heads):
        k_head = n // (model.num_heads // model.num_kv_heads)
        q_TH, k_TH, v_TH = x_TD @ p["wq"][:, n], x_TD @ p["wk"][:, k_head], x_TD @ p["wv"][:, k_head]
        if model.qk_norm:
            q_TH = _plain_norm(q_TH, p["q_norm"]["scale"], model)
            k_TH = _plain_norm(k_TH, p["k_norm"]["scale"], model)
        q_TH, k_TH = plain_rope(q_TH, positions_T, model), plain_rope(k_TH, positions_T, model)
        for t in range(len(x_TD)):
            scores = k_TH[: t + 1] @ q_TH[t] / math.sqrt(model.head_dim)
            weights = np.exp(scores - scores.max())
            out_TD[t] += weights / weights.sum() @ v_TH[: t + 1] @ p["wo"][n]
    return out_TD
