"""usage: jaxlc export WORKDIR OUT [--step=STEP] [--dtype=bf16] [--adapters]

Writes the weights of a run as a Hugging Face directory, which transformers and other programs open. It needs no
accelerator, and host memory for the largest parameter, stacked over the layers.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from jaxlc import runtime
from jaxlc.config import RuntimeConfig
from jaxlc.config.command_line import ParsedCommand, VerbFlags, run_main
from jaxlc.config.values import Positive


@dataclass(frozen=True, kw_only=True)
class Flags(VerbFlags):
    positional: ClassVar[tuple[str, ...]] = ("workdir", "out")

    workdir: str  # workdir of the run
    out: str  # directory to write, which must not exist or be empty
    step: int | None = None  # checkpoint to export; default: the latest
    dtype: Literal["bf16", "fp32"] = "bf16"  # data type of the weights, bf16 or fp32
    max_shard_gb: Positive = Positive(5.0)  # size limit of a file in GB
    adapters: bool = False  # write the adapters of LoRA alone, for peft, in float32, instead of merging them


def export(
    workdir: str | Path, out: str | Path, *, step: int | None, dtype: str, max_shard_gb: float, adapters: bool
) -> Path:
    """See `jaxlc.export`."""
    runtime.start(RuntimeConfig(num_processes=1))
    from jaxlc.checkpoints import to_huggingface
    from jaxlc.train.result import loaded_run

    return to_huggingface.export(
        workdir,
        out,
        step=step,
        dtype=dtype,
        max_shard_gb=max_shard_gb,
        adapters=adapters,
        load_params=lambda step: loaded_run.load(workdir, step=step, mesh={}).params,
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    return run_main(_export, argv, description=__doc__, flags=Flags, interrupted="interrupted; nothing was written")


def _export(command: ParsedCommand[Flags]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = command.flags
    target = export(
        flags.workdir,
        flags.out,
        step=flags.step,
        dtype=flags.dtype,
        max_shard_gb=flags.max_shard_gb,
        adapters=flags.adapters,
    )
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
