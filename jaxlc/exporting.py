"""Writes the weights of a run as a Hugging Face directory, which transformers and other programs open.

It needs no accelerator, and host memory for the largest parameter, stacked over the layers.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import jaxlc
from jaxlc.core.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    parser = argparse.ArgumentParser(prog="jaxlc export", description=__doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="workdir of the run")
    parser.add_argument("out", metavar="OUT", help="directory to write, which must not exist or be empty")
    parser.add_argument("--step", type=int, help="checkpoint to export; default: the latest")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights; default: bf16")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size limit of a file in GB; default: 5")
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write the adapters of LoRA alone, for peft, in float32; default: merge them into the weights",
    )
    flags = parser.parse_args(argv[1:])
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        target = jaxlc.export(
            flags.workdir,
            flags.out,
            step=flags.step,
            dtype=flags.dtype,
            max_shard_gb=flags.max_shard_gb,
            adapters=flags.adapters,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
