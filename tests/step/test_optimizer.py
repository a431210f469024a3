"""Schedules at their boundaries, weight decay and clipping."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlc.config import OptimizerConfig
from jaxlc.step.update import learning_rate_schedule, make_optimizer

CONFIG = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_learning_rate_ratio=0.1)


def _rates(steps=20, **changes):
    schedule = learning_rate_schedule(dataclasses.replace(CONFIG, **changes), steps)
    return np.array([schedule(step) for step in range(steps + 1)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_starts_above_zero(schedule):
    np.testing.assert_allclose(
        _rates(schedule=schedule, decay_steps=5)[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6
    )


def test_cosine_decays_from_peak_to_final_rate():
    rates = _rates(schedule="cosine")
    assert rates[4] == 1.0 and np.isclose(rates[12], 0.55) and np.isclose(rates[20], 0.1)
    assert (np.diff(rates[4:]) < 0).all()


def test_wsd_is_stable_then_decays_linearly():
    rates = _rates(schedule="wsd", decay_steps=5)
    np.testing.assert_allclose(rates[4:16], 1.0)
    np.testing.assert_allclose(np.diff(rates[15:]), -0.18, rtol=1e-5)
    assert np.isclose(rates[20], 0.1)


def test_constant_stays_at_peak():
    np.testing.assert_allclose(_rates(schedule="constant")[4:], 1.0)


def test_schedule_without_warmup_starts_at_peak():
    assert _rates(schedule="cosine", warmup_steps=0)[0] == 1.0


def test_weight_decay_skips_norm_scales():
    params = {"weight": jnp.ones((2, 3)), "norm": jnp.ones(3), "bias": jnp.ones((2, 3, 4))}
    dims = {
        "weight": ("model", "ffn"),
        "norm": ("layers", "norm"),
        "bias": ("layers", "heads", "bias"),
    }
    optimizer = make_optimizer(CONFIG, learning_rate_schedule(CONFIG, 20), dims)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params, grad_norm=0.0)
    assert (
        (updates["weight"] < 0).all()
        and (updates["norm"] == 0).all()
        and (updates["bias"] == 0).all()
    )


@pytest.mark.parametrize("max_grad_norm, same", [(1.0, True), (0.0, False)])
def test_clipping_uses_global_norm(max_grad_norm, same):
    """With clipping, gradients of norm 50 and 500 give the same first moment."""
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    dims = {"a": ("norm",), "b": ("model",)}
    config = dataclasses.replace(CONFIG, max_grad_norm=max_grad_norm)
    optimizer = make_optimizer(config, learning_rate_schedule(config, 20), dims)
    small = {"a": jnp.array([30.0, 0, 0]), "b": jnp.array([0.0, 40, 0, 0])}
    large = jax.tree.map(lambda g: 10 * g, small)
    states = [
        optimizer.update(
            gradients, optimizer.init(params), params, grad_norm=optax.tree.norm(gradients)
        )[1]
        for gradients in (small, large)
    ]
    moments = [[leaf for leaf in jax.tree.leaves(state) if jnp.ndim(leaf)] for state in states]
    assert all(np.allclose(a, b) for a, b in zip(*moments)) == same
