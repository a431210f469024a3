"""Prints the table of 2026-11-30-expert-kernels.md as Markdown: a step with each kernel of experts.

    python -m benchmarks.expert_plans
    python -m benchmarks.expert_plans --kernels=blocks,pallas --attention=fa3

The step is AOT-compiled for one H100, for about 20 seconds with each kernel: the row `experts` of
`benchmarks.gpu_comparison`.
"""

import argparse

import jax

from benchmarks.row_plans import config_of, figures
from jaxlc.config.kinds.experts import block_rows, num_blocks

KERNELS = ("blocks", "mosaic", "pallas")


def row(kernel: str, attention: str) -> str:
    settings = {"runtime.expert_kernel": kernel, "attention.kernel": attention}
    config = config_of("experts", settings)
    num_rows = config.data.seq_len * config.model.experts.experts_per_token
    sizes = num_rows, config.model.experts.num_experts, kernel
    cells = (
        f"{jax.__version__}, `{attention}`",
        f"`{kernel}`",
        f"{num_blocks(*sizes) * block_rows(*sizes) / num_rows - 1:.1%}",
        *figures("experts", settings),
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
