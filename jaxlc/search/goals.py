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
    """Numbers of whole domains, and of GPUs of one domain: divisors and powers of two, down to one GPU."""
    yield from (part_of(gpus, size, gpus.gpus_per_domain) for size in _sizes(gpus.num_domains))
    yield from (part_of(gpus, 1, size) for size in _sizes(gpus.gpus_per_domain)[1:])


def _sizes(num: int) -> list[int]:
    return [size for size in range(num, 0, -1) if num % size == 0 or size & (size - 1) == 0]


def lengths(num_gpus: int) -> list[int]:
    """Sequence lengths in tokens to try for "longest", longest first: four in each doubling, up to 2^28.

    They are multiples of the odd factors of `num_gpus`, so that any mesh divides them.
    """
    odd = num_gpus
    while odd % 2 == 0:
        odd //= 2
    sizes = {odd * 2**power * quarter for power in range(10, 26) for quarter in (4, 5, 6, 7)}
    return sorted((size for size in sizes if size < 2**28), reverse=True)
