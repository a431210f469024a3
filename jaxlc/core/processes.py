"""Runs calls of a function in processes of their own, several at a time, so that a crash ends only
one call. `run` yields what the calls return; `run_in_processes` runs a function on configs and
makes a row of each result or error.

A process neither is a fork, because JAX has threads, nor imports the main module of its parent, so
that scripts need no `if __name__ == "__main__"`. It exits when its parent dies. This module
imports no jax, so that a process can set the environment before it imports jax.
"""

import contextlib
import itertools
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from jaxlc.core.errors import UserError
from jaxlc.core.files import temporary_explained
from jaxlc.interrupts import start_thread

_POLL_SECONDS = 0.5
_MAIN = "from jaxlc.core.processes import main; main({descriptor})"


# Without -P, files of the working directory, such as a json.py, would precede Python's modules.
PYTHON = (sys.executable, "-P")


def child_environment() -> dict[str, str]:
    """The variables with which `PYTHON` finds the modules that this process finds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}


@dataclass(frozen=True)
class Died:
    """A process ended before its call did."""

    exit_code: int  # negative: the signal that killed it
    output: str  # of the process


def run(
    function: Callable[..., Iterable[Any]],
    calls: Sequence[tuple[Any, ...]],
    num_processes: int,
    *,
    is_reused: bool = False,
    environment: Mapping[str, str] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[tuple[int, Any] | None, None, None]:
    """Yields (number of the call, value) for each value of `function(*call)`, as soon as there is one.

    Closing the iterator kills the processes. The last value of a call may also be a UserError that it raised, or
    `Died`; other exceptions end its process with a traceback.

    Args:
      function: a function of a module that returns an iterable; it, the calls and the values are pickled.
      is_reused: a process runs further calls after the first one.
      environment: variables of the processes, besides the variables of this one.
      is_over: called about twice a second; when it is true, the processes are killed.
    Yields:
      None if there was no value for half a second.
    """
    waiting = deque(enumerate(calls))
    running: dict[Any, _Process] = {}  # by connection
    try:
        while (waiting or running) and not is_over():
            while waiting and len(running) < num_processes:
                process = _Process(environment or {})
                running[process.connection] = process
                process.begin(function, *waiting.popleft())
            ready = wait(list(running), _POLL_SECONDS)
            if not ready:
                yield None
            for connection in ready:
                process = running[connection]
                number = process.number
                value, is_last = process.receive()
                if is_last and value is None and is_reused and waiting:
                    process.begin(function, *waiting.popleft())
                elif is_last:
                    process.end()
                    del running[connection]
                if value is not None:
                    yield number, value
    finally:
        for process in running.values():
            process.kill()
            process.end()


class _Process:
    """One process; its standard output and errors go to a file, because they would corrupt the
    display of progress.
    """

    number = 0  # of its call

    def __init__(self, environment: Mapping[str, str]):
        self.connection, other_end = Pipe()
        with temporary_explained():
            self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `end`
        self._process = subprocess.Popen(
            [*PYTHON, "-c", _MAIN.format(descriptor=other_end.fileno())],
            stdin=subprocess.PIPE,  # closed when this process dies
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**child_environment(), **environment},
            pass_fds=[other_end.fileno()],
            # the terminal sends Ctrl-C to the group of a command; only its first process must react
            process_group=0,
        )
        other_end.close()  # otherwise the end of the process would not close the connection

    def begin(self, function: Callable[..., Any], number: int, call: tuple[Any, ...]) -> None:
        self.number = number
        with contextlib.suppress(BrokenPipeError):  # `receive` has the reason
            self.connection.send((function, call))

    def receive(self) -> tuple[Any, bool]:
        """A value, or None, and whether the call has ended."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            exit_code = self._process.wait()
            self._output.seek(0)
            return Died(exit_code, self._output.read().decode(errors="replace").strip()), True

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.connection.close()
        self._process.wait()
        self._process.communicate()  # closes standard input
        self._output.close()


def main(descriptor: int) -> None:
    """The main function of a process."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    start_thread(_exit_with_the_parent, "parent")
    while True:
        try:
            function, call = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent has no more calls
            return
        try:
            for value in function(*call):
                connection.send((value, False))
            connection.send((None, True))
        except UserError as error:
            connection.send((error, True))


def _exit_with_the_parent() -> None:
    os.read(0, 1)  # returns when standard input is closed: nothing is written to it
    os._exit(1)


Row = dict[str, Any]
# a module-level function, or a partial of one: it is pickled by name
Work = Callable[[Any], Row]

# Host memory of one compilation: an 8B step for 64 GPUs took 0.65 GB (jax 0.10.1, kernel pallas);
# others take more.
_COMPILE_BYTES = 2 * 2**30


def run_in_processes(
    configs: Sequence[Any],
    work: Work,
    num_workers: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Row]]:
    """Runs `work` on every config, `num_workers` at a time; yields (index, row) in order of
    completion.

    Every row has a `status`: "done"; "refused" after a UserError; "failed" after any other
    exception, or if the process died, which adds `exit_code`. `reason` is the error message, empty if done.

    Args:
      is_over: called about twice a second; when it is true, running processes are killed and have
        no rows.
    """
    pickled_work = pickle.dumps(work)
    calls = [(config, pickled_work) for config in configs]
    with contextlib.closing(run(_rows, calls, num_workers, is_over=is_over)) as results:
        for index, row in filter(None, results):
            if isinstance(row, Died):
                reason = _exit_reason(row.exit_code, row.output.splitlines())
                row = dict(status="failed", reason=reason, exit_code=row.exit_code)
            yield index, row


def default_num_workers() -> int:
    """The number of concurrent compilations that cores and available host memory allow."""
    return max(1, min(num_cores(), free_host_bytes() // _COMPILE_BYTES))


# hard limits of memory and what is used of them, in cgroup 2 and in cgroup 1
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# the quota and its period, in cgroup 2 and in cgroup 1
_QUOTA = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
UNKNOWN_MEMORY = 2**62  # more than any machine has


def num_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processor cores that this process may use: its affinity, and the quota of a container or job."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for directory in _cgroups(proc, cgroup):
        text = " ".join(system_text(directory / name) for name in _QUOTA)
        quota, _, period = text.strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Free memory of the machine, or less if the limit of a container, job or user leaves less.
    UNKNOWN_MEMORY where the system does not tell it, as on macOS.
    """
    meminfo = system_text(proc / "meminfo")
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    free = [limit - used for limit, used in memory_limits(proc, cgroup)]
    return min([*free, 1024 * int(match[1])] if match else free, default=UNKNOWN_MEMORY)


def memory_limits(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """The limits of containers, jobs and users for the memory of this process, and what they use, in bytes."""
    for directory in _cgroups(proc, cgroup):
        for names in _LIMITS:
            limit, used = (system_text(directory / name) for name in names)
            if limit.isdigit() and used.isdigit():
                # Pages of files count as used, but are dropped when memory is needed.
                stat = system_text(directory / "memory.stat")
                cached = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
                yield int(limit), int(used) - (int(cached[1]) if cached else 0)


def _cgroups(proc: Path, root: Path) -> Iterator[Path]:
    """Directories that may have limits of this process: of its cgroups and those above them. In a
    container the root is its own cgroup, whatever path the process has.
    """
    lines = system_text(proc / "self" / "cgroup").splitlines()
    own = [Path(line.split(":", 2)[-1].lstrip("/")) for line in lines]  # "0::/user.slice/a.scope"
    for path in {Path(), *own, *itertools.chain.from_iterable(path.parents for path in own)}:
        yield from (root / path, root / "memory" / path, root / "cpu" / path)


def system_text(path: Path) -> str:
    """The text of a file of the system; "" if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _rows(config: Any, pickled_work: bytes) -> Iterator[Row]:
    """The row of a config. Unpickling `work` imports its module, so its errors are caught too."""
    start_seconds = time.perf_counter()
    try:
        row: Row = dict(status="done", reason="", **pickle.loads(pickled_work)(config))
    except UserError as error:
        row = dict(status="refused", reason=str(error))
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        row = dict(status="failed", reason=f"{type(error).__name__}: {first_line}")
    row["seconds"] = time.perf_counter() - start_seconds
    # KiB on Linux
    row["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield row


def _exit_reason(exit_code: int, lines: Sequence[str]) -> str:
    """The error message for a process that exited without a row, with the end of its output: the
    errors of C++ code, which a list of all flags may follow, or the last line."""
    last_lines = "; ".join(
        [line for line in lines if re.match(r"[EF]\d{4} ", line)][-2:] or lines[-1:]
    )
    if exit_code >= 0:
        reason = f"the process exited with status {exit_code}"
    else:
        name = signal.Signals(-exit_code).name
        reason = f"the process was killed by {name}" + (
            " (possibly out of host memory)" if name == "SIGKILL" else ""
        )
    return f"{reason}; its last output: {last_lines}" if last_lines else reason
