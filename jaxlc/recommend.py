"""usage: jaxlc recommend --config=NAME[:VARIANT] --topology=GPU:DOMAINSxGPUS [--config.SECTION.KEY=VALUE ...]

Searches mesh, attention strategy, microbatches and memory settings, without a GPU: compiles candidates ahead of time
(AOT), prints up to three meshes to measure, and writes a config file. --model instead of --config needs no config:

    jaxlc recommend --model=llama3.1-8b --seq_len=1M --topology=h100:1x8

The same command resumes an interrupted search.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxlc.config.base_config import base_config
from jaxlc.config.command_line import ParsedCommand, StageFlags, run_main
from jaxlc.config.values import Count, Positive
from jaxlc.plan.terminal import start_on_cpu, target_topology


@dataclass(frozen=True, kw_only=True)
class Flags(StageFlags):
    topology: str = ""  # target GPUs, such as h100:8x8; default: config.runtime.topology
    # what is best: the fastest, the cheapest or the fewest GPUs, or the longest sequence that fits
    goal: Literal["fastest", "cheapest", "fewest_gpus", "longest"] = "fastest"
    model: str | None = None  # instead of --config: a preset, a Hugging Face directory or hub id
    seq_len: str | None = None  # sequence length in tokens, such as 131072, 32K or 1M
    search_minutes: Positive = Positive(8.0)  # time limit of the search
    workers: Count | None = None  # number of concurrent compilations; default: as many as cores and memory allow
    # price of a GPU for one hour, in any currency; prints the cost of tokens
    price_per_gpu_hour: Positive | None = None
    host_memory_gib: Positive | None = None  # host memory of one node in GiB; default: a typical value for these GPUs
    devices_per_process: Count = Count(1)  # GPUs per process
    constants: str = ""  # JSON file of measured efficiencies and latencies, as for jaxlc plan
    out: str = "recommended.py"  # config file to write


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns its status: 1 if nothing fits, 130 after Ctrl-C."""
    kept = "interrupted; compiled steps are kept, and the same command resumes"
    return run_main(_recommend, argv, description=__doc__, flags=Flags, base=base_config, interrupted=kept)


def _recommend(command: ParsedCommand[Flags]) -> int:
    flags = command.flags
    topology = target_topology(flags.topology, command.stages[0].config)
    start_on_cpu()
    from jaxlc.search import recommendation_page
    from jaxlc.simulate.topology import topology as parse_topology

    options = dict(devices_per_process=flags.devices_per_process, host_memory_gib=flags.host_memory_gib)
    gpus = parse_topology(topology, **options)
    return recommendation_page.run(command, gpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
