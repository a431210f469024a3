"""What a recommendation optimizes, and the GPUs and sequence lengths that it may choose for that."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.simulate.topology import Topology, part_of

GOALS = ("fastest", "cheapest", "fewest_gpus", "longest")


class Score(NamedTuple):
    """What a candidate costs; smaller is better, and the first difference decides."""

    first: float
    second: float


def score(goal: str, *, step_seconds: float, num_gpus: int, tokens_per_step: int, seq_len: int) -> Score:
    """The score of a step: seconds, GPU-seconds, GPUs or negative length first; then seconds per token."""
    seconds_per_token = step_seconds / tokens_per_step
    firsts = dict(
        fastest=seconds_per_token,
        cheapest=seconds_per_token * num_gpus,
        fewest_gpus=num_gpus,
        longest=-seq_len,
    )
    return Score(firsts[goal], seconds_per_token)


def topologies(goal: str, gpus: Topology) -> list[Topology]:
    """The GPUs to search: all of `gpus`, or for cheapest and fewest_gpus also parts of them, largest first."""
    return [gpus] if goal in ("fastest", "longest") else list(_parts(gpus))


def _parts(gpus: Topology) -> Iterator[Topology]:
    """`gpus`, and halves of them down to one GPU."""
    yield gpus
    if gpus.num_domains > 1:
        domains = [size for size in range(gpus.num_domains // 2, 0, -1) if gpus.num_domains % size == 0]
        yield from (part_of(gpus, size, gpus.gpus_per_domain) for size in domains if (size & (size - 1)) == 0)
    size = gpus.gpus_per_domain // 2
    while size:
        yield part_of(gpus, 1, size)
        size //= 2


def lengths() -> list[int]:
    """Sequence lengths in tokens to try for "longest", longest first: four in each doubling."""
    powers = range(12, 28)
    return sorted({2**power * quarter // 4 for power in powers for quarter in (4, 5, 6, 7)}, reverse=True)
