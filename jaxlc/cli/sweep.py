"""usage: jaxlc sweep --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS
[--config.SECTION.KEY=VALUE ...]

Compiles the training step ahead of time (AOT) for every mesh of the target GPUs, which need not be
attached, and ranks the meshes by estimated tokens/s. The same command resumes an interrupted sweep.
With --run, the steps are measured on the devices of this machine instead, one configuration at a
time:

    jaxlc sweep --config=256k:mini --run --axes=context,tensor
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlc.cli.flags import TargetFlags, start_on_cpu, target_topology
from jaxlc.config import Config
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.models.model_schema import model_name
from jaxlc.config.settings import hint_at
from jaxlc.config.values import From1, Tokens, typed
from jaxlc.core.axes import CONTEXT, FSDP, TENSOR, mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.files import local_path
from jaxlc.core.text import print_to_stderr as log
from jaxlc.runtime.worker_processes import Row, default_num_workers, run_in_processes
from jaxlc.search import runner, space
from jaxlc.search.ranking import Ranking, ranked
from jaxlc.search.space import Point


@dataclass(frozen=True, kw_only=True)
class Flags(TargetFlags):
    # mesh axes to vary; the others keep the size of the config
    axes: tuple[str, ...] = (CONTEXT, TENSOR, FSDP)
    # attention strategies to compare, such as ring,hybrid; default: the config's
    strategies: tuple[str, ...] = ()
    # rematerialization policies to compare, such as attention,full; default: the config's
    remat: tuple[str, ...] = ()
    # sequence lengths to compare, such as 64K,262144; default: the config's
    seq_len: tuple[Tokens, ...] = ()
    # transports to compare, such as nccl,nvshmem; default: the config's
    transports: tuple[str, ...] = ()
    # number of concurrent compilations; default: as many as cores and memory allow
    workers: From1[int] | None = None
    out: str = ""  # directory for points, ranking and plots; default: runs/sweep_NAME
    # measure on the devices of this machine, or on config.runtime.simulated_devices
    run: bool = False


def _sweep(command: ParsedCommand[Flags]) -> int:
    """Prints the ranking and writes it to --out; returns the exit status, 1 if no point completed."""
    flags, config = command.flags, command.config
    out = local_path(flags.out or f"runs/sweep_{Path(command.workdir).name}")
    ranking = _measured(config, flags, out) if flags.run else estimated(config, flags, out)
    print(ranking)
    print(*ranking.write(out), sep=", ")
    if ranking.rows[0]["status"] != "done":
        return 1
    print(f"first: {ranking.rows[0]['overrides']}")
    return 0


def estimated(config: Config, flags: Flags, out: Path) -> Ranking:
    """AOT-compiles every point for --topology and ranks them by estimated speed."""
    topology = target_topology(flags.topology, config)
    start_on_cpu()
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as parse_topology

    roofline = from_file(flags.constants)  # an invalid file is reported once, not for every point
    gpus = parse_topology(topology)
    points = grid(space.unchecked(config, {"runtime.topology": topology}), gpus.num_gpus, flags)
    log(f"starting the GPU compiler for {topology}")
    _ = gpus.devices  # a missing compiler is reported once, too
    workers = flags.workers or default_num_workers()
    rows = runner.estimate(points, topology, flags.constants, out=out, num_workers=workers)
    return Ranking(tuple(ranked(rows)), pair_spread=roofline.pair_spread)


def _measured(config: Config, flags: Flags, out: Path) -> Ranking:
    """Measures every point on the devices of this machine, one at a time, and ranks them by speed."""
    for name in ("topology", "workers", "constants"):
        if value := getattr(flags, name):
            raise UserError(
                f"--{name}={value} is unsupported with --run, which measures on this machine; remove one"
            )
    log("starting JAX")
    # In another process: JAX in this one would reserve the memory of the devices.
    ((_, local),) = run_in_processes([config], runner.local_devices, num_workers=1)
    if local["status"] != "done":
        raise UserError(f"JAX does not start: {local['reason']}")
    devices = f"{local['num_devices']} x {local['device']}"
    about: Row = dict(figures="measured", topology=devices, model=model_name(vars(config.model)))
    points = grid(config, local["num_devices"], flags)
    return Ranking(
        tuple(ranked(runner.run(points, runner.measure_point, about=about, out=out, num_workers=1)))
    )


def grid(config: Config, num_devices: int, flags: Flags) -> list[Point]:
    """All combinations of the values in the flags; logs the number of skipped duplicates.

    With context=1 all strategies compile to the same program, so only the first is kept. Hybrid is skipped where
    context has no divisor that splits it into an all-to-all group and a ring: it would equal ulysses or ring. The
    global batch size is that of `config`. Gradient accumulation steps follow from the number of replicas, so that the
    microbatch per replica stays the same. Points that the config checks reject are included.

    Raises:
      UserError: an unknown name; no mesh of these axes has `num_devices` devices, or none of them splits context for
        hybrid.
    """
    for axis in flags.axes:
        hint_at(f"mesh.{axis}")  # raises for an unknown one
    meshes = list(space.meshes(config, num_devices, flags.axes))
    if not meshes:
        fixed = mesh_text(
            {axis: size for axis, size in vars(config.mesh).items() if axis not in flags.axes}
        )
        raise UserError(
            f"no mesh of {num_devices} devices: --axes={','.join(flags.axes)} cannot complete {fixed};"
            " add axes to --axes"
        )
    train, replicas = config.train, config.mesh.data * config.mesh.fsdp
    sequences = max(1, train.global_batch_size // (train.gradient_accumulation_steps * replicas))
    if config.runtime.simulated_devices:
        config = space.unchecked(config, {"runtime.simulated_devices": num_devices})
    names = _choices("strategies", flags.strategies, config, "attention.strategy")
    choices = {
        "data.seq_len": list(dict.fromkeys(flags.seq_len or (config.data.seq_len,))),
        "runtime.transport": _choices("transports", flags.transports, config, "runtime.transport"),
        "memory.remat": _choices("remat", flags.remat, config, "memory.remat"),
    }
    points = [
        Point(
            base=config,
            settings=space.mesh_settings(mesh)
            | strategy
            | dict(zip(choices, values))
            | space.batch_settings(config, mesh, sequences),
        )
        for values in itertools.product(*choices.values())
        for mesh in meshes
        for strategy in space.strategies(config, mesh, names, max_degrees=1)
    ]
    if not points:
        raise UserError(
            "no points: hybrid needs a context axis that splits into Ulysses ranks and a ring, such as context=4, and a"
            " Ulysses degree that divides the heads; add axes to --axes, or strategies to --strategies"
        )
    num_duplicates = len(meshes) * len(names) * math.prod(map(len, choices.values())) - len(points)
    log(
        f"{len(points)} points"
        + (f"; {num_duplicates} duplicate configurations skipped" if num_duplicates else "")
    )
    return points


def _choices(flag: str, names: Sequence[str], config: Config, path: str) -> list[str]:
    """The values of a setting that a flag names; without any, the value of the config."""
    return [
        typed(f"--{flag}", name, hint_at(path))
        for name in dict.fromkeys(names or [space.value_of(config, path)])
    ]


# (argv, program name first) -> exit status
main = functools.partial(
    run_main,
    _sweep,
    description=__doc__,
    flags=Flags,
    interrupted="interrupted; finished points are kept, and the same command resumes",
)
