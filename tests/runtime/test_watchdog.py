"""The watchdog: deadlines of phases, and the end of a process that hangs."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.runtime import peers, watchdog
from jaxlc.runtime.watchdog import DEVICES, PhaseBoard, Row, Watchdog, suspects
from tests import environment
from tests.helpers import TIMEOUT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        seconds = 0.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.seconds)
    return Clock


@pytest.fixture
def make(tmp_path, clock, monkeypatch):
    """Makes watchdogs with a factor of 10 and a floor of 60 s, which do not end this process."""
    made = []
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)

    def make_watchdog(**settings) -> Watchdog:
        config = RuntimeConfig(watchdog_floor_seconds=60, **settings)
        made.append(Watchdog(config, tmp_path / "hangs"))
        return made[-1]

    yield make_watchdog
    for one in made:
        one.close()


def seconds_left(dog: Watchdog, clock) -> float:
    return dog._current.deadline - clock.seconds


def run_steps(dog: Watchdog, clock, first: int, seconds: list[float]) -> None:
    for step, duration in enumerate(seconds, first):
        dog.dispatched(step)
        with dog.fetching(step):
            clock.seconds += duration


def test_deadline_of_steps_follows_their_time_on_the_devices(make, clock):
    """Fetches follow each other at once where a dispatch has waited for the devices: their distance
    is no step.
    """
    dog = make()
    with dog.steps(0):
        for step, seconds_between_fetches in enumerate(
            [1800.0, 0.02, 3600.0, 0.02, 3600.0, 0.02, 3600.0, 0.02], 1
        ):
            dog.dispatched(step)
            with dog.fetching(step) as measured:
                clock.seconds += seconds_between_fetches
                measured.append(1800.0)
        dog.dispatched(9)
        assert seconds_left(dog, clock) == pytest.approx(10 * 1800.0, rel=0.01)


def test_deadline_is_known_after_the_first_steps_that_are_fetched_together(make, clock):
    dog = make()
    with dog.steps(0):
        for last in (8, 16):
            dog.dispatched(last)
            with dog.fetching(last) as measured:
                clock.seconds += 8 * 300.0
                measured.extend([300.0] * 8)
        dog.dispatched(17)
        assert seconds_left(dog, clock) == 3000.0


def test_steps_have_a_deadline_after_five_durations(make, clock):
    """The first step takes ten hours; the deadline of later ones is ten times their median."""
    dog = make()
    with dog.steps(0):
        run_steps(dog, clock, 1, [36_000.0])
        run_steps(dog, clock, 2, [20.0, 20.0, 20.0, 30.0])
        assert seconds_left(dog, clock) == math.inf
        run_steps(dog, clock, 6, [20.0])
        dog.dispatched(7)
        assert seconds_left(dog, clock) == 200.0
        dog.dispatched(8)  # two steps are in flight
        assert seconds_left(dog, clock) == 400.0
        with dog.phase("data"):
            assert seconds_left(dog, clock) == math.inf
            clock.seconds += 1000.0
        assert seconds_left(dog, clock) == 400.0  # the time in other phases does not count
    with dog.steps(8):  # a stage of longer sequences
        dog.dispatched(9)
        assert seconds_left(dog, clock) == math.inf


def test_quick_phases_have_the_floor_or_the_time_of_steps(make, clock):
    """Data of the next step may take as long as a step, although waiting for it took no time
    before.
    """
    dog = make()

    def wait_for_data() -> float:
        with dog.phase("data"):
            return seconds_left(dog, clock)

    with dog.steps(0):
        for _ in range(5):
            assert wait_for_data() == math.inf
        assert wait_for_data() == 60.0
        dog.dispatched(1)
        assert wait_for_data() == math.inf  # it may be a step of an hour
        run_steps(dog, clock, 1, [100.0] * 6)
        assert wait_for_data() == 1000.0
        with dog.phase("checkpoint files", repeats=False):
            assert seconds_left(dog, clock) == math.inf


def test_first_durations_have_the_deadline_of_the_user(make, clock):
    dog = make(watchdog_first_seconds=7200)
    with dog.phase("evaluation"):
        assert seconds_left(dog, clock) == 7200.0
        with pytest.raises(KeyError), dog.phase("scores"):
            raise KeyError
        clock.seconds += 1.0
        assert (dog._current.phase, seconds_left(dog, clock)) == ("evaluation", 7199.0)


def test_waiting_for_devices_is_timed_without_the_phase_around_it(clock):
    before = watchdog.phase_seconds()
    with watchdog.phase("evaluation"):
        clock.seconds += 1.0
        with watchdog.fetching(3):
            clock.seconds += 2.0
    added = {
        name: watchdog.phase_seconds()[name] - before.get(name, 0.0)
        for name in ("evaluation", DEVICES)
    }
    assert added == {"evaluation": 1.0, DEVICES: 2.0}


def test_run_without_a_hang_leaves_no_files(make, tmp_path):
    make().close()
    assert not (tmp_path / "hangs").exists()
    with watchdog.watching(RuntimeConfig(watchdog_factor=0.0), tmp_path):
        assert watchdog._watchdog is None


_HANG = """
import ctypes, time
from pathlib import Path
from jaxlc.config import RuntimeConfig
from jaxlc.runtime import watchdog
watchdog._ALARM_SECONDS, watchdog._TICK_SECONDS = 1.0, 0.05
def hang():
    {call}
{setup}
with watchdog.watching(RuntimeConfig(watchdog_floor_seconds=1), Path({workdir!r})):
    for call in [lambda: None] * 5 + [hang]:
        with watchdog.phase("data"):
            call()
"""


def run_hang(workdir: Path, call: str, *, setup: str = "") -> subprocess.CompletedProcess:
    """Runs a program that is in a phase with a deadline of 1 s during `call`."""
    return subprocess.run(
        [sys.executable, "-c", _HANG.format(call=call, setup=setup, workdir=str(workdir))],
        cwd=ROOT,
        env=environment.for_user(JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("call", "status"),
    [("time.sleep(600)", 75), ("ctypes.PyDLL(None).sleep(600)", -14)],
    ids=["sleeps", "holds_lock"],
)
def test_process_that_hangs_ends_with_stacks(tmp_path, call, status):
    """With a thread that holds the interpreter lock, no Python code runs."""
    done = run_hang(tmp_path, call)
    assert done.returncode == status, done.stderr
    report = (tmp_path / "hangs" / "process-0.txt").read_text()
    assert "in hang\n" in report
    if status == 75:
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: process 0 of 1 on "), last
        assert "is in phase data of step 0 for 1 s, at <string>:8 hang" in last, last
        assert f"stacks: {tmp_path / 'hangs'}; start all processes again" in last
        assert "cpu:0: " in report  # device memory


_PROCESS_0 = """
import socket
from jaxlc.runtime import peers
from jaxlc.runtime.rendezvous import Connection, Member
listener = socket.create_server(("127.0.0.1", 0))
others = [socket.create_connection(listener.getsockname()) for _ in range(2)]  # they never end
connections = [Connection(listener.accept()[0]) for _ in range(2)]
me = Member(0, 3, "host0", "0.1")
peers._link = peers.Link(me, connections, heartbeat_seconds=10, on_loss=peers.end_run)
watchdog._ALARM_SECONDS, peers._LAST_SECONDS = 3.0, 6.0
{settings}
"""


@pytest.mark.parametrize(
    ("settings", "call", "status", "problem"),
    [
        ("", "time.sleep(600)", 75, "error: process 0 of 1 on "),
        (
            "",
            "Connection(others[0]).send(lost='process 2 hangs', status=75); time.sleep(600)",
            75,
            "error: process 2 hangs; ",
        ),
        (
            "peers._LAST_LIMIT_SECONDS = 4.0; peers.Link.wait_for_others = lambda *_: ctypes.PyDLL(None).sleep(600)",
            "time.sleep(600)",
            -signal.SIGALRM,
            "error: process 0 of 1 on ",
        ),
    ],
    ids=["hangs", "another_process_reports_a_hang", "holds_lock_at_its_end"],
)
def test_process_0_outlives_the_others_but_not_its_limit(tmp_path, settings, call, status, problem):
    """It waits for processes that do not end, for longer than the timer of the phase in which it
    hangs.
    """
    done = run_hang(tmp_path, call, setup=_PROCESS_0.format(settings=settings))
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1].startswith(problem), done.stderr


def test_phases_after_the_end_has_begun_do_not_set_the_timer(monkeypatch):
    timers = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: timers.append(seconds))
    monkeypatch.setattr(peers, "_is_ending", False)
    peers.set_limit(80.0)
    peers.set_limit(math.inf)
    peers.set_end_limit(25.0)
    for seconds in (20.0, math.inf):
        peers.set_limit(seconds)
    assert timers == [80.0, 0, 25.0]


def test_timer_of_the_end_spares_a_program_that_uses_its_signal(monkeypatch):
    timers = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: timers.append(seconds))
    monkeypatch.setattr(peers, "_is_ending", False)
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    peers.set_end_limit(25.0)
    assert timers == []


def row(process_id: int, phase: str, step: int, age: float = 0.0) -> Row:
    published = time.monotonic() - watchdog._together - age
    return Row(process_id, f"host{process_id}", phase, step, 60.0, "user.py:3 read", published)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(DEVICES, 8), (DEVICES, 8, 40.0)], [1]),
        ([(DEVICES, 8), ("data", 7), (DEVICES, 8)], [1]),
        ([("step", 8), (DEVICES, 8), (DEVICES, 8)], [0]),
        ([(DEVICES, 8), (DEVICES, 8)], []),
    ],
    ids=["silent", "earlier_step", "not_at_its_devices", "unknown"],
)
def test_suspects_are_those_for_whom_the_others_wait(rows, expected):
    assert [
        one.process_id for one in suspects([row(i, *cells) for i, cells in enumerate(rows)])
    ] == expected


def test_age_of_a_row_does_not_depend_on_the_time_of_day(make, clock, monkeypatch):
    """The clocks of machines may be minutes apart, and jump."""
    published = make()._row()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock.seconds += 7.0
    assert published.age == pytest.approx(7.0)


class Store(dict):
    """The key-value store of the coordinator."""

    def key_value_set(self, key, value, allow_overwrite):
        self[key] = value

    def key_value_dir_get(self, prefix):
        return list(self.items())

    def key_value_delete(self, key):
        self.pop(key)


def test_board_names_the_process_that_is_silent(monkeypatch):
    monkeypatch.setattr(watchdog, "_PUBLISH_SECONDS", 0.01)
    store = Store()
    boards = [PhaseBoard(store, i, 2, lambda i=i: row(i, "step", 5)) for i in range(2)]
    wait_until(lambda: len(store) == 2)
    assert [board.silent(60.0) for board in boards] == [None, None] and len(boards[0].rows()) == 2
    monkeypatch.setattr(boards[1], "_client", None)  # it publishes nothing
    wait_until(lambda: boards[0].silent(0.2))
    assert "process 1 of 2 on host1 has not answered for" in boards[0].silent(0.2)
    assert boards[0].silent(60.0) is None
    assert "process 0 of 2 has not answered" in boards[1].silent(0.2)
    boards[0].close()
    assert list(store) == ["jaxlc/phases/1"]


def test_board_of_a_coordinator_that_hangs_has_no_rows(monkeypatch):
    monkeypatch.setattr(watchdog, "_READ_SECONDS", 0.05)
    store = Store()
    store.key_value_dir_get = lambda prefix: time.sleep(2)
    board = PhaseBoard(store, 1, 2, lambda: row(1, "step", 5))
    assert board.rows() is None
    board.close()
