"""Calls in processes of their own: values, errors, deaths, and what is left when the caller ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from jaxlc.core import processes
from jaxlc.core.errors import UserError
from tests.helpers import TIMEOUT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]


def count(number: int):
    for i in range(number):
        yield os.environ["BASE"] + str(i)


def ends(how: str):
    yield how
    print("last words", flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(0)
    raise UserError("no such file") if how == "refuses" else RuntimeError("a bug")


def hangs(path: Path):
    path.write_text(str(os.getpid()))
    signal.pause()
    yield "never"


def values_of(calls, function):
    values = {number: [] for number in range(len(calls))}
    for number, value in filter(None, processes.run(function, calls, 2, environment={"BASE": "x"})):
        values[number].append(value)
    return list(values.values())


def test_values_come_in_the_order_of_each_call():
    assert values_of([(0,), (3,), (1,)], count) == [[], ["x0", "x1", "x2"], ["x0"]]


def own_pid(_: int):
    yield os.getpid()


def test_processes_are_reused_if_asked():
    def pids(**options):
        return {
            pid
            for _, pid in filter(
                None, processes.run(own_pid, [(i,) for i in range(4)], 1, **options)
            )
        }

    assert len(pids(is_reused=True)) == 1 and len(pids()) == 4


def test_the_last_value_says_how_a_call_ended():
    endings = [
        values[-1]
        for values in values_of([("refuses",), ("killed",), ("exits",), ("raises",)], ends)
    ]
    assert isinstance(endings[0], UserError) and str(endings[0]) == "no such file"
    assert endings[1] == processes.Died(-signal.SIGKILL, "last words")
    assert endings[2] == processes.Died(0, "last words")
    assert endings[3].exit_code == 1 and endings[3].output.endswith("RuntimeError: a bug")


def test_closing_kills_the_processes(tmp_path):
    path = tmp_path / "pid"
    results = processes.run(hangs, [(path,)], 1)
    while not path.exists() or not path.read_text():
        assert next(results) is None
    results.close()
    assert not (Path("/proc") / path.read_text()).exists()


_SCRIPT = """
import sys
from pathlib import Path
from jaxlc.core import processes
from tests.core.test_processes import hangs
print("main module")
for _ in processes.run(hangs, [(Path(sys.argv[1]),)], 1):
    pass
"""


def test_a_script_without_main_guard_is_run_once_and_its_death_ends_the_process(tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(_SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    parent = subprocess.Popen(
        [sys.executable, script, path], env=environment, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: path.exists() and path.read_text())
    parent.kill()
    assert parent.communicate(timeout=TIMEOUT_SECONDS)[0] == "main module\n"
    stat = Path("/proc") / path.read_text() / "stat"
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
