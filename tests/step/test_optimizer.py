"""Schedules at their boundaries, weight decay, clipping and Muon."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlc.config import MeshConfig, OptimizerConfig
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.update import learning_rate_schedule, make_optimizer
from tests.step.synthetic import small_config, small_step
from tests.tolerances import MUON_PARITY, max_relative_error

MESH = make_mesh(MeshConfig(), jax.devices()[:1])
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
    optimizer = make_optimizer(CONFIG, learning_rate_schedule(CONFIG, 20), dims, MESH)
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
    optimizer = make_optimizer(config, learning_rate_schedule(config, 20), dims, MESH)
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


MUON_MODEL = dict(
    num_layers=3, experts=dict(num_experts=4, experts_per_token=2, ffn_dim=16), qk_norm="head"
)


def _muon_update_on(mesh: dict, **optimizer):
    """Parameters of the layers, gradients, and the parameters after an update, on the host; and the
    program.
    """
    settings = dict(name="muon", warmup_steps=0, learning_rate=0.5, max_grad_norm=0.0)
    step = small_step(small_config(mesh=mesh, model=MUON_MODEL, optimizer=settings | optimizer))

    def gradient(param: jax.Array) -> jax.Array:
        values = np.random.default_rng(param.size).normal(size=param.shape)
        return jax.device_put(values.astype(np.float32), param.sharding)

    # the embedding and the output head are padded on some meshes
    params, dims = ({"layers": tree["layers"]} for tree in (step.init().params, step.dims))
    gradients = jax.tree.map(gradient, params)
    optimizer = step._step_optimizer.of(dims)

    @jax.jit
    def updated(params, gradients):
        updates, _ = optimizer.update(
            gradients, optimizer.init(params), params, grad_norm=jnp.ones(())
        )
        return optax.apply_updates(params, updates)

    program = updated.lower(params, gradients)
    return jax.device_get((params, gradients, program.compile()(params, gradients))), program


@pytest.fixture(scope="module")
def on_one_device():
    return _muon_update_on({})[0]


def _orthogonalized(x: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations of a matrix."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def _muon_update(gradient: np.ndarray, scale: str) -> np.ndarray:
    """The first update of a matrix [inputs, outputs], without weight decay; see torch.optim.Muon."""
    inputs, outputs = gradient.shape
    factor = 0.2 * max(inputs, outputs) ** 0.5
    if scale == "original":
        factor = max(1, outputs / inputs) ** 0.5
    return factor * _orthogonalized(gradient.astype(np.float64))


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_orthogonalizes_each_matrix(scale: str, heads: bool):
    """Projections are matrices as a whole or by head, and each expert has its own."""
    trees, _ = _muon_update_on({}, muon_scale=scale, muon_heads=heads)

    def check(block: str, name: str, matrices):
        param, gradient, new = (tree["layers"][block][name][-1] for tree in trees)
        # the momentum of the first step is a multiple of the gradient
        change = (param * (1 - 0.5 * 0.1) - new) / 0.5
        assert max_relative_error(change, matrices(gradient)) < MUON_PARITY, name

    def of_projection(gradient):
        D, N, H = gradient.shape
        if heads:
            return np.stack([_muon_update(gradient[:, n], scale) for n in range(N)], 1)
        return _muon_update(gradient.reshape(D, N * H), scale).reshape(D, N, H)

    def of_output(gradient):
        N, H, D = gradient.shape
        if heads:
            return np.stack([_muon_update(head, scale) for head in gradient])
        return _muon_update(gradient.reshape(N * H, D), scale).reshape(N, H, D)

    def of_experts(gradient):
        return np.stack([_muon_update(expert, scale) for expert in gradient])

    check("attention", "wq", of_projection)
    check("attention", "wk", of_projection)
    check("attention", "wo", of_output)
    check("mlp", "expert_up", of_experts)
    check("mlp", "expert_down", of_experts)


@pytest.mark.parametrize(
    "mesh", [dict(context=2, tensor=2), dict(data=2, fsdp=2, tensor=2), dict(context=8)], ids=str
)
def test_muon_on_a_mesh_equals_one_device(on_one_device, mesh: dict):
    """Each rank has at most one whole matrix of the three layers, and its share of the twelve of
    experts.
    """
    (_, _, updated), program = _muon_update_on(mesh)
    ranks = math.prod(mesh.values())
    products = re.findall(r"dot_general.*: \(tensor<(\d+)x", program.as_text())
    assert {int(x) for x in products} == {1, -(-12 // ranks)}
    params, _, expected = on_one_device
    errors = jax.tree.map(
        lambda a, b, p: max_relative_error(a - p, b - p), updated, expected, params
    )
    assert max(jax.tree.leaves(errors)) < MUON_PARITY, errors
