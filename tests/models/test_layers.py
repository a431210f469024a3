"""The layers' parts: first values, norm, what a remat policy can name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlc.config.presets import PRESETS
from jaxlc.models.layers import RMSNorm, in_use, matrix, residual_depth_scale
from jaxlc.sharding.rules import Sharder
from tests.models.small import run, small_inputs, small_mesh, small_model, small_params


def test_a_declared_matrix():
    param = matrix(nnx.Rngs(0), fan_in=64, model=64, heads=32, head_dim=16)
    assert param.dims == ("model", "heads", "head_dim")
    assert param[...].shape == (64, 32, 16) and param[...].dtype == jnp.float32
    assert float(param[...].std()) == pytest.approx(1 / 8, rel=0.02)
    assert float(jnp.abs(param[...]).max()) < 3 / 8  # truncated: a plain normal of this size reaches 4 deviations


def test_depth_scale():
    assert residual_depth_scale(PRESETS["llama3-8b"]) == pytest.approx(1 / 8)
    param = matrix(nnx.Rngs(0), fan_in=64, depth_scale=0.1, ffn=64, model=512)
    assert float(param[...].std()) == pytest.approx(0.1 / 8, rel=0.02)


def test_norm_statistics_are_float32():
    """In bfloat16 the mean of squares of 4096 terms stands still at 256."""
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16)
    out = RMSNorm(4096, 1e-5)(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, rtol=1e-2)


def test_norm_epsilon():
    np.testing.assert_allclose(RMSNorm(4, 1.0)(jnp.ones(4)), 1 / np.sqrt(2), rtol=1e-6)


def test_in_use_casts():
    param = matrix(nnx.Rngs(0), fan_in=4, model=4, ffn=6)
    used = in_use(param, Sharder(small_mesh()), jnp.bfloat16)
    np.testing.assert_array_equal(used, param[...].astype(jnp.bfloat16))


NAMES = {"query", "key", "value", "attention_projected", "mlp_gate", "mlp_up", "residual"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_remat_policy_finds_each_name(name):
    """Kept by name, a tensor is among what the layer stacks up for its backward: one more [L, ...] array."""
    model = small_model()
    params, (tokens, positions) = small_params(model), small_inputs(model)

    def num_residuals(policy):
        def remat(layer):
            return jax.checkpoint(layer, policy=policy)

        def total(params):
            return run(params, model, tokens, positions, remat=remat)[0].sum()

        return len(jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(total, p)[1], params)))

    text = str(jax.make_jaxpr(lambda p: run(p, model, tokens, positions)[0])(params))
    assert f"name={name}]" in text or f"name[name={name}" in text
    if name != "residual":  # the layer's input is kept with or without its name
        assert num_residuals(jax.checkpoint_policies.save_only_these_names(name)) > num_residuals(
            jax.checkpoint_policies.nothing_saveable
        )


def test_weights_are_gathered_in_the_compute_dtype():
    """Every weight of the layer is cast before the constraint that gathers it."""
    model = dataclasses.replace(small_model(), tie_embeddings=False)
    params, (tokens, positions) = small_params(model), small_inputs(model)
    mesh = small_mesh(context=2, tensor=2)
    jaxpr = str(jax.make_jaxpr(lambda p: run(p, model, tokens, positions, mesh=mesh, compute_dtype=jnp.bfloat16))(params))
    for weight in ("16,4,6", "16,2,6", "4,6,16", "16,24", "24,16"):
        assert f"bf16[{weight}] = sharding_constraint" in jaxpr
