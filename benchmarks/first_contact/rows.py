"""Rows of measurements. Each is written to a file at once, and none starts that would not fit into
the time left.

The file of the row that is being measured lets another process find out which row crashed or hangs.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_ERROR_CHARS = 600
# XLA times other libraries for each product of a Triton kernel, which takes seconds. References are
# float32 products.
FLAGS_WITHOUT_TRITON = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false".strip()
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    labels: dict[str, Any]  # what is measured
    measure: Callable[[], dict[str, Any]]
    # estimated for one H100, with compilation: upper limits, because they decide what is started
    seconds: float
    # Variables of the process, in parts with one process per row.
    environment: Mapping[str, str] = field(default_factory=dict)


class StartedRow(NamedTuple):
    """The row that a process measures."""

    index: int  # in its part
    labels: dict[str, Any]
    seconds: float  # estimated
    start_seconds: float  # from time.monotonic, which is the same clock in all processes


class RowFile:
    """Appends rows to a JSON Lines file; each is on disk before the next measurement starts."""

    def __init__(self, path: Path, common: Mapping[str, Any] | None = None):
        """
        Args:
          common: values of all rows.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._started_path = path, path.with_suffix(".started.json")
        self._common = common or {}

    def start(self, index: int, row: Row) -> None:
        """Records that the measurement of a row starts."""
        self._started_path.write_text(
            json.dumps([index, row.labels, row.seconds, time.monotonic()])
        )

    def clear_started(self) -> None:
        """Forgets the row of an earlier process."""
        self._started_path.unlink(missing_ok=True)

    def started(self) -> StartedRow | None:
        """The row that was started last; None if there is none, or while it is written."""
        try:
            return StartedRow(*json.loads(self._started_path.read_text()))
        except (OSError, ValueError):
            return None

    def write(self, part: str, labels: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        row = {"part": part, **labels, **values, **self._common}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{part}: {json.dumps({**labels, **values})[:400]}", file=sys.stderr, flush=True)


def run(
    part: str,
    rows: Iterable[Row],
    file: RowFile,
    deadline_seconds: float,
    *,
    first: int = 0,
    after_error: Callable[[], None] = lambda: None,
) -> None:
    """Measures `rows` until `deadline_seconds` of `time.monotonic`. A row that fails gets an error
    and no result.

    Raises nothing: `rows` may also fail while it is iterated over.

    Args:
      first: index of the first row to measure.
      after_error: called after a row that failed.
    """
    iterator = iter(rows)
    for index in itertools.count():
        try:
            row = next(iterator, None)
        except Exception as error:
            file.write(part, {}, dict(error=_text(error)))
            return
        if row is None:
            return
        if index < first:
            continue
        left_seconds = deadline_seconds - time.monotonic()
        if row.seconds > left_seconds:
            file.write(
                part,
                row.labels,
                dict(skipped=f"takes about {row.seconds:.0f} s of {left_seconds:.0f} s left"),
            )
            continue
        file.start(index, row)
        start_seconds, has_failed = time.monotonic(), False
        try:
            values = row.measure()
        except Exception as error:  # the other rows must still run
            values, has_failed = dict(error=_text(error)), True
        file.write(
            part, row.labels, values | dict(row_seconds=round(time.monotonic() - start_seconds, 2))
        )
        if has_failed:
            after_error()


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
