"""Training in float16 with dynamic loss scaling, and with FP8 matrix products."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.checkpoints.restore import RestoreTarget
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import PrecisionConfig, to_dict
from jaxlc.core.errors import UserError
from jaxlc.step.precision import is_retried
from tests.step.synthetic import (
    HYBRID,
    MIXED_KINDS,
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import BFLOAT16_GRADIENT, FLOAT16_GRADIENT, FP8_GRADIENT, max_relative_error

DELAYED = dict(compute="fp8", fp8_scaling="delayed", fp8_amax_history_len=3)
MESH = dict(context=2, tensor=2, fsdp=2)
MODELS = {
    "": {},
    "kinds": MIXED_KINDS | dict(layer_kinds=("sliding", "wide")),  # layers of several sizes
    "recurrent": HYBRID | dict(layer_kinds=("gated_delta_net",), num_layers=1),
}


@functools.cache
def _in_float32(model: str = ""):
    """(parameters, gradients, cross entropy) on one device, of one of MODELS."""
    step = small_step(small_config(model=MODELS[model]))
    params = step.init().params
    return params, *jax.jit(gradients_and_loss(step))(params, make_batch(step, natural_rows()))


def _gradients(mesh, model="", **sections):
    """Gradients of the same parameters in another precision; also checks the loss."""
    params, _, loss = _in_float32(model)
    step = small_step(small_config(mesh=mesh, model=MODELS[model], **sections))
    got, got_loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, natural_rows())
    )
    np.testing.assert_allclose(got_loss, loss, rtol=1e-2)
    return jax.tree.map(without_padding, got, params)


def _norm_error(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        pytest.param({}, "", marks=pytest.mark.full),
        pytest.param(dict(context=8), "", marks=pytest.mark.full),
        (MESH, ""),
        (dict(context=2), "recurrent"),
    ],
    ids=str,
)
def test_float16_gradients_are_close_to_float32(mesh, model):
    train = dict(gradient_accumulation_steps=1 if not mesh else 2)
    got = _gradients(mesh, model, precision=dict(compute="fp16"), train=train)
    # The largest errors of the gradients of decays, sums over all tokens that cancel, are 1.02e-2.
    error_of = _norm_error if model == "recurrent" else max_relative_error
    errors = jax.tree.map(error_of, got, _in_float32(model)[1])
    assert max(jax.tree.leaves(errors)) <= FLOAT16_GRADIENT, errors


def test_reduce_in_fp32_does_not_round_gradients_of_layers():
    """By default they are rounded to bfloat16 before the sum over ranks, and the sum is a bfloat16
    number too.
    """
    rounded, exact = (
        _gradients(MESH, precision=dict(compute="bf16", reduce=reduce))["layers"]
        for reduce in ("compute", "fp32")
    )
    for a, b in zip(_matrices(rounded), _matrices(exact), strict=True):
        assert _unrounded_fraction(a) == 0 and _unrounded_fraction(b) > 0.9
    errors = [
        max(jax.tree.leaves(jax.tree.map(_norm_error, got, _in_float32()[1]["layers"])))
        for got in (exact, rounded)
    ]
    assert errors[0] <= 1.01 * errors[1] <= BFLOAT16_GRADIENT


def _matrices(tree):
    return [x for x in jax.tree.leaves(tree) if x.ndim > 2]


def _unrounded_fraction(x) -> float:
    """The fraction of values that are not bfloat16 numbers."""
    return float(np.mean(np.asarray(x) != np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32))))


def test_bfloat16_ring_without_document_mask_runs_on_cpu():
    """Without masks XLA once dispatched bfloat16 products to a library that does not support them."""
    config = small_config(
        model=dict(num_layers=1),
        mesh=dict(context=2),
        precision=dict(compute="bf16"),
        attention=dict(kernel="blockwise", document_mask=False),
        train=dict(global_batch_size=4),
    )
    step = small_step(config)
    _, loss = jax.jit(gradients_and_loss(step))(
        step.init().params, make_batch(step, natural_rows(4))
    )
    assert np.isfinite(loss)


@pytest.mark.parametrize(("mesh", "memory", "model"), [
    pytest.param({}, {}, "", marks=pytest.mark.full), pytest.param(MESH, {}, "", marks=pytest.mark.full),
    (MESH, dict(tile_tokens=24), ""), pytest.param(MESH, {}, "kinds", marks=pytest.mark.full),
], ids=str)  # fmt: skip
@pytest.mark.heavy
def test_fp8_gradients_are_close_to_float32(mesh, memory, model):
    got = _gradients(mesh, model, precision=dict(compute="fp8"), memory=memory)
    errors = jax.tree.map(_norm_error, got, _in_float32(model)[1])
    assert BFLOAT16_GRADIENT < max(jax.tree.leaves(errors)) <= FP8_GRADIENT, errors


@pytest.mark.heavy
def test_bf16_layers_are_equal_in_scan_and_tiles():
    """The error is far below the difference to another bf16 layer; FP8 rounding may flip."""

    def gradients(layer, **memory):
        return _gradients({}, precision=dict(compute="fp8", bf16_layers=(layer,)), memory=memory)

    def distance(a, b):
        return max(jax.tree.leaves(jax.tree.map(_norm_error, a, b)))

    first, last = gradients(0, remat="none"), gradients(-1, remat="none")
    got = gradients(0, tile_tokens=48, parameters="host")
    assert distance(got, first) < distance(got, last) / 2


def test_fp8_matmuls_selects_products_in_fp8():
    """Three products of each matrix: forward, gradient of x, gradient of w."""
    names = ("query", "mlp_down")
    step = small_step(
        small_config(precision=dict(compute="fp8", fp8_matmuls=names), memory=dict(remat="none"))
    )
    params, batch = step.abstract_state.params, step.abstract_batch
    text = jax.jit(gradients_and_loss(step)).lower(params, batch).as_text()
    products = re.findall(r"dot_general.* : \(tensor<\w*x(f8E\w+)>, tensor<\w*x(f8E\w+)>\)", text)
    kinds = ("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")
    assert sorted(products) == sorted(kinds * len(names)), products


@functools.cache
def _trained(num_steps: int, mesh=(), gradient_accumulation_steps: int = 1, **precision):
    """(step, states after each step, metrics), always on the same batch."""
    train = dict(gradient_accumulation_steps=gradient_accumulation_steps)
    optimizer = dict(learning_rate=1e-2, warmup_steps=0, schedule="constant")
    step = small_step(
        small_config(precision=precision, mesh=dict(mesh), train=train, optimizer=optimizer)
    )
    run, batch = step.compile(), make_batch(step, natural_rows())
    state, states, metrics = step.init(), [], []
    for _ in range(num_steps):
        states.append(jax.device_get(state))
        state, step_metrics = run(state, batch)
        metrics.append(jax.device_get(step_metrics))
    return step, run, [*states, jax.device_get(state)], metrics


# The first scales overflow: weight gradients of about 0.1, times 2^20, exceed the range of float16.
OVERFLOWS = dict(compute="fp16", loss_scale=2.0**20, loss_scale_growth_interval=3)


def test_overflow_skips_update_and_halves_loss_scale():
    _, _, states, metrics = _trained(8, mesh=(("context", 2),), **OVERFLOWS)
    finite = [bool(step_metrics.is_finite) for step_metrics in metrics]
    num_overflows = finite.index(True)
    assert num_overflows >= 1 and all(finite[num_overflows : num_overflows + 3])
    for overflow in range(num_overflows):
        before, after = states[overflow], states[overflow + 1]
        # parameters and moments
        jax.tree.map(np.testing.assert_array_equal, after[1:3], before[1:3])
        assert after.scaling.loss_scale.scale == before.scaling.loss_scale.scale / 2
        assert metrics[overflow].loss_scale == before.scaling.loss_scale.scale
        assert metrics[overflow].skipped_steps == overflow + 1
        # independent of the scale
        np.testing.assert_allclose(metrics[overflow].loss, metrics[0].loss)
    good = num_overflows + 3
    assert (
        states[good].scaling.loss_scale.scale == 2 * metrics[num_overflows].loss_scale
    )  # after three steps without overflow
    assert metrics[good - 1].skipped_steps == num_overflows
    assert metrics[good - 1].loss < metrics[0].loss


GROWS = dict(
    compute="fp16", loss_scale=2.0**15, loss_scale_max=2.0**16, loss_scale_growth_interval=1
)


def test_loss_scale_stays_between_bounds():
    _, _, states, _ = _trained(3, **GROWS)
    scales = [float(state.scaling.loss_scale.scale) for state in states]
    assert scales == [2**15, 2**16, 2**16, 2**16]
    config = PrecisionConfig(compute="fp16", loss_scale_min=2.0)
    assert is_retried(4.0, config) and not is_retried(2.0, config) and not is_retried(None, config)


def test_loss_scale_does_not_change_gradients():
    """Rounding to float16 is independent of the exponent, except for subnormal values."""
    step, run, *_ = _trained(3, **GROWS)
    norms = []
    for scale in (2.0**12, 2.0**16):
        state = step.init()
        loss_scale = state.scaling.loss_scale
        scaled = loss_scale._replace(scale=jnp.full_like(loss_scale.scale, scale))
        state = state._replace(scaling=state.scaling._replace(loss_scale=scaled))
        _, metrics = run(state, make_batch(step, natural_rows()))
        norms.append(float(metrics.grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize(
    "precision",
    [
        # Gradients with current scales are compared with float32, above and in test_experts.py.
        pytest.param(dict(compute="fp8"), id="current", marks=pytest.mark.full),
        pytest.param(DELAYED, id="delayed"),
    ],
)
def test_fp8_training_reduces_loss(precision):
    _, _, _, metrics = _trained(6, mesh=(("context", 2),), **precision)
    assert metrics[-1].loss < 0.9 * metrics[0].loss


def test_amax_histories_cover_all_ranks_and_microbatches():
    """The maximum, equal to that of one device and one microbatch up to bfloat16 rounding."""
    (_, _, one, _), (_, _, many, _) = (
        _trained(6, mesh=(("context", 2),), **DELAYED),
        _trained(2, mesh=tuple(MESH.items()), gradient_accumulation_steps=2, **DELAYED),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=FP8_GRADIENT),
        many[1].scaling,
        one[1].scaling,
    )
    for before, after in ((one[1], one[2]), (one[2], one[3])):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a[..., 1:], b[..., :-1]),
            after.scaling,
            before.scaling,
        )


@pytest.mark.parametrize("precision", [OVERFLOWS, DELAYED], ids=["fp16", "fp8"])
def test_resume_from_checkpoint_is_bitwise(precision, tmp_path):
    num_steps, saved = (8, 2) if precision is OVERFLOWS else (6, 2)
    step, run, states, _ = _trained(num_steps, mesh=(("context", 2),), **precision)
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract_state)
    model = to_dict(step.config)["model"]
    checkpoints = Checkpoints(tmp_path, keep=1, warn=print)
    checkpoints.save(
        saved, jax.device_put(states[saved], shardings), dict(step=saved, config=dict(model=model))
    )
    checkpoints.wait()
    state, _ = checkpoints.restore_latest(lambda _: RestoreTarget(step.abstract_state, model))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), states[saved])
    for _ in range(saved, num_steps):
        state, metrics = run(state, make_batch(step, natural_rows()))
        jax.device_get(metrics)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), states[-1])


@pytest.mark.parametrize(("sections", "sentence"), [
    (dict(precision=dict(compute="fp8", fp8_matmuls=("mlp",))), "'mlp' for config.precision.fp8_matmuls"),
    (dict(precision=dict(compute="bf16", fp8_scaling="delayed")), "fp8_scaling='delayed' is for compute='fp8'"),
    (dict(precision=dict(compute="fp8", loss_scale=2.0)), "loss_scale=2.0 is for compute='fp16'"),
    (dict(precision=dict(loss_scale_growth_interval=5)), "loss_scale_growth_interval=5 is for compute='fp16'"),
    (dict(precision=dict(compute="fp8", fp8_amax_history_len=5)), "fp8_amax_history_len=5 is for delayed scaling"),
    (dict(precision=dict(compute="fp8", fp8_matmuls=())), "no fp8_matmuls is bf16"),
    (dict(precision=dict(bf16_layers=(0,))), "bf16_layers=(0,) is for compute='fp8'"),
    (dict(precision=dict(compute="fp8", bf16_layers=(0, 2))), "the model has 2 layers; they are 0 to 1, or -2 to -1"),
    (dict(precision=dict(compute="fp8", bf16_layers=(-3,))), "the model has 2 layers"),
    (dict(precision=dict(compute="fp8", bf16_layers=(1, -1))), "names a layer twice, of 2: they are [1, 1]"),
    (dict(precision=dict(compute="fp8", bf16_layers=(0, -1))), "are all layers, so compute='fp8' equals bf16"),
    (dict(precision=dict(compute="fp16", loss_scale_min=2.0**20)), "is not between loss_scale_min"),
    (dict(precision=dict(compute="fp8", reduce="fp32")), "whose products return gradients in bf16"),
    (dict(precision=DELAYED, memory=dict(tile_tokens=24)), "computes it tile by tile"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_unsupported_precision_raises(sections, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        small_config(**sections)
