"""Summaries of a compiled step for the plan page and its JSON: collectives, ring, kernels."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.attention_kernels import AttentionCollective
from jaxlc.hlo.collectives import Collective, mesh_axes
from jaxlc.hlo.kernel_costs import ALLOCATE_BUFFER, is_expert_kernel
from jaxlc.hlo.parser import Instruction, pass_of
from jaxlc.simulate.time_model import TimeModel


class CollectiveStats(NamedTuple):
    """All collectives of one step that agree in kind, axes, transport and link."""

    kind: str  # HLO opcode, such as "all-gather"
    axes: tuple[str, ...]  # mesh axes along which the members of a replica group differ
    backend: str  # "NCCL" or "NVSHMEM"
    mode: str  # "symmetric" is NCCL's one-sided put, "peer" a copy; "" the default
    count: int  # number of collectives
    bytes: int  # sent by each device, in all of them together
    crosses_domains: bool  # some leave an NVLink domain and use the network


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Collective permutes of attention in one step. The JSON calls one of them, between two ranks, a hop.

    `hidden` and `exposed` are estimates: hidden permutes take no longer than the attention kernels that overlap with
    them (`TimeModel.is_hidden_by_attention`); all others are exposed. Other kernels may hide those as well, which the
    simulated step time takes into account.
    """

    hops: int  # all permutes, between two ranks each
    hidden: int  # estimated
    exposed: int  # hops - hidden
    exposed_forward: int  # exposed hops in the forward pass
    by_backend: dict[str, int]  # hops by backend and mode: "NCCL", "NVSHMEM", "NCCL symmetric"


def collective_stats(
    collectives: Sequence[Collective], mesh_shape: dict[str, int], gpus_per_domain: int
) -> tuple[CollectiveStats, ...]:
    """Groups the collectives of a program; most bytes first."""
    count, size = Counter(), Counter()
    for collective in collectives:
        groups = collective.groups
        crosses = any(len({member // gpus_per_domain for member in group}) > 1 for group in groups)
        key = (collective.kind, mesh_axes(groups, mesh_shape), *_transport(collective), crosses)
        count[key] += collective.times
        size[key] += collective.times * collective.sent_bytes
    stats = [CollectiveStats(*key[:4], count[key], size[key], key[4]) for key in count]
    return tuple(sorted(stats, key=lambda group: -group.bytes))


def ring(exchanges: Sequence[AttentionCollective], model: TimeModel) -> Ring:
    """Counts the collective permutes among the collectives of attention."""
    permutes = [exchange for exchange in exchanges if exchange.collective.kind == "collective-permute"]
    exposed = [permute for permute in permutes if not model.is_hidden_by_attention(permute)]
    by_backend = Counter()
    for permute in permutes:
        by_backend[" ".join(filter(None, _transport(permute.collective)))] += permute.times
    return Ring(
        hops=_count(permutes),
        hidden=_count(permutes) - _count(exposed),
        exposed=_count(exposed),
        exposed_forward=_count(permute for permute in exposed if permute.pass_name == "forward"),
        by_backend=dict(by_backend),
    )


def kernels(program: AnalyzedProgram) -> dict[str, int]:
    """Executions per step of attention kernels by pass, of matrix products, and of library calls by name.

    Matrix products are Triton fusions wherever XLA has a choice: without a GPU it does not time other libraries.
    """
    counts = Counter()
    for call, times in program.attention_calls:
        counts[f"{call.kernel} attention {call.pass_name}"] += times
    for computation in program:
        for instruction in computation:
            name = None if instruction in program.attention_call_of else _library_call(instruction)
            if name is not None and program.execution_counts[computation.name]:
                counts[name] += program.execution_counts[computation.name]
    return dict(counts.most_common())


def _library_call(instruction: Instruction) -> str | None:
    if is_expert_kernel(instruction):
        return f"mosaic experts {pass_of(instruction.op_name)}"
    if instruction.opcode == "custom-call":
        name = instruction.attributes["custom_call_target"].strip('"')
        return None if name == ALLOCATE_BUFFER else name  # which runs nothing
    if instruction.opcode == "fusion":
        kind = instruction.backend_config.get("fusion_backend_config", {}).get("kind", "")
        return "triton gemm" if "gemm" in kind else None
    return None


def _transport(collective: Collective) -> tuple[str, str]:
    """(backend, mode), as in `CollectiveStats`."""
    name = collective.transport
    return ("NVSHMEM" if name == "nvshmem" else "NCCL"), (name if name in ("symmetric", "peer") else "")


def _count(exchanges: Iterable[AttentionCollective]) -> int:
    return sum(exchange.times for exchange in exchanges)
