"""Ranks configurations by speed: each is compiled, or measured, in its own process.

Every result is appended to a file as soon as it is known. A sweep that is started again skips the points in that file.
"""

import functools
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Config, to_dict
from jaxlc.core.errors import UserError
from jaxlc.plan.terminal import start_on_cpu
from jaxlc.runtime import worker_processes
from jaxlc.runtime.worker_processes import Row, Work
from jaxlc.search import space, worker
from jaxlc.search.ranking import name_of, ranked
from jaxlc.search.results import ROWS, Ranking, read_rows, row_text
from jaxlc.search.space import Point


def log(line: str) -> None:
    """Progress goes to stderr, results to stdout."""
    print(line, file=sys.stderr, flush=True)


def estimate(
    config: Config, out: Path, *, topology: str, workers: int | None, constants: str, **grid_flags: str | None
) -> int:
    """AOT-compiles every point for `topology`, ranks them by estimated speed and prints the ranking.

    Args:
      topology: target GPUs, such as "gb200:1x64".
      workers: number of concurrent compilations; None selects what cores and memory allow.
      constants: JSON file of measured constants for the estimates; see `jaxlc.simulate.roofline`.
      grid_flags: see `space.grid`.
    Returns:
      The exit status: 1 if no point could be compiled.
    Raises:
      UserError: an invalid flag, or no compiler for these GPUs.
      KeyboardInterrupt: with a message for the user.
    """
    log(f"starting the GPU compiler for {topology}")
    start_on_cpu()
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as parse_topology

    gpus = parse_topology(topology)
    assert gpus.devices  # raises here, rather than for every point, if the compiler is not installed
    roofline = from_file(constants)  # an invalid file is reported once, not for every point
    work = functools.partial(worker.estimate, topology=topology, constants=constants)
    about = about_estimates(config, topology, constants)
    num_workers = workers or worker_processes.default_num_workers()
    rows = run(_points(config, gpus.num_gpus, grid_flags), work, about=about, out=out, num_workers=num_workers)
    return _report(Ranking(tuple(rows), pair_spread=roofline.pair_spread), out)


def measure(config: Config, out: Path, **grid_flags: str | None) -> int:
    """Measures every point on the devices of this machine, one at a time, and ranks them as `estimate` does."""
    log("starting JAX")
    # In another process: JAX in this one would reserve the memory of the devices.
    ((_, local),) = worker_processes.run_in_processes([config], worker.local_devices, num_workers=1)
    if local["status"] != "done":
        raise UserError(f"JAX does not start: {local['reason']}")
    devices = f"{local['num_devices']} x {local['device']}"
    about = dict(figures="measured", topology=devices, model=config.model.preset)
    points = _points(config, local["num_devices"], grid_flags)
    return _report(Ranking(tuple(run(points, worker.measure, about=about, out=out, num_workers=1))), out)


def about_estimates(config: Config, topology: str, constants: str, **options: Any) -> Row:
    """The columns that are the same in all rows of one command, as for `run`.

    Args:
      options: further values on which estimates depend; None has no effect.
    """
    about = dict(figures="estimated", topology=topology, model=config.model.preset)
    if constants:  # other constants give other rows
        about["constants"] = hashlib.sha256(Path(constants).read_bytes()).hexdigest()[:16]
    return about | {name: value for name, value in options.items() if value is not None}


def run(
    points: Sequence[Point],
    work: Work,
    *,
    about: Row,
    out: Path,
    num_workers: int,
    log: Callable[[str], None] = log,
) -> list[Row]:
    """Runs `work` on all points that are not in out/points.jsonl and returns the rows of all points, best first.

    Args:
      work: computes the figures of one config; see `jaxlc.search.worker`.
      about: columns with the same value in all rows, such as the topology. A row in the file belongs to a point if
        these columns, the whole config and the version of JAX are equal.
      log: called with lines that report progress.
    Raises:
      KeyboardInterrupt: with the number of finished points in its message.
    """
    path = out / ROWS
    out.mkdir(parents=True, exist_ok=True)
    about = about | dict(jax=importlib.metadata.version("jax"))
    keyed = [(_key(point, about), point) for point in points]
    rows = {row["key"]: row for row in read_rows(path)}
    new = [(key, point) for key, point in keyed if key not in rows]
    if len(new) < len(points):
        log(f"{len(points) - len(new)} of {len(points)} points are already in {path}")
    num_to_run = sum(point.config is not None for _, point in new)
    if num_to_run:
        log(f"running {num_to_run} points, {min(num_workers, num_to_run)} at a time; results go to {path}")
    num_run, start_seconds = 0, time.monotonic()
    try:
        with path.open("a") as file:
            for key, point, figures in _figures(new, work, num_workers):
                row = dict(key=key) | about | point.columns() | dict(overrides=point.overrides) | figures
                rows[key] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                if point.config is not None:
                    num_run += 1
                    minutes = (time.monotonic() - start_seconds) / num_run * (num_to_run - num_run) / 60
                    left = f"; about {minutes:.0f} min left" if minutes >= 1 else ""
                    name = f"{name_of(row)}, {row['remat']}, {row['seq_len']:,} tokens, {row['transport']}"
                    log(f"{num_run}/{num_to_run} {name}: {row_text(row)}{left}")
    except KeyboardInterrupt:
        num_done = sum(key in rows for key, _ in keyed)
        raise KeyboardInterrupt(
            f"interrupted: {num_done} of {len(points)} points are in {path}; the same command resumes"
        ) from None
    return ranked([rows[key] for key, _ in keyed])


def _points(config: Config, num_devices: int, grid_flags: dict[str, str | None]) -> list[Point]:
    points, num_duplicates = space.grid(config, num_devices, **grid_flags)
    skipped = f"; {num_duplicates} duplicate configurations skipped" if num_duplicates else ""
    log(f"{len(points)} points{skipped}")
    return points


def _report(ranking: Ranking, out: Path) -> int:
    """Prints the ranking and writes it to `out`; returns the exit status, 1 if no point completed."""
    print(ranking)
    print(*ranking.write(out), sep=", ")
    first = ranking.rows[0]
    if first["status"] != "done":
        return 1
    print(f"first: {first['overrides']}")
    return 0


def _key(point: Point, about: Row) -> str:
    identity = point.settings if point.config is None else to_dict(point.config)
    return hashlib.sha256(json.dumps([identity, about], sort_keys=True).encode()).hexdigest()[:16]


def _figures(keyed: Sequence[tuple[str, Point]], work: Work, num_workers: int) -> Iterator[tuple[str, Point, Row]]:
    """Yields the points that the config checks reject, then the others in order of completion."""
    for key, point in keyed:
        if point.config is None:
            yield key, point, dict(status="refused", reason=point.refusal)
    to_run = [(key, point) for key, point in keyed if point.config is not None]
    for index, figures in worker_processes.run_in_processes([point.config for _, point in to_run], work, num_workers):
        yield *to_run[index], figures
