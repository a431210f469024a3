"""Prints plans of the rows of `benchmarks.gpu_comparison` as Markdown.

    python -m benchmarks.row_plans
    python -m benchmarks.row_plans --rows=hybrid runtime.delta_kernel=pallas
    python -m benchmarks.row_plans --rows=mamba2,kimi_delta,latent

The steps are AOT-compiled for one H100, for 10 to 60 seconds each; `kimi_delta` for 2 minutes.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks.gpu_comparison import ROWS, Row, setting_value
from jaxlc.config import Config, load, with_settings
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.plan import Plan
from jaxlc.plan.program import StepProgram
from jaxlc.plan.result import on_gpus
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step.step import build_step

_LOOPS = ("while", "call")
# Kinds of layers that no row of the comparison has.
_KINDS = dict(
    mamba2=Row(
        title="Nemotron 3 Nano: two layers of Mamba-2, one of experts, one of attention",
        preset="nemotron-3-nano-30b-a3b", num_tokens=32_768, tiny={},
        model=dict(num_layers=4, layer_kinds=("mamba", "moe", "mamba", "attention")),
    ),
    kimi_delta=Row(
        title="Kimi Linear: three dense layers of Kimi Delta Attention, one of latents and experts",
        preset="kimi-linear-48b-a3b", num_tokens=32_768, tiny={},
        model=dict(num_layers=4, layer_kinds=(*["dense_kimi_delta"] * 3, "latent_nope")),
    ),
    latent=Row(
        title="DeepSeek V2 Lite, 4 layers", preset="deepseek-v2-lite", num_tokens=32_768, tiny={},
        model=dict(num_layers=4),
    ),
)  # fmt: skip


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


def config_of(name: str, settings: Mapping[str, Any]) -> Config:
    """The settings of `benchmarks.gpu_comparison` for a row, and others by their paths."""
    row = (ROWS | _KINDS)[name]
    sections = dict(
        model=dict(preset=row.preset, **row.model),
        data=dict(seq_len=row.num_tokens),
        attention=dict(document_mask=False),
        memory=dict(remat="attention", loss_chunk_tokens=4096),
        precision=dict(compute="bf16"),
        lora=row.lora,
        optimizer=dict(schedule="constant", warmup_steps=0, weight_decay=0.0),
        train=dict(global_batch_size=1, eval_sequences=1),
    )
    return with_settings(load(ConfigDict(sections)), dict(settings))


def figures(name: str, settings: Mapping[str, Any]) -> list[str]:
    """GB that kernels read and write, temporaries in GiB, GiB per GPU, and estimated seconds."""
    gpus = topology("h100:1x1")
    config = on_gpus(config_of(name, settings), gpus)
    step = build_step(config, make_mesh(gpus, config.mesh))
    program = StepProgram.compile(step, TimeModel(gpus, config))
    plan = Plan.of(program)
    return [
        f"{sum(kernel_bytes(program.program)) / 1e9:,.0f}",
        f"{program.temp_bytes / 2**30:.1f}",
        f"{plan.memory.device_peak_bytes / 2**30:.1f}",
        f"{plan.predicted.step_seconds:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="8b,hybrid,experts,lora")
    parser.add_argument("settings", nargs="*", metavar="SECTION.NAME=VALUE")
    flags = parser.parse_args()
    settings = {
        path: setting_value(value)
        for path, value in (setting.split("=", 1) for setting in flags.settings)
    }
    for name in flags.rows.split(","):
        cells = f"`{name}`", jax.__version__, *flags.settings, *figures(name, settings)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
