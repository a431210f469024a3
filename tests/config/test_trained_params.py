"""Counts of trained and frozen parameters, which need no JAX, against the parameter tree."""

import jax
import pytest

from jaxlc.config import PRESETS, LoraConfig
from jaxlc.config.flops import (
    document_pairs,
    num_adapter_params,
    num_frozen_params,
    step_flops,
    trains_layers,
)
from jaxlc.config.schema import TrainConfig
from jaxlc.models import lora as freezing
from jaxlc.models.lora import is_adapter
from tests.step.synthetic import HYBRID, MIXED_KINDS, small_config, small_step

CASES = {
    "lora": dict(
        lora=dict(rank=3, projections=("query", "value", "attention_projected", "mlp_down"))
    ),
    "lora, tied": dict(
        lora=dict(rank=3), model=dict(tie_embeddings=True), train=dict(trainable=("embedding",))
    ),
    "lora, shapes": dict(
        lora=dict(rank=3, projections=("query", "value")),
        model=MIXED_KINDS | dict(num_layers=7),
        train=dict(trainable=("layers/wide/mlp/*",)),
    ),
    "lora, delta net": dict(lora=dict(rank=3), model=HYBRID | dict(num_layers=3)),
    "no lora": dict(train=dict(frozen=("embedding", "*/w_up", "*norm*"))),
    "all trained": {},
    "head": dict(train=dict(frozen=("embedding", "layers/*"))),
    "norms": dict(
        model=HYBRID | dict(num_layers=3), train=dict(trainable=("layers/*/*_norm/scale",))
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_counts_equal_those_of_tree(case):
    config = small_config(**CASES[case])
    step = small_step(config)
    params = step.abstract_state.params
    adapters = frozenset(name for name in freezing.names_of(step.dims) if is_adapter(name))
    assert num_adapter_params(config.model, config.lora) == _count(
        freezing.split(params, adapters)[1]
    )
    matrices = frozenset(
        name
        for name in step.frozen
        if "norm" not in name and "decay" not in name and "conv" not in name
    )
    assert num_frozen_params(config.model, config.lora, config.train) == _count(
        freezing.split(params, matrices)[1]
    )
    trained = {*freezing.names_of(step.dims)} - step.frozen
    has_gradients = any(name == "embedding" or name.startswith("layers/") for name in trained)
    assert trains_layers(config.model, config.lora, config.train) == has_gradients


def test_model_flops_of_adapters_of_experts_count_routed_experts():
    """17.17 GFLOP per token of Qwen3-30B-A3B at 4,096 tokens: 2 products with all weights, 3 with
    the adapters.
    """
    model = PRESETS["qwen3-30b-a3b"]
    lora = LoraConfig(rank=8, projections=("query", "expert_gate", "expert_up", "expert_down"))
    flops = step_flops(
        model, lora, TrainConfig(), num_tokens=4096, num_pairs=document_pairs(model, [4096])
    )
    assert flops.total / 4096 == pytest.approx(17.17e9, rel=1e-4)


def _count(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
