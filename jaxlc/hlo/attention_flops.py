"""How much attention a program computes, against how much the mask leaves to compute."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from jaxlc.hlo.attention_kernels import AttentionKernelCall, attention_kernels
from jaxlc.hlo.op_names import Pass
from jaxlc.hlo.parser import Program
from jaxlc.hlo.trip_counts import executions

# (number of queries, number of keys) of a masked call -> the pairs it computes on each rank
Visited = Callable[[int, int], list[int]]


class CountedCall(NamedTuple):
    call: AttentionKernelCall
    times: int  # in one run of the program


def counted_calls(program: Program) -> list[CountedCall]:
    """The attention kernels that run at least once; a conditional counts as if all its branches ran."""
    times = executions(program)
    inside = set()  # the bodies of kernels that are loops
    found = []
    for computation in reversed(list(program)):  # callers before callees
        if not times[computation.name]:
            continue
        if computation.name in inside:
            inside.update(name for each in computation for name in each.called)
            continue
        for call in attention_kernels(program, computation):
            found.append(CountedCall(call, times[computation.name]))
            inside.update(call.instruction.called)
    return found


def flops_by_rank(program: Program, visited: Visited, num_ranks: int) -> dict[Pass, list[float]]:
    """Attention FLOPs of one run on each rank, by pass.

    Args:
      visited: what masked calls leave to compute; all others compute all their pairs.
    Raises:
      ValueError: a kernel that is a loop over tiles: its text does not tell its numbers of queries and keys.
    """
    flops: dict[Pass, list[float]] = defaultdict(lambda: [0.0] * num_ranks)
    for call, times in counted_calls(program):
        if call.sizes is None:
            raise ValueError(f"{call.instruction.name} is a loop: what its mask leaves to compute is not known")
        pairs = call.sizes.num_queries * call.sizes.num_keys
        computed = visited(*call.sizes[1:]) if call.is_masked else [pairs] * num_ranks
        flops[call.which] = [
            so_far + times * call.full_flops * rank_pairs / pairs
            for so_far, rank_pairs in zip(flops[call.which], computed, strict=True)
        ]
    return dict(flops)


def imbalance(work_by_rank: list[float]) -> float:
    """The busiest rank's work over the mean: the others wait for it. 1 is even."""
    return max(work_by_rank) * len(work_by_rank) / math.fsum(work_by_rank)
