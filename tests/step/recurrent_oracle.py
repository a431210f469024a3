"""Compares recurrent layers with oracles that are written from the papers, in float64.

    python -m tests.step.recurrent_oracle [--all]

As `latent_oracle`, with the whole mixers of Mamba-2 (arXiv:2405.21060) and Kimi Delta Attention
(arXiv:2510.26692), token after token, and a layer of latent attention. With --all, the model also
has a layer of Gated DeltaNet (arXiv:2412.06464).
"""

import functools
import math
import sys

import jax

from tests.step import latent_oracle  # first: it replaces float32

import jax.numpy as jnp  # isort: skip

from tests.step.synthetic import HYBRID, KIMI_DELTA, MAMBA  # isort: skip

ORDER = "mamba2", "kimi_delta", "latent", "gated_delta_net"
MODEL = latent_oracle.MODEL | MAMBA | KIMI_DELTA | dict(num_layers=3, layer_kinds=ORDER[:3])
MORE = MODEL | HYBRID | dict(num_layers=4, layer_kinds=ORDER)
EPSILON = 1e-5
UNIT_EPSILON = 1e-6  # added to the sum of squares of queries and keys


def low_rank(h, w, name):
    return jnp.einsum("d,dl,lhk->hk", h, w[f"{name}_down"], w[f"{name}_up"])


def heads(h, matrix):
    return jnp.einsum("d,dhk->hk", h, matrix)


def mixer(kind, h_TD, w):
    """u_TD of a sequence: convolutions of queries, keys and values, with silu, then a state."""
    value_heads, key_dim = w["conv_v"].shape[1], w["conv_k"].shape[2]

    def token(carry, h):
        S, past = carry
        past = {x: jnp.concatenate([past[x][1:], heads(h, w[f"w{x}"])[None]]) for x in "qkv"}
        q, k, v = (
            jax.nn.silu((past[x] * w[f"conv_{x}"]).sum(0) + w.get(f"bias_{x}", 0.0)) for x in "qkv"
        )
        q, k = (jnp.repeat(x, value_heads // len(x), axis=0) for x in (q, k))
        S, out = kind(h, w, S, q, k, v)
        return (S, past), jnp.einsum("hv,hvd->d", out, w["wo"])

    past = {x: jnp.zeros_like(w[f"conv_{x}"]) for x in "qkv"}
    S = jnp.zeros((value_heads, key_dim, w["conv_v"].shape[2]))
    return jax.lax.scan(token, (S, past), h_TD)[1]


def mamba2(h, w, S, C, B, x):
    """S [H, N, P]. The gate is before the norm, which is of each group of heads."""
    step = jax.nn.softplus(h @ w["wb"] + w["decay_bias"])
    step = jnp.minimum(step, MODEL["mamba2"]["largest_step"])[:, None]
    decay = jnp.exp(-jnp.exp(w["log_decay"])[:, None] * step)
    S = decay[..., None] * S + B[..., None] * (step * x)[:, None]
    y = jnp.einsum("hn,hnp->hp", C, S) + w["skip"][:, None] * x
    gated = y * jax.nn.silu(heads(h, w["wz"]))
    groups = gated.reshape(MODEL["mamba2"]["groups"], -1)
    normed = latent_oracle.norm(groups, 1.0, EPSILON)
    return S, normed.reshape(gated.shape) * w["out_norm"]["scale"]


def delta_rule(w, S, q, k, v, decay, beta):
    """S [H, K, V] and the normed output, with the decay of each channel of K."""
    q, k = (x / jnp.sqrt((x**2).sum(-1, keepdims=True) + UNIT_EPSILON) for x in (q, k))
    S = decay[..., None] * S
    error = v - jnp.einsum("hk,hkv->hv", k, S)
    S = S + k[..., None] * (beta[:, None] * error)[:, None]
    out = jnp.einsum("hk,hkv->hv", q, S) / math.sqrt(q.shape[-1])
    return S, latent_oracle.norm(out, w["out_norm"]["scale"], EPSILON)


def kimi_delta(h, w, S, q, k, v):
    rate = jnp.exp(w["log_decay"]).reshape(-1, 1)
    decay = jnp.exp(-rate * jax.nn.softplus(low_rank(h, w, "wf") + w["decay_bias"]))
    S, out = delta_rule(w, S, q, k, v, decay, jax.nn.sigmoid(h @ w["wb"]))
    return S, out * jax.nn.sigmoid(low_rank(h, w, "wz"))


def gated_delta_net(h, w, S, q, k, v):
    decay = jnp.exp(-jnp.exp(w["log_decay"]) * jax.nn.softplus(h @ w["wa"] + w["decay_bias"]))
    S, out = delta_rule(w, S, q, k, v, decay[:, None], jax.nn.sigmoid(h @ w["wb"]))
    return S, out * jax.nn.silu(heads(h, w["wz"]))


def main() -> None:
    for kind in mamba2, kimi_delta, gated_delta_net:
        latent_oracle.MIXERS[kind.__name__] = functools.partial(mixer, kind)
    latent_oracle.MODEL = MORE if sys.argv[1:] == ["--all"] else MODEL
    latent_oracle.main()


if __name__ == "__main__":
    main()
