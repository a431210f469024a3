"""The chunked loss against a reference: values, gradients, padding, weights, meshes, tiles; and its
array sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.config import MeshConfig
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.loss import LossSpec, loss_sums, token_losses
from tests.tolerances import FLOAT32_PARITY, max_relative_error

B, T, D, V, V_PADDED = 2, 24, 8, 13, 16
EPSILON = 0.1  # large, so that a missing epsilon is detected


def _inputs():
    """(x, scale, head, targets, weights)"""
    keys = jax.random.split(jax.random.key(0), 5)
    x_BTD = jax.random.normal(keys[0], (B, T, D))
    scale_D = jax.random.uniform(keys[4], (D,), minval=0.5, maxval=1.5)
    head_DV = jax.random.normal(keys[1], (D, V_PADDED))
    targets_BT = jax.random.randint(keys[2], (B, T), 0, V)
    weights_BT = jax.random.uniform(keys[3], (B, T)).at[:, ::5].set(0.0)
    return x_BTD, scale_D, head_DV, targets_BT, weights_BT


def _plain(x_BTD, scale_D, head_DV, targets_BT, weights_BT, z_loss):
    normed_BTD = x_BTD / jnp.sqrt((x_BTD**2).mean(axis=-1, keepdims=True) + EPSILON) * scale_D
    logits_BTV = (normed_BTD @ head_DV)[..., :V]
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    losses_BT = log_z_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    objective = (weights_BT * (losses_BT + z_loss * log_z_BT**2)).sum()
    return objective, ((weights_BT * losses_BT).sum(), losses_BT)


def _spec(chunk_tokens, z_loss=0.0, vocab_size=V, **axes):
    config = MeshConfig(**axes)
    mesh = make_mesh(config, jax.devices()[: config.num_devices])
    return LossSpec(
        mesh=mesh,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        norm_epsilon=EPSILON,
    )


def _assert_parity(spec, shape):
    """`shape`: shape of the targets; the tokens and their order do not depend on it."""
    inputs = _inputs()
    plain = jax.value_and_grad(_plain, (0, 1, 2), has_aux=True)
    (objective, (cross_entropy, losses_BT)), expected = plain(*inputs, spec.z_loss)

    x_BTD, scale_D, head_DV, *rest = inputs
    x_BTD, (targets_BT, weights_BT) = x_BTD.reshape(*shape, D), (x.reshape(shape) for x in rest)

    def ours(x_BTD, scale_D, head_DV):
        sums = loss_sums(x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec)
        return 3.0 * sums.objective, sums

    (_, sums), got = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(
        x_BTD, scale_D, head_DV
    )
    np.testing.assert_allclose(sums.objective, objective, rtol=1e-6)
    np.testing.assert_allclose(sums.cross_entropy, cross_entropy, rtol=1e-6)
    assert got[0].shape == x_BTD.shape
    for mine, theirs in zip(got, expected):
        assert max_relative_error(mine.reshape(theirs.shape), 3.0 * theirs) <= FLOAT32_PARITY
    assert (got[2][:, V:] == 0).all()  # vocabulary padding has no gradient
    losses = jax.jit(token_losses, static_argnums=4)(x_BTD, scale_D, head_DV, targets_BT, spec)
    assert losses.shape == shape
    np.testing.assert_allclose(losses.reshape(B, T), losses_BT, rtol=1e-5)


MESHES = [dict(), dict(tensor=4), dict(context=3, tensor=2), dict(data=2, context=2, tensor=2)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [5, 1024])
def test_loss_sums_on_mesh_equals_reference(axes, chunk_tokens):
    """With chunks of 5 tokens the last chunk is shorter on most meshes."""
    _assert_parity(_spec(chunk_tokens, z_loss=0.01, **axes), (B, T))


@pytest.mark.parametrize("axes", [dict(), dict(data=2, context=2, tensor=2)], ids=str)
@pytest.mark.parametrize("shape", [(3, B, T // 3), (2, 3, B, T // 6)], ids=str)
def test_loss_sums_on_tiles_equals_reference(axes, shape):
    _assert_parity(_spec(5, z_loss=0.01, **axes), shape)


def test_loss_sums_without_gradient_has_equal_value():
    spec, inputs = _spec(7), _inputs()
    value = loss_sums(*inputs, spec)
    grad_value = jax.value_and_grad(lambda x: loss_sums(x, *inputs[1:], spec).objective)(inputs[0])[
        0
    ]
    np.testing.assert_allclose(value.objective, grad_value, rtol=1e-6)


def test_loss_sums_never_materializes_all_logits():
    """The largest float array of forward and backward is far smaller than [tokens, vocabulary]."""
    spec = _spec(8, vocab_size=4096)
    x, scale, head = jnp.zeros((1, 512, 4)), jnp.ones(4), jnp.zeros((4, 4096))
    targets, weights = jnp.zeros((1, 512), jnp.int32), jnp.ones((1, 512))
    gradients = jax.grad(
        lambda *inputs: loss_sums(*inputs, targets, weights, spec).objective, (0, 1, 2)
    )
    lowered = jax.jit(gradients).lower(x, scale, head)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 512 * 4096 * 4 / 4
