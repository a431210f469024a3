"""Trains one config in several precisions, from the same weights and on the same rows: a table, JSONL rows, a picture.

    python scripts/compare_precision.py --config=configs/quickstart.py --config.train.steps=300 --out=runs/precision

Started again it goes on where it was; what is done is not done again.
"""

import dataclasses
import sys
from pathlib import Path

from jaxlc import runtime
from jaxlc.config.command_line import ParsedCommand, run_main

_FLAGS = {
    "precisions": "of bf16,fp8,fp8-delayed,fp16,fp32; all by default",
    "out": "directory of a workdir for each, precision.jsonl and precision.png; runs/precision by default",
}


def main(command: ParsedCommand) -> int:
    runtime.start(command.config.runtime)  # before anything imports jax
    from jaxlc import train
    from jaxlc.bench import precision

    given = dict(command.extra)
    out = Path(given["out"] or "runs/precision")
    for name in (given["precisions"] or ",".join(precision.PRECISIONS)).split(","):
        settings = dataclasses.replace(command.config.precision, **precision.PRECISIONS[name])
        print(f"\n{name}", flush=True)
        train.run(dataclasses.replace(command.config, precision=settings), out / name)
    print(precision.compare(out))
    print(f"{out / 'precision.jsonl'}, {out / 'precision.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv, description=__doc__, extra_flags=_FLAGS))
