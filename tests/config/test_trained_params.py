"""Counts of trained and frozen parameters, which need no JAX, against the parameter tree."""

import jax
import pytest

from jaxlc.config.trained_params import num_adapter_params, num_frozen_params
from jaxlc.models import freezing
from jaxlc.models.lora import is_adapter
from tests.step.synthetic import HYBRID, MIXED_KINDS, small_config, small_step

CASES = {
    "lora": dict(lora=dict(rank=3, projections=("query", "value", "attention_projected", "mlp_down"))),
    "lora, tied": dict(lora=dict(rank=3), model=dict(tie_embeddings=True), train=dict(trainable=("embedding",))),
    "lora, shapes": dict(
        lora=dict(rank=3, projections=("query", "value")),
        model=MIXED_KINDS | dict(num_layers=7),
        train=dict(trainable=("layers/wide/mlp/*",)),
    ),
    "lora, delta net": dict(lora=dict(rank=3), model=HYBRID | dict(num_layers=3)),
    "no lora": dict(train=dict(frozen=("embedding", "*/w_up", "*norm*"))),
    "all trained": {},
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_counts_equal_those_of_tree(case):
    config = small_config(**CASES[case])
    step = small_step(config)
    params = step.abstract_state.params
    adapters = frozenset(name for name in freezing.names_of(step.dims) if is_adapter(name))
    assert num_adapter_params(config.model, config.lora) == _count(freezing.split(params, adapters)[1])
    matrices = frozenset(
        name for name in step.frozen if "norm" not in name and "decay" not in name and "conv" not in name
    )
    assert num_frozen_params(config.model, config.lora, config.train) == _count(freezing.split(params, matrices)[1])


def test_model_flops_exclude_gradients_of_frozen_weights():
    """A forward pass is a third, and the gradients of inputs another; without attention to other tokens."""
    all_trained, head_only = small_config(), small_config(train=dict(trainable=("head",)))
    frozen = 2 * (4 * 32 * 32 - 2 * 32 * 16 + 3 * 32 * 64)  # two layers
    assert all_trained.flops_per_step - head_only.flops_per_step == 2 * frozen * all_trained.tokens_per_step


def _count(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
