"""Runs a function on points, each in its own process. Imports no jax.

Every row is appended to a file as soon as it is known. A command that is started again skips the points in that file.
"""

import functools
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Config, to_dict
from jaxlc.config.models.model_schema import model_name
from jaxlc.core.errors import UserError
from jaxlc.core.progress_lines import print_to_stderr as log
from jaxlc.runtime.worker_processes import Row, Work, run_in_processes
from jaxlc.search import worker
from jaxlc.search.results import ROWS, read_rows, row_text
from jaxlc.search.space import Point, name_of


def estimate(
    points: Sequence[Point],
    topology: str,
    constants: str,
    *,
    out: Path,
    num_workers: int,
    log: Callable[[str], None] = log,
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
    return run(points, work, about=about, out=out, num_workers=num_workers, log=log)


def run(
    points: Sequence[Point],
    work: Work,
    *,
    about: Row,
    out: Path,
    num_workers: int,
    log: Callable[[str], None] = log,
) -> list[Row]:
    """Runs `work` on all points that are not in out/points.jsonl and returns the rows of all points, in their order.

    Args:
      work: computes the figures of one config; see `jaxlc.search.worker`.
      about: columns with the same value in all rows, such as the topology. The version of JAX is added.
      log: called with lines that report progress.
    Raises:
      KeyboardInterrupt: with the number of finished points in its message.
    """
    path = out / ROWS
    out.mkdir(parents=True, exist_ok=True)
    about = about | dict(jax=importlib.metadata.version("jax"))
    keys = [_key(point.config, about) for point in points]
    points_by_key = dict(zip(keys, points))
    rows = {row["key"]: row for row in read_rows(path)}
    new = [key for key in points_by_key if key not in rows]
    if len(new) < len(points):
        log(f"{len(points) - len(new)} of {len(points)} points are already in {path}")
    configs: dict[str, Config] = {}
    start_seconds = time.monotonic()
    with path.open("a") as file:

        def add(key: str, figures: Row) -> None:
            point = points_by_key[key]
            rows[key] = dict(key=key) | about | point.columns() | dict(overrides=point.overrides) | figures
            file.write(json.dumps(rows[key]) + "\n")
            file.flush()

        for key in new:
            try:
                configs[key] = points_by_key[key].checked()
            except UserError as error:
                add(key, dict(status="refused", reason=str(error)))
        total = len(configs)
        if total:
            log(f"running {total} points, {min(num_workers, total)} at a time; results go to {path}")
        try:
            results = run_in_processes([*configs.values()], work, num_workers)
            for num_run, (index, figures) in enumerate(results, start=1):
                key, config = [*configs.items()][index]
                add(key, figures)
                minutes = (time.monotonic() - start_seconds) / num_run * (total - num_run) / 60
                left = f"; about {minutes:.0f} min left" if minutes >= 1 else ""
                name = f"{name_of(config)}, {config.data.seq_len:,} tokens, {config.runtime.transport}"
                log(f"{num_run}/{total} {name}: {row_text(rows[key])}{left}")
        except KeyboardInterrupt:
            num_done = sum(key in rows for key in keys)
            raise KeyboardInterrupt(
                f"interrupted: {num_done} of {len(points)} points are in {path}; the same command resumes"
            ) from None
    return [rows[key] for key in keys]


def _key(config: Config, about: Row) -> str:
    """Identifies a row of the file: the whole config, and the columns that all rows share."""
    return hashlib.sha256(json.dumps([to_dict(config), about], sort_keys=True).encode()).hexdigest()[:16]
