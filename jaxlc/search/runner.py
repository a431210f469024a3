"""Runs a function on points, each in its own process. Imports no jax.

Every row is appended to a file as soon as it is known. A command that is started again skips the points in that file.
"""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Config, to_dict
from jaxlc.config.models.model_schema import model_name
from jaxlc.core.errors import UserError
from jaxlc.core.text import print_to_stderr as log
from jaxlc.core.text import progress_lines
from jaxlc.runtime.worker_processes import Row, Work, run_in_processes
from jaxlc.search import worker
from jaxlc.search.results import ROWS, read_rows, row_text
from jaxlc.search.space import Point, name_of

IsOver = Callable[[Collection[Row]], bool]
STOPPED = dict(status="stopped", reason="at the time limit")


def estimate(
    points: Sequence[Point],
    topology: str,
    constants: str,
    *,
    out: Path,
    num_workers: int,
    log: Callable[[str], None] = log,
    is_over: IsOver = lambda rows: False,
    **options: Any,
) -> list[Row]:
    """AOT-compiles the points' steps and estimates their times, as `run` does.

    Args:
      topology: the GPUs of the command; those of a point, in its config, may be a part of them.
      options: of `worker.estimate`; None has no effect.
    """
    options = {name: value for name, value in options.items() if value is not None}
    about = dict(figures="estimated", topology=topology, model=model_name(vars(points[0].base.model))) | options
    if constants:  # other constants give other rows
        about["constants"] = hashlib.sha256(Path(constants).read_bytes()).hexdigest()[:16]
    work = functools.partial(worker.estimate, constants=constants, **options)
    return run(points, work, about=about, out=out, num_workers=num_workers, log=log, is_over=is_over)


def run(
    points: Sequence[Point],
    work: Work,
    *,
    about: Row,
    out: Path,
    num_workers: int,
    log: Callable[[str], None] = log,
    is_over: IsOver = lambda rows: False,
) -> list[Row]:
    """Runs `work` on all points that are not in out/points.jsonl and returns the rows of all points, in their order.

    Args:
      work: computes the figures of one config; see `jaxlc.search.worker`.
      about: columns with the same value in all rows, such as the topology. The version of JAX is added.
      log: called with lines that report progress.
      is_over: called about twice a second with the rows so far; when it is true, points without one are `STOPPED`.
    Raises:
      KeyboardInterrupt: with the number of finished points in its message.
    """
    path = out / ROWS
    out.mkdir(parents=True, exist_ok=True)
    about = about | dict(jax=importlib.metadata.version("jax"))
    keys = [_key(point.config, about) for point in points]
    rows, configs = {row["key"]: row for row in read_rows(path)}, dict[str, Config]()
    new = {key: point for key, point in zip(keys, points) if key not in rows}
    if len(new) < len(points):
        log(f"{len(points) - len(new)} of {len(points)} points are already in {path}")
    with path.open("a") as file:

        def add(key: str, figures: Row) -> None:
            settings = new[key].columns() | dict(overrides=new[key].overrides)
            rows[key] = dict(key=key) | about | settings | figures
            file.write(json.dumps(rows[key]) + "\n")
            file.flush()

        for key, point in new.items():
            try:
                configs[key] = point.checked()
            except UserError as error:
                add(key, dict(status="refused", reason=str(error)))
        total = len(configs)
        if total:
            log(f"running {total} points, {min(num_workers, total)} at a time; results go to {path}")
        try:
            with progress_lines(f"running {total} points", is_shown=total > 0, log=log) as update:
                ended = lambda: is_over([rows[key] for key in new if key in rows])  # noqa: E731
                results = run_in_processes([*configs.values()], work, num_workers, ended)
                for num_run, (index, figures) in enumerate(results, start=1):
                    key, config = [*configs.items()][index]
                    add(key, figures)
                    update(num_run, total)
                    log(f"{num_run}/{total} {_line(config, rows[key])}")
        except KeyboardInterrupt:
            num_done = sum(key in rows for key in keys)
            raise KeyboardInterrupt(
                f"interrupted: {num_done} of {len(points)} points are in {path}; the same command resumes"
            ) from None
    return [rows.get(key, STOPPED) for key in keys]


def _line(config: Config, row: Row) -> str:
    """What the log shows of a finished point."""
    return f"{name_of(config)}, {config.data.seq_len:,} tokens, {config.runtime.transport}: {row_text(row)}"


def _key(config: Config, about: Row) -> str:
    """Identifies a row of the file: the whole config, and the columns that all rows share."""
    return hashlib.sha256(json.dumps([to_dict(config), about], sort_keys=True).encode()).hexdigest()[:16]
