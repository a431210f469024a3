"""usage: jaxlc sweep --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE ...]

Compiles the training step ahead of time (AOT) for every mesh of the target GPUs, which need not be attached, and ranks
the meshes by estimated tokens/s. The same command resumes an interrupted sweep. With --run, the steps are measured on
the devices of this machine instead, one configuration at a time:

    jaxlc sweep --config=256k:mini --run --axes=context,tensor
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlc.config.command_line import ParsedCommand, StageFlags, run_main
from jaxlc.config.values import Count
from jaxlc.core.errors import UserError
from jaxlc.core.paths import local_path
from jaxlc.plan.terminal import target_topology

if TYPE_CHECKING:
    from jaxlc.search.results import Ranking

__all__ = ["load"]


@dataclass(frozen=True, kw_only=True)
class Flags(StageFlags):
    topology: str = ""  # target GPUs, such as gb200:1x64; default: config.runtime.topology
    axes: str | None = None  # mesh axes to vary; default: context,tensor,fsdp
    strategies: str | None = None  # attention strategies to compare, such as ring,hybrid; default: the config's
    remat: str | None = None  # rematerialization policies to compare, such as attention,full; default: the config's
    seq_len: str | None = None  # sequence lengths to compare, such as 64K,262144; default: the config's
    transports: str | None = None  # transports to compare, such as nccl,nvshmem; default: the config's
    workers: Count | None = None  # number of concurrent compilations; default: as many as cores and memory allow
    constants: str = ""  # JSON file of measured efficiencies and latencies, as for jaxlc plan
    out: str = ""  # directory for points, ranking and plots; default: runs/sweep_NAME
    run: bool = False  # measure on the devices of this machine, or on config.runtime.simulated_devices


def load(path: str | Path) -> "Ranking":
    """The results of a finished or interrupted sweep, best first. Print them, or show them in a notebook.

    Args:
      path: the directory of the sweep (`jaxlc sweep --out`), or its points.jsonl.
    Raises:
      UserError: there are no points.
    """
    from jaxlc.search import results  # imports rich and more, which a worker of a sweep does not need

    return results.load(path)


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 130 after Ctrl-C."""
    kept = "interrupted; finished points are kept, and the same command resumes"
    return run_main(_sweep, argv, description=__doc__, flags=Flags, interrupted=kept)


def _sweep(command: ParsedCommand[Flags]) -> int:
    from jaxlc.search import runner

    flags = command.flags
    out = local_path(flags.out or f"runs/sweep_{Path(command.workdir).name}")
    grid = {name: getattr(flags, name) for name in ("axes", "strategies", "remat", "seq_len", "transports")}
    target = {name: getattr(flags, name) for name in ("topology", "workers", "constants")}
    if not flags.run:
        target["topology"] = target_topology(flags.topology, command.config)
        return runner.estimate(command.config, out, **target, **grid)
    for name, value in target.items():
        if value:
            raise UserError(f"--{name}={value} is unsupported with --run, which measures on this machine; remove one")
    return runner.measure(command.config, out, **grid)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
