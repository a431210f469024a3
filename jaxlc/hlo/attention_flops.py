"""FLOPs that the attention kernels of a program compute on each rank, given what masks skip."""

import math
from collections import defaultdict
from collections.abc import Callable

from jaxlc.hlo.analysis import AnalyzedProgram
from jaxlc.hlo.op_names import Pass

# (number of queries, number of keys) of a masked call -> the pairs that it computes on each rank
ComputedPairs = Callable[[int, int], list[int]]


def flops_by_rank(program: AnalyzedProgram, computed_pairs: ComputedPairs, num_ranks: int) -> dict[Pass, list[float]]:
    """Attention FLOPs of one run on each rank, by pass.

    Args:
      computed_pairs: pairs that a masked call computes; all other calls compute all pairs.
    Raises:
      ValueError: a blockwise kernel; its number of queries and keys cannot be read from the program text.
    """
    flops: dict[Pass, list[float]] = defaultdict(lambda: [0.0] * num_ranks)
    for call, times in program.attention_calls:
        if call.sizes is None:
            raise ValueError(f"{call.instruction.name} is a loop: what its mask skips is unknown")
        pairs = call.sizes.num_queries * call.sizes.num_keys
        computed = computed_pairs(*call.sizes[1:]) if call.is_masked else [pairs] * num_ranks
        flops[call.pass_name] = [
            rank_flops + times * call.full_flops * rank_pairs / pairs
            for rank_flops, rank_pairs in zip(flops[call.pass_name], computed, strict=True)
        ]
    return dict(flops)


def imbalance(work_by_rank: list[float]) -> float:
    """Work of the busiest rank over the mean; 1 means balanced."""
    return max(work_by_rank) * len(work_by_rank) / math.fsum(work_by_rank)
