"""The order of configurations.

Estimates with the same GPUs, mesh and microbatch share most errors and are compared to 2%: among
equal ones, the one with the fewest departures from `defaults()` stands for the others, and of
several the one with the most memory left. These are compared to 5%, across meshes: among equal
ones, the one with the most memory left is first, then the one with the fewest departures. Copies to
host memory have to pay: what copies more kinds of arrays (saved activations, optimizer state,
parameters) is first only if all others are slower by more than 5%. What its own plan warns about is
first only if nothing else fits. Measurements are ordered by speed.

`Ranking` has the results of a search, best first: a table in terminals and notebooks, CSV, and
plots: a bar per mesh, and a line per transport over sequence length.
"""

import csv
import itertools
import math
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from jaxlc.core import MESH_AXES, UserError, aligned, checked, errors, plot_style, preformatted
from jaxlc.core.files import local_path, read_json_lines
from jaxlc.core.plot_style import AMBER, BLUE, GRAY, RED, TEAL
from jaxlc.core.processes import Row
from jaxlc.search.space import row_name
from jaxlc.simulate.roofline import PAIR_SPREAD, Interval, estimate_text, two_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

K = TypeVar("K", bound=Hashable)
NUM_MESHES = 3  # that are compiled by a search, and named as the ones to measure
# Relative differences of time that do not decide: with the same kernels, whose errors cancel for
# the most part, or not.
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
    # arrays in host memory: saved activations, optimizer state, parameters
    host_kinds: int = 0

    @property
    def shape(self) -> Hashable:
        """Configurations with the same one run kernels of the same shapes."""
        return self.mesh, self.microbatches

    @property
    def by_memory(self) -> tuple[float, int, float]:
        """The sort key among entries whose time is equal."""
        return -self.memory_left_bytes, self.num_departures, self.seconds


def entry_of(row: Row) -> Entry:
    """The entry of an estimated row. Rows of a sweep lack departures, pools, and settings that do
    not vary; rows of candidates that are not compiled lack pools.
    """
    return Entry(
        mesh=mesh_of(row),
        microbatches=row["gradient_accumulation_steps"],
        seconds=1 / row["tokens_per_second_per_device"],
        memory_left_bytes=row["device_usable_bytes"] - row["device_peak_bytes"],
        num_departures=row.get("departures", 0),
        fits=row["fits"],
        # The size of NVSHMEM's heap is a setting of the config that the
        # search writes.
        has_warnings=bool(row.get("warnings")) or "runtime.memory_fraction" in row.get("pools", ()),
        host_kinds=bool(row.get("offload"))
        + (row.get("optimizer"), row.get("parameters")).count("host"),
    )


def mesh_of(row: Row) -> tuple[Hashable, ...]:
    return row["topology"], row["seq_len"], *(row[axis] for axis in MESH_AXES)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: estimates as `places`; measurements by tokens/s; then points without results."""
    done = [row for row in rows if row["status"] == "done"]
    others = [row for row in rows if row["status"] != "done"]
    if done and done[0]["figures"] == "measured":
        return (
            sorted(done, key=lambda row: (not row["fits"], -row["tokens_per_second_per_device"]))
            + others
        )
    return [done[index] for index in places(dict(enumerate(map(entry_of, done))))] + others


def places(entries: Mapping[K, Entry]) -> list[K]:
    """The keys of `entries`, best first."""
    return sorted(entries, key=_ranks(entries).__getitem__)


def decisive(entries: Mapping[K, Entry]) -> list[K]:
    """The keys on which the first place depends: the first, the fastest, and the fastest with the
    first one's shape.
    """
    ranks = _ranks(entries)
    first = min(entries, key=ranks.__getitem__)
    group = [key for key in entries if ranks[key][:2] == ranks[first][:2]]
    group.sort(key=lambda key: entries[key].seconds)
    return [
        first,
        group[0],
        next(key for key in group if entries[key].shape == entries[first].shape),
    ]


def _ranks(entries: Mapping[K, Entry]) -> dict[K, tuple[float, ...]]:
    """The sort key of each entry: its group, whether it is near the fastest one, then its memory or
    its time.
    """
    # Tiers: what fits without warnings, what fits with warnings, the rest. Copies of more kinds of
    # arrays than the fewest within `_ACROSS_MESHES` of the fastest one of a tier do not pay.
    groups: dict[tuple[int, bool], dict[K, Entry]] = {}  # smaller is better
    for tier in (0, 1, 2):
        members = {
            key: x for key, x in entries.items() if (int(x.has_warnings) if x.fits else 2) == tier
        }
        limit = (1 + _ACROSS_MESHES) * min((x.seconds for x in members.values()), default=0.0)
        few = min((x.host_kinds for x in members.values() if x.seconds <= limit), default=0)
        for key, entry in members.items():
            groups.setdefault((tier, tier < 2 and entry.host_kinds > few), {})[key] = entry
    ranks: dict[K, tuple[float, ...]] = {}
    for group, members in groups.items():
        limit = (1 + _ACROSS_MESHES) * min(x.seconds for x in members.values())
        by_shape: dict[Hashable, list[K]] = {}
        for key, entry in members.items():
            by_shape.setdefault(entry.shape, []).append(key)
        first_of_shapes = set()
        for keys in by_shape.values():
            same = (1 + _SAME_SHAPE) * min(entries[key].seconds for key in keys)
            equal = [key for key in keys if entries[key].seconds <= same]
            first_of_shapes.add(
                min(equal, key=lambda key: (entries[key].num_departures, *entries[key].by_memory))
            )
        for key, entry in members.items():
            is_near = key in first_of_shapes and entry.seconds <= limit
            ranks[key] = (*group, not is_near, *(entry.by_memory if is_near else (entry.seconds,)))
    return ranks


ROWS, RANKING = "points.jsonl", "ranking.csv"
_SETTINGS = dict(  # and their headings, besides mesh and strategy
    topology="GPUs",
    seq_len="length",
    remat="remat",
    transport="transport",
    gradient_accumulation_steps="microbatches",
)


@dataclass(frozen=True, repr=False)
class Ranking:
    """The points of a sweep, best first: those that fit, those that do not fit, those without
    results.

    `rows` are dictionaries with the settings and results of each point, for `pandas.DataFrame`.
    `print(ranking)` prints a table, and a notebook shows one.
    """

    rows: tuple[Row, ...]
    price_per_gpu_hour: float | None = None  # None: no cost is printed
    # Half of the 80% interval of the logarithm of the ratio of two times.
    pair_spread: float = PAIR_SPREAD

    @property
    def title(self) -> str:
        """The model, and the GPUs of the estimates or measurements."""
        row, topologies = (
            self.rows[0],
            ", ".join(dict.fromkeys(row["topology"] for row in self.rows)),
        )
        return f"{row['model']}, {row['figures']} {'for' if row['figures'] == 'estimated' else 'on'} {topologies}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> "Ranking":
        """`ranking[:10]` is the ranking of the first ten points."""
        return replace(self, rows=self.rows[rows])

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.rows)} points: {self.title};\n first: {self.rows[0]['overrides']}>"

    def __str__(self) -> str:
        same = ", ".join(  # the settings that are equal in all rows
            f"{name}={self.rows[0][name]}"
            for name in _SETTINGS
            if name != "topology" and len({row[name] for row in self.rows}) == 1
        )
        table = aligned(self._table() if self._done() else [])
        return "\n".join([self.title, same, *table, *self._notes()])

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def figure(self) -> "Figure":
        """Tokens/s and memory, one bar per point, at the longest sequence length, best first.

        Raises:
          UserError: no point completed, or matplotlib is not installed.
        """
        done = self._completed()
        longest = max(row["seq_len"] for row in done)
        shown = [row for row in done if row["seq_len"] == longest][:_MAX_BARS]
        also = [name for name in ("remat", "transport") if len({row[name] for row in shown}) > 1]
        labels = [", ".join([row_name(row), *(row[name] for name in also)]) for row in shown]
        figure = plot_style.new_figure(10, 1.4 + 0.24 * len(shown))
        speed, memory = figure.subplots(1, 2, sharey=True)
        colors = [(_COLORS[row["strategy"]], 1.0 if row["fits"] else 0.35) for row in shown]
        places = range(len(shown))
        for axes, column, unit in (
            (speed, "tokens_per_second_per_device", 1),
            (memory, "device_peak_bytes", 2**30),
        ):
            axes.barh(places, [row[column] / unit for row in shown], color=colors, height=0.72)
            plot_style.style_axes(axes, "x")
        is_estimate = shown[0]["figures"] == "estimated"
        if is_estimate:
            memory.axvline(
                shown[0]["device_usable_bytes"] / 2**30,
                color=GRAY,
                linestyle=(0, (5, 4)),
                linewidth=0.9,
            )
        speed.set_yticks(places, labels, fontsize=8)
        speed.invert_yaxis()
        speed.set(xlabel="tokens/s per device")
        memory.set(xlabel="GiB per device" + ("; dashed: usable" if is_estimate else ""))
        names = list(dict.fromkeys(row["strategy"] for row in shown))
        if len(names) > 1:
            handles = [speed.barh(0, 0, color=_COLORS[name], label=name) for name in names]
            figure.legend(
                handles=handles,
                ncols=len(names),
                frameon=False,
                loc="outside lower right",
                fontsize=8,
            )
        plot_style.set_title(figure, f"{self.title}, sequence length {longest:,}")
        return figure

    def transports_figure(self) -> "Figure":
        """Left: tokens/s of the best mesh over sequence length, one line per transport. Right: for
        every mesh, the speedup of each transport over the first one. Raises UserError as `figure`.
        """
        done = self._completed()
        longest = max(row["seq_len"] for row in done)
        best = _program(next(row for row in done if row["seq_len"] == longest))
        names = sorted({row["transport"] for row in done})
        rate = {
            (_program(row), row["transport"], row["seq_len"]): row["tokens_per_second_per_device"]
            for row in done
        }
        lengths = sorted({row["seq_len"] for row in done})
        figure = plot_style.new_figure(12, 4)
        speed, gain = figure.subplots(1, 2)
        for number, name in enumerate(names):
            known = [length for length in lengths if (best, name, length) in rate]
            rates = [rate[best, name, length] for length in known]
            width = 5 - 3 * number / len(names)  # lines that coincide all stay visible
            speed.plot(
                known,
                rates,
                "o-",
                color=plot_style.CYCLE[number],
                linewidth=width,
                alpha=0.7,
                label=name,
            )
        lines = list(itertools.product(dict.fromkeys(_program(row) for row in done), names[1:]))
        for (program, name), line in zip(lines, plot_style.line_styles()):
            both = [
                n for n in lengths if (program, names[0], n) in rate and (program, name, n) in rate
            ]
            gains = [100 * (rate[program, name, n] / rate[program, names[0], n] - 1) for n in both]
            gain.plot(
                both, gains, "o", **line, linewidth=1, markersize=3, label=f"{name}: {program[0]}"
            )
        for axes in (speed, gain):
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            axes.set_xlabel("sequence length, tokens")
            plot_style.style_axes(axes, "y")
        speed.legend(frameon=False, fontsize=7)
        # A long legend would cover the lines.
        figure.legend(
            handles=gain.get_lines(), loc="outside right upper", frameon=False, fontsize=7
        )
        speed.set_ylim(bottom=0)
        speed.set(ylabel="tokens/s per device", title=best[0])
        gain.set(ylabel="speedup, %", title=f"speedup over {names[0]}")
        plot_style.set_title(figure, self.title)
        return figure

    def write(self, out: Path) -> list[Path]:
        """Writes the ranking as CSV, and the plots if matplotlib is installed. Returns their paths."""
        path = out / RANKING
        names = dict.fromkeys(name for row in self.rows for name in row if name != "key")
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["rank", *names], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(dict(rank=rank) | row for rank, row in enumerate(self.rows, start=1))
        if not errors.is_installed("matplotlib"):
            print(
                f"plots skipped, matplotlib is not installed: {errors.install_hint('matplotlib')}",
                file=sys.stderr,
            )
            return [path]
        figures = {"meshes.png": self.figure} if self._done() else {}
        if len({row["transport"] for row in self._done()}) > 1:
            figures["transports.png"] = self.transports_figure
        for name, draw in figures.items():
            draw().savefig(out / name)
        return [path, *(out / name for name in figures)]

    def note(self) -> str:
        """Which configurations the estimate cannot order, up to three meshes by number; "" if there
        are none.
        """
        fitting = [(rank, row) for rank, row in enumerate(self._done(), start=1) if row["fits"]]
        if not fitting:
            return ""
        _, first = fitting[0]
        speed = "tokens_per_second_per_device"
        # a ratio has at most the errors of both times
        both = math.log(first["step_seconds_high"] / first["step_seconds_low"])
        spread = min(self.pair_spread, both)
        close = [
            (mesh_of(row), rank)
            for rank, row in fitting
            if mesh_of(row)[:2] == mesh_of(first)[:2]
            and abs(math.log(row[speed] / first[speed])) <= spread
        ]
        if len(close) == 1:
            return ""
        # the first one of each mesh
        names = list(map(str, sorted(dict(reversed(close)).values())))[:NUM_MESHES]
        num_others = len(close) - len(names)
        *names, last = [*names, *([f"{num_others} more"] if num_others else [])]
        return (
            f"The estimate cannot order {', '.join(names)} and {last}: they differ by less than the 80% interval of a"
            f" ratio, {math.expm1(spread):.0%} (docs/calibration.md).\nOf the fastest, 1 leaves"
            " the most memory. Measure them on your GPUs: jaxlc sweep --run (docs/sweep.md)."
        )

    def _table(self) -> list[list[str]]:
        """Headings and rows. Settings that are equal in all rows are in the heading above."""
        varying = [name for name in _SETTINGS if len({row[name] for row in self.rows}) > 1]
        figures = [_figures(row, self.price_per_gpu_hour) for row in self._done()]
        headings = list(dict.fromkeys(heading for texts in figures for heading in texts))
        table = [["", *(_SETTINGS[name] for name in varying), *headings, ""]]
        for rank, (row, texts) in enumerate(zip(self._done(), figures), start=1):
            settings = [
                f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in varying
            ]
            cells = [texts.get(heading, "") for heading in headings]
            table.append(
                [
                    f"{rank}: {row_name(row)}",
                    *settings,
                    *cells,
                    "" if row["fits"] else "does not fit",
                ]
            )
        return table

    def _done(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "done"]

    def _completed(self) -> list[Row]:
        errors.require("matplotlib", "a figure of a sweep")
        if not self._done():
            raise UserError("no point of this sweep completed; the table lists the reasons")
        return self._done()

    def _notes(self) -> Iterator[str]:
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row["status"] != "done":
                reasons.setdefault((row["status"], row["reason"]), []).append(row_name(row))
        for (status, reason), names in reasons.items():
            yield f"{status}: {'; '.join(names)}: {reason}"
        if self.rows[0]["figures"] == "estimated" and self._done():
            yield "Memory is AOT-compiled; times are estimates, with their 80% interval."
            yield from filter(None, [self.note()])


@checked
def load(path: str | Path) -> Ranking:
    """The results of a finished or interrupted sweep, best first. Print them, or show them in a
    notebook.

    Args:
      path: the directory of the sweep (`jaxlc sweep --out`), or its points.jsonl.
    Raises:
      UserError: there are no points.
    """
    file = local_path(path)
    if file.is_dir():
        file /= ROWS
    rows = read_json_lines(file)
    if not rows:
        raise UserError(f"no points in {file}; run jaxlc sweep --out={file.parent}")
    return Ranking(tuple(ranked(rows)))


def row_text(row: Row) -> str:
    """Time and memory in one line, or why there are none."""
    if row["status"] != "done":
        return f"{row['status']}: {row['reason']}"
    figures = _figures(row)
    host = (
        f" and {figures['host GiB/node']} GiB of host memory" if "host GiB/node" in figures else ""
    )
    fits = "" if row["fits"] else ", does not fit"
    return f"{figures['step (80%)']}, {figures['GiB/GPU']} GiB{host}{fits}"


def _figures(row: Row, price_per_gpu_hour: float | None = None) -> dict[str, str]:
    """Results by their headings: measurements as they are, estimated times as scaled medians with
    two digits.
    """
    seconds = row["step_seconds"]
    is_estimate = row.get("figures") == "estimated"
    interval = Interval(1.0, 1.0)
    step = f"{seconds:,.3g} s"
    if is_estimate:
        interval = Interval(row["step_seconds_low"] / seconds, row["step_seconds_high"] / seconds)
        step = estimate_text(seconds, interval).removeprefix("about ")
    rate = row["tokens_per_second_per_device"] / interval.median
    gpu_hours = 1e9 / rate / 3600

    def text(value: float, digits: str = ".3g") -> str:
        return two_digits(value) if is_estimate else f"{value:,{digits}}"

    texts = {"tokens/s/GPU": text(rate, ".0f"), "step (80%)": step}
    if row.get("mfu_causal") is not None:
        texts["MFU"] = text(100 * row["mfu_causal"] / interval.median, ".1f") + "%"
    if "exposed_communication_seconds" in row:
        texts["exposed s"] = text(interval.median * row["exposed_communication_seconds"])
    texts["GiB/GPU"] = f"{row['device_peak_bytes'] / 2**30:.3g}"
    if row.get("host_bytes_per_node"):
        texts["host GiB/node"] = f"{row['host_bytes_per_node'] / 2**30:,.0f}"
    texts["GPU-hours per 1B tokens"] = text(gpu_hours)
    if price_per_gpu_hour is not None:
        texts["cost per 1B tokens"] = text(price_per_gpu_hour * gpu_hours)
    return texts


_MAX_BARS = 32
_COLORS = {"ring": BLUE, "hybrid": RED, "ulysses": TEAL, "all_gather": AMBER}


def _program(row: dict) -> tuple[str, str]:
    """Everything but transport and sequence length."""
    return row_name(row), row["remat"]
