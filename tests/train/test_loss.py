"""The chunked loss against the plain one: values, gradients, padding, weights, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.config import MeshConfig
from jaxlc.sharding.mesh import make_mesh
from jaxlc.train.loss import LossSpec, loss_sums, token_losses
from tests.tolerances import FLOAT32_PARITY, max_relative_error

B, T, D, V, V_PADDED = 2, 24, 8, 13, 16


def _inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    x_BTD = jax.random.normal(keys[0], (B, T, D))
    head_DV = jax.random.normal(keys[1], (D, V_PADDED))
    targets_BT = jax.random.randint(keys[2], (B, T), 0, V)
    weights_BT = jax.random.uniform(keys[3], (B, T)).at[:, ::5].set(0.0)
    return x_BTD, head_DV, targets_BT, weights_BT


def _plain(x_BTD, head_DV, targets_BT, weights_BT, z_loss):
    logits_BTV = (x_BTD @ head_DV)[..., :V]
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    losses_BT = log_z_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    objective = (weights_BT * (losses_BT + z_loss * log_z_BT**2)).sum()
    return objective, ((weights_BT * losses_BT).sum(), losses_BT)


MESHES = [dict(), dict(tensor=4), dict(context=3, tensor=2), dict(data=2, context=2, tensor=2)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [5, 1024])
def test_parity_with_the_plain_loss(axes, chunk_tokens):
    inputs, z_loss = _inputs(), 0.01
    config = MeshConfig(**axes)
    mesh = make_mesh(config, jax.devices()[: config.num_devices])
    spec = LossSpec(mesh=mesh, vocab_size=V, chunk_tokens=chunk_tokens, z_loss=z_loss)
    plain = jax.value_and_grad(_plain, (0, 1), has_aux=True)
    (objective, (cross_entropy, losses_BT)), gradients = plain(*inputs, z_loss)

    def ours(x_BTD, head_DV):
        sums = loss_sums(x_BTD, head_DV, *inputs[2:], spec)
        return 3.0 * sums.objective, sums

    (_, sums), got = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(*inputs[:2])
    np.testing.assert_allclose(sums.objective, objective, rtol=1e-6)
    np.testing.assert_allclose(sums.cross_entropy, cross_entropy, rtol=1e-6)
    for mine, theirs in zip(got, gradients):
        assert max_relative_error(mine, 3.0 * theirs) <= FLOAT32_PARITY
    assert (got[1][:, V:] == 0).all()  # the padding of the vocabulary learns nothing
    np.testing.assert_allclose(jax.jit(token_losses, static_argnums=3)(*inputs[:3], spec), losses_BT, rtol=1e-5)


def test_the_value_without_a_gradient_is_the_same():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    spec = LossSpec(mesh=mesh, vocab_size=V, chunk_tokens=7, z_loss=0.0)
    inputs = _inputs()
    value = loss_sums(*inputs, spec)
    grad_value = jax.value_and_grad(lambda x: loss_sums(x, *inputs[1:], spec).objective)(inputs[0])[0]
    np.testing.assert_allclose(value.objective, grad_value, rtol=1e-6)


def test_no_array_holds_all_logits():
    """The widest float array of forward and backward is far smaller than [tokens, vocabulary]."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    spec = LossSpec(mesh=mesh, vocab_size=4096, chunk_tokens=8, z_loss=0.0)
    shapes = jnp.zeros((1, 512, 4)), jnp.zeros((4, 4096)), jnp.zeros((1, 512), jnp.int32), jnp.ones((1, 512))
    gradients = jax.grad(lambda x, head: loss_sums(x, head, *shapes[2:], spec).objective, (0, 1))
    lowered = jax.jit(gradients).lower(*shapes[:2])
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 512 * 4096 * 4 / 4
