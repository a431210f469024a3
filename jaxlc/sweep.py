"""usage: jaxlc sweep --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE ...]

Compiles the training step ahead of time (AOT) for every mesh of the target GPUs, which need not be attached, and ranks
the meshes by estimated tokens/s. The same command resumes an interrupted sweep. With --run, the steps are measured on
the devices of this machine instead, one configuration at a time:

    jaxlc sweep --config=256k:mini --run --axes=context,tensor
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlc.config.command_line import ParsedCommand, run_main

if TYPE_CHECKING:
    from jaxlc.search.stored import Ranking

__all__ = ["load"]

_FLAGS = {
    "stage": "name of the stage to compile, for a config with stages",
    "topology": "target GPUs, such as gb200:1x64; default: config.runtime.topology",
    "axes": "mesh axes to vary; default: context,tensor,fsdp",
    "strategies": "attention strategies to compare, such as ring,hybrid; default: the config's",
    "remat": "rematerialization policies to compare, such as attention,full; default: the config's",
    "seq_len": "sequence lengths to compare, such as 64K,262144; default: the config's",
    "transports": "transports to compare, such as nccl,nvshmem; default: the config's",
    "workers": "number of concurrent compilations; default: as many as cores and memory allow",
    "constants": "JSON file of measured efficiencies and latencies, as for jaxlc plan",
    "out": "directory for points, ranking and plots; default: runs/sweep_NAME",
    "run": "measure on the devices of this machine, or on config.runtime.simulated_devices",
}


def load(path: str | Path) -> "Ranking":
    """The results of a finished or interrupted sweep, best first. Print them, or show them in a notebook.

    Args:
      path: the directory of the sweep (`jaxlc sweep --out`), or its points.jsonl.
    Raises:
      UserError: there are no points.
    """
    from jaxlc.search import stored  # imports rich and more, which a worker of a sweep does not need

    return stored.load(path)


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 130 after Ctrl-C."""
    try:
        return run_main(_sweep, argv, description=__doc__, extra_flags=_FLAGS, switches=("run",))
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130


def _sweep(command: ParsedCommand) -> int:
    from jaxlc.search import runner

    flags = dict(command.extra)
    out = Path(flags.pop("out") or f"runs/sweep_{Path(command.workdir).name}")
    if flags.pop("run"):
        return runner.measure(command.config, out, **flags)
    return runner.estimate(command.config, out, **flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
