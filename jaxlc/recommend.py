"""usage: jaxlc recommend --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE ...]

Searches mesh, attention strategy, microbatches and memory settings, without a GPU: compiles candidates ahead of time
(AOT), prints up to three meshes to measure, and writes a config file. --model instead of --config needs no config:

    jaxlc recommend --model=llama3.1-8b --seq_len=1M --topology=h100:1x8

The same command resumes an interrupted search.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxlc.config.base_config import base_config
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.core.errors import UserError

_FLAGS = {
    "stage": "name of one stage to search, for a config with stages",
    "topology": "target GPUs, such as h100:8x8; default: config.runtime.topology",
    "goal": "fastest (default), cheapest, fewest_gpus, or longest (the longest sequence that fits)",
    "model": "instead of --config: a preset, a Hugging Face directory or hub id",
    "seq_len": "sequence length in tokens, such as 131072, 32K or 1M",
    "search_minutes": "time limit of the search (default: 8)",
    "workers": "number of concurrent compilations; default: as many as cores and memory allow",
    "price_per_gpu_hour": "price of one GPU for one hour, in any currency; prints the cost of tokens",
    "host_memory_gib": "host memory of one node in GiB (default: a typical value for these GPUs)",
    "devices_per_process": "GPUs per process (default: 1)",
    "constants": "JSON file of measured efficiencies and latencies, as for jaxlc plan",
    "out": "config file to write (default: recommended.py)",
}


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns its status: 1 if nothing fits, 130 after Ctrl-C."""
    try:
        return run_main(_recommend, argv, description=__doc__, extra_flags=_FLAGS, base=base_config)
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130


def _recommend(command: ParsedCommand) -> int:
    from jaxlc.search.goals import GOALS

    flags = command.extra
    topology = flags["topology"] or command.stages[0].config.runtime.topology
    if not topology:
        raise UserError("no topology: pass target GPUs, such as --topology=h100:8x8")
    goal = flags["goal"] or GOALS[0]
    if goal not in GOALS:
        raise UserError(f"invalid --goal={goal}: expected one of {', '.join(GOALS)}")
    model, source = flags["model"] or "", ":".join(filter(None, (command.config_path, command.variant)))
    numbers = {name: _number(flags, name) for name in ("search_minutes", "price_per_gpu_hour", "host_memory_gib")}
    workers, per_process = _whole(flags, "workers"), _whole(flags, "devices_per_process") or 1
    _start_on_cpu()
    from jaxlc.search import recommend_stages
    from jaxlc.simulate.topology import topology as parse_topology

    host_gib = numbers["host_memory_gib"]
    host_bytes = None if host_gib is None else int(host_gib * 2**30)
    options = recommend_stages.Options(
        goal=goal,
        source=source,
        model=model,
        path=Path(flags["out"] or "recommended.py"),
        points=Path("runs") / f"recommend_{Path(command.workdir if source else model).name}",
        limit_seconds=60 * (numbers["search_minutes"] or 8.0),
        num_workers=workers,
        price_per_gpu_hour=numbers["price_per_gpu_hour"],
        constants=flags["constants"] or "",
        host_memory_gib=host_gib,
        devices_per_process=per_process,
    )
    gpus = parse_topology(topology, devices_per_process=per_process, host_memory_bytes_per_node=host_bytes)
    return recommend_stages.run(command.stages, options, gpus)


def _start_on_cpu() -> None:
    """Starts JAX on the CPU, here and in workers, whether or not there are GPUs."""
    import os

    from jaxlc import runtime
    from jaxlc.config import RuntimeConfig

    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    runtime.start(RuntimeConfig(num_processes=1))


def _whole(flags: Mapping[str, str | None], name: str) -> int | None:
    """The whole number of a flag, at least 1; None if it is not given."""
    text = flags[name]
    if text is not None and not (text.isdecimal() and int(text)):
        raise UserError(f"invalid --{name}={text}: expected a whole number, at least 1")
    return None if text is None else int(text)


def _number(flags: Mapping[str, str | None], name: str) -> float | None:
    """The positive number of a flag; None if it is not given."""
    text = flags[name]
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"invalid --{name}={text}: expected a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv))
