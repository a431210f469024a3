"""What a compiled step sends and which kernels it runs, summed up for a page and for JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxlc.hlo import Program
from jaxlc.hlo.attention_flops import counted_calls
from jaxlc.hlo.attention_hops import Hop
from jaxlc.hlo.collectives import Collective, mesh_axes
from jaxlc.hlo.kernel_costs import ALLOCATE_BUFFER
from jaxlc.hlo.parser import Instruction
from jaxlc.hlo.trip_counts import executions
from jaxlc.simulate.topology import Topology

_HOP = "collective-permute"


class CollectiveStats(NamedTuple):
    """Collectives that differ in nothing that is listed here, in one step."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, along which they go
    backend: str  # "NCCL" or "NVSHMEM"
    mode: str  # "symmetric" is NCCL's one-sided put, "peer" a copy; "" the usual way
    count: int
    bytes: int  # that each device sends, in all of them together
    crosses_domains: bool  # some lead out of an NVLink domain, and over the network


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Point-to-point hops of attention, in one step. Hidden and exposed are modelled: `jaxlc.hlo.attention_hops`."""

    hops: int
    hidden: int
    exposed: int
    exposed_forward: int
    by_backend: dict[str, int]


def traffic(
    sent: Sequence[Collective], mesh_shape: dict[str, int], gpus_per_domain: int
) -> tuple[CollectiveStats, ...]:
    """All collectives, most bytes first."""
    count, size = Counter(), Counter()
    for each in sent:
        crosses = any(len({member // gpus_per_domain for member in group}) > 1 for group in each.groups)
        row = (each.kind, mesh_axes(each.groups, mesh_shape), *_transport(each), crosses)
        count[row] += each.times
        size[row] += each.times * each.sent_bytes
    rows = [CollectiveStats(*row[:4], count[row], size[row], row[4]) for row in count]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def ring(found: Sequence[Hop], gpus: Topology) -> Ring:
    hops = [hop for hop in found if hop.collective.kind == _HOP]
    exposed = [hop for hop in hops if not hop.is_hidden(gpus.device, gpus.gpus_per_domain)]
    by_backend = Counter()
    for hop in hops:
        by_backend[" ".join(filter(None, _transport(hop.collective)))] += hop.times
    return Ring(
        hops=_times(hops),
        hidden=_times(hops) - _times(exposed),
        exposed=_times(exposed),
        exposed_forward=_times(hop for hop in exposed if hop.which == "forward"),
        by_backend=dict(by_backend),
    )


def kernels(program: Program) -> dict[str, int]:
    """Attention kernels by pass, matrix products and other calls of libraries, by name: how often in one step.

    Matrix products are Triton fusions wherever XLA may choose: it tries the libraries' beside them on a GPU only.
    """
    found, attention, times = Counter(), set(), executions(program)
    for call, count in counted_calls(program):
        found[f"{call.kernel} attention {call.which}"] += count
        attention.add(call.instruction.name)
    for computation in program:
        for instruction in computation:
            name = None if instruction.name in attention else _library_call(instruction)
            if name is not None and times[computation.name]:
                found[name] += times[computation.name]
    return dict(found.most_common())


def _library_call(instruction: Instruction) -> str | None:
    if instruction.opcode == "custom-call":
        name = instruction.attributes["custom_call_target"].strip('"')
        return None if name == ALLOCATE_BUFFER else name  # which runs nothing
    if instruction.opcode == "fusion":
        kind = instruction.backend_config.get("fusion_backend_config", {}).get("kind", "")
        return "triton gemm" if "gemm" in kind else None
    return None


def _transport(collective: Collective) -> tuple[str, str]:
    """Backend and mode."""
    name = collective.transport
    return ("NVSHMEM" if name == "nvshmem" else "NCCL"), (name if name in ("symmetric", "peer") else "")


def _times(hops: Iterable[Hop]) -> int:
    return sum(hop.times for hop in hops)
