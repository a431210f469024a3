"""`dot_product_attention` against `jax.nn.dot_product_attention`, whose signature it has."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxlc.attention import dot_product_attention
from jaxlc.core.errors import Unsupported, UserError
from tests.attention.cases import inputs
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error

TOKENS = 32
LENGTHS = jnp.asarray([32, 19, 1], jnp.int32)
SAME_LENGTHS = dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS)


def operands(**shape):
    return inputs(batch=3, num_tokens=TOKENS, head_dim=8, **shape)


def on_mesh(**settings):
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))
    return functools.partial(dot_product_attention, mesh=mesh, context_axis="sp", **settings)


def results_of(attend_fn, operands, **settings):
    """(out, residual), and the gradients with respect to query, key and value."""
    *qkv, dout = operands

    def objective(*qkv):
        results = attend_fn(*qkv, return_residual=True, **settings)
        return (results[0] * dout).sum().astype(jnp.float32), results

    gradients, results = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(*qkv)
    return results, gradients


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(is_causal=True, scale=0.5),
        dict(is_causal=True, local_window_size=5),
        dict(local_window_size=(5, 0)),
        dict(is_causal=True, local_window_size=(1, 3)),
        SAME_LENGTHS,
        dict(is_causal=True, query_seq_lengths=LENGTHS),
        dict(local_window_size=(4, 0), **SAME_LENGTHS),
    ],
    ids=lambda settings: " ".join(settings) or "full",
)
def test_dot_product_attention_matches_jax_nn(settings):
    actual, gradients = results_of(on_mesh(), operands(), **settings)
    expected, expected_gradients = results_of(jax.nn.dot_product_attention, operands(), **settings)
    lengths = settings.get("query_seq_lengths", jnp.full(3, TOKENS))
    is_token = (jnp.arange(TOKENS) < lengths[:, None])[:, :, None]
    np.testing.assert_array_equal(
        jnp.isneginf(actual[1]), jnp.broadcast_to(~is_token, actual[1].shape)
    )
    pairs = [
        (actual[0], expected[0]),
        (jnp.where(is_token, actual[1], 0), jnp.where(is_token, expected[1], 0)),
    ]
    for x, y in [*pairs, *zip(gradients, expected_gradients)]:
        assert x.dtype == y.dtype and max_relative_error(x, y) <= FLOAT32_PARITY


def test_dot_product_attention_without_batch_matches_jax_nn():
    unbatched = [x[0] for x in operands()]
    actual, expected = (
        results_of(attend_fn, unbatched, is_causal=True)
        for attend_fn in (on_mesh(), jax.nn.dot_product_attention)
    )
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert max_relative_error(x, y) <= FLOAT32_PARITY


def test_dot_product_attention_in_bfloat16_matches_jax_nn():
    q, k, v, _ = operands(dtype=jnp.bfloat16)
    actual, expected = (
        attend_fn(q, k, v, is_causal=True, return_residual=True)
        for attend_fn in (on_mesh(implementation="xla"), jax.nn.dot_product_attention)
    )
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16 and max_relative_error(x, y) <= BFLOAT16_ATTENTION


def test_dot_product_attention_strategies_agree():
    q, k, v, _ = operands()
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    for strategy in ("all_gather", "ulysses"):
        actual = on_mesh(strategy=strategy)(q, k, v, is_causal=True)
        assert max_relative_error(actual, expected) <= FLOAT32_PARITY


@pytest.mark.jax_version
def test_dot_product_attention_has_signature_of_jax_nn():
    def parameters(function):
        return [
            (x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()
        ]

    expected = parameters(jax.nn.dot_product_attention)
    assert parameters(dot_product_attention)[: len(expected)] == expected


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(bias=jnp.zeros((1, 1, TOKENS, TOKENS))), "unsupported: bias"),
        (dict(mask=jnp.ones((1, 1, TOKENS, TOKENS), bool)), "unsupported: mask"),
        (
            dict(local_window_size=3),
            r"local_window_size=3 with is_causal=False, .* local_window_size=\(3, 0\)",
        ),
        (dict(local_window_size=(-1, 0)), r"local_window_size=\(-1, 0\)"),
        (dict(query_seq_lengths=LENGTHS), "key_value_seq_lengths other than query_seq_lengths"),
        (
            dict(is_causal=True, key_value_seq_lengths=LENGTHS),
            "key_value_seq_lengths other than query_seq_lengths",
        ),
        (
            dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS - 1),
            "key_value_seq_lengths other than",
        ),
        (dict(implementation="cudnn"), "unsupported by attention kernel cudnn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_dot_product_attention_unsupported_argument_raises(settings, words):
    q, k, v, _ = operands()
    with pytest.raises(Unsupported, match=words):
        on_mesh()(q, k, v, **settings)


def test_dot_product_attention_of_cross_attention_raises():
    q, k, v, _ = operands()
    with pytest.raises(Unsupported, match="queries and keys differ in length"):
        on_mesh()(q[:, :16], k, v)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(key=(3, TOKENS, 8)), "invalid shapes query"),
        (dict(dtype=jnp.bfloat16), "invalid dtypes float32, bfloat16"),
        (dict(implementation="triton"), "invalid implementation='triton'"),
        (
            dict(query_seq_lengths=LENGTHS[:2], is_causal=True),
            r"invalid query_seq_lengths int32\(2,\)",
        ),
    ],
    ids=["shape", "dtype", "implementation", "lengths"],
)
def test_dot_product_attention_with_invalid_argument_raises(change, words):
    q, k, v, _ = operands()
    k = (
        k.astype(change.pop("dtype", k.dtype))
        if "key" not in change
        else jnp.zeros(change.pop("key"))
    )
    with pytest.raises(UserError, match=words):
        on_mesh()(q, k, v, **change)
