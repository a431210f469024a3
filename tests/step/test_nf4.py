"""Frozen weights in NF4 and MXFP4: gradients, gathers of codes, and what the compiled step holds."""

import math

import jax
import numpy as np
import pytest

from jaxlc.config.flops import frozen_bytes
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.models.quantized import is_quantized
from jaxlc.step.memory import state_bytes
from tests.step.synthetic import (
    MIXED_KINDS,
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
)
from tests.tolerances import FLOAT32_PARITY, max_relative_error

# blocks within rows of the tensors; in the model of other tests, they cross rows
WIDE = dict(model_dim=128, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=128, num_layers=3)
LORA = dict(rank=4, alpha=6.0)


def nf4_step(frozen="nf4", **sections):
    sections = dict(model=WIDE, lora=LORA) | sections
    return small_step(small_config(precision=dict(compute="fp32", frozen=frozen), **sections))


def dequantized(params):
    return jax.tree.map(
        lambda x: np.asarray(x.dequantized(), np.float32) if is_quantized(x) else np.asarray(x),
        params,
        is_leaf=is_quantized,
    )


def gradients_of(step, params):
    run = jax.jit(gradients_and_loss(step))
    return jax.device_get(run(put_params(step, params), make_batch(step, natural_rows())))


GPT_OSS = WIDE | dict(
    experts=dict(num_experts=5, experts_per_token=2, ffn_dim=64, router="topk_softmax", bias=True),
    num_layers=3,
    qkv_bias=True,
    attention_out_bias=True,
    attention_sinks=True,
    activation="clamped_swiglu",
)
ADAPTERS = LORA | dict(projections=("query", "attention_projected", "expert_gate", "expert_down"))
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_ffn_dim=64, shared_ffn_dim=64)
CASES = {
    "mesh": dict(mesh=dict(fsdp=2, context=2, tensor=2)),
    "blocks_across_rows": dict(model={}, mesh=dict(fsdp=2, tensor=2)),
    "tiles": dict(mesh=dict(context=2), memory=dict(tile_tokens=12, remat="full")),
    "groups": dict(model=WIDE | dict(num_layers=4), memory=dict(layers_per_remat_group=2)),
    "host": dict(memory=dict(parameters="host", optimizer="host")),
    "kinds": dict(model=WIDE | MIXED_KINDS, memory=dict(remat="matmuls")),
    "experts": dict(model=WIDE | EXPERTS, mesh=dict(fsdp=2)),
    "gpt_oss": dict(model=GPT_OSS, lora=ADAPTERS, mesh=dict(fsdp=2, context=2, tensor=2)),
}  # fmt: skip


_IN_EVERY_RUN = ("gpt_oss",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[] if x in _IN_EVERY_RUN else [pytest.mark.full]) for x in CASES],
)
def test_nf4_gradients_of_adapters_equal_those_of_dequantized_weights(case: str):
    step, plain = (
        nf4_step(**CASES[case]),
        nf4_step("fp32", **CASES[case] | dict(mesh={}, memory={})),
    )
    params = nf4_step(**CASES[case] | dict(mesh={}, memory={})).init().params
    got, loss = gradients_of(step, params)
    expected, expected_loss = gradients_of(plain, dequantized(params))
    assert max_relative_error(loss, expected_loss) <= FLOAT32_PARITY
    errors = jax.tree.map(max_relative_error, got, expected)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_compiled_step_gathers_codes_and_holds_one_dequantized_layer():
    step = nf4_step(mesh=dict(fsdp=2), train=dict(gradient_accumulation_steps=1))
    program = analyze(step.compile().as_text())
    gathers = [x for x in program.collectives if x.kind == "all-gather" and x.times > 1]
    arrays = [x for gather in gathers for x in gather.transfer.start.arrays]
    codes = [x for x in arrays if x.dtype == "u8" and math.prod(x.dims) >= 128 * 64]
    assert len(codes) >= 2 * 7  # of seven matrices, in the forward and in the backward pass
    others = [math.prod(x.dims) for x in arrays if x.dtype != "u8"]
    assert max(others) < 128 * 128  # adapters
    params = jax.tree.leaves(step.abstract_state.params, is_leaf=is_quantized)
    sizes = {math.prod(x.shape) for x in params if is_quantized(x)}
    held = [x for computation in program for y in computation for x in y.arrays]
    stacks = [x for x in held if x.dims[:1] == (WIDE["num_layers"],) and x.dtype != "u8"]
    assert stacks
    assert not [x for x in stacks if math.prod(x.dims) in sizes]


@pytest.mark.parametrize(
    "kinds", [("full",), pytest.param(("sliding", "full"), marks=pytest.mark.full)]
)
def test_compiled_step_of_gpt_oss_gathers_codes_and_holds_experts_of_one_layer(kinds):
    window = 20 if "sliding" in kinds else 0
    model = GPT_OSS | dict(layer_kinds=kinds, window=window, num_layers=3 * len(kinds))
    sections = dict(model=model, lora=ADAPTERS, mesh=dict(fsdp=2))
    step = nf4_step("mxfp4", **sections, train=dict(gradient_accumulation_steps=1))
    program = analyze(step.compile().as_text())
    gathers = [x for x in program.collectives if x.kind == "all-gather"]
    arrays = [x for gather in gathers for x in gather.transfer.start.arrays]
    codes = [x for x in arrays if x.dtype == "u8" and math.prod(x.dims) == 5 * 128 * 32]
    # three matrices of each layer in the body of a loop; the forward and the backward pass
    assert len(codes) >= 2 * 3 * len(kinds)
    in_layer = 5 * 128 * 64  # and no size of an activation is a multiple
    held = [x for computation in program for y in computation for x in y.arrays]
    sizes = [math.prod(x.dims) for x in held if x.dtype != "u8"]
    assert max(size for size in sizes if size % in_layer == 0) == in_layer


def test_state_bytes_of_nf4_are_those_of_codes_and_scales():
    config = nf4_step(mesh=dict(fsdp=2)).config
    entries = 3 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 128)
    sharded = entries // 2 + entries // 64 + 2 * 2 * 61 * 128  # and vocabulary in bf16
    norms, maxima, offsets = 3 * 2 * 128 + 128, 3 * (2 * 2 + 5), 3 * 7  # float32
    assert state_bytes(config).frozen == sharded // 2 + 4 * (norms + maxima + offsets)
    matrices = entries * (1 / 2 + 1 / 64 + 4 / 64 / 256) + 2 * 2 * 61 * 128
    assert frozen_bytes(config.model, config) == pytest.approx(matrices, rel=1e-12)


@pytest.mark.parametrize("frozen", ["nf4", "mxfp4"])
def test_state_bytes_of_gpt_oss_have_its_experts_in_mxfp4(frozen):
    config = nf4_step(frozen, model=GPT_OSS, lora=ADAPTERS).config
    attention, experts = 3 * 128 * 64 * (2 * 4 + 2 * 2), 3 * 3 * 5 * 128 * 64
    nf4 = attention * (1 / 2 + 1 / 64 + 4 / 64 / 256)
    others = 2 * (2 * 61 * 128 + 3 * 128 * 5)  # vocabulary and routers in bf16
    expected = experts * (1 / 2 + 1 / 32) + (nf4 if frozen == "nf4" else 2 * attention) + others
    assert frozen_bytes(config.model, config) == pytest.approx(expected, rel=1e-12)
    vectors = 3 * (2 * 128 + 64 * (4 + 2 * 2) + 128 + 4 + 5 * (2 * 64 + 128 + 1)) + 128
    offsets = 3 * 4 * (frozen == "nf4")
    assert state_bytes(config).frozen == pytest.approx(expected + 4 * (vectors + offsets), rel=1e-4)


def test_parameters_are_counted_as_those_of_dequantized_weights():
    counts = [nf4_step(frozen).sharding_table.num_params for frozen in ("nf4", "bf16")]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (dict(memory=dict(remat="none")), "memory.remat=matmuls"),
        (
            dict(memory=dict(node_copy_devices=1), mesh=dict(fsdp=2)),
            "use --config.memory.node_copy_devices=0",
        ),
        (dict(model=WIDE | dict(ffn_dim=129)), "mlp/w_down has 129 inputs"),
        (dict(frozen="mxfp4"), "is for frozen experts of gpt-oss, .*precision.frozen=nf4"),
        (
            dict(model=GPT_OSS | dict(model_dim=72), lora=ADAPTERS),
            "expert_gate has 72; .*precision.frozen=bf16",
        ),
    ],
)
def test_nf4_refuses_what_it_does_not_support(sections, words):
    with pytest.raises(UserError, match=words):
        nf4_step(**sections)
