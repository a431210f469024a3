"""Kimi Delta Attention against a loop over tokens, written from arXiv:2510.26692: the recurrence
with its convolutions in float64, and the whole mixer in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlc
from jaxlc.attention import natural_order, zigzag_order
from jaxlc.attention.recurrence import chunks
from jaxlc.attention.recurrence.sharded_recurrence import (
    Documents,
    Filter,
    Operands,
    ShardedRecurrence,
)
from jaxlc.models.block import Init
from jaxlc.models.kinds.kda import KimiDeltaAttention
from jaxlc.sharding.rules import Sharder
from tests.step.synthetic import KIMI_DELTA, small_config
from tests.tolerances import max_relative_error

TOKENS, HEADS, WIDTH, TAPS = 256, 2, 8, 4
# borders inside chunks and between ranks; the last document is padding
LENGTHS = 5, 90, 61, 1, 75, 24
SEGMENTS = np.repeat([1, 2, 3, 4, 5, 0], LENGTHS)[None].astype(np.int32)
NAMES = "out", "q", "k", "v", "g", "beta", "conv_q", "conv_k", "conv_v"
EPSILON = 1e-6  # added to the sum of squares of queries and keys
GATES = {"-5": (5.0,), "-50": (50.0,), "-1000": (1000.0,), "mixed": (0.0, 0.01, 5.0, 50.0, 1000.0)}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that a rank has several chunks."""
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 64)


def mesh_of(context):
    return jaxlc.make_mesh(context=context, devices=jax.devices()[:context])


def filtered(x, taps, segments):
    """silu of the causal convolution, which reads only tokens of the same document."""
    out = 0
    for i in range(len(taps)):
        shift = len(taps) - 1 - i
        moved = jnp.pad(x, ((0, 0), (shift, 0), (0, 0), (0, 0)))[:, : x.shape[1]]
        same = np.pad(segments, ((0, 0), (shift, 0)))[:, : x.shape[1]] == segments
        out += jnp.where(same[..., None, None], moved, 0) * taps[i]
    return out * jax.nn.sigmoid(out)


def oracle(q, k, v, g, beta, *taps, segments):
    """The recurrence, token by token."""
    q, k, v = (filtered(x, w, segments) for x, w in zip((q, k, v), taps))
    q, k = (x / jnp.sqrt((x**2).sum(-1, keepdims=True) + EPSILON) for x in (q, k))
    is_first = np.pad(segments, ((0, 0), (1, 0)))[:, :-1] != segments

    def token(S, inputs):
        q, k, v, g, beta, is_first, segment = inputs
        S = jnp.where(is_first[:, None, None, None], 0, jnp.exp(g)[..., None] * S)
        error = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, S))
        S = S + k[..., None] * error[..., None, :]
        out = jnp.einsum("bhk,bhkv->bhv", q, S) * q.shape[-1] ** -0.5
        return S, jnp.where(segment[:, None, None] == 0, 0, out)

    inputs = jax.tree.map(
        lambda x: jnp.asarray(x).swapaxes(0, 1), (q, k, v, g, beta, is_first, segments)
    )
    S = jnp.zeros((len(q), *q.shape[2:], q.shape[-1]), q.dtype)
    return jax.lax.scan(token, S, inputs)[1].swapaxes(0, 1)


def operands(sizes, dtype="float64"):
    """Of gates that are about minus one of `sizes`, which channels and tokens have in turn."""
    rng = np.random.default_rng(0)
    shape = 1, TOKENS, HEADS, WIDTH
    q, k, v = (rng.standard_normal(shape) for _ in "qkv")
    g = -rng.choice(sizes, shape) * rng.uniform(0.5, 1.5, shape)
    beta = rng.uniform(0, 1, shape[:3])
    taps = (rng.standard_normal((TAPS, HEADS, WIDTH)) for _ in "qkv")
    return [jnp.asarray(x, dtype) for x in (q, k, v, g, beta, *taps)]


def values_and_gradients(function, arrays):
    weights = jnp.sin(jnp.arange(arrays[2].size, dtype=arrays[2].dtype)).reshape(arrays[2].shape)

    def weighted(*arrays):
        out = function(*arrays)
        return (out * weights).sum(), out

    grad = jax.value_and_grad(weighted, tuple(range(len(arrays))), has_aux=True)
    (_, out), grads = jax.jit(grad)(*arrays)
    return [out, *grads]


@pytest.mark.parametrize(
    "gates, context, dtype",
    [
        ("mixed", 4, "float64"),
        pytest.param("mixed", 1, "float32", marks=pytest.mark.full),
        pytest.param("-5", 1, "float64", marks=pytest.mark.full),
        pytest.param("-50", 1, "float64", marks=pytest.mark.full),
        pytest.param("-1000", 4, "float64", marks=pytest.mark.full),
        pytest.param("-1000", 2, "float32", marks=pytest.mark.full),
    ],
)
def test_recurrence_equals_a_loop_over_tokens(gates, context, dtype):
    with jax.enable_x64(True):
        order = zigzag_order(TOKENS, context)

        def ours(q, k, v, g, beta, *taps):
            tokens = (x[:, order] for x in (q, k, v, g, beta))
            rule = chunks.Rule(scale=WIDTH**-0.5)
            out = ShardedRecurrence(mesh_of(context), rule)(
                *Operands(*tokens, None, tuple(map(Filter, taps))),
                ranges=Documents(jnp.asarray(SEGMENTS[:, order]), None),
            )
            return out[:, natural_order(order)]

        actual = values_and_gradients(ours, operands(GATES[gates], dtype))
        exact = values_and_gradients(
            functools.partial(oracle, segments=SEGMENTS),
            [x.astype("float64") for x in operands(GATES[gates], dtype)],
        )
        for name, a, b in zip(NAMES, actual, exact, strict=True):
            assert np.isfinite(a).all(), name
            bound = 1e-12 if name == "out" else 1e-11
            if dtype == "float32":
                bound = 2e-6
            if name == "g":  # its gradient is exp(g) times others, which are about 1
                assert np.abs(a - b).max() < bound * max(1, np.abs(b).max())
            else:
                assert max_relative_error(a, b) < bound, name


def test_mixer_with_a_bound_of_decays_equals_its_formulas():
    """With decays, norms and gates that are random; tests/step/recurrent_oracle.py has no bound."""
    bound = -5.0
    model = KIMI_DELTA | dict(kda=KIMI_DELTA["kda"] | dict(gate_lower_bound=bound))
    config = small_config(model=model)
    mixer = KimiDeltaAttention(config.model.layer_config("kimi_delta"), Init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    mixer.out_norm.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, 8), jnp.float32)
    mixer.decay_bias[...] = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((1, 128, 32)), jnp.float32)
    mesh = mesh_of(1)
    shard = Sharder(mesh)

    @jax.jit
    def ours(x):
        arrays, z = mixer.operands(x, shard=shard)
        out = ShardedRecurrence(mesh, chunks.Rule(scale=8**-0.5))(*arrays)
        return mixer.projected(out, z, shard=shard)

    def w(name):
        return np.asarray(getattr(mixer, name)[...], np.float64)

    with jax.enable_x64(True):
        wide = np.asarray(x, np.float64)
        q, k, v = (np.einsum("btd,dhk->bthk", wide, w(f"w{x}")) for x in "qkv")
        y = np.einsum("btd,dl,lhk->bthk", wide, w("wf_down"), w("wf_up")) + w("decay_bias")
        rate = np.exp(w("log_decay")).reshape(-1, 1)
        g = bound / (1 + np.exp(-rate * y))
        beta = 1 / (1 + np.exp(-wide @ w("wb")))
        taps = (w(f"conv_{x}") for x in "qkv")
        out = np.asarray(oracle(q, k, v, g, beta, *taps, segments=np.ones((1, 128), np.int32)))
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + config.model.norm_epsilon)
        z = np.einsum("btd,dl,lhk->bthk", wide, w("wz_down"), w("wz_up"))
        out = out * np.asarray(mixer.out_norm.scale[...], np.float64)
        exact = np.einsum("bthk,hkd->btd", out / (1 + np.exp(-z)), w("wo"))
    assert max_relative_error(ours(x), exact) < 2e-5
