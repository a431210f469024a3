"""LoRA of experts: an adapter for each expert, and those of shared experts and dense layers next to
layers of experts, against the model whose weights contain their products."""

import functools
import math
import re

import jax
import numpy as np
import pytest

from jaxlc.config.flops import num_adapter_params
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS, num_blocks
from jaxlc.hf.load import paths_of
from jaxlc.models.lora import is_adapter
from tests.step.synthetic import (
    ROWS,
    TOKENS,
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.step.test_experts import DENSE_BETWEEN, EXPERTS, GPT_OSS, LOSSES, SHARED
from tests.tolerances import FLOAT32_PARITY, max_relative_error
from tests.train.test_lora import flat, nested

LORA = dict(rank=4, alpha=6.0, projections=("query", *EXPERT_PROJECTIONS))
MLP_PROJECTIONS = ("mlp_gate", "mlp_up", "mlp_down")
SCALE = 1.5
# no activation has as many entries as the weights of an expert projection
E, D, F, R = 8, 32, 28, 4
MODELS = {
    "qwen": EXPERTS | dict(expert_ffn_dim=F),
    "shared": EXPERTS | SHARED,
    "dense": EXPERTS | SHARED | DENSE_BETWEEN,
    "gpt_oss": EXPERTS | GPT_OSS,
}


def _step(model: str, lora=LORA, **sections):
    precision = dict(compute="fp32", frozen="fp32")
    if model in ("shared", "dense") and lora is LORA:
        lora = LORA | dict(projections=(*LORA["projections"], *MLP_PROJECTIONS))
    sections = dict(train=LOSSES) | sections
    return small_step(small_config(model=MODELS[model], lora=lora, precision=precision, **sections))


def _results(step, params):
    """(gradients by name, cross entropy, text of the compiled program)"""
    operands = put_params(step, params), make_batch(step, natural_rows())
    compiled = jax.jit(gradients_and_loss(step)).lower(*operands).compile()
    gradients, loss = compiled(*operands)
    return flat(gradients), loss, compiled.as_text()


def _mlp_adapters(leaves):
    """(name of the weight, name of its adapter) for the adapters of feed-forward blocks in every
    stack.
    """
    names = (name.removesuffix("/a") for name in leaves if "/mlp/" in name and name.endswith("/a"))
    return [(name.replace("/lora/mlp_", "/w_").replace("/lora", ""), name) for name in names]


@functools.cache
def _reference(model: str):
    """(parameters, gradients of adapters, loss, text of the program), by the chain rule from the
    gradients of the weights W + scale a b, of each expert too, of a model without adapters of
    feed-forward blocks."""
    rng = np.random.default_rng(0)
    leaves = {
        name: (rng.normal(size=x.shape) / 5 + name.endswith("norm/scale")).astype(np.float32)
        for name, x in paths_of(_step(model).abstract_state.params)
    }
    pairs = _mlp_adapters(leaves)
    dense = {name: x for name, x in leaves.items() if "/attention/" in name or "/lora/" not in name}
    for weight, adapter in pairs:
        dense[weight] = dense[weight] + SCALE * leaves[f"{adapter}/a"] @ leaves[f"{adapter}/b"]
    trained = (
        "*/expert_gate",
        "*/expert_up",
        "*/expert_down",
        *(["*/mlp/*w_*"] if model in ("shared", "dense") else []),
    )
    step = _step(model, LORA | dict(projections=("query",)), train=LOSSES | dict(trainable=trained))
    gradients, loss, text = _results(step, nested(dense))
    expected = {name: x for name, x in gradients.items() if is_adapter(name)}  # of the queries
    for weight, adapter in pairs:
        a, b, dw = leaves[f"{adapter}/a"], leaves[f"{adapter}/b"], gradients[weight]
        expected[f"{adapter}/a"] = SCALE * dw @ b.swapaxes(-1, -2)
        expected[f"{adapter}/b"] = SCALE * a.swapaxes(-1, -2) @ dw
    return nested(leaves), expected, loss, text


def _sizes_of_products(text: str) -> set[int]:
    """Numbers of entries of the results of matrix products, sums and scatters."""
    results = re.findall(r"= \w+\[([\d,]+)\]\S* (?:dot|scatter|add|custom-call|all-reduce)\(", text)
    return {math.prod(map(int, dims.split(","))) for dims in results}


def _assert_equal(results, model: str) -> None:
    (gradients, loss, _), (_, expected, expected_loss, _) = results, _reference(model)
    assert max_relative_error(loss, expected_loss) <= FLOAT32_PARITY
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.any(gradient), name
        assert (
            max_relative_error(without_padding(gradients[name], gradient), gradient)
            <= FLOAT32_PARITY
        ), name


CASES = {
    "shared expert and dense layers": ("dense", dict(tensor=2), {}),
    "shared expert and dense layers in tiles": (
        "dense",
        dict(context=2, tensor=2),
        dict(tile_tokens=24, remat="full"),
    ),
    "shared expert in tiles": (
        "shared",
        dict(context=2, tensor=2),
        dict(tile_tokens=24, remat="full"),
    ),
    "tiles": ("qwen", dict(context=2, tensor=2), dict(tile_tokens=24, remat="full")),
    "context and tensor": ("qwen", dict(context=2, tensor=2), {}),
    "all axes": ("dense", dict(fsdp=2, context=2, tensor=2), dict(layers_per_remat_group=2)),
    "copies of nodes": ("qwen", dict(fsdp=2, context=2, tensor=2), dict(node_copy_devices=4)),
    "biases": ("gpt_oss", dict(context=2, tensor=2), dict(remat="none")),
    "biases in tiles": (
        "gpt_oss",
        dict(context=4, tensor=2),
        dict(tile_tokens=24, remat="attention"),
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=() if x == "shared expert in tiles" else pytest.mark.full)
        for x in CASES
    ],
)
def test_gradients_of_expert_adapters_equal_chain_rule_of_merged_weights(case: str):
    model, mesh, memory = CASES[case]
    _assert_equal(_results(_step(model, mesh=mesh, memory=memory), _reference(model)[0]), model)


def test_expert_adapters_on_one_device_have_no_product_or_gradient_of_whole_weights():
    """Neither a b of an expert, nor the gradient of its frozen weights, exists in the program."""
    results = _results(_step("qwen"), _reference("qwen")[0])
    _assert_equal(results, "qwen")
    blocks = num_blocks(ROWS * TOKENS * 2, E)
    products = _sizes_of_products(results[2])
    assert {blocks * D * R, blocks * F * R} <= products and not {
        blocks * D * F,
        E * D * F,
    } & products
    # so that the search can find it
    assert blocks * D * F in _sizes_of_products(_reference("qwen")[3])


@pytest.mark.full
def test_new_expert_adapters_do_not_change_the_loss():
    params = _step("qwen").init().params
    base = {
        name: x for name, x in flat(params).items() if "/attention/" in name or "/lora/" not in name
    }
    query_step = _step("qwen", LORA | dict(projections=("query",)))
    assert _results(_step("qwen"), params)[1] == _results(query_step, nested(base))[1]


def test_number_of_adapter_entries_counts_all_experts():
    step = _step("dense")
    params = dict(paths_of(step.abstract_state.params))
    assert sum(x.size for path, x in params.items() if is_adapter(path)) == num_adapter_params(
        step.config.model, step.config.lora
    )
