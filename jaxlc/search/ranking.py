"""The ranking of configurations, and a sweep's as a table on stdout, as CSV, and as plots.

Estimates with the same GPUs, mesh and microbatch share most errors and are compared to 2%: among equal ones, the one
with the fewest departures from `defaults()` stands for the others, and of several the one with the most memory left.
These are compared to 5%, across meshes: among equal ones, the one with the most memory left is first, then the one with
the fewest departures. Copies to host memory have to pay: what uses it is first only if all others are slower by more
than 5%. What its own plan warns about is first only if nothing else fits. Measurements are ordered by speed.
"""

import csv
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from jaxlc.core import extras
from jaxlc.core.axes import MESH_AXES
from jaxlc.runtime.worker_processes import Row
from jaxlc.simulate.interval import PAIR_SPREAD, is_distinguishable

# Relative differences of time that do not decide: with the same kernels, whose errors cancel for the most part, or not.
_SAME_SHAPE, _ACROSS_MESHES = 0.02, 0.05
RANKING = "ranking.csv"
_TABLE_WIDTH = 160  # where stdout is not a terminal
_SETTINGS = (*MESH_AXES, "strategy", "ulysses_degree", "remat", "seq_len", "transport", "gradient_accumulation_steps")


class _Figure(NamedTuple):
    heading: str
    column: str
    power: int  # of time: estimates are multiplied by this power of the scale of published runs
    text: Callable[[float], str]  # of a measurement, or of memory
    unit: float = 1.0


_FIGURES = (
    _Figure("tokens/s per device", "tokens_per_second_per_device", -1, "{:,.0f}".format),
    _Figure("MFU, causal", "mfu_causal", -1, "{:.1%}".format),
    _Figure("step s", "step_seconds", 1, "{:,.3g}".format),
    _Figure("exposed s", "exposed_communication_seconds", 1, "{:,.3g}".format),
    _Figure("GiB per device", "device_peak_bytes", 0, "{:.3g}".format, 2**30),
)


def two_digits(value: float) -> str:
    """1234.5 as "1,200", 0.0123 as "0.012"."""
    return f"{float(f'{value:.2g}'):,.10g}"


def time_interval(row: Row) -> tuple[float, float, float]:
    """The 80% interval of an estimated step, with its median between the ends. Both are scaled by published runs."""
    low, high = row["step_seconds_low"], row["step_seconds_high"]
    return low, math.sqrt(low * high), high


def _figure_text(figure: _Figure, row: Row) -> str:
    """Measurements as they are; of estimated times the scaled median with two digits."""
    value = row[figure.column] / figure.unit
    if row.get("figures") != "estimated" or not figure.power:
        return figure.text(value)
    scale = time_interval(row)[1] / row["step_seconds"] if row.get("step_seconds_low") else 1.0
    value *= scale**figure.power
    return f"{value:.0%}" if figure.column == "mfu_causal" else two_digits(value)


def report(rows: Sequence[Row], what: str, out: Path, note: str = "") -> int:
    """Prints the ranking and writes it to `out`; returns the exit status, 1 if no point completed."""
    title = f"{rows[0]['model']}, {what}"
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    console.print(table(rows, title))
    for line in failures(rows):
        console.print(line, markup=False)
    paths = write(rows, title, out)
    console.print(", ".join(str(path) for path in paths))
    if rows[0]["status"] != "done":
        return 1
    if note:
        console.print(note, markup=False)
    console.print(f"first: {rows[0]['overrides']}", markup=False)
    return 0


def estimate_note(rows: Sequence[Row], spread: float = PAIR_SPREAD) -> str:
    """How far the order of the ranking can be trusted, for points with the sequence length of the first.

    Args:
      spread: half of the 80% interval of the logarithm of the ratio of two times.
    """
    fitting = [row for row in rows if row["status"] == "done" and row["fits"]]
    speeds = [row["tokens_per_second_per_device"] for row in fitting if row["seq_len"] == fitting[0]["seq_len"]]
    num_close = sum(not is_distinguishable(speed, max(speeds), spread) for speed in speeds) - 1 if speeds else 0
    note = (
        f"Estimates, not measurements: speeds within a factor of {math.exp(spread):.2f} of each other are within the"
        " 80% interval of a comparison (docs/calibration.md)"
    )
    if num_close < 1:
        return f"{note}."
    return f"{note}. {num_close} of the other {len(speeds) - 1} of this length that fit may be as fast as the first."


class Entry(NamedTuple):
    """What the order of a configuration depends on."""

    mesh: Hashable  # GPUs, mesh and sequence length
    microbatches: int
    seconds: float  # GPU-seconds per token
    memory_left_bytes: float
    num_departures: int
    fits: bool = True
    has_warnings: bool = False
    uses_host: bool = False

    @property
    def shape(self) -> Hashable:
        """Configurations with the same one run kernels of the same shapes."""
        return self.mesh, self.microbatches


def places(entries: Sequence[Entry]) -> list[int]:
    """Indices of `entries`, best first."""
    result = []
    for tier in _tiers(entries):
        near = _first_of_shapes(entries, tier)
        rest = sorted(set(tier) - set(near), key=lambda index: entries[index].seconds)
        result += [*near, *rest]
    return result


def decisive(entries: Sequence[Entry]) -> list[int]:
    """Indices on which the first place depends: the first, the fastest, and the fastest with the shape of the first."""
    tier = next(_tiers(entries))
    first = _first_of_shapes(entries, tier)[0]
    peers = [index for index in tier if entries[index].shape == entries[first].shape]
    return [first, _fastest(entries, tier), _fastest(entries, peers)]


def _tiers(entries: Sequence[Entry]) -> Iterator[list[int]]:
    """What fits without warnings, what fits with warnings, the rest.

    Of the first, what uses host memory is apart, unless everything else is slower by more than `_ACROSS_MESHES`.
    """
    tiers: tuple[list[int], ...] = ([], [], [])
    for index, entry in enumerate(entries):
        tiers[2 if not entry.fits else int(entry.has_warnings)].append(index)
    on_device = [index for index in tiers[0] if not entries[index].uses_host]
    if on_device:
        seconds = [entries[_fastest(entries, tier)].seconds for tier in (on_device, tiers[0])]
        if seconds[0] <= (1 + _ACROSS_MESHES) * seconds[1]:
            tiers = (on_device, sorted(set(tiers[0]) - set(on_device)), *tiers[1:])
    yield from filter(None, tiers)


def _first_of_shapes(entries: Sequence[Entry], tier: Sequence[int]) -> list[int]:
    """One entry of each shape within `_ACROSS_MESHES` of the fastest, the one with the most memory left first."""
    by_shape: dict[Hashable, list[int]] = {}
    for index in tier:
        by_shape.setdefault(entries[index].shape, []).append(index)
    first = []
    for indices in by_shape.values():
        fastest = entries[_fastest(entries, indices)].seconds
        equal = [index for index in indices if is_equal(entries[index].seconds, fastest)]
        first.append(min(equal, key=lambda index: (entries[index].num_departures, *_by_memory(entries[index]))))
    fastest = entries[_fastest(entries, tier)].seconds
    near = [index for index in first if entries[index].seconds <= (1 + _ACROSS_MESHES) * fastest]
    return sorted(near or [_fastest(entries, tier)], key=lambda index: _by_memory(entries[index]))


def _fastest(entries: Sequence[Entry], indices: Sequence[int]) -> int:
    return min(indices, key=lambda index: entries[index].seconds)


def _by_memory(entry: Entry) -> tuple[float, int, float]:
    return -entry.memory_left_bytes, entry.num_departures, entry.seconds


def is_equal(seconds: float, fastest_seconds: float) -> bool:
    """Whether two estimates of one shape count as equal."""
    return seconds <= (1 + _SAME_SHAPE) * fastest_seconds


def entry_of(row: Row) -> Entry:
    """Of a row with results. Rows of older versions lack warnings and departures."""
    usable_bytes = row.get("device_usable_bytes") or row.get("device_capacity_bytes") or row["device_peak_bytes"]
    return Entry(
        mesh=(row["topology"], row["seq_len"], *(row[axis] for axis in MESH_AXES)),
        microbatches=row.get("gradient_accumulation_steps", 1),
        seconds=1 / row["tokens_per_second_per_device"],
        memory_left_bytes=usable_bytes - row["device_peak_bytes"],
        num_departures=row.get("departures", 0),
        fits=row["fits"],
        has_warnings=bool(row.get("warnings") or row.get("pools")),
        uses_host=bool(row.get("host_bytes_per_node")),
    )


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: estimates as `places`; measurements by tokens/s; then points without results."""
    done = [row for row in rows if row["status"] == "done"]
    others = [row for row in rows if row["status"] != "done"]
    if done and done[0].get("figures") == "measured":
        return sorted(done, key=lambda row: (not row["fits"], -row["tokens_per_second_per_device"])) + others
    return [done[index] for index in places([entry_of(row) for row in done])] + others


def write(rows: Sequence[Row], title: str, out: Path) -> list[Path]:
    """Writes the ranking as CSV, and the plots if matplotlib is installed. Returns their paths."""
    path = out / RANKING
    names = dict.fromkeys(name for row in rows for name in row if name != "key")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["rank", *names], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(dict(rank=rank) | row for rank, row in enumerate(rows, start=1))
    if not extras.is_installed("matplotlib"):
        print(f"plots skipped, matplotlib is not installed: {extras.install_hint('matplotlib')}", file=sys.stderr)
        return [path]
    from jaxlc.search import ranking_plots

    return [path, *ranking_plots.write(rows, title, out)]


def table(rows: Sequence[Row], title: str) -> Table:
    """The ranking as a table. Settings that are equal in all rows are in its title."""
    varying = [name for name in _SETTINGS if len({row[name] for row in rows}) > 1]
    same = ", ".join(f"{name}={rows[0][name]}" for name in _SETTINGS if name not in varying)
    done = [row for row in rows if row["status"] == "done"]
    figures = [figure for figure in _FIGURES if any(row.get(figure.column) is not None for row in done)]
    ranking = Table(title=f"{title}\n{same}", title_justify="left")
    for name in ("", *varying, *(figure.heading for figure in figures), ""):
        ranking.add_column(name, justify="left" if name in ("strategy", "remat", "transport", "") else "right")
    for rank, row in enumerate(done, start=1):
        settings = [f"{row[name]:,}" if name == "seq_len" else str(row[name]) for name in varying]
        texts = [_figure_text(figure, row) for figure in figures]
        ranking.add_row(str(rank), *settings, *texts, "" if row["fits"] else "does not fit")
    return ranking


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """One line per reason for which points were refused or failed, with the names of these points."""
    reasons = {}
    for row in rows:
        if row["status"] != "done":
            reasons.setdefault((row["status"], row["reason"]), []).append(name_of(row))
    for (status, reason), names in reasons.items():
        yield f"{status}: {'; '.join(names)}: {reason}"


def name_of(row: Row) -> str:
    """A short name: "fsdp=2 context=8 tensor=4 ring"."""
    axes = [f"{axis}={row[axis]}" for axis in MESH_AXES if row[axis] > 1]
    strategy = f"{row['strategy']}/{row['ulysses_degree']}" if row["strategy"] == "hybrid" else row["strategy"]
    return " ".join([*axes, strategy])
