"""Ends a process that hangs, with one line on stderr that names the process and the phase for which all others wait.

A run tells in which phase it is: `with watchdog.phase("checkpoint"):`. A thread compares the time in the phase with its
deadline, a multiple of the median of its last durations. When it has passed, the thread

1. writes the Python stacks, the phase and the device memory to WORKDIR/hangs/process-N.txt, and reads the phases of the
   other processes, for at most a few seconds;
2. announces the reason to the other processes, which print it and end (`jaxlc.runtime.peers`);
3. ends the process with status 75, after which launchers restart the run.

A thread that holds the interpreter lock stops all Python code. The operating system's timer (`jaxlc.runtime.peers`)
ends such a process, with its stacks and status 142. When the end in step 2 begins, `peers` sets the timer to the limit
of the end itself, since process 0 waits for the others.

Each process publishes its phase in the key-value store of JAX's coordinator. A call to the coordinator may not return:
with process 0 stopped by SIGSTOP, a read had not returned after 37 s. So all calls are made in helper threads. Barriers
of the same store make all processes wait for each other before they execute a program together.
"""

import contextlib
import faulthandler
import itertools
import json
import math
import pickle
import socket
import statistics
import sys
import sysconfig
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from jaxlc import interrupts
from jaxlc._jax_internals import coordination_client
from jaxlc.config import RuntimeConfig
from jaxlc.core import aligned
from jaxlc.interrupts import call_within, start_thread
from jaxlc.runtime import peers

DEVICES = "devices"  # the phase of a process that waits for its devices
DATA = "data"  # or for its next batch

_PREFIX = "jaxlc/phases/"
_PUBLISH_SECONDS = 10.0
_READ_SECONDS = 5.0
# a process that has published nothing for this time does not answer
_STALE_SECONDS = 1.5 * _PUBLISH_SECONDS


class Row(NamedTuple):
    """What a process publishes."""

    process_id: int
    host: str
    phase: str
    step: int  # the last step that was dispatched
    seconds: float  # in this phase
    place: str  # where its Python code is, such as "user_data.py:12 read"
    published: float  # seconds since the processes were together, by the clock of its machine

    @property
    def age(self) -> float:
        """Seconds since it was published. The times of day of two machines may differ."""
        return _together_seconds() - self.published

    @property
    def is_stale(self) -> bool:
        return self.age > _STALE_SECONDS


_together = time.monotonic()  # when the processes of the run were together


def _together_seconds() -> float:
    return time.monotonic() - _together


class PhaseBoard:
    """Publishes the row of this process every 10 s; process 0 also reads the rows of all processes."""

    def __init__(self, client: Any, process_id: int, num_processes: int, row: Callable[[], Row]):
        """
        Args:
          client: of JAX's coordination service.
          row: returns what to publish; called in a thread.
        """
        self._client = client
        self._process_id = process_id
        self._num_processes = num_processes
        self._row = row
        # process -> its row, and when it was new here
        self._published: dict[int, tuple[Row, float]] = {}
        self._last_answer = time.monotonic()
        self._is_closed = threading.Event()
        self._thread = start_thread(self._publish, "phases")

    def silent(self, limit_seconds: float) -> str | None:
        """Names a process that has not answered for `limit_seconds`, at least 30 s; None: all have.

        Process 0 looks at all processes, and the others look at process 0.
        """
        now = time.monotonic()
        limit_seconds = max(limit_seconds, 3 * _PUBLISH_SECONDS)
        if (seconds := now - self._last_answer) > limit_seconds:
            return f"process 0 of {self._num_processes} has not answered for {seconds:.0f} s"
        for row, since in list(self._published.values()):
            if (seconds := now - since) > limit_seconds:
                return self.describe(row, seconds)
        return None

    def rows(self) -> list[Row] | None:
        """The rows of all processes that have published one; None: the coordinator does not answer."""
        return call_within(_READ_SECONDS, self._read)

    def describe(self, row: Row, silent_seconds: float = 0.0) -> str:
        """Where a process is, or was before it was silent."""
        name = f"process {row.process_id} of {self._num_processes} on {row.host}"
        if silent_seconds:
            return f"{name} has not answered for {silent_seconds:.0f} s, since phase {row.phase} of step {row.step}"
        return f"{name} is in phase {row.phase} of step {row.step}, at {row.place}"

    def close(self) -> None:
        """Removes the row of this process, which ends."""
        self._is_closed.set()
        self._thread.join(_READ_SECONDS)

    def _publish(self) -> None:
        key = f"{_PREFIX}{self._process_id}"
        with contextlib.suppress(Exception):  # process 0 has ended, which `peers` notices
            while True:
                self._client.key_value_set(key, json.dumps(self._row()), allow_overwrite=True)
                if self._process_id == 0:
                    self._note(self._read())
                self._last_answer = time.monotonic()
                if self._is_closed.wait(_PUBLISH_SECONDS):
                    break
            self._client.key_value_delete(key)

    def _read(self) -> list[Row]:
        return sorted(
            Row(*json.loads(value)) for _, value in self._client.key_value_dir_get(_PREFIX)
        )

    def _note(self, rows: list[Row]) -> None:
        """Remembers which rows are new, by this machine's clock."""
        now = time.monotonic()
        known = self._published
        unchanged = {
            row.process_id for row in rows if known.get(row.process_id, (None, 0.0))[0] == row
        }
        self._published = {
            row.process_id: (row, known[row.process_id][1] if row.process_id in unchanged else now)
            for row in rows
        }


def table_lines(rows: list[Row]) -> list[str]:
    """The rows as a table."""
    head = ("process", "host", "phase", "step", "seconds", "last row", "Python code")
    cells = [
        (
            row.process_id,
            row.host,
            row.phase,
            row.step,
            f"{row.seconds:.0f}",
            f"{row.age:.0f} s ago",
            row.place,
        )
        for row in rows
    ]
    return aligned([head, *(tuple(map(str, cell)) for cell in cells)], "rllrrrl")


def suspects(rows: list[Row]) -> list[Row]:
    """The processes for which the others seem to wait; empty if the rows do not show any.

    They are silent, or at an earlier step than others, or do not wait for their devices while
    others do.
    """
    for is_suspect in (
        lambda row: row.is_stale,
        lambda row: row.step < max(row.step for row in rows),
        lambda row: row.phase != DEVICES and any(other.phase == DEVICES for other in rows),
    ):
        if found := [row for row in rows if is_suspect(row)]:
            return found
    return []


HANGS_DIRECTORY = "hangs"  # in the workdir
STEP = "step"
_LEAST_DURATIONS = 5
_KEPT_DURATIONS = 50
_TICK_SECONDS = 1.0
_REPORT_SECONDS = 5.0  # limit of the time to write the report
_ALARM_SECONDS = 20.0  # after the deadline
# a tick that is so late shows that this process was stopped, for example by Ctrl-Z
_STOPPED_SECONDS = 10.0
_MAX_NAMED = 4  # processes in the last line
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_PACKAGE = str(Path(__file__).parents[1])

T = TypeVar("T")


class _Current(NamedTuple):
    """The phase of the watched thread; times are of time.monotonic()."""

    phase: str
    since: float
    deadline: float  # infinite: none


class Watchdog:
    """Watches the thread that creates it."""

    def __init__(self, config: RuntimeConfig, directory: Path):
        """
        Args:
          directory: for the reports.
        """
        self._factor = config.watchdog_factor
        self._floor_seconds = float(config.watchdog_floor_seconds)
        self._first_seconds = float(config.watchdog_first_seconds or math.inf)
        self._process_id = jax.process_index()
        self._num_processes = jax.process_count()
        self._host = socket.gethostname()
        self._watched_thread = threading.get_ident()
        self._durations: dict[str, deque[float]] = {}
        self._step = self._fetched_step = 0
        self._last_fetch: float | None = None
        self._current = _Current("run", time.monotonic(), math.inf)
        directory.mkdir(exist_ok=True)
        self._path = directory / f"process-{self._process_id}.txt"
        self._report = self._path.open("a", encoding="utf-8")
        self._has_alarm = self._set_up_alarm()
        self._board = None
        if (client := coordination_client()) is not None:
            self._board = PhaseBoard(client, self._process_id, self._num_processes, self._row)
        self._is_closed = threading.Event()
        self._thread = start_thread(self._watch, "watchdog")

    @contextlib.contextmanager
    def phase(self, name: str, *, repeats: bool = True) -> Iterator[None]:
        outer = self._current
        start = time.monotonic()
        seconds = self._seconds_allowed(name) if repeats else math.inf
        self._enter(_Current(name, start, start + seconds))
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            seconds = time.monotonic() - start
            if is_complete and repeats:
                self._add_duration(name, seconds)
            self._enter(
                outer._replace(since=outer.since + seconds, deadline=outer.deadline + seconds)
            )

    @contextlib.contextmanager
    def steps(self, first_step: int) -> Iterator[None]:
        self._durations, self._last_fetch = {}, None  # they depend on the stage
        self._step = self._fetched_step = first_step
        with self.phase(STEP):
            yield

    def dispatched(self, step: int) -> None:
        self._step = step
        since = self._current.since
        self._enter(
            _Current(STEP, since, since + self._seconds_allowed(STEP, step - self._fetched_step))
        )

    @contextlib.contextmanager
    def fetching(self, step: int) -> Iterator[list[float]]:
        measured: list[float] = []
        self._enter(self._current._replace(phase=DEVICES))
        yield measured
        now = time.monotonic()
        if self._last_fetch is not None:
            # The time between fetches includes callbacks, which are in no phase. It is shorter than the time of the
            # devices where a dispatch has waited for them.
            elapsed = (now - self._last_fetch) / max(1, step - self._fetched_step)
            for seconds in measured or [0.0]:
                self._add_duration(STEP, max(elapsed, seconds))
        self._last_fetch = now
        self._fetched_step = step
        self._enter(_Current(STEP, now, now + self._seconds_allowed(STEP, self._step - step)))

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        if self._has_alarm:
            peers.remove()
        if self._board is not None:
            self._board.close()
        self._report.close()
        with contextlib.suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()
            self._path.parent.rmdir()  # if it is empty

    def _add_duration(self, phase: str, seconds: float) -> None:
        self._durations.setdefault(phase, deque(maxlen=_KEPT_DURATIONS)).append(seconds)

    def _seconds_allowed(self, phase: str, num_steps: int = 1) -> float:
        """How long a phase may take. Every phase may take as long as a step, because data and steps
        overlap; so none has a deadline while a step is in flight whose time is unknown."""
        known = {
            name: statistics.median(durations)
            for name in {phase, STEP}
            if len(durations := self._durations.get(name, ())) >= _LEAST_DURATIONS
        }
        if phase not in known or (STEP not in known and self._step > self._fetched_step):
            return self._first_seconds
        return max(self._floor_seconds, self._factor * max(known.values()) * max(1, num_steps))

    def _enter(self, current: _Current) -> None:
        self._current = current
        if self._has_alarm:
            peers.set_limit(current.deadline + _ALARM_SECONDS - time.monotonic())

    def _set_up_alarm(self) -> bool:
        """Whether the timer can be used.

        False: the program uses its signal, or it runs in a terminal, where Ctrl-Z may stop it for
        any time.
        """
        is_interactive = self._num_processes == 1 and sys.stdin is not None and sys.stdin.isatty()
        if is_interactive or not peers.is_available():
            return False
        peers.write_stacks_to(self._report)
        return True

    def _watch(self) -> None:
        last = time.monotonic()
        not_before = 0.0
        while not self._is_closed.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - last > _STOPPED_SECONDS:
                not_before = now + self._floor_seconds
            last = now
            if now < not_before:
                continue
            if now > (current := self._current).deadline:
                self._end(now, *self._describe(current))
            if (
                self._board is not None
                and (silent := self._board.silent(self._floor_seconds)) is not None
            ):
                self._end(now, silent, [])

    def _describe(self, current: _Current) -> tuple[str, list[Row]]:
        """Why the run ends, and the rows of all processes. Takes at most a few seconds."""
        row = self._row()
        me = f"process {self._process_id} of {self._num_processes} on {self._host}"
        problem = f"{me} is in phase {current.phase} of step {self._step} for {row.seconds:.0f} s, at {row.place}"
        if self._board is None:
            return problem, [row]
        if (rows := self._board.rows()) is None:
            return f"process 0 of {self._num_processes} does not answer; {problem}", [row]
        others = [other for other in suspects(rows) if other.process_id != self._process_id]
        if others:
            causes = [
                self._board.describe(other, other.age * other.is_stale)
                for other in others[:_MAX_NAMED]
            ]
            problem = (
                f"{'; '.join(causes)}; {me} has waited {row.seconds:.0f} s in phase {current.phase}"
            )
        return problem, rows

    def _end(self, since: float, problem: str, rows: list[Row]) -> NoReturn:
        text = f"{problem}; stacks: {self._path.parent}"
        call_within(_REPORT_SECONDS, lambda: self._write_report(text, rows))
        peers.end_run(text, announces=True, since=since)

    def _write_report(self, text: str, rows: list[Row]) -> None:
        lines = [
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}",
            "",
            *(table_lines(rows) if rows else []),
            "",
        ]
        print(*lines, sep="\n", file=self._report, flush=True)
        faulthandler.dump_traceback(self._report, all_threads=True)
        for device in jax.local_devices():
            print(f"{device}: {device.memory_stats()}", file=self._report, flush=True)

    def _row(self) -> Row:
        current = self._current
        seconds = time.monotonic() - current.since
        place = _place(sys._current_frames().get(self._watched_thread))
        return Row(
            self._process_id,
            self._host,
            current.phase,
            self._step,
            round(seconds, 1),
            place,
            _together_seconds(),
        )


def _place(frame: FrameType | None) -> str:
    """The innermost call outside libraries, such as "user_data.py:12 read"."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) or not file.startswith((*_LIBRARIES, "<frozen")):
            return f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown code"


_watchdog: Watchdog | None = None
_phase_seconds: defaultdict[str, float] = defaultdict(float)
_nested_seconds: list[float] = []  # for each open phase, the seconds in nested phases


@contextlib.contextmanager
def watching(config: RuntimeConfig, workdir: Path) -> Iterator[None]:
    """Watches the calling thread, which calls the functions below; without it they have no effect."""
    global _watchdog, _together
    if not config.watchdog_factor:
        yield
        return
    wait_for_processes("watched")
    _together = time.monotonic()
    _watchdog = Watchdog(config, workdir / HANGS_DIRECTORY)
    try:
        with interrupts.undone(_watchdog.close):
            yield
    finally:
        watchdog = _watchdog
        _watchdog = None
        watchdog.close()


@contextlib.contextmanager
def phase(name: str, *, repeats: bool = True) -> Iterator[None]:
    """A phase of the run: its deadline follows from the durations of earlier phases with this name.

    Args:
      repeats: False: every duration is normal, so there is no deadline.
    """
    watched = (
        contextlib.nullcontext() if _watchdog is None else _watchdog.phase(name, repeats=repeats)
    )
    with _timed(name), watched:
        yield


@contextlib.contextmanager
def _timed(name: str) -> Iterator[None]:
    """Adds the time of the block to `phase_seconds`."""
    start = time.monotonic()
    _nested_seconds.append(0.0)
    try:
        yield
    finally:
        seconds = time.monotonic() - start
        _phase_seconds[name] += seconds - _nested_seconds.pop()
        if _nested_seconds:
            _nested_seconds[-1] += seconds


def phase_seconds() -> dict[str, float]:
    """The seconds of this process in each phase until now, without those in phases inside of it."""
    return dict(_phase_seconds)


def phases(name: str, items: Iterable[T], *, repeats: bool = True) -> Iterator[T]:
    """Yields the items; getting each one is a phase, as `phase`."""
    iterator = iter(items)
    end = object()
    while True:
        with phase(name, repeats=repeats):
            item = next(iterator, end)
        if item is end:
            return
        yield item


def steps(first_step: int) -> contextlib.AbstractContextManager[None]:
    """The steps of a stage after `first_step`."""
    return contextlib.nullcontext() if _watchdog is None else _watchdog.steps(first_step)


def dispatched(step: int) -> None:
    """A step was dispatched to the devices."""
    if _watchdog is not None:
        _watchdog.dispatched(step)


@contextlib.contextmanager
def fetching(step: int) -> Iterator[list[float]]:
    """The program waits for the results of the steps up to `step`: the phase `DEVICES`.

    Yields a list, to which the caller adds the seconds of each step.
    """
    watched = contextlib.nullcontext([]) if _watchdog is None else _watchdog.fetching(step)
    with _timed(DEVICES), watched as measured:
        yield measured


_DAY_SECONDS = 24 * 3600
_num_names = itertools.count()  # each barrier and each text needs its own name


def wait_for_processes(name: str, timeout_seconds: int = _DAY_SECONDS) -> None:
    """Waits until all processes of the run are here.

    It precedes the first execution of each program: compilation times differ between processes by
    minutes, and a collective of devices fails if a process is late (Gloo: after about 30 s), or has
    a limit of its own.
    """
    # Not jax.experimental.multihost_utils: its barrier is such a collective.
    if (client := coordination_client()) is None:
        return
    with phase("waiting for processes", repeats=False):
        client.wait_at_barrier(f"jaxlc/{name} {next(_num_names)}", 1000 * timeout_seconds)


def text_of_process_0(name: str, text: str, timeout_seconds: int = _DAY_SECONDS) -> str:
    """`text` of process 0, on every process; the text of other processes is not used."""
    if (client := coordination_client()) is None:
        return text
    key = f"jaxlc/{name} {next(_num_names)}"
    if jax.process_index() == 0:
        client.key_value_set(key, text)
        return text
    with phase("waiting for processes", repeats=False):
        return client.blocking_key_value_get(key, 1000 * timeout_seconds)


def raise_together(error: Exception | None) -> None:
    """Raises the error of process 0, if it has one, and in other processes a Process0Error."""
    if broadcast_one_to_all(np.array(error is not None)):
        raise error or peers.Process0Error("process 0 cannot continue; its message says why")


def on_process_0(call: Callable[[], T]) -> T:
    """What a call returns in process 0, in all processes, which wait for it; its error is raised by
    all of them.
    """
    result = error = None
    if jax.process_index() == 0:
        try:
            result = call()
        except Exception as raised:
            error = raised
    wait_for_processes("process 0")  # for longer than a collective may take
    raise_together(error)
    if jax.process_count() == 1:
        return result
    content = np.frombuffer(pickle.dumps(result), np.uint8)
    # A power of two, since each size has its own program. What follows the result is not read.
    num_bits = int(broadcast_one_to_all(np.int32(content.size.bit_length())))
    content = broadcast_one_to_all(np.resize(content, 2**num_bits))
    return pickle.loads(content.tobytes())


def problem_of_any_process(name: str, problem: str) -> str:
    """The problem of the first process that has one, on every process; "": none has."""
    if (client := coordination_client()) is None:
        return problem
    prefix = f"jaxlc/{name} {next(_num_names)}/"
    if problem:
        client.key_value_set(f"{prefix}{jax.process_index():09}", problem)
    wait_for_processes(name)
    return min(client.key_value_dir_get(prefix), default=("", ""))[1]


class Program:
    """A jitted function that all processes of a run call with the same shapes. When it is compiled,
    they wait for each other before it is executed."""

    def __init__(self, name: str, jitted: Any):
        """
        Args:
          jitted: what `jax.jit` returns.
        """
        self._name = name
        self._jitted = jitted
        self._compiled: set[Any] = set()  # structures, shapes and dtypes of arguments

    def __call__(self, *arguments: Any) -> Any:
        if jax.process_count() > 1:
            leaves, structure = jax.tree.flatten(arguments)
            if (key := (structure, *map(jax.typeof, leaves))) not in self._compiled:
                with phase("compilation", repeats=False):
                    self._jitted.lower(*arguments).compile()
                wait_for_processes(f"{self._name} compiled")
                self._compiled.add(key)
        return self._jitted(*arguments)
