"""Every CPU kernel against the reference; the reference against finite differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.support_table import cpu_kernels
from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults, merge
from jaxlc.attention.kernels import reference
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from tests.attention.cases import assert_rows_match, inputs, ranges, sequence_positions
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY

kernels = pytest.mark.parametrize(
    "kernel", [KERNELS[name] for name in cpu_kernels()], ids=cpu_kernels()
)


def _oracle(q, k, v, dout, dlse, ranges, spec):
    """((out, lse), (dq, dk, dv)) by automatic differentiation of the reference."""

    def objective(q, k, v):
        out, lse = reference.forward(q, k, v, ranges, spec)
        return (out * dout).sum() + (jnp.where(jnp.isneginf(lse), 0.0, lse) * dlse).sum(), (
            out,
            lse,
        )

    gradients, results = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
    return results, gradients


def _assert_lse_match(actual, expected, tolerance):
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    np.testing.assert_allclose(
        np.maximum(actual, -1e9), np.maximum(expected, -1e9), rtol=tolerance, atol=tolerance
    )


def _check(kernel, q, k, v, dout, ranges, spec, tolerance=FLOAT32_PARITY):
    dlse = jax.random.normal(jax.random.key(9), (q.shape[0], q.shape[2], q.shape[1]))
    (out, lse), gradients = _oracle(
        *(x.astype(jnp.float32) for x in (q, k, v, dout)), dlse, ranges, spec
    )
    actual_out, actual_lse = jax.jit(kernel.forward, static_argnums=4)(q, k, v, ranges, spec)
    assert_rows_match(actual_out, out, tolerance)
    _assert_lse_match(actual_lse, lse, tolerance)
    actual = jax.jit(kernel.backward, static_argnums=4)(
        q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse)
    )
    assert all(x.dtype == jnp.float32 for x in (actual_out, actual_lse, *actual))
    assert_rows_match(actual, gradients, tolerance)


@kernels
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "block", [(256, 256), (32, 32), (40, 20)], ids=["one_block", "blocks", "ragged_blocks"]
)
def test_kernel_matches_reference(kernel, packed, causal, block):
    spec = AttentionSpec(causal=causal, query_block_tokens=block[0], key_block_tokens=block[1])
    _check(kernel, *inputs(), ranges(packed, spec), spec)


@kernels
def test_kernel_with_fewer_queries_than_keys_matches_reference(kernel):
    q, _, _, dout = inputs(batch=2, num_tokens=33)
    _, k, v, _ = inputs(batch=2, num_tokens=70, seed=1)
    positions = jnp.broadcast_to(jnp.arange(70, dtype=jnp.int32), (2, 70))
    spec = AttentionSpec(query_block_tokens=16, key_block_tokens=32)
    last = key_ranges(TokenInfo(positions[:, 37:], None), TokenInfo(positions, None), spec)
    _check(kernel, q, k, v, dout, last, spec)


@kernels
def test_kernel_with_value_head_dim_and_scale_matches_reference(kernel):
    spec = AttentionSpec(scale=0.3, key_block_tokens=32)
    _check(kernel, *inputs(value_dim=24), ranges(packed=True, spec=spec), spec)


@kernels
def test_kernel_with_positions_above_2_24_matches_reference(kernel):
    tokens = TokenInfo(2**24 + sequence_positions(2), None)
    _check(kernel, *inputs(batch=2), key_ranges(tokens, tokens, AttentionSpec()), AttentionSpec())


@pytest.mark.jax_version
@kernels
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_kernel_over_two_kv_blocks_merges_to_reference(kernel, causal):
    """The merged results equal those over all keys; so do the sums of gradients from the global out
    and lse.
    """
    q, k, v, dout = inputs()
    spec, dlse = AttentionSpec(causal=causal), jnp.zeros((q.shape[0], 4, 96))
    all_ranges = ranges(packed=True, spec=spec)
    (out, lse), gradients = _oracle(q, k, v, dout, dlse, all_ranges, spec)

    def block(s):
        return all_ranges.within(s.start, s.stop - s.start)

    blocks = [slice(0, 30), slice(30, 96)]
    parts = [kernel.forward(q, k[:, s], v[:, s], block(s), spec) for s in blocks]
    merged_out, merged_lse = merge(*parts[0], *parts[1])
    assert_rows_match(merged_out, out, FLOAT32_PARITY)
    _assert_lse_match(merged_lse, lse, FLOAT32_PARITY)
    block_gradients = [
        kernel.backward(q, k[:, s], v[:, s], block(s), spec, QueryResults(out, lse, dout, dlse))
        for s in blocks
    ]
    dk, dv = (jnp.concatenate([x[i] for x in block_gradients], axis=1) for i in (1, 2))
    assert_rows_match(
        (block_gradients[0][0] + block_gradients[1][0], dk, dv), gradients, FLOAT32_PARITY
    )


@kernels
def test_kernel_in_bfloat16_matches_float32_reference(kernel):
    spec = AttentionSpec(key_block_tokens=32)
    _check(
        kernel,
        *inputs(dtype=jnp.bfloat16),
        ranges(packed=False, spec=spec),
        spec,
        BFLOAT16_ATTENTION,
    )


@kernels
def test_kernel_with_large_scores_is_finite(kernel):
    q, k, v, dout = inputs(batch=2)
    row, spec = ranges(packed=False, spec=AttentionSpec()), AttentionSpec(key_block_tokens=32)
    row = KeyRanges(*(x[:2] for x in row))
    out, lse = kernel.forward(40 * q, 40 * k, v, row, spec)
    gradients = kernel.backward(40 * q, 40 * k, v, row, spec, QueryResults(out, lse, dout, 0 * lse))
    assert all(np.isfinite(x).all() for x in (out, lse, *gradients))


def test_reference_matches_finite_differences():
    """An independent definition in numpy and float64: causal, grouped queries."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in inputs(batch=1, num_tokens=6, head_dim=4))
    spec = AttentionSpec()

    def attend(q):
        scores = spec.scale_for(4) * np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2))
        weights = np.where(np.tril(np.ones((6, 6), bool)), np.exp(scores), 0.0)
        total = weights.sum(-1)
        return np.einsum(
            "bnts,bsnh->btnh", weights / total[..., None], np.repeat(v, 2, axis=2)
        ), np.log(total)

    direction = np.random.default_rng(0).normal(size=q.shape)
    slope = (
        sum(sign * (attend(q + sign * 1e-5 * direction)[0] * dout).sum() for sign in (1, -1)) / 2e-5
    )
    out, lse = (jnp.float32(x) for x in attend(q))
    float32 = [jnp.float32(x) for x in (q, k, v)]
    np.testing.assert_allclose(
        reference.forward(*float32, None, spec)[0], out, rtol=1e-5, atol=1e-6
    )
    dq, _, _ = reference.backward(
        *float32, None, spec, QueryResults(out, lse, jnp.float32(dout), 0 * lse)
    )
    assert abs((np.asarray(dq) * direction).sum() - slope) <= 1e-4 * abs(slope)


@pytest.mark.jax_version
def test_reference_products_have_the_highest_precision():
    """On GPUs, the default precision of float32 products is TF32."""
    x, spec = jnp.zeros((1, 4, 2, 8)), AttentionSpec()
    out, lse = jax.eval_shape(lambda x: reference.forward(x, x, x, None, spec), x)
    passes = (
        jax.make_jaxpr(lambda x: reference.forward(x, x, x, None, spec))(x),
        jax.make_jaxpr(lambda *args: reference.backward(x, x, x, None, spec, QueryResults(*args)))(
            out, lse, out, lse
        ),
    )
    for jaxpr in passes:
        products = [equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
        assert products and all(
            x.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for x in products
        )
