"""Metrics on disk: WORKDIR/metrics.jsonl, one JSON object per line, and the same numbers for TensorBoard.

The rows of a step are written after its checkpoint is saved, since that may fail; so the checkpoint contains them. A
run that resumes from it adds those that are missing and drops the later ones, so its file equals the file of an
uninterrupted run. A row is passed to the operating system in one write, so killing the process truncates at most the
last line.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxlc.core import extras
from jaxlc.core.atomic_files import replacing
from jaxlc.core.errors import UserError
from jaxlc.core.foreign_files import parse_json

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

# "step", "stage" (a string, only if the run has stages) and the values measured at it; None: the value was not finite.
Row = dict[str, Any]
_TIMINGS = ("tokens_per_second", "step_seconds", "flops_per_second_documents", "mfu_documents", "seconds")
_TIMING_GROUPS = ("checkpoint", "slowest")  # before a slash


def is_timing(name: str) -> bool:
    """Whether a metric depends on the speed of the machine, so that it differs when a run is repeated."""
    group, _, last = name.rpartition("/")
    return last in _TIMINGS or group in _TIMING_GROUPS


class Timings:
    """Times of what a run does between steps, which join the next row of a step.

    A row of their own would be lost if the run is killed after a checkpoint, which contains the rows of its step.
    """

    def __init__(self):
        self._row: dict[str, float] = {}
        self._last_save = time.monotonic()

    def add(self, **values: float) -> None:
        self._row |= values

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measures how long steps wait for a checkpoint, and the share of the time since the checkpoint before."""
        start = time.monotonic()
        yield
        now = time.monotonic()
        self.add(**{"checkpoint/seconds": now - start, "checkpoint/share": (now - start) / (now - self._last_save)})
        self._last_save = now

    def take(self) -> dict[str, float]:
        """Returns what was measured since the last call."""
        row, self._row = self._row, {}
        return row


class MetricsWriter(Protocol):
    """Where rows go besides metrics.jsonl."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Called with the finite values of a row; must neither wait nor raise for reasons outside of this machine."""

    def close(self) -> None:
        """Called at the end of the run."""


def open_metrics(
    workdir: str | Path,
    *,
    resume_step: int | None,
    is_primary: bool,
    writers: Iterable[MetricsWriter] = (),
    warn: Callable[[str], None] = print,
    stage: str = "",
    rows: Sequence[Row] = (),
    repeated: Sequence[str] = (),
) -> "MetricsLog":
    """Opens the metrics of a run in `workdir`.

    Args:
      resume_step: the step that the run resumes from: rows after it are dropped. None: a new run, all rows are dropped.
      is_primary: False on all processes but one; they write nothing.
      writers: get each row as well, besides the event files for TensorBoard.
      warn: called with one line if the file is deleted during the run.
      stage: of `resume_step`.
      rows: of the last steps, with their losses; those that the file lacks are added.
      repeated: names of metrics, or of their groups, that are measured again at `resume_step`: their rows are dropped.
    Raises:
      UserError: a line of metrics.jsonl, other than a truncated last one, is not a metrics row.
    """
    if not is_primary:
        return MetricsLog(None)
    last_step = -1 if resume_step is None else resume_step
    path = Path(workdir) / METRICS_FILE
    prefixes = tuple(repeated)

    def is_kept(row: Row) -> bool:
        is_repeated = row["step"] == last_step and any(name.startswith(prefixes) for name in row)
        return row["step"] <= last_step and not (prefixes and is_repeated)

    kept = list(filter(is_kept, read_rows(path)))
    with replacing(path) as out:
        out.write("".join(map(_line, kept)).encode())
    directory = Path(workdir) / TENSORBOARD_DIRECTORY
    tensorboard = [_TensorBoard(directory, last_step)] if extras.is_installed("tensorboardX") else []
    log = MetricsLog(_RowFile(path, warn), [*tensorboard, *writers])
    known = {row["step"] for row in kept if "loss" in row}
    for row in rows:
        if row["step"] not in known:
            log.for_stage(stage).write(**row)
    return log


class _RowFile:
    """A file to which lines are appended. If it is deleted or replaced, it is written again."""

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self._path, self._warn = path, warn
        self._file = path.open("a+")

    def append(self, line: str) -> None:
        if self._path.parent.exists() and not self._is_in_place():
            self._warn(f"warning: {self._path} was deleted or replaced during the run: its rows are written again")
            self._file.seek(0)
            with replacing(self._path) as out:
                out.write(self._file.read().encode())
            self.close()
            self._file = self._path.open("a+")
        self._file.write(line)
        self._file.flush()

    def _is_in_place(self) -> bool:
        return self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))

    def close(self) -> None:
        self._file.close()


def finite(value: float | None) -> float | None:
    """`value`, None if it is not finite: JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


class MetricsLog:
    """Appends metrics rows; made by `open_metrics`."""

    def __init__(self, file: _RowFile | None, writers: Sequence[MetricsWriter] = (), stage: str = ""):
        self._file, self._writers, self._stage = file, writers, stage

    def for_stage(self, name: str) -> "MetricsLog":
        """The same log, whose rows name a stage; "": none."""
        return MetricsLog(self._file, self._writers, name)

    def write(self, *, step: int, **values: float | None) -> None:
        """Appends a row. Values that are not finite become null."""
        if self._file is None:
            return
        stage = dict(stage=self._stage) if self._stage else {}
        measured = {name: finite(value) for name, value in values.items()}
        self._file.append(_line(dict(step=step) | stage | measured))
        for writer in self._writers:
            writer.write(step, {name: value for name, value in measured.items() if value is not None})

    def close(self) -> None:
        for log in (self._file, *self._writers):
            if log is not None:
                log.close()


class _TensorBoard:
    """Scalars for TensorBoard, which are in the file when `write` returns. tensorboardX's SummaryWriter queues them for
    a thread, so a kill would lose values that metrics.jsonl has."""

    def __init__(self, directory: Path, last_step: int):
        # tensorboardX is optional: pip install -e '.[tensorboard]'.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads event files in the order of their names, which start with the time in whole seconds.
        self._events = EventsWriter(str(directory / "events"), filename_suffix=f".{last_step:09}")
        # Hides the scalars of earlier event files from this step on.
        restart = Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.write_event(restart)
        self._events.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a metrics.jsonl, in order; none without the file. A truncated last line is skipped.

    Raises:
      UserError: another line is not a JSON object with a step.
    """
    lines = Path(path).read_text(errors="replace").split("\n") if Path(path).exists() else [""]
    return [_parse(line, f"line {number} of {path}") for number, line in enumerate(lines[:-1], start=1)]


def _parse(line: str, where: str) -> Row:
    try:
        row = parse_json(line)
        row["step"] + 0
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where} is not a metrics row ({line[:40]!r}): remove that line") from error
    return row


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
