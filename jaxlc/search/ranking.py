"""The order of configurations.

Estimates with the same GPUs, mesh and microbatch share most errors and are compared to 2%: among equal ones, the one
with the fewest departures from `defaults()` stands for the others, and of several the one with the most memory left.
These are compared to 5%, across meshes: among equal ones, the one with the most memory left is first, then the one with
the fewest departures. Copies to host memory have to pay: what copies more kinds of arrays (saved activations, optimizer
state, parameters) is first only if all others are slower by more than 5%. What its own plan warns about is first only
if nothing else fits. Measurements are ordered by speed.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jaxlc.core.axes import MESH_AXES
from jaxlc.runtime.worker_processes import Row
from jaxlc.search.space import layout_name

K = TypeVar("K", bound=Hashable)
NUM_MESHES = 3  # that are compiled by a search, and named as the ones to measure
# Relative differences of time that do not decide: with the same kernels, whose errors cancel for the most part, or not.
_SAME_SHAPE, _ACROSS_MESHES = 0.02, 0.05


class Entry(NamedTuple):
    """What the order of a configuration depends on."""

    mesh: tuple[Hashable, ...]  # GPUs, sequence length, and the sizes of the axes
    microbatches: int
    seconds: float  # GPU-seconds per token
    memory_left_bytes: float
    num_departures: int
    fits: bool = True
    has_warnings: bool = False
    host_kinds: int = 0  # of `host_kinds`

    @property
    def shape(self) -> Hashable:
        """Configurations with the same one run kernels of the same shapes."""
        return self.mesh, self.microbatches


def entry_of(row: Row) -> Entry:
    """The entry of an estimated row. Rows of a sweep lack departures, pools, and settings that do not vary."""
    return Entry(
        mesh=mesh_of(row),
        microbatches=row["gradient_accumulation_steps"],
        seconds=1 / row["tokens_per_second_per_device"],
        memory_left_bytes=row["device_usable_bytes"] - row["device_peak_bytes"],
        num_departures=row.get("departures", 0),
        fits=row["fits"],
        # As `Candidate.entry`. The size of NVSHMEM's heap is a setting of the config that the search writes.
        has_warnings=bool(row.get("warnings")) or "runtime.memory_fraction" in row.get("pools", ()),
        host_kinds=host_kinds(row.get("offload", ()), row.get("optimizer", ""), row.get("parameters", "")),
    )


def host_kinds(offload: Sequence[str], optimizer: str, parameters: str) -> int:
    """Kinds of arrays in host memory, from settings of memory: saved activations, optimizer state, parameters."""
    return bool(offload) + (optimizer, parameters).count("host")


def mesh_of(row: Row) -> tuple[Hashable, ...]:
    return row["topology"], row["seq_len"], *(row[axis] for axis in MESH_AXES)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: estimates as `places`; measurements by tokens/s; then points without results."""
    done = [row for row in rows if row["status"] == "done"]
    others = [row for row in rows if row["status"] != "done"]
    if done and done[0]["figures"] == "measured":
        return sorted(done, key=lambda row: (not row["fits"], -row["tokens_per_second_per_device"])) + others
    return [done[index] for index in places(dict(enumerate(map(entry_of, done))))] + others


def places(entries: Mapping[K, Entry]) -> list[K]:
    """The keys of `entries`, best first."""
    result = []
    for tier in _tiers(entries):
        near = dict.fromkeys(_first_of_shapes(entries, tier))
        result += [*near, *sorted((key for key in tier if key not in near), key=lambda key: entries[key].seconds)]
    return result


def decisive(entries: Mapping[K, Entry]) -> list[K]:
    """The keys on which the first place depends: the first, the fastest, and the fastest with the first one's shape."""
    tier = next(_tiers(entries))
    first = _first_of_shapes(entries, tier)[0]
    peers = [key for key in tier if entries[key].shape == entries[first].shape]
    return [first, _fastest(entries, tier), _fastest(entries, peers)]


def _tiers(entries: Mapping[K, Entry]) -> Iterator[list[K]]:
    """What fits without warnings, what fits with warnings, the rest.

    Of what fits, those that copy more kinds of arrays to host memory follow the others, unless all others are slower by
    more than `_ACROSS_MESHES`.
    """
    tiers: tuple[list[K], ...] = ([], [], [])
    for key, entry in entries.items():
        tiers[2 if not entry.fits else int(entry.has_warnings)].append(key)
    for tier in tiers[:2]:
        yield from filter(None, _with_few_host_kinds(entries, tier))
    yield from filter(None, tiers[2:])


def _with_few_host_kinds(entries: Mapping[K, Entry], tier: Sequence[K]) -> tuple[list[K], list[K]]:
    """Those with the fewest kinds of arrays in host memory within `_ACROSS_MESHES`; the rest."""
    for limit in sorted({entries[key].host_kinds for key in tier}):
        few = [key for key in tier if entries[key].host_kinds <= limit]
        if entries[_fastest(entries, few)].seconds <= (1 + _ACROSS_MESHES) * entries[_fastest(entries, tier)].seconds:
            return few, [key for key in tier if entries[key].host_kinds > limit]
    return [], []


def _first_of_shapes(entries: Mapping[K, Entry], tier: Sequence[K]) -> list[K]:
    """One entry of each shape within `_ACROSS_MESHES` of the fastest, the one with the most memory left first."""
    by_shape: dict[Hashable, list[K]] = {}
    for key in tier:
        by_shape.setdefault(entries[key].shape, []).append(key)
    first = []
    for keys in by_shape.values():
        limit = (1 + _SAME_SHAPE) * entries[_fastest(entries, keys)].seconds
        equal = [key for key in keys if entries[key].seconds <= limit]
        first.append(min(equal, key=lambda key: (entries[key].num_departures, *_by_memory(entries[key]))))
    limit = (1 + _ACROSS_MESHES) * entries[_fastest(entries, tier)].seconds
    near = [key for key in first if entries[key].seconds <= limit]
    return sorted(near or [_fastest(entries, tier)], key=lambda key: _by_memory(entries[key]))


def _fastest(entries: Mapping[K, Entry], keys: Sequence[K]) -> K:
    return min(keys, key=lambda key: entries[key].seconds)


def _by_memory(entry: Entry) -> tuple[float, int, float]:
    return -entry.memory_left_bytes, entry.num_departures, entry.seconds


def name_of(row: Row) -> str:
    """The mesh and the strategy, such as "fsdp=2 x context=8 ring"."""
    return layout_name({axis: row[axis] for axis in MESH_AXES}, row["strategy"], row["ulysses_degree"])
