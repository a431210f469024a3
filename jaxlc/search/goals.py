"""What a recommendation looks for, as the GPUs and sequence lengths that it may choose, and a filter of what fits."""

from collections.abc import Iterator, Sequence

from jaxlc.runtime.worker_processes import Row
from jaxlc.simulate.topology import Topology, part_of

GOALS = ("fastest", "cheapest", "fewest_gpus", "longest")


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


def eligible(goal: str, fitting: Sequence[Row]) -> list[Row]:
    """Of rows that fit, the ones that meet the goal; their GPU time per token decides among them."""
    if goal == "fewest_gpus":
        fewest = min((row["num_devices"] for row in fitting), default=0)
        return [row for row in fitting if row["num_devices"] == fewest]
    if goal == "longest":
        longest = max((row["seq_len"] for row in fitting), default=0)
        return [row for row in fitting if row["seq_len"] == longest]
    return list(fitting)
