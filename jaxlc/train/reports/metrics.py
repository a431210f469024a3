"""Metrics of a run: of steps in flight, on disk (WORKDIR/metrics.jsonl, one JSON object per line), for TensorBoard and
for Weights & Biases, and as columns.

Rows
----
The rows of a step are written after its checkpoint is saved, since that may fail; so the checkpoint contains them. A
run that resumes from it adds those that are missing and drops the later ones, so its file equals the file of an
uninterrupted run. A row is passed to the operating system in one write, so killing the process truncates at most the
last line.

Time of a step
--------------
Devices process steps in order. The time of a step is the time from the end of the step before it, or from its own
dispatch if that is later, to its end. So it includes nothing that the host does while the devices are idle between two
steps: evaluations, checkpoints, callbacks, the start and the end of a trace, and waiting for data. They have their own
times (phases of `jaxlc.runtime.watchdog`).

A thread waits for each step and records its end. The thread of the loop cannot do so: it may fetch the metrics of a
step long after its end, since the dispatch of the next step, a report or a callback may take any time.

Weights & Biases
----------------
Needs the package wandb: pip install -e '.[wandb]'. All calls to it are made in a thread, so that neither a slow server
nor an error of the package delays or ends a run.
"""

import contextlib
import json
import math
import os
import queue
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxlc.core import Log, UserError, errors, text
from jaxlc.core.files import errors_named, read_json_lines, replacing
from jaxlc.interrupts import start_thread
from jaxlc.runtime import watchdog
from jaxlc.step.step import StepMetrics

# By name: numbers, or generated texts by their prompts.
Values = Mapping[str, float | Mapping[str, str]]


class _Step(NamedTuple):
    number: int
    metrics: StepMetrics
    dispatch_seconds: float  # when the host began to dispatch it
    end_seconds: Future[float]


class PendingMetrics:
    """The metrics of the steps that were not fetched, in order, and the times of the steps since
    the last row.

    Attributes:
      last: metrics of the newest fetched step, numpy; None before the first fetch.
      last_step: the newest fetched step.
      first_end_seconds: when the first step ended, as `now`; NaN before the first fetch.
    """

    def __init__(self, step: int):
        """
        Args:
          step: the step after which the stage starts or resumes.
        """
        self.last: StepMetrics | None = None
        self.last_step = step
        self.first_end_seconds = math.nan
        self._pending: list[_Step] = []
        self._dispatch_seconds = self._last_end_seconds = -math.inf
        # No daemon thread: if Python ends while one waits in JAX, the process aborts.
        self._clock = ThreadPoolExecutor(1, "jaxlc-step-clock")
        self.start_row()

    @property
    def num_steps(self) -> int:
        """Number of steps that were added and not fetched."""
        return len(self._pending)

    def dispatching(self) -> None:
        """The host begins to dispatch the next step."""
        self._dispatch_seconds = now()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """The step was dispatched; `metrics` may still be computed."""
        self._pending.append(
            _Step(step, metrics, self._dispatch_seconds, self._clock.submit(end_of, metrics))
        )

    def fetch(self, until: int) -> list[tuple[int, StepMetrics]]:
        """Waits for the steps up to `until` and returns (step, numpy metrics) of each that was not
        fetched.
        """
        steps = [step for step in self._pending if step.number <= until]
        with watchdog.fetching(until) as measured:
            fetched = [(step.number, jax.device_get(step.metrics)) for step in steps]
            seconds = [self._seconds_of(step) for step in steps]
            measured.extend(seconds)
        self._pending = self._pending[len(steps) :]
        self.last_step, self.last = fetched[-1]
        self._num_steps += len(steps)
        self._seconds += sum(seconds)
        if self.last.attention_pairs is not None:
            self._attention_pairs += sum(float(metrics.attention_pairs) for _, metrics in fetched)
        return fetched

    def start_row(self) -> None:
        """The means below are over the steps that are fetched from now on."""
        self._num_steps = 0
        self._seconds = 0.0
        self._attention_pairs = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Mean time of the fetched steps since the last row."""
        return self._seconds / self._num_steps

    @property
    def attention_pairs_per_step(self) -> float:
        """Mean of the same steps; 0 without a document mask."""
        return self._attention_pairs / self._num_steps

    def close(self) -> None:
        """Ends the thread, after the steps that were added."""
        self._clock.shutdown(wait=False)

    def _seconds_of(self, step: _Step) -> float:
        end_seconds = step.end_seconds.result()
        if math.isnan(self.first_end_seconds):
            self.first_end_seconds = end_seconds
        start_seconds = max(step.dispatch_seconds, self._last_end_seconds)
        self._last_end_seconds = end_seconds
        return end_seconds - start_seconds


def now() -> float:
    """Seconds of the clock of steps."""
    return time.perf_counter()


def end_of(metrics: StepMetrics) -> float:
    """Waits for the step that computes `metrics`; returns the time of its end."""
    jax.block_until_ready(metrics)
    return now()


_MAX_ROWS = 10_000  # that wait for the thread; later ones are dropped
_CLOSE_SECONDS = 30.0  # how long the end of a run waits for the thread


class WandbWriter:
    """Sends rows to a run of Weights & Biases; `WANDB_MODE=offline` keeps them in the workdir."""

    def __init__(
        self,
        project: str,
        run_id: str,
        workdir: Path,
        settings: Mapping[str, Any],
        log: Log,
    ):
        """
        Args:
          run_id: a later start with the same identifier continues the run.
          settings: of the run, by their paths.
          log: prints a line.
        """
        self._arguments = dict(
            project=project,
            id=run_id,
            resume="allow",
            name=workdir.name,
            dir=str(workdir),
            config=dict(settings),
        )
        self._log = log
        self._num_dropped = 0
        self._has_failed = False
        self._rows: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(_MAX_ROWS)
        self._thread = start_thread(self._send, "wandb")

    def write(self, step: int, values: Values) -> None:
        """Passes a row to the thread; does not wait. Texts become a table."""
        try:
            self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Waits for the rows to be sent, for a limited time."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._num_dropped += 1
        else:
            self._thread.join(_CLOSE_SECONDS)
        if self._has_failed:
            return
        if self._thread.is_alive():
            self._log(f"warning: Weights & Biases has not taken all metrics in {_CLOSE_SECONDS:.0f} s; they are in the"
                      " workdir, for `wandb sync`, and in metrics.jsonl")  # fmt: skip
        elif self._num_dropped:
            self._log(
                f"warning: {self._num_dropped} rows were not sent to Weights & Biases; metrics.jsonl has them"
            )

    def _send(self) -> None:
        try:
            import wandb

            run = wandb.init(**self._arguments)
            while (item := self._rows.get()) is not None:
                step, row = item
                for name, value in row.items():
                    if isinstance(value, Mapping):
                        data = [list(item) for item in value.items()]
                        row[name] = wandb.Table(columns=["prompt", "text"], data=data)
                # After a resume, W&B ignores rows of steps that it already has.
                run.log(row, step=step)
            run.finish()
        except Exception as error:
            self._has_failed = True
            reason = (str(error).splitlines() or [""])[0]
            self._log(
                f"warning: no metrics for Weights & Biases from here on ({type(error).__name__}: {reason})"
            )


METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

# "step", "stage" (a string, only if the run has stages) and the values measured at it; None: the
# value was not finite.
Row = dict[str, Any]
_TIMINGS = (
    "tokens_per_second",
    "step_seconds",
    "flops_per_second_documents",
    "mfu_documents",
    "seconds",
)
_TIMING_GROUPS = ("checkpoint", "slowest")  # before a slash


def is_timing(name: str) -> bool:
    """Whether a metric depends on the speed of the machine, so that it differs when a run is
    repeated.
    """
    group, _, last = name.rpartition("/")
    return last in _TIMINGS or group in _TIMING_GROUPS


class Timings:
    """Times of what a run does between steps, which join the next row of a step.

    A row of their own would be lost if the run is killed after a checkpoint, which contains the
    rows of its step.
    """

    def __init__(self):
        self._row: dict[str, float] = {}
        self._last_save = time.monotonic()

    def add(self, **values: float) -> None:
        self._row |= values

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measures how long steps wait for a checkpoint, and the share of the time since the
        checkpoint before.
        """
        start = time.monotonic()
        yield
        now = time.monotonic()
        self.add(
            **{
                "checkpoint/seconds": now - start,
                "checkpoint/share": (now - start) / (now - self._last_save),
            }
        )
        self._last_save = now

    def take(self) -> dict[str, float]:
        """Returns what was measured since the last call."""
        row = self._row
        self._row = {}
        return row


class MetricsWriter(Protocol):
    """Where rows go besides metrics.jsonl."""

    def write(self, step: int, values: Values) -> None:
        """Called with the finite values of a row, or with texts; must neither wait nor raise for
        reasons outside of this machine.
        """

    def close(self) -> None:
        """Called at the end of the run."""


def open_metrics(
    workdir: str | Path,
    *,
    resume_step: int | None,
    is_primary: bool,
    writers: Iterable[MetricsWriter] = (),
    warn: Log = print,
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
      rows: of the last steps; those that the file lacks are added.
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
        return row["step"] <= last_step and not is_repeated

    kept = list(filter(is_kept, read_rows(path)))
    with replacing(path) as out:
        out.write("".join(map(_line, kept)).encode())
    directory = Path(workdir) / TENSORBOARD_DIRECTORY
    tensorboard = (
        [_TensorBoard(directory, last_step)] if errors.is_installed("tensorboardX") else []
    )
    log = MetricsLog(_RowFile(path, warn), [*tensorboard, *writers])
    known = {(row["step"], name) for row in kept for name in row if name != "step"}
    for row in rows:
        if known.isdisjoint((row["step"], name) for name in row):
            log.for_stage(stage).write(**row)
    return log


class _RowFile:
    """A file to which lines are appended. If it is deleted or replaced, it is written again."""

    def __init__(self, path: Path, warn: Log):
        self._path = path
        self._warn = warn
        self._file = path.open("a+")

    def append(self, line: str) -> None:
        path = self._path
        with errors_named(path):
            own = os.fstat(self._file.fileno())
            is_in_place = path.exists() and os.path.samestat(path.stat(), own)
            if path.parent.exists() and not is_in_place:
                self._warn(
                    f"warning: {path} was deleted or replaced during the run: its rows are written again"
                )
                self._file.seek(0)
                with replacing(path) as out:
                    out.write(self._file.read().encode())
                self.close()
                self._file = path.open("a+")
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def finite(value: float | None) -> float | None:
    """`value`, None if it is not finite: JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


class MetricsLog:
    """Appends metrics rows; made by `open_metrics`."""

    def __init__(
        self, file: _RowFile | None, writers: Sequence[MetricsWriter] = (), stage: str = ""
    ):
        self._file = file
        self._writers = writers
        self._stage = stage

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
        self.write_elsewhere(
            step, {name: value for name, value in measured.items() if value is not None}
        )

    def write_elsewhere(self, step: int, values: Values) -> None:
        """Passes values to the writers only: metrics.jsonl has no texts."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        for log in (self._file, *self._writers):
            if log is not None:
                log.close()


class _TensorBoard:
    """Scalars for TensorBoard, which are in the file when `write` returns. tensorboardX's
    SummaryWriter queues them for a thread, so a kill would lose values that metrics.jsonl has."""

    def __init__(self, directory: Path, last_step: int):
        # tensorboardX is optional: pip install -e '.[tensorboard]'.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads event files in the order of their names, which start with the time in
        # whole seconds.
        self._events = EventsWriter(str(directory / "events"), filename_suffix=f".{last_step:09}")
        # Hides the scalars of earlier event files from this step on.
        restart = Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.write_event(restart)
        self._events.flush()

    def write(self, step: int, values: Values) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar, text

        summaries = []
        for name, value in values.items():
            if isinstance(value, Mapping):
                texts = enumerate(value.items(), start=1)
                summaries += [
                    text(f"{name}/{i}", f"**{prompt}**{new}") for i, (prompt, new) in texts
                ]
            else:
                summaries.append(scalar(name, value))
        for summary in summaries:
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a metrics.jsonl, in order; none without the file. A truncated last line is
    skipped.

    Raises:
      UserError: another line is not a JSON object with a step.
    """
    rows = read_json_lines(Path(path))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise UserError(
                f"line {number} of {path} is not a metrics row ({str(row)[:40]}): remove that line"
            )
    return rows


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


_DTYPES = dict(step=np.int64, stage=np.str_)  # of columns that are not float64
_SHOWN_ROWS = 5  # at the start and at the end of a table


class History(dict[str, np.ndarray]):
    """The rows of metrics.jsonl as columns: a dictionary of float64 arrays of equal length, "step"
    int64, "stage" str.

    Missing and non-finite values are NaN. `pandas.DataFrame(history)` gives a data frame.
    """

    def __init__(self, rows: Sequence[Row]):
        # in the order of their first use
        names = dict.fromkeys(["step", *(name for row in rows for name in row)])
        super().__init__({name: _column([row.get(name) for row in rows], name) for name in names})

    @property
    def num_rows(self) -> int:
        """The length of each column."""
        return len(self["step"])

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the rows that have a finite value of `name`; both empty if there are
        none.
        """
        if name not in self:
            return np.zeros(0, np.int64), np.zeros(0)
        is_finite = np.isfinite(self[name])
        return self["step"][is_finite], self[name][is_finite]

    @property
    def loss_unit(self) -> str:
        """The unit of the training loss; losses of post-training have none."""
        return "" if "ratio" in self or "margin" in self else "nats per token"

    def median(self, name: str) -> float | None:
        """The median of the finite values of `name`, the upper one of an even number; None if there
        are none.
        """
        values = self.column(name)[1].tolist()
        return statistics.median_high(values) if values else None

    def __repr__(self) -> str:
        losses = self.column("loss")[1]
        loss = f", loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) else ""
        return f"History({self.num_rows} rows: {', '.join(self)}{loss})"

    def _repr_html_(self) -> str:
        indices = list(range(self.num_rows))
        if self.num_rows > 2 * _SHOWN_ROWS:
            indices = [*indices[:_SHOWN_ROWS], None, *indices[-_SHOWN_ROWS:]]
        rows = [
            ["…" if i is None else _cell(column[i]) for column in self.values()] for i in indices
        ]
        return text.table(list(self), rows, caption=f"{self.num_rows} rows of metrics.jsonl")


def _column(values: list, name: str) -> np.ndarray:
    known = [np.nan if value is None else value for value in values]
    return np.array(known, _DTYPES.get(name, np.float64))


def _cell(value) -> str:
    if isinstance(value, str):
        return value
    if np.isnan(value):
        return ""
    return f"{value:,}" if isinstance(value, np.integer) else f"{value:,.4g}"
