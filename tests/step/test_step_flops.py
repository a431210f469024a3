"""The formula of model FLOPs against the matrix products of compiled steps."""

from collections import Counter

import pytest

from jaxlc.config.kinds.experts import block_rows, num_blocks
from jaxlc.core import scopes
from jaxlc.hlo import analyze
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.hlo.parser import components
from jaxlc.runtime import compilation_cache
from tests.step.synthetic import HYBRID, ROWS, TOKENS, small_config, small_step

EXPERTS = dict(num_experts=8, experts_per_token=2, expert_ffn_dim=16)
CASES = {
    "frozen": dict(model=dict(tie_embeddings=True), train=dict(trainable=("*/w_up", "*norm*"))),
    "adapters of experts": dict(
        model=EXPERTS,
        lora=dict(rank=3, projections=("query", "expert_gate", "expert_up", "expert_down")),
    ),
    "adapters of a hybrid": dict(
        model=HYBRID | dict(layer_kinds=("gated_delta_net",)), lora=dict(rank=3)
    ),
    "head": dict(train=dict(trainable=("head",))),
}
# FLOPs of compiled steps beyond the model's: the loss computes the gradient of the hidden states with that of the head,
# whether it is needed or not, and blocks of experts are padded.
ROUTED = 2 * ROWS * TOKENS  # rows
PADDING = num_blocks(ROUTED, 8) * block_rows(ROUTED, 8) - ROUTED
OTHERS = {
    "head": 2 * 32 * 61 * ROWS * TOKENS,
    # layers, matrices, products
    "adapters of experts": 2 * PADDING * 2 * 3 * (2 * 32 * 16 + 3 * 3 * (32 + 16)),
}


def counted_flops(config) -> Counter[str]:
    """FLOPs of the products of the compiled step, without those of CPU libraries, which have no
    name.
    """
    with compilation_cache.disabled():  # it may have the scopes of an earlier commit
        program = analyze(small_step(config).compile().as_text())
    flops = Counter()
    for computation in program:
        for instruction in computation:
            parts = {*components(instruction.op_name)}
            if (
                instruction.opcode == "dot"
                and instruction.op_name
                and not parts & {*scopes.RECURRENCE}
            ):
                kind = "attention" if scopes.CORE_ATTENTION in parts else "products"
                cost = kernel_cost(program, computation, instruction)
                flops[kind] += program.execution_counts[computation.name] * cost.flops
    return flops


@pytest.mark.parametrize("case", CASES)
def test_step_flops_equal_products_of_compiled_step(case):
    memory = dict(remat="none", loss_chunk_tokens=TOKENS)
    config = small_config(**CASES[case], memory=memory, attention=dict(kernel="reference"))
    counted, flops = (
        counted_flops(config),
        config.step_flops(config.model.num_layers * ROWS * TOKENS**2),
    )
    assert counted["products"] == flops.products + OTHERS.get(case, 0)
    # two products in the forward; five in the backward, of which one is recomputed
    if case != "adapters of a hybrid":
        assert counted["attention"] == pytest.approx(
            flops.mixing * (1 if case == "head" else 7 / 6), rel=2e-3
        )
