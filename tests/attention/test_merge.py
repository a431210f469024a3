"""Merging partial results: fully masked sides, order, and values that overflow a naive exponential."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.attention.contract import merge


def _parts(lse_a, lse_b):
    out_a, out_b = jnp.full((1, 1, 1, 2), 1.0), jnp.full((1, 1, 1, 2), 3.0)
    return out_a, jnp.full((1, 1, 1), lse_a), out_b, jnp.full((1, 1, 1), lse_b)


def test_merge_weights_are_exponentials_of_lse():
    out, lse = merge(*_parts(np.log(1.0), np.log(3.0)))
    np.testing.assert_allclose(out[0, 0, 0], 2.5, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], np.log(4.0), rtol=1e-6)


def test_merge_with_fully_masked_side_has_weight_zero():
    for lse in ((0.7, -jnp.inf), (-jnp.inf, 0.7)):
        out, merged = merge(*_parts(*lse))
        assert out[0, 0, 0, 0] == (1.0 if lse[0] == 0.7 else 3.0)
        np.testing.assert_allclose(merged, 0.7)


def test_merge_of_fully_masked_sides_is_fully_masked():
    zero = jnp.zeros((1, 1, 1, 2))
    empty = jnp.full((1, 1, 1), -jnp.inf)
    out, lse = merge(zero, empty, zero, empty)
    assert (out == 0).all() and jnp.isneginf(lse).all()


def test_merge_with_large_lse_is_finite():
    out, lse = merge(*_parts(5000.0, 4999.0))
    weight = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(out[0, 0, 0], weight * 1.0 + (1 - weight) * 3.0, rtol=1e-6)
    assert np.isfinite(lse).all()


def test_merge_is_commutative():
    keys = jax.random.split(jax.random.key(0), 4)
    out_a, out_b = (jax.random.normal(k, (2, 5, 3, 4)) for k in keys[:2])
    lse_a, lse_b = (jax.random.normal(k, (2, 3, 5)) for k in keys[2:])
    for first, second in zip(merge(out_a, lse_a, out_b, lse_b), merge(out_b, lse_b, out_a, lse_a)):
        np.testing.assert_array_equal(first, second)
