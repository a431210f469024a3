"""The ranking of a sweep: as a table on stdout, as CSV, and as plots."""

import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from jaxlc.core import extras
from jaxlc.core.axes import MESH_AXES
from jaxlc.runtime.worker_processes import Row
from jaxlc.simulate.interval import PAIR_SPREAD, is_distinguishable

RANKING = "ranking.csv"
_TABLE_WIDTH = 160  # where stdout is not a terminal
_SETTINGS = (*MESH_AXES, "strategy", "ulysses_degree", "remat", "seq_len", "transport", "gradient_accumulation_steps")


class _Figure(NamedTuple):
    heading: str
    column: str
    text: Callable[[float], str]


_FIGURES = (
    _Figure("tokens/s per device", "tokens_per_second_per_device", "{:,.0f}".format),
    _Figure("MFU, causal", "mfu_causal", "{:.1%}".format),
    _Figure("step s", "step_seconds", "{:,.3g}".format),
    _Figure("exposed s", "exposed_communication_seconds", "{:,.3g}".format),
    _Figure("GiB per device", "device_peak_bytes", lambda num_bytes: f"{num_bytes / 2**30:.3g}"),
)


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


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: points that fit, by tokens/s; points that do not fit, by tokens/s; points without figures."""

    def place(row: Row) -> tuple:
        if row["status"] != "done":
            return (2, 0.0)
        return (0 if row["fits"] else 1, -row["tokens_per_second_per_device"])

    return sorted(rows, key=place)


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
        texts = [figure.text(row[figure.column]) for figure in figures]
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
