"""Layers of experts in the training step: meshes, tiles, rematerialization, and the losses of
experts.
"""

import functools
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlc import _jax_internals
from jaxlc.config import with_settings
from jaxlc.core.errors import UserError
from jaxlc.models import expert_products
from jaxlc.models.contract import CHOICE
from jaxlc.posttrain.losses import denominator
from jaxlc.step import step as kernel_checks
from jaxlc.step.loss import with_balanced_biases
from jaxlc.train.reports.step_reports import _balance
from tests.step.synthetic import (
    HYBRID,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.step.test_replay import policy_rows
from tests.tolerances import (
    BFLOAT16_ATTENTION,
    BFLOAT16_GRADIENT,
    FLOAT32_PARITY,
    FP8_GRADIENT,
    max_relative_error,
    relative_norm_error,
)

EXPERTS = dict(num_experts=8, experts_per_token=2, expert_ffn_dim=24, renormalize_router=True)
DENSE_BETWEEN = dict(
    layer_kinds=("full", "dense"), kinds=dict(dense=dict(feed_forward="dense")), num_layers=3
)
GPT_OSS = dict(
    router="topk_softmax", renormalize_router=False, expert_bias=True, activation="clamped_swiglu"
)
# queries are scaled by their position, which padding has not
SCALED = GPT_OSS | dict(
    rope_scaling="yarn",
    rope_scaling_factor=4.0,
    rope_scaling_original_tokens=8,
    rope_scaling_query_beta=0.5,
)
SHARED = dict(shared_ffn_dim=16, shared_expert_gate=True)
SIGMOID = dict(
    router="sigmoid",
    router_choice_bias=True,
    router_groups=4,
    router_groups_per_token=2,
    router_scale=1.5,
)
BIASED = DENSE_BETWEEN | SIGMOID | SHARED
LOSSES = dict(balance_loss=0.5, router_z_loss=0.1)
FP8 = dict(compute="fp8", fp8_matmuls=("query", "expert_gate", "expert_up", "expert_down"))
NO_EXPERTS = dict(num_experts=0, experts_per_token=0, expert_ffn_dim=0, renormalize_router=False)
DELTA_DIMS = dict(delta_key_dim=16, delta_value_dim=32)
MOSAIC, BF16 = dict(expert_kernel="mosaic"), dict(compute="bf16")


def _step(axes=(), memory=(), model=(), **train):
    return small_step(
        small_config(
            model=EXPERTS | dict(model), mesh=dict(axes), memory=dict(memory), train=LOSSES | train
        )
    )


class _Dict(dict):
    """A dictionary of settings that is an argument of a cached function."""

    def __hash__(self):
        return hash(repr(self))


@functools.cache
def _params(model=()):
    """Initial parameters; biases, which are 0 at first, get other values."""
    params = jax.device_get(_step(model=model).init().params)
    rng = np.random.default_rng(0)
    return jax.tree.map_with_path(
        lambda path, x: (
            rng.standard_normal(x.shape).astype(x.dtype) if "bias" in path[-1].key else x
        ),
        params,
    )


def _results(step, model=(), rows=None):
    """(cross entropy, gradients, None, `ExpertSums`)"""
    batch = make_batch(step, rows or natural_rows())
    return jax.device_get(
        jax.jit(step.objective.loss_and_grads)(put_params(step, _params(model)), batch)
    )


@functools.cache
def _on_one_device(model=()):
    return _results(_step(model=model), model)


CASES = [
    (dict(context=2, tensor=2, fsdp=2), dict(remat="attention"), {}),
    (dict(context=8), dict(remat="full", layers_per_remat_group=2), {}),
    (dict(context=2, tensor=2), dict(remat="full", tile_tokens=24), SCALED),
    (dict(context=4, data=2), dict(remat="none"), DENSE_BETWEEN),
    (dict(context=4, tensor=2), dict(remat="matmuls"), SCALED),
    (dict(context=4, tensor=2), dict(remat="attention", tile_tokens=24), SHARED),
    (dict(context=2, tensor=2), dict(remat="full"), BIASED),
    (
        dict(fsdp=4),
        dict(remat="full", tile_tokens=48, layers_per_remat_group=2, optimizer="host"),
        {},
    ),
]


@pytest.mark.parametrize(
    ("axes", "memory", "model"),
    [
        pytest.param(*case, marks=[] if index in (0, 2) else pytest.mark.full)
        for index, case in enumerate(CASES)
    ],
    ids=str,
)
def test_layers_of_experts_equal_one_device(axes, memory, model):
    """Gradients include those of both losses; rows have several documents and padding."""
    model = _Dict(model)
    expected, got = _on_one_device(model), _results(_step(axes, memory, model), model)
    assert abs(got[0] - expected[0]) <= FLOAT32_PARITY * expected[0]
    errors = jax.tree.map(
        lambda a, b: max_relative_error(without_padding(a, b), b), got[1], expected[1]
    )
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
    np.testing.assert_allclose(got[3].balance_loss, expected[3].balance_loss, rtol=1e-6)
    np.testing.assert_allclose(got[3].router_z_loss, expected[3].router_z_loss, rtol=1e-6)
    np.testing.assert_array_equal(got[3].counts_LE, expected[3].counts_LE)


FIRST_DENSE = dict(kinds=dict(dense=dict(feed_forward="dense")), num_layers=3, **SIGMOID, **SHARED)


@pytest.mark.parametrize(
    ("axes", "memory"),
    [
        (dict(context=2, tensor=2), dict(remat="full")),
        pytest.param(
            dict(context=2, tensor=2), dict(remat="full", tile_tokens=24), marks=pytest.mark.full
        ),
        pytest.param(
            dict(fsdp=2, context=2),
            dict(remat="full", layers_per_remat_group=2),
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_first_dense_layers_equal_one_group_of_all_layers(axes, memory):
    """A dense layer before a loop over two of experts, against one iteration of all three on one
    device.
    """
    group = _Dict(FIRST_DENSE | dict(layer_kinds=("dense", "full", "full")))
    first = FIRST_DENSE | dict(first_layer_kinds=["dense"])

    def stacked(tree):
        """The tree of `group` as that of `first`."""
        stacks = tree["layers"]
        return {
            **tree,
            "first_layers": {"dense": stacks["dense"]},
            "layers": {"full": stacks["full"]},
        }

    expected, step = _on_one_device(group), _step(axes, memory, first)
    got = jax.device_get(
        jax.jit(step.objective.loss_and_grads)(
            put_params(step, stacked(_params(group))), make_batch(step, natural_rows())
        )
    )
    assert abs(got[0] - expected[0]) <= FLOAT32_PARITY * expected[0]
    errors = jax.tree.map(
        lambda a, b: max_relative_error(without_padding(a, b), b), got[1], stacked(expected[1])
    )
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
    np.testing.assert_array_equal(got[3].counts_LE, expected[3].counts_LE)


def test_gradients_of_experts_in_fp8_are_close_to_float32():
    step = small_step(
        small_config(
            model=EXPERTS,
            mesh=dict(context=2, tensor=2),
            precision=FP8,
            memory=dict(remat="full"),
            train=LOSSES,
        )
    )
    got, expected = _results(step, _Dict())[1], _on_one_device(_Dict())[1]
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, expected)
    for name in ("expert_gate", "expert_up", "expert_down"):
        assert BFLOAT16_GRADIENT < errors["layers"]["mlp"][name] <= FP8_GRADIENT, errors


def test_counts_include_text_and_exclude_padding():
    rows = natural_rows()
    num_text = sum(int((row["segment_ids"] > 0).sum()) for row in rows)
    assert num_text < sum(len(row["tokens"]) for row in rows)
    counts_LE = _on_one_device(_Dict())[3].counts_LE
    np.testing.assert_array_equal(counts_LE.sum(1), [2 * num_text] * 2)


@pytest.mark.parametrize("over", ["layers", "layer"])
def test_balance_loss_of_microbatches_is_the_mean_of_theirs(over):
    """And the gradients: those of each microbatch alone, times its part of the tokens or of the
    microbatches.
    """
    rows = natural_rows()
    whole = _results(_step(gradient_accumulation_steps=2, balance_loss_over=over), rows=rows)
    results = _results_of_halves(balance_loss_over=over)
    np.testing.assert_allclose(
        whole[3].balance_loss,
        sum(result[3].balance_loss for result in results),
        rtol=FLOAT32_PARITY,
    )
    without = _results_of_halves(balance_loss=0, router_z_loss=0)
    weights = [sum(row["loss_weights"].sum() for row in part) for part in (rows[:2], rows[2:])]
    expected = jax.tree.map(
        lambda *x: x[2] + x[3] + sum(weights) / 2 * sum((x[i] - x[2 + i]) / weights[i] for i in (0, 1)),
        results[0][1], results[1][1], without[0][1], without[1][1],
    )  # fmt: skip
    errors = jax.tree.map(max_relative_error, whole[1], expected)
    assert max(jax.tree.leaves(errors)) <= 1e-4, errors


def test_microbatches_of_padding_do_not_count_in_losses_of_experts():
    """As of rollouts that fill fewer sequences than the batch has."""
    rows = natural_rows()[:2]
    padding = [{name: np.zeros_like(x) for name, x in row.items()} for row in rows]
    got = _results(_step(gradient_accumulation_steps=2), rows=rows + padding)
    expected = _results_of_halves()[0]
    errors = jax.tree.map(max_relative_error, got[1], expected[1])
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_losses_of_experts_are_added_to_the_mean_of_a_policy_loss():
    """Advantages are 0, so only the losses of experts have gradients. They are multiplied by what
    grpo divides by: the number of answers.
    """
    posttrain = dict(loss="grpo")
    step = small_step(
        small_config(model=EXPERTS | dict(num_layers=1), posttrain=posttrain, train=LOSSES)
    )
    batch = make_batch(
        step, [row | dict(advantages=0 * row["advantages"]) for row in policy_rows()]
    )
    run, params = jax.jit(step.objective.loss_and_grads), step.init().params
    found = []
    for factor in (1, 3):
        part = batch._replace(answer_weights=factor * batch.answer_weights)
        gradients = run(params, part)[1]["layers"]["mlp"]["router"]
        found.append(gradients / denominator(part, step.config.posttrain))
    assert max_relative_error(*found) <= FLOAT32_PARITY and found[0].any()


@functools.cache
def _results_of_halves(**train):
    """As `_results`, of the first and the second half of the rows, with one program."""
    rows = natural_rows()
    step = _step(global_batch_size=2, eval_sequences=2, **train)
    run, params = jax.jit(step.objective.loss_and_grads), put_params(step, _params(()))
    return [jax.device_get(run(params, make_batch(step, part))) for part in (rows[:2], rows[2:])]


@pytest.mark.parametrize(
    "memory",
    [
        dict(remat="attention", tile_tokens=24),
        dict(remat="full", layers_per_remat_group=2),
        pytest.param(
            dict(remat="full", tile_tokens=24, layers_per_remat_group=2), marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_recomputation_does_not_choose_experts_again(memory):
    """Each layer calls top_k once. Without the saved choice, a rounded logit could choose others in
    the backward.
    """
    step = _step(memory=memory)
    text = jax.jit(step.objective.loss_and_grads).lower(
        step.abstract_state.params, step.abstract_batch
    ).compile().as_text()  # fmt: skip
    # layers of a group are written out
    num_loops = 1 if not memory.get("layers_per_remat_group") else 2
    assert CHOICE and text.count('custom_call_target="TopK"') == num_loops


@pytest.mark.parametrize(
    "axes", [pytest.param({}, marks=pytest.mark.full), dict(context=2, tensor=2)], ids=str
)
def test_step_changes_biases_of_the_choice_by_its_loads(axes):
    """By the rate, up or down; over both microbatches, and not by the optimizer."""
    model = _Dict(BIASED)
    step = _step(axes, model=model, balance_bias_rate=0.25, gradient_accumulation_steps=2)
    state = step.init()._replace(params=put_params(step, _params(model)))
    first, loads_LE = _biases(_params(model)), _loads_on_one_device(model)
    params = jax.device_get(step.jitted(state, make_batch(step, natural_rows()))[0].params)
    change = 0.25 * np.sign(loads_LE.mean(1, keepdims=True) - loads_LE)
    assert (change > 0).any() and (change < 0).any()
    np.testing.assert_array_equal(_biases(params), first + change.astype(np.float32))


def _loads_on_one_device(model):
    """[layers with experts, E], by a forward pass alone."""
    step = _step(model=model)
    forward = jax.jit(lambda *arguments: step.objective.loss_and_grads(*arguments)[3].counts_LE)
    return jax.device_get(
        forward(put_params(step, _params(model)), make_batch(step, natural_rows()))
    )


def _biases(params):
    """[layers with experts, E]"""
    stacks = [params[name]["full"] for name in ("layers", "last_layers")]
    return np.concatenate([np.asarray(stack["mlp"]["choice_bias"]) for stack in stacks])


def test_biases_of_frozen_layers_and_of_skipped_steps_do_not_change():
    config = small_config(model=EXPERTS | BIASED, train=dict(balance_bias_rate=0.25))
    loads_LE = jax.numpy.array([[3.0, 1, *[0] * 6], [1, 3, *[0] * 6]])
    last = {"full": {"mlp": {"choice_bias": jax.numpy.zeros((1, 8))}}}
    trained = {"layers": {"full": {"mlp": {}}}, "last_layers": last}
    for is_finite, expected in ((True, [-0.25, -0.25, *[0.25] * 6]), (False, [0] * 8)):
        after = with_balanced_biases(
            trained, loads_LE, jax.numpy.array(is_finite), config.model, config.train
        )
        assert after["layers"] == {"full": {"mlp": {}}}
        np.testing.assert_array_equal(
            after["last_layers"]["full"]["mlp"]["choice_bias"], [expected]
        )


def test_metrics_of_a_step_have_the_balance_of_each_layer():
    step = _step()
    metrics = jax.device_get(step.jitted(step.init(), make_batch(step, natural_rows()))[1])
    row = _balance(metrics.experts)
    assert row.keys() >= {
        "balance_loss",
        "router_z_loss",
        "expert_load_1",
        "expert_entropy_0",
        "unused_experts_1",
    }
    assert (
        row["expert_load_0"] >= 1
        and 0 < row["expert_entropy_0"] <= 1
        and row["unused_experts_0"] == 0
    )
    assert 1.5 < row["balance_loss"] < 8  # 2 experts per token if loads are equal


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (dict(memory=dict(parameters="host")), "parameters='host' with experts"),
        (
            dict(precision=dict(compute="fp8")),
            "fp8_matmuls names mlp_gate, mlp_up, mlp_down, which .*,expert_gate,expert_up",
        ),
        (
            dict(precision=FP8 | dict(fp8_scaling="delayed")),
            "FP8 products of experts with .*fp8_scaling='delayed'",
        ),
        (
            dict(precision=FP8 | dict(bf16_layers=(0,))),
            "FP8 products of experts with .*bf16_layers",
        ),
        (
            dict(lora=dict(rank=4)),
            "no layer of the model has; .*attention_projected,expert_gate,expert_up,expert_down",
        ),
        (dict(memory=dict(save=("mlp_gate",))), "names mlp_gate, which no layer has"),
        (dict(model=dict(experts_per_token=9)), "experts_per_token=9 is not between 1"),
        (dict(model=dict(num_experts=0)), "no effect, since the model has no layers of experts"),
        (
            dict(model=dict(mlp_bias=True)),
            "mlp_bias=True has no effect, since the model has no dense",
        ),
        (
            dict(mesh=dict(tensor=4), model=dict(expert_ffn_dim=10)),
            "experts.ffn_dim=10 is not divisible",
        ),
        (
            dict(mesh=dict(tensor=4), model=dict(shared_ffn_dim=10)),
            "shared_ffn_dim=10 is not divisible",
        ),
        (dict(model=dict(shared_expert_gate=True)), "no effect without a shared expert"),
        (
            dict(model=GPT_OSS | dict(router_choice_bias=True)),
            "experts.choice_bias=True has no effect",
        ),
        (dict(model=SIGMOID | dict(router_groups=3)), "experts.groups=3 does not divide"),
        (
            dict(model=SIGMOID | dict(experts_per_token=5)),
            "fewer than config.model.experts.experts_per_token=5",
        ),
        (dict(train=dict(balance_bias_rate=0.1)), "no effect without biases"),
        (
            dict(runtime=MOSAIC, model=NO_EXPERTS),
            "expert_kernel='mosaic' has no effect, since the model has no",
        ),
        (
            dict(runtime=MOSAIC),
            "expert_kernel='mosaic' with config.precision.compute='fp32'; use compute=bf16",
        ),
        (dict(runtime=MOSAIC, precision=FP8), "'mosaic' with FP8 products of experts"),
        (
            dict(runtime=MOSAIC, precision=dict(compute="bf16", reduce="fp32")),
            "precision.reduce='fp32'",
        ),
        (
            dict(runtime=dict(expert_kernel="pallas"), precision=BF16),
            "'pallas' with .*model_dim=32",
        ),
        (dict(runtime=MOSAIC, precision=BF16), "model_dim=32 .supported: multiples of 64.; use"),
        (
            dict(
                runtime=MOSAIC,
                precision=BF16,
                mesh=dict(tensor=2),
                model=dict(model_dim=64, expert_ffn_dim=64),
            ),
            "experts.ffn_dim=64 .supported: multiples of 64 x config.mesh.tensor=2",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_of_experts_raise(sections, problem):
    model = EXPERTS | sections.pop("model", {})
    with pytest.raises(UserError, match=problem):
        small_config(model=model, **sections)


def test_step_with_mosaic_on_cpu_raises():
    with pytest.raises(
        UserError,
        match="expert_kernel='mosaic' needs GPUs of compute capability 9.0, and cpu is no",
    ):
        small_step(_kernel_config("mosaic"))


def test_gpus_that_triton_kernels_do_not_support_are_refused():
    def mesh(capability):
        device = SimpleNamespace(device_kind="GPU", compute_capability=capability)
        return SimpleNamespace(devices=np.array([device]))

    problem = "8.0 or higher but 8.6, 8.9, 12.0, 12.1, and GPU has 8.9; .*expert_kernel=blocks"
    with pytest.raises(UserError, match=problem):
        kernel_checks.build_step(_kernel_config("pallas"), mesh("8.9"))
    delta = small_config(model=HYBRID | DELTA_DIMS, runtime=dict(delta_kernel="pallas"))
    with pytest.raises(UserError, match="8.0 or higher, and GPU has 7.0; .*delta_kernel=xla"):
        kernel_checks.build_step(delta, mesh("7.0"))


def test_step_with_pallas_equals_blocks():
    """The weights of an expert are split over tensor; bf16."""
    axes = dict(context=2, tensor=2)
    results = []
    for kernel in ("pallas", "blocks"):
        step = small_step(_kernel_config(kernel, **axes))
        batch = make_batch(step, natural_rows())
        params = put_params(step, jax.device_get(step.init().params))
        results.append(jax.device_get(jax.jit(step.objective.loss_and_grads)(params, batch)))
    got, expected = results
    assert relative_norm_error(got[0], expected[0]) < BFLOAT16_ATTENTION
    assert relative_norm_error(got[1], expected[1]) < BFLOAT16_GRADIENT


def test_step_with_mosaic_multiplies_all_projections_with_its_kernels(monkeypatch):
    """Forward, recomputed, and the gradients of x and w, with the part of the weights of a rank."""
    calls = Counter()

    def dot(x, w, sizes, *, transpose_rhs, **tiles):
        calls["dx" if transpose_rhs else "forward", w.shape] += 1
        return jax.numpy.zeros((len(x), w.shape[1 if transpose_rhs else 2]), x.dtype)

    def gradient(x, dout, sizes, **tiles):
        calls["dw", (len(sizes), x.shape[1], dout.shape[1])] += 1
        return jax.numpy.zeros((len(sizes), x.shape[1], dout.shape[1]), x.dtype)

    monkeypatch.setattr(_jax_internals, "mosaic_ragged_dot", dot)
    monkeypatch.setattr(_jax_internals, "mosaic_ragged_gradient", gradient)
    monkeypatch.setattr(expert_products, "check_devices", lambda devices: None)
    step = small_step(_kernel_config("mosaic", context=2, tensor=2))
    jax.eval_shape(step.objective.loss_and_grads, step.abstract_state.params, step.abstract_batch)
    up, down = (8, 64, 128), (8, 128, 64)
    assert calls == {("forward", up): 4, ("forward", down): 2} | {
        (name, shape): times for name in ("dx", "dw") for shape, times in ((up, 2), (down, 1))
    }


def test_run_with_mosaic_compares_its_kernels_with_the_sizes_of_a_rank(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(kernel_checks, "check_product", lambda kernel, device, **sizes: sizes)
    for tensor, latent_dim in ((1, 0), (2, 0), (1, 128)):
        config = _kernel_config("mosaic", tensor=tensor)
        config = with_settings(config, {"model.experts.latent_dim": latent_dim})
        step = SimpleNamespace(config=config, model=None, kernels={})
        assert kernel_checks.check_kernels(step) == [
            dict(num_experts=8, model_dim=latent_dim or 64, ffn_dim=256 // tensor)
        ]
    step.config = small_config(model=EXPERTS)
    assert kernel_checks.check_kernels(step) == []


def _kernel_config(kernel, **mesh):
    return small_config(
        model=EXPERTS | dict(model_dim=64, expert_ffn_dim=256),
        mesh=mesh,
        runtime=dict(expert_kernel=kernel),
        precision=BF16,
    )
