"""The chunked loss against a reference: values, gradients, padding, weights, meshes, tiles; and its
array sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.config import MeshConfig
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step import loss
from jaxlc.step.loss import LossSpec, Teacher, loss_sums, sums_and_losses
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
    inputs = x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec
    _, losses = jax.jit(sums_and_losses, static_argnums=5)(*inputs)
    assert losses.shape == shape
    np.testing.assert_allclose(losses.reshape(B, T), losses_BT, rtol=1e-5)


MESHES = [dict(), dict(tensor=4), dict(context=3, tensor=2), dict(data=2, context=2, tensor=2)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [5, 1024])
def test_loss_sums_on_mesh_equals_reference(monkeypatch, axes, chunk_tokens):
    """With chunks of 5 tokens the last chunk is shorter on most meshes, and the logits are read once, as
    on GPUs.
    """
    if chunk_tokens == 5:
        monkeypatch.setattr(loss, "_two_passes", loss._one_pass)
    _assert_parity(_spec(chunk_tokens, z_loss=0.01, **axes), (B, T))


def test_one_pass_over_extreme_logits_equals_two():
    """Columns of padding, rows of padding only, and logits whose exponentials overflow."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 1000)).astype(np.float32) * [[1], [30], [1e30], [1], [1], [1]]
    logits[3, 10:] = logits[4] = -np.inf
    got, expected = (
        jax.jit(f)(logits.astype(np.float32)) for f in (loss._one_pass, loss._two_passes)
    )
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
    assert np.isfinite(got[0]).all() and got[1][4] == 0


@pytest.mark.parametrize("axes", [dict(), dict(data=2, context=2, tensor=2)], ids=str)
@pytest.mark.parametrize("shape", [(3, B, T // 3), (2, 3, B, T // 6)], ids=str)
def test_loss_sums_on_tiles_equals_reference(axes, shape):
    _assert_parity(_spec(5, z_loss=0.01, **axes), shape)


def _teacher(top_k: int) -> Teacher:
    """The best tokens of other logits; one token has no teacher, and another a single candidate."""
    log_probs = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(9), (B, T, V)))
    log_probs_k, tokens_k = jax.lax.top_k(log_probs, top_k)
    tokens_k = tokens_k.at[0, 1].set(-1).at[1, 2, 1:].set(-1)
    return Teacher(tokens_k.astype(jnp.int32), log_probs_k)


def _plain_distillation(x_BTD, scale_D, head_DV, weights_BT, teacher: Teacher):
    """The whole distribution, with one bucket for what is not among the teacher's tokens."""
    normed_BTD = x_BTD / jnp.sqrt((x_BTD**2).mean(axis=-1, keepdims=True) + EPSILON) * scale_D
    student_BTV = jax.nn.log_softmax((normed_BTD @ head_DV)[..., :V])
    is_top_BTV = (teacher.tokens[..., None] == jnp.arange(V)).any(-2)
    own_BTk = jnp.take_along_axis(student_BTV, jnp.maximum(teacher.tokens, 0), axis=-1)
    probs_BTk = jnp.where(teacher.tokens >= 0, jnp.exp(teacher.log_probs), 0)
    losses_BT = (probs_BTk * (teacher.log_probs - own_BTk)).sum(-1)
    others_BT = jnp.where(is_top_BTV, 0, jnp.exp(student_BTV)).sum(-1)
    is_empty_BT = is_top_BTV.all(-1)
    prob_BT = jnp.where(is_empty_BT, 1, 1 - probs_BTk.sum(-1))
    ratio_BT = prob_BT / jnp.where(is_empty_BT, 1, others_BT)
    losses_BT += prob_BT * jnp.log(ratio_BT)
    return (weights_BT * losses_BT).sum(), losses_BT


@pytest.mark.parametrize(
    "axes, top_k, scale",
    [
        (dict(), 3, 6.0),
        (dict(data=2, context=2, tensor=2), 3, 1.0),
        pytest.param(dict(tensor=4), 3, 6.0, marks=pytest.mark.full),
        pytest.param(dict(tensor=2), V, 1.0, marks=pytest.mark.full),
        pytest.param(dict(context=3, tensor=2), 1, 3.0, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_distillation_equals_the_dense_divergence_in_float64(axes, top_k, scale):
    """With `scale`, the student gives some buckets a probability of 1e-9; in tiles and chunks."""
    x_BTD, scale_D, head_DV, targets_BT, weights_BT = _inputs()
    teacher, head_DV = _teacher(top_k), scale * head_DV
    with jax.enable_x64(True):
        arguments = (x_BTD, scale_D, head_DV, weights_BT, teacher)
        wide = jax.tree.map(lambda x: x if x.dtype == "int32" else x.astype(jnp.float64), arguments)
        plain = jax.jit(jax.value_and_grad(_plain_distillation, (0, 1, 2), has_aux=True))
        (total, losses_BT), expected = jax.tree.map(np.asarray, plain(*wide))
    spec, tiles = _spec(5, **axes), (2, B, T // 2)
    shaped = [jnp.moveaxis(x.reshape(B, 2, T // 2, -1), 1, 0) for x in (x_BTD, *teacher)]
    x_BTD, teacher = shaped[0], Teacher(*shaped[1:])
    targets_BT, weights_BT = (
        jnp.moveaxis(x.reshape(B, 2, -1), 1, 0) for x in (targets_BT, weights_BT)
    )

    def ours(*inputs):
        sums = loss_sums(*inputs, targets_BT, weights_BT, spec, teacher)
        return sums.objective, sums.cross_entropy

    run = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))
    (objective, value), got = run(x_BTD, scale_D, head_DV)
    assert objective == value
    np.testing.assert_allclose(value, total, rtol=1e-6)
    got = (jnp.moveaxis(got[0], 0, 1).reshape(expected[0].shape), *got[1:])
    for mine, theirs in zip(got, expected):
        assert max_relative_error(mine, theirs) <= FLOAT32_PARITY
    inputs = x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec, teacher
    _, losses = jax.jit(sums_and_losses, static_argnums=5)(*inputs)
    assert losses.shape == tiles
    atol = 1e-6 * np.abs(losses_BT).max()
    np.testing.assert_allclose(jnp.moveaxis(losses, 0, 1).reshape(B, T), losses_BT, rtol=1e-5, atol=atol)  # fmt: skip


def test_loss_sums_without_gradient_has_equal_value():
    spec, inputs = _spec(7), _inputs()

    def objective(*inputs):
        return loss_sums(*inputs, spec).objective

    value, (grad_value, _) = (
        jax.jit(f)(*inputs) for f in (objective, jax.value_and_grad(objective))
    )
    np.testing.assert_allclose(value, grad_value, rtol=1e-6)


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
    teacher = Teacher(jnp.zeros((1, 512, 2), jnp.int32), jnp.full((1, 512, 2), -1.0))
    distilled = jax.jit(
        jax.grad(lambda *x: loss_sums(*x, targets, weights, spec, teacher).objective, (0, 1, 2))
    )
    compiled = distilled.lower(x, scale, head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 4096 * 4 / 4
