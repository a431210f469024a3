"""Many meshes compared: each compiled, or measured, in a process of its own; a row each, then a ranking and pictures.

A row is written as it is done, and a sweep that is started again goes on where it was: rows that are there stay.
"""

import csv
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxlc import runtime
from jaxlc.config import Config, RuntimeConfig, to_dict
from jaxlc.core import extras
from jaxlc.core.axes import MESH_AXES
from jaxlc.core.errors import UserError
from jaxlc.sweep import grid, worker
from jaxlc.sweep.grid import Point
from jaxlc.sweep.worker import Measure, Row, Work

ROWS, RANKING = "points.jsonl", "ranking.csv"
_WIDTH = 160  # of the table in a file
_SETTINGS = (*MESH_AXES, "strategy", "ulysses_degree", "remat", "seq_len", "transport", "gradient_accumulation_steps")


class _Figure(NamedTuple):
    heading: str
    column: str
    text: Callable[[float], str]


_FIGURES = (
    _Figure("tokens/s a device", "tokens_per_second_per_device", "{:,.0f}".format),
    _Figure("MFU, causal", "mfu_causal", "{:.1%}".format),
    _Figure("step s", "step_seconds", "{:,.3g}".format),
    _Figure("exposed s", "exposed_communication_seconds", "{:,.3g}".format),
    _Figure("GiB a device", "device_peak_bytes", lambda num_bytes: f"{num_bytes / 2**30:.3g}"),
)


def compare(config: Config, out: Path, *, topology: str | None, workers: str | None = None, **asked: str | None) -> int:
    """Ranks meshes of GPUs that need not be here by their predicted speed, and prints; returns the exit status.

    Args:
      topology: GPUs such as "gb200:1x64"; None: config.runtime.topology.
      asked: see `grid.space`.
    """
    name = topology or config.runtime.topology
    if not name:
        raise UserError("no topology is given; name GPUs to compile for, such as --topology=h100:8x8")
    if workers is not None and not (workers.isdigit() and int(workers)):
        raise UserError(f"--workers is {workers!r}; it must be a whole number, at least 1")
    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")  # of the workers too
    runtime.start(RuntimeConfig())
    from jaxlc.simulate.topology import topology as gpus_of

    gpus = gpus_of(name)
    assert gpus.devices  # or tells here, not at each point, that there is no compiler for them
    work = functools.partial(worker.predicted, topology=name)
    about = dict(figures="predicted", topology=name, model=config.model.preset)
    num_workers = int(workers) if workers else worker.num_workers_here()
    points = _points(config, gpus.num_gpus, asked)
    return _show(run(points, work, about=about, out=out, num_workers=num_workers), f"predicted for {name}", out)


def measure(config: Config, out: Path, measure: Measure, **asked: str | None) -> int:
    """Ranks meshes of all devices that are here by their measured speed, one after the other.

    Args:
      measure: (config, repeats) -> figures, as `jaxlc.sweep.measure` has it; runs in another process, by its name.
    """
    for flag, value in dict(topology=asked.pop("topology", None), workers=asked.pop("workers", None)).items():
        if value is not None:
            raise UserError(f"--{flag}={value} is for predictions; leave it out, or leave out --run")
    # The leading process starts no JAX: it would take the memory of the devices.
    ((_, here),) = worker.rows([config], worker.devices_here, num_workers=1)
    if here["status"] != "done":
        raise UserError(f"JAX does not start: {here['reason']}")
    work = functools.partial(worker.measured, measure=measure)
    about = dict(figures="measured", topology=f"{here['num_devices']} x {here['device']}", model=config.model.preset)
    points = _points(config, here["num_devices"], asked)
    return _show(run(points, work, about=about, out=out, num_workers=1), f"measured on {about['topology']}", out)


def run(
    points: Sequence[Point],
    work: Work,
    *,
    about: Row,
    out: Path,
    num_workers: int,
    console: Console | None = None,
) -> list[Row]:
    """Does all points that are not in out/points.jsonl yet; returns the rows of all, best first.

    Args:
      work: figures of one config; see `sweep_worker`.
      about: what is the same for all points and belongs beside their figures, such as the topology. It is part of what
        tells whether a row is of the same point; so are the whole config and the version of JAX.
    """
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    about = about | dict(jax=importlib.metadata.version("jax"))
    keyed = [(_key(point, about), point) for point in points]
    there = {row["key"]: row for row in read_rows(out / ROWS)}
    new = [(key, point) for key, point in keyed if key not in there]
    if len(new) < len(points):
        console.print(f"{len(points) - len(new)} of {len(points)} points are in {out / ROWS} already")
    with (out / ROWS).open("a") as file, _progress(console) as bars:
        task = bars.add_task("", total=sum(point.config is not None for _, point in new))
        for key, point, figures in _figures(new, work, num_workers):
            row = dict(key=key) | about | point.columns() | dict(overrides=point.overrides) | figures
            there[key] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            if point.config is not None:
                bars.advance(task)
                bars.update(task, description=_left(bars.tasks[task]))
                console.print(_line(row, bars.tasks[task]), markup=False)
    return ranked([there[key] for key, _ in keyed])


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that may not exist. A last line that was not written to its end is cut off in the file."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Those that fit first, by tokens/s; then those that do not fit; then those without figures, in their order."""

    def place(row: Row) -> tuple:
        if row["status"] != "done":
            return (2, 0.0)
        return (0 if row["fits"] else 1, -row["tokens_per_second_per_device"])

    return sorted(rows, key=place)


def write(rows: Sequence[Row], title: str, out: Path) -> list[Path]:
    """Writes the ranking as CSV, and the pictures. Returns their paths."""
    path = out / RANKING
    names = dict.fromkeys(name for row in rows for name in row if name != "key")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["rank", *names], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(dict(rank=rank) | row for rank, row in enumerate(rows, start=1))
    if not extras.is_installed("matplotlib"):
        print(f"pictures skipped, matplotlib is not installed: {extras.install_hint('matplotlib')}", file=sys.stderr)
        return [path]
    from jaxlc.sweep import ranking_plots  # imported here: matplotlib is slow to import

    return [path, *ranking_plots.write(rows, title, out)]


def table(rows: Sequence[Row], title: str) -> Table:
    """The ranking of rows in order; settings that are the same in all of them stand above it."""
    varying = [name for name in _SETTINGS if len({row[name] for row in rows}) > 1]
    same = ", ".join(f"{name}={rows[0][name]}" for name in _SETTINGS if name not in varying)
    done = [row for row in rows if row["status"] == "done"]
    figures = [figure for figure in _FIGURES if any(row.get(figure.column) is not None for row in done)]
    found = Table(title=f"{title}\n{same}", title_justify="left")
    for name in ("", *varying, *(figure.heading for figure in figures), ""):
        found.add_column(name, justify="left" if name in ("strategy", "remat", "transport", "") else "right")
    for rank, row in enumerate(done, start=1):
        settings = [f"{row[name]:,}" if name == "seq_len" else str(row[name]) for name in varying]
        texts = [figure.text(row[figure.column]) for figure in figures]
        found.add_row(str(rank), *settings, *texts, "" if row["fits"] else "does not fit")
    return found


def without_figures(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each reason, with the points that have it."""
    reasons = {}
    for row in rows:
        if row["status"] != "done":
            reasons.setdefault((row["status"], row["reason"]), []).append(name_of(row))
    for (status, reason), names in reasons.items():
        yield f"{status}: {'; '.join(names)}: {reason}"


def name_of(row: Row) -> str:
    """Short: "fsdp=2 context=8 tensor=4 ring"."""
    axes = [f"{axis}={row[axis]}" for axis in MESH_AXES if row[axis] > 1]
    strategy = f"{row['strategy']}/{row['ulysses_degree']}" if row["strategy"] == "hybrid" else row["strategy"]
    return " ".join([*axes, strategy])


def _points(config: Config, num_devices: int, asked: dict[str, str | None]) -> list[Point]:
    points, num_left_out = grid.points(config, num_devices, grid.space(config, **asked))
    print(f"{len(points)} points, and {num_left_out} left out that are no programs of their own", flush=True)
    return points


def _show(rows: Sequence[Row], what: str, out: Path) -> int:
    """Prints the ranking and writes it; returns the exit status, 1 where no point has figures."""
    title = f"{rows[0]['model']}, {what}"
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table(rows, title))
    for line in without_figures(rows):
        console.print(line, markup=False)
    paths = write(rows, title, out)
    console.print(", ".join(str(path) for path in (out / ROWS, *paths)))
    if rows[0]["status"] != "done":
        return 1
    console.print(f"first: {rows[0]['overrides']}", markup=False)
    return 0


def _key(point: Point, about: Row) -> str:
    what = point.settings if point.config is None else to_dict(point.config)
    return hashlib.sha256(json.dumps([what, about], sort_keys=True).encode()).hexdigest()[:16]


def _figures(keyed: Sequence[tuple[str, Point]], work: Work, num_workers: int) -> Iterator[tuple[str, Point, Row]]:
    """Of each point: first those that the config's checks refuse, then the others as they are done."""
    for key, point in keyed:
        if point.config is None:
            yield key, point, dict(status="refused", reason=point.refusal)
    to_do = [(key, point) for key, point in keyed if point.config is not None]
    for index, figures in worker.rows([point.config for _, point in to_do], work, num_workers):
        yield *to_do[index], figures


def _progress(console: Console) -> Progress:
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _left(task: Task) -> str:
    """rich's own estimate goes by the last few; points side by side end together, and far apart from the next."""
    if task.completed == task.total:
        return ""
    return f"about {task.elapsed / task.completed * (task.total - task.completed) / 60:.0f} min left"


def _line(row: Row, task: Task) -> str:
    """A point that is done, for who watches."""
    what = f"{name_of(row)}, {row['remat']}, {row['seq_len']:,} tokens, {row['transport']}"
    result = f"{row['status']}: {row['reason']}"
    if row["status"] == "done":
        rate, gib = row["tokens_per_second_per_device"], row["device_peak_bytes"] / 2**30
        result = f"{rate:,.0f} tokens/s a device, {gib:.3g} GiB" + ("" if row["fits"] else ", does not fit")
    return "; ".join(filter(None, [f"{task.completed:.0f}/{task.total:.0f} {what}: {result}", _left(task)]))
