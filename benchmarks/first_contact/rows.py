"""Rows of measurements. Each is written to a file at once, and none starts that would not fit into the time left."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_ERROR_CHARS = 600


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    labels: dict[str, Any]  # what is measured
    measure: Callable[[], dict[str, Any]]
    seconds: float  # estimated for one H100, with compilation: upper limits, because they decide what is started
    # Variables of the process, in parts with one process per row.
    environment: Mapping[str, str] = field(default_factory=dict)


class RowFile:
    """Appends rows to a JSON Lines file; each is on disk before the next measurement starts."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, part: str, labels: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        row = {"part": part, **labels, **values}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{part}: {json.dumps({**labels, **values})[:400]}", file=sys.stderr, flush=True)


def run(part: str, rows: Iterable[Row], file: RowFile, deadline_seconds: float) -> None:
    """Measures `rows` until `deadline_seconds` of `time.monotonic`. A row that fails gets an error and no result.

    Raises nothing: `rows` may also fail while it is iterated over.
    """
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator, None)
        except Exception as error:
            file.write(part, {}, dict(error=_text(error)))
            return
        if row is None:
            return
        left_seconds = deadline_seconds - time.monotonic()
        if row.seconds > left_seconds:
            file.write(part, row.labels, dict(skipped=f"takes about {row.seconds:.0f} s of {left_seconds:.0f} s left"))
            continue
        start_seconds = time.monotonic()
        try:
            values = row.measure()
        except Exception as error:  # the other rows must still run
            values = dict(error=_text(error))
        file.write(part, row.labels, values | dict(row_seconds=round(time.monotonic() - start_seconds, 2)))


def read(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The complete rows of several files."""
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote the last line
                continue


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"
