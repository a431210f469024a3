"""Metrics on disk: WORKDIR/metrics.jsonl, one JSON object a line, and the same numbers for TensorBoard.

The order that makes a resumed run's file equal to an uninterrupted one's: **a step's rows are written before its
checkpoint is saved.** Then, when the checkpoint of step n exists, so do all rows up to n, and `rewind(n)` drops the
others: no row is lost and none is there twice. A row goes to the operating system in one write, so a kill of the
process leaves at most the last line torn.
"""

import json
import math
import time
from pathlib import Path

from jaxlc.core import extras
from jaxlc.core.errors import UserError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

Row = dict[str, float | None]  # "step" and what was measured then; None is a value that was not finite


class MetricsLog:
    """Appends rows. Call `rewind` first: with 0 for a new run. On processes other than the primary it does nothing."""

    def __init__(self, workdir: str | Path, *, is_primary: bool):
        self._workdir, self._is_primary = Path(workdir), is_primary
        self._file = self._tensorboard = None

    def rewind(self, step: int) -> None:
        """Makes the log read as if nothing had happened after `step`.

        Raises:
          UserError: a line of metrics.jsonl, other than a torn last one, is not JSON.
        """
        if not self._is_primary:
            return
        self.close()
        path = self._workdir / METRICS_FILE
        kept = [row for row in read_rows(path) if row["step"] <= step] if path.exists() else []
        new_path = path.with_suffix(".jsonl.new")
        new_path.write_text("".join(_line(row) for row in kept))
        new_path.replace(path)  # atomic: killed here, either the old file is there or the new one
        self._file = path.open("a")
        if extras.is_installed("tensorboardX"):
            self._tensorboard = _TensorBoard(self._workdir / TENSORBOARD_DIRECTORY, step)

    def write(self, *, step: int, **values: float) -> None:
        """Appends a row: values that are not finite become null, which JSON has and NaN it has not."""
        if not self._is_primary:
            return
        assert self._file is not None, "call rewind(step) first, with 0 for a new run"
        row = dict(step=step) | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(_line(row))
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.write(step, values)

    def close(self) -> None:
        for log in (self._file, self._tensorboard):
            if log is not None:
                log.close()
        self._file = self._tensorboard = None


class _TensorBoard:
    """Scalars for TensorBoard, in the file when `write` returns; tensorboardX's own SummaryWriter queues them in a
    thread, where a kill would lose what metrics.jsonl has."""

    def __init__(self, directory: Path, rewound_to_step: int):
        # tensorboardX is optional: pip install "jaxlc[tensorboard]".
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads event files in the order of their names, which begin with the time in whole seconds.
        self._events = EventsWriter(str(directory / "events"), filename_suffix=f".{rewound_to_step:09}")
        # What earlier event files hold from this step on is hidden.
        restart = Event(step=rewound_to_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.write_event(restart)
        self._events.flush()

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a metrics.jsonl, in order; a torn last line is left out.

    Raises:
      UserError: another line is not a JSON object with a step.
    """
    lines = Path(path).read_text(errors="replace").split("\n")
    return [_parse(line, f"line {number} of {path}") for number, line in enumerate(lines[:-1], start=1)]


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
        row["step"] + 0
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where} is not a metrics row ({line[:40]!r}): remove that line") from error
    return row


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
