"""Ends a process that hangs, with one line on stderr that names the process and the phase for which all others wait.

A run tells in which phase it is: `with watchdog.phase("checkpoint"):`. A thread compares the time in the phase with its
deadline, a multiple of the median of its last durations. When it has passed, the thread

1. writes the Python stacks, the phase and the device memory to WORKDIR/hangs/process-N.txt, and reads the phases of the
   other processes (`jaxlc.runtime.phase_board`), for at most a few seconds;
2. announces the reason to the other processes, which print it and end (`jaxlc.runtime.peers`);
3. ends the process with status 75, after which launchers restart the run.

A thread that holds the interpreter lock stops all Python code. The operating system's timer (`jaxlc.runtime.alarm`)
ends such a process, with its stacks and status 142. When the end in step 2 begins, `peers` sets the timer to the limit
of the end itself, since process 0 waits for the others.
"""

import contextlib
import faulthandler
import math
import socket
import statistics
import sys
import sysconfig
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TypeVar

from jaxlc._jax_internals import coordination_client
from jaxlc.config import RuntimeConfig
from jaxlc.core import interrupts
from jaxlc.core.time_limit import call_within
from jaxlc.runtime import alarm, peers
from jaxlc.runtime.phase_board import DEVICES, PhaseBoard, Row, suspects, table_lines

HANGS_DIRECTORY = "hangs"  # in the workdir
STEP = "step"
_LEAST_DURATIONS, _KEPT_DURATIONS = 5, 50
_TICK_SECONDS = 1.0
_REPORT_SECONDS = 5.0  # limit of the time to write the report
_ALARM_SECONDS = 20.0  # after the deadline
_STOPPED_SECONDS = 10.0  # a tick that is so late shows that this process was stopped, for example by Ctrl-Z
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
        import jax

        self._factor, self._floor_seconds = config.watchdog_factor, float(config.watchdog_floor_seconds)
        self._first_seconds = float(config.watchdog_first_seconds or math.inf)
        self._process_id, self._num_processes = jax.process_index(), jax.process_count()
        self._host, self._watched_thread = socket.gethostname(), threading.get_ident()
        self._durations: dict[str, deque[float]] = {}
        self._step = self._fetched_step = 0
        self._last_fetch: float | None = None
        self._current = _Current("run", time.monotonic(), math.inf)
        directory.mkdir(exist_ok=True)
        self._path = directory / f"process-{self._process_id}.txt"
        self._report = self._path.open("a")
        self._has_alarm = self._set_up_alarm()
        self._board = None
        if (client := coordination_client()) is not None:
            self._board = PhaseBoard(client, self._process_id, self._num_processes, self._row)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxlc-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str, *, repeats: bool = True) -> Iterator[None]:
        outer, start = self._current, time.monotonic()
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
            self._enter(outer._replace(since=outer.since + seconds, deadline=outer.deadline + seconds))

    @contextlib.contextmanager
    def steps(self, first_step: int) -> Iterator[None]:
        self._durations, self._last_fetch = {}, None  # they depend on the stage
        self._step = self._fetched_step = first_step
        with self.phase(STEP):
            yield

    def dispatched(self, step: int) -> None:
        self._step = step
        since = self._current.since
        self._enter(_Current(STEP, since, since + self._seconds_allowed(STEP, step - self._fetched_step)))

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
        self._last_fetch, self._fetched_step = now, step
        self._enter(_Current(STEP, now, now + self._seconds_allowed(STEP, self._step - step)))

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        if self._has_alarm:
            alarm.remove()
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
        """How long a phase may take. Every phase may take as long as a step, because data and steps overlap; so none
        has a deadline while a step is in flight whose time is unknown."""
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
            alarm.set_limit(current.deadline + _ALARM_SECONDS - time.monotonic())

    def _set_up_alarm(self) -> bool:
        """Whether the timer can be used.

        False: the program uses its signal, or it runs in a terminal, where Ctrl-Z may stop it for any time.
        """
        is_interactive = self._num_processes == 1 and sys.stdin is not None and sys.stdin.isatty()
        if is_interactive or not alarm.is_available():
            return False
        alarm.write_stacks_to(self._report)
        return True

    def _watch(self) -> None:
        last, not_before = time.monotonic(), 0.0
        while not self._is_closed.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - last > _STOPPED_SECONDS:
                not_before = now + self._floor_seconds
            last = now
            if now < not_before:
                continue
            if now > (current := self._current).deadline:
                self._end(now, *self._describe(current))
            if self._board is not None and (silent := self._board.silent(self._floor_seconds)) is not None:
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
            causes = [self._board.describe(other, other.age * other.is_stale) for other in others[:_MAX_NAMED]]
            problem = f"{'; '.join(causes)}; {me} has waited {row.seconds:.0f} s in phase {current.phase}"
        return problem, rows

    def _end(self, since: float, problem: str, rows: list[Row]) -> NoReturn:
        text = f"{problem}; stacks: {self._path.parent}"
        call_within(_REPORT_SECONDS, lambda: self._write_report(text, rows))
        peers.end_run(text, announces=True, since=since)

    def _write_report(self, text: str, rows: list[Row]) -> None:
        import jax

        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", "", *(table_lines(rows) if rows else []), ""]
        print(*lines, sep="\n", file=self._report, flush=True)
        faulthandler.dump_traceback(self._report, all_threads=True)
        for device in jax.local_devices():
            print(f"{device}: {device.memory_stats()}", file=self._report, flush=True)

    def _row(self) -> Row:
        current = self._current
        seconds = time.monotonic() - current.since
        place = _place(sys._current_frames().get(self._watched_thread))
        return Row(self._process_id, self._host, current.phase, self._step, round(seconds, 1), place, time.time())


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
_nested_seconds: list[float] = []  # of the phases that are entered, the seconds in phases inside of each


@contextlib.contextmanager
def watching(config: RuntimeConfig, workdir: Path) -> Iterator[None]:
    """Watches the calling thread, which calls the functions below; without it they have no effect."""
    global _watchdog
    if not config.watchdog_factor:
        yield
        return
    _watchdog = Watchdog(config, workdir / HANGS_DIRECTORY)
    try:
        with interrupts.undone(_watchdog.close):
            yield
    finally:
        watchdog, _watchdog = _watchdog, None
        watchdog.close()


@contextlib.contextmanager
def phase(name: str, *, repeats: bool = True) -> Iterator[None]:
    """A phase of the run: its deadline follows from the durations of earlier phases with this name.

    Args:
      repeats: False: every duration is normal, so there is no deadline.
    """
    watched = contextlib.nullcontext() if _watchdog is None else _watchdog.phase(name, repeats=repeats)
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
    iterator, end = iter(items), object()
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
