"""Trains one config in several precisions, from the same weights and on the same rows: a table, JSONL rows, a picture.

    python scripts/compare_precision.py --config=configs/quickstart.py --config.train.steps=300 --out=runs/precision

Started again it goes on where it was; what is done is not done again.
"""

import sys
from pathlib import Path

from jaxlc import runtime
from jaxlc.config import with_settings
from jaxlc.config.command_line import ParsedCommand, run_main

_FLAGS = {
    "precisions": "of bf16,fp8,fp8-delayed,fp16,fp32; all by default",
    "out": "directory of a workdir for each, loss_curves.jsonl and loss_curves.png; runs/precision by default",
}


def main(command: ParsedCommand) -> int:
    """Returns the exit status: 0, or that of a run which was ended by a signal."""
    runtime.start(command.config.runtime)  # before anything imports jax
    from benchmarks import loss_curves
    from jaxlc import train

    given = dict(command.extra)
    out = Path(given["out"] or "runs/precision")
    configs = {
        name: with_settings(command.config, {"train.log_every_steps": 1} | loss_curves.settings_of(name))
        for name in (given["precisions"] or ",".join(loss_curves.PRECISIONS)).split(",")
    }
    for name, config in configs.items():
        print(f"\n{name}", flush=True)
        ended = train.run(config, out / name)
        if ended.exit_status:
            return ended.exit_status
    print(loss_curves.compare(out))
    print(f"{out / 'loss_curves.jsonl'}, {out / 'loss_curves.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv, description=__doc__, extra_flags=_FLAGS))
