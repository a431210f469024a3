"""Calls in processes of their own: values, errors, deaths, and what is left when the caller ends."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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

import pytest
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


def test_files_of_the_working_directory_do_not_replace_modules(tmp_path, monkeypatch):
    """The command `jaxlc` does not find them either."""
    for name in ("signal.py", "multiprocessing.py", "jaxlc/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *filter(None, sys.path)])
    assert values_of([(1,)], count) == [["x0"]]
    program = [*processes.PYTHON, "-c", "import jaxlc; print(jaxlc.__file__)"]
    done = subprocess.run(
        program, env=processes.child_environment(), capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(ROOT)


def test_missing_directory_of_temporary_files_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(UserError, match=r"temporary files \(No such file.*\): set TMPDIR"):
        values_of([(1,)], count)


MEMINFO = "MemTotal: 100 kB\nMemAvailable:   80 kB\n"
FILES = {"max": "50000", "current": "40000", "stat": "anon 1\ninactive_file 5000\n"}
FILES_1 = {"limit_in_bytes": "50000", "usage_in_bytes": "40000", "stat": "total_inactive_file 5000"}


@pytest.mark.parametrize(
    ("own", "directory", "files"),
    [
        ("0::/", "", FILES),
        ("0::/system.slice/job_7/step_0", "system.slice/job_7", FILES),  # as of Slurm
        ("4:cpu:/x\n3:memory:/docker/1", "memory", FILES_1),  # of a container
        ("3:memory:/slurm/uid_1/job_7", "memory/slurm/uid_1/job_7", FILES_1),
    ],
)
def test_free_memory_is_limited_by_containers_and_jobs(own, directory, files, tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    assert processes.free_host_bytes(proc, cgroup) == 80 * 1024
    (proc / "self" / "cgroup").write_text(own)
    (cgroup / directory).mkdir(parents=True)
    for name, text in files.items():
        (cgroup / directory / f"memory.{name}").write_text(text)
    assert processes.free_host_bytes(proc, cgroup) == 15_000
    for limit in ("max\n", f"{2**63}"):
        (cgroup / directory / f"memory.{next(iter(files))}").write_text(limit)
        assert processes.free_host_bytes(proc, cgroup) == 80 * 1024
    assert processes.free_host_bytes(tmp_path, tmp_path) == processes.UNKNOWN_MEMORY


def test_workers_are_limited_by_affinity_quota_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    assert processes.num_cores(tmp_path, tmp_path) == 6
    for quota, cores in (("max 100000", 6), ("250000 100000", 3), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(quota)
        assert processes.num_cores(tmp_path, tmp_path) == cores
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:cpu,cpuacct:/docker/1")  # cgroup 1
    (directory := tmp_path / "cpu" / "docker" / "1").mkdir(parents=True)
    (tmp_path / "cpu.max").unlink()
    for quota, cores in (("-1", 6), ("250000", 3)):
        (directory / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (directory / "cpu.cfs_period_us").write_text("100000\n")
        assert processes.num_cores(tmp_path, tmp_path) == cores
    monkeypatch.setattr(processes, "num_cores", lambda: 6)
    for free_bytes, workers in ((2**40, 6), (5 * 2**30, 2), (0, 1)):
        monkeypatch.setattr(processes, "free_host_bytes", lambda free_bytes=free_bytes: free_bytes)
        assert processes.default_num_workers() == workers
