"""Layers with prefetched weights against a plain scan; here all weights are on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxlc.models import offloaded_layers
from jaxlc.models.offloaded_layers import LayerParams, Place
from tests.tolerances import FLOAT32_PARITY, max_relative_error

pytestmark = pytest.mark.jax_version

L, B, D, F = 3, 2, 4, 5
_KEEP = jax.checkpoint_policies.save_only_these_names
POLICIES = {"nothing": _KEEP(), "hidden": _KEEP("hidden")}


def _run(x_BD, params, shared, prefetch=None):
    weights = {**params.trainable, **jax.lax.stop_gradient(params.frozen)}
    bias_BF = shared["bias_BF"][:, : weights["up"].shape[-1]]
    work = lambda x_BD: jnp.tanh(x_BD @ weights["up"] + bias_BF)  # noqa: E731
    hidden_BF, fetched = offloaded_layers.overlap_with_prefetch(work, (x_BD,), prefetch)
    hidden_BF = checkpoint_name(hidden_BF, "hidden")
    return (x_BD * shared["scale_B1"] + hidden_BF @ weights["down"], hidden_BF.sum()), fetched


def _inputs(trainable=("up", "down")):
    """(x, trainable weights, frozen weights)."""
    rng = np.random.default_rng(0)
    shapes = dict(x=(B, D), up=(L, D, F), down=(L, F, D))
    x, up, down = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes.values()
    )
    weights = dict(up=up, down=down)
    return x, {name: weights.pop(name) for name in trainable}, weights


def _loss(results):
    """Of the output of the last layer, and of the sum that each layer returns."""
    y_BD, sums_L = results
    return (y_BD**2).sum() + (sums_L**2).sum()


def _losses(policy):
    run = jax.checkpoint(_run, policy=policy)
    scale_B1 = jnp.arange(1.0, B + 1)[:, None]
    shared = dict(scale_B1=scale_B1, bias_BF=jnp.ones((B, F)))

    def plain(x_BD, trainable, frozen):
        stacked = LayerParams(trainable, frozen)
        return _loss(jax.lax.scan(lambda x_BD, params: run(x_BD, params, shared)[0], x_BD, stacked))

    def prefetched(x_BD, trainable, frozen):
        stacked = LayerParams(trainable, frozen)
        return _loss(
            offloaded_layers.run_layers([run], None, x_BD, stacked, shared, fetch=lambda w: w)
        )

    return plain, prefetched


@pytest.mark.parametrize("trainable", [("up", "down"), ("up",)])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_run_layers_equals_scan(policy, trainable):
    inputs = _inputs(trainable)
    plain, prefetched = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*inputs) for loss in _losses(policy)
    )
    errors = jax.tree.map(max_relative_error, prefetched, plain)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_run_layers_of_two_kinds_equals_loop():
    """Three layers per iteration, of two stacks with different shapes."""
    rng = np.random.default_rng(0)
    places = [Place("a", "a", 0), Place("b", "b", 0), Place("a", "a", 1)]
    shapes = dict(
        a=dict(up=(L, 2, D, F), down=(L, 2, F, D)),
        b=dict(up=(L, 1, D, F - 1), down=(L, 1, F - 1, D)),
    )
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    weights = jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
    shared = dict(scale_B1=jnp.ones((B, 1)), bias_BF=jnp.ones((B, F)))
    run = jax.checkpoint(_run, policy=POLICIES["hidden"])

    def loop(x_BD, weights):
        sums: list[list] = [[], [], []]
        for iteration in range(L):
            for place, place_sums in zip(places, sums):
                own = jax.tree.map(lambda x: x[iteration, place.index], weights[place.stack])  # noqa: B023
                (x_BD, total), _ = run(x_BD, LayerParams(own, {}), shared)
                place_sums.append(total)
        return _loss((x_BD, jnp.array(sums)))

    def prefetched(x_BD, weights):
        stacked = LayerParams(weights, dict(a={}, b={}))
        x_BD, sums = offloaded_layers.run_layers(
            [run] * 3, places, x_BD, stacked, shared, fetch=lambda w: w
        )
        return _loss((x_BD, jnp.array(sums)))

    x_BD = draw((B, D))
    plain, got = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x_BD, weights) for f in (loop, prefetched)
    )
    errors = jax.tree.map(max_relative_error, got, plain)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


@pytest.mark.parametrize("policy, trainable, kept", [
    ("nothing", ("up", "down"), [(L, B, D)]),
    ("hidden", ("up", "down"), [(L, B, D), (L, B, F)]),
    ("hidden", ("up",), [(L, B, D)]),  # only the gradient of "down" reads the hidden values
])  # fmt: skip
def test_run_layers_saves_policy_residuals_but_no_weights(policy, trainable, kept):
    _, prefetched = _losses(POLICIES[policy])
    vjp = lambda x_BD, weights, frozen: jax.vjp(lambda *x: prefetched(*x, frozen), x_BD, weights)[1]  # noqa: E731
    residuals = jax.tree.leaves(jax.eval_shape(vjp, *_inputs(trainable)))
    # without the sums
    stacked_shapes = [x.shape for x in residuals if x.shape[:1] == (L,) and x.ndim > 1]
    stacked = [(L, D, F), (L, F, D)]  # the stored weights, not copies of each layer
    assert sorted(stacked_shapes) == sorted(kept + stacked)
