"""8-bit matrix products in a program compiled for an H100: cuBLAS runs all of them."""

import pytest

from jaxlc.config import load
from jaxlc.config.kinds.experts import block_rows, num_blocks
from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.plan.program import compile_step, kernels
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step.step import TrainStep, build_step
from tests.advice import followed
from tests.plan.gpus import small_config

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]
TOKENS, D, N, K, H, F = 1024, 256, 4, 2, 64, 512
WEIGHTS = dict(
    query=D * N * H, key=D * K * H, value=D * K * H, attention_projected=N * H * D, mlp_gate=D * F, mlp_up=D * F,
    mlp_down=F * D,
)  # fmt: skip
MLP = ("mlp_gate", "mlp_up", "mlp_down")


def fp8_step(gpu: str = "h100", model=(), **precision) -> TrainStep:
    config = small_config(model_dim=D, num_heads=N, num_kv_heads=K, head_dim=H, ffn_dim=F)
    config.model.update(dict(model))
    config.mesh.update(context=1, tensor=1)
    config.data.seq_len = TOKENS
    config.memory.remat = "none"
    config.precision.update({"compute": "fp8"} | precision)
    config = load(config)
    return build_step(config, make_mesh(topology(f"{gpu}:1x1"), config.mesh))


def fp8_flops(program: AnalyzedProgram) -> float:
    costs = [
        (program.execution_counts[computation.name], kernel_cost(program, computation, instruction))
        for computation in program
        for instruction in computation
        if "matmul$f8" in instruction.attributes.get("custom_call_target", "")
    ]
    assert all(cost.dtype.startswith("f8") for _, cost in costs)
    return sum(count * cost.flops for count, cost in costs)


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        # The test of experts has current scales of the other products.
        pytest.param(dict(), set(WEIGHTS), marks=pytest.mark.full),
        (dict(fp8_scaling="delayed", fp8_matmuls=MLP), set(MLP)),
        # The layer is chosen at run time, so every branch counts.
        pytest.param(dict(bf16_layers=(0,)), set(WEIGHTS), marks=pytest.mark.full),
    ],
    ids=["current", "delayed", "one layer in bf16"],
)
@pytest.mark.heavy
def test_fp8_step_runs_all_products_in_cublas(precision, names):
    """Forward, gradient of x and gradient of w: 6 FLOPs per token and weight."""
    program = compile_step(fp8_step(**precision)).program
    assert kernels(program)["__cublas$lt$matmul$f8"] > 0
    assert fp8_flops(program) == 2 * 6 * TOKENS * sum(WEIGHTS[name] for name in names)  # two layers


@pytest.mark.heavy
def test_fp8_step_runs_products_of_experts_in_cublas():
    """Batches of blocks, padding included; and products of attention."""
    experts, rows = 8, 2 * TOKENS
    model = dict(num_experts=experts, experts_per_token=2, expert_ffn_dim=F)
    attention = WEIGHTS.keys() - set(MLP)
    names = (*attention, "expert_gate", "expert_up", "expert_down")
    program = compile_step(fp8_step(model=model, fp8_matmuls=names)).program
    in_attention = TOKENS * sum(WEIGHTS[name] for name in attention)
    in_experts = num_blocks(rows, experts) * block_rows(rows, experts) * 3 * D * F
    assert fp8_flops(program) == 2 * 6 * (in_attention + in_experts)


def test_fp8_peak_is_twice_that_of_bfloat16():
    """1,979 TFLOP/s on an H100."""
    seconds = Roofline(f8_matmul_share=1.0).matmul_seconds(
        hardware.find("h100"), "f8e4m3fn", 1979e12
    )
    assert seconds == pytest.approx(1, rel=1e-3)


def test_fp8_step_for_a100_raises():
    error = followed(
        lambda settings: fp8_step("a100", compute=settings.get("precision.compute", "fp8"))
    )
    assert "compute='fp8' needs GPUs of compute capability 8.9 or more, and NVIDIA A100" in error


def test_auto_is_float16_on_a_gpu_without_bfloat16():
    def compute(name):
        return fp8_step("t4", compute=name).config.precision.compute

    assert compute("auto") == "fp16"
    config = small_config()
    config.posttrain.loss, config.attention.document_mask = "dapo", True
    with pytest.raises(UserError, match="loss='dapo' with config.precision.compute='fp16'"):
        build_step(load(config), make_mesh(topology("t4:1x4"), load(config).mesh))
    error = followed(lambda settings: compute(settings.get("precision.compute", "bf16")))
    assert "compute='bf16' needs GPUs of compute capability 8.0 or more, and Tesla T4" in error
