"""Prints the table of 2026-11-30-expert-kernels.md as Markdown: a step with each kernel of experts.

    python -m benchmarks.expert_plans
    python -m benchmarks.expert_plans --kernels=blocks,pallas --attention=fa3

The step is AOT-compiled for one H100, for about 20 seconds with each kernel: the row `experts` of
`benchmarks.gpu_comparison`.
"""

import argparse
from collections.abc import Iterator

import jax
from ml_collections import ConfigDict

from jaxlc.config import Config, load
from jaxlc.config.kinds.experts import block_rows, num_blocks
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.plan import Plan
from jaxlc.plan.program import StepProgram
from jaxlc.plan.result import on_gpus
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step.step import build_step

KERNELS = ("blocks", "mosaic", "pallas")
_TOKENS = 32_768
_LOOPS = ("while", "call")


def kernel_bytes(program: AnalyzedProgram) -> Iterator[int]:
    """Bytes of operands and results, of each launch of a kernel."""
    fused = {x for c in program for i in c if i.opcode not in _LOOPS for x in i.called}
    for computation in program:
        if computation.name in fused:
            continue
        for instruction in computation:
            times = program.execution_counts[computation.name]
            if times and instruction.opcode not in _LOOPS:
                cost = kernel_cost(program, computation, instruction)
                yield from [cost.bytes] * times if cost else ()


def config_of(kernel: str, attention: str) -> Config:
    """The settings of `benchmarks.gpu_comparison`."""
    sections = dict(
        model=dict(preset="qwen3-30b-a3b", num_layers=4),
        data=dict(seq_len=_TOKENS),
        attention=dict(document_mask=False, kernel=attention),
        memory=dict(remat="attention", loss_chunk_tokens=4096),
        precision=dict(compute="bf16"),
        optimizer=dict(schedule="constant", warmup_steps=0, weight_decay=0.0),
        train=dict(global_batch_size=1, eval_sequences=1),
        runtime=dict(expert_kernel=kernel),
    )
    return load(ConfigDict(sections))


def row(kernel: str, attention: str) -> str:
    gpus = topology("h100:1x1")
    config = on_gpus(config_of(kernel, attention), gpus)
    step = build_step(config, make_mesh(gpus, config.mesh))
    program = StepProgram.compile(step, TimeModel(gpus, config))
    plan = Plan.of(program)
    num_rows = _TOKENS * config.model.experts.experts_per_token
    sizes = num_rows, config.model.experts.num_experts, kernel
    cells = (
        f"{jax.__version__}, `{attention}`",
        f"`{kernel}`",
        f"{num_blocks(*sizes) * block_rows(*sizes) / num_rows - 1:.1%}",
        f"{sum(kernel_bytes(program.program)) / 1e9:.0f}",
        f"{program.temp_bytes / 2**30:.1f}",
        f"{plan.memory.device_peak_bytes / 2**30:.1f}",
        f"{plan.predicted.step_seconds:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--attention", default="cudnn")
    flags = parser.parse_args()
    for kernel in flags.kernels.split(","):
        print(row(kernel, flags.attention), flush=True)


if __name__ == "__main__":
    main()
