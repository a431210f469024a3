"""Runs a function on configs, each in its own process, so that a crash or an exception fails only that config.

Imports no jax, so that a worker process can set the environment before it imports jax.
"""

import contextlib
import multiprocessing
import os
import pickle
import re
import resource
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from jaxlc.config import Config
from jaxlc.core.errors import UserError

Row = dict[str, Any]
Work = Callable[[Config], Row]  # a module-level function, or a partial of one: it is pickled by name

# Host memory of one compilation: an 8B step for 64 GPUs took 0.65 GB (jax 0.10.1, kernel pallas); others take more.
_COMPILE_BYTES = 2 * 2**30
_POLL_SECONDS = 0.5


def run_in_processes(
    configs: Sequence[Config], work: Work, num_workers: int, is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, Row]]:
    """Runs `work` on every config, `num_workers` at a time; yields (index, row) in order of completion.

    Every row has a `status`: "done"; "refused" after a UserError; "failed" after any other exception, or if the process
    died. `reason` is the error message, empty if done.

    Args:
      is_over: called about twice a second; when it is true, running processes are killed and have no rows.
    """
    pending, running = deque(enumerate(configs)), []
    try:
        while (pending or running) and not is_over():
            while pending and len(running) < num_workers:
                running.append(_Worker.start(*pending.popleft(), work))
            ready = wait([worker.connection for worker in running], _POLL_SECONDS)
            for worker in [worker for worker in running if worker.connection in ready]:
                running.remove(worker)
                yield worker.index, worker.result()
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()
            worker.log.unlink()


def default_num_workers() -> int:
    """The number of concurrent compilations that cores and available host memory allow."""
    with contextlib.suppress(FileNotFoundError):  # /proc exists on Linux only; elsewhere use the number of cores
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available_bytes = 1024 * int(memory["MemAvailable"].split()[0])
        return max(1, min(_num_cores(), available_bytes // _COMPILE_BYTES))
    return _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker(NamedTuple):
    index: int
    process: multiprocessing.Process
    connection: Connection  # receives one row; closed without a row if the process dies
    log: Path  # stdout and stderr of the process, which would corrupt the progress display

    @classmethod
    def start(cls, index: int, config: Config, work: Work) -> "_Worker":
        context = multiprocessing.get_context("spawn")  # fork would copy JAX's locks, but not its threads
        receiver, sender = context.Pipe(duplex=False)
        descriptor, log = tempfile.mkstemp(prefix="jaxlc-worker-", suffix=".log")
        os.close(descriptor)
        process = context.Process(target=_main, args=(config, pickle.dumps(work), sender, log), daemon=True)
        with _sigint_blocked():
            process.start()
        sender.close()  # otherwise the receiver would not see the end of the process
        return cls(index, process, receiver, Path(log))

    def result(self) -> Row:
        try:
            row = self.connection.recv()
        except EOFError:
            row = None
        self.process.join()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        self.log.unlink()
        return row or dict(status="failed", reason=_exit_reason(self.process.exitcode, lines))


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in this context never receive SIGINT. The terminal sends Ctrl-C to all processes of a command;
    only the leading one must react, the workers would each print a traceback."""
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _main(config: Config, pickled_work: bytes, connection: Connection, log: str) -> None:
    """The main function of a worker process. Unpickling `work` imports its module, so its errors are caught too."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_exit_with_the_parent, daemon=True).start()
    start_seconds = time.perf_counter()
    try:
        row = dict(status="done", reason="", **pickle.loads(pickled_work)(config))
    except UserError as error:
        row = dict(status="refused", reason=str(error))
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        row = dict(status="failed", reason=f"{type(error).__name__}: {first_line}")
    row["seconds"] = time.perf_counter() - start_seconds
    row["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    connection.send(row)


def _exit_with_the_parent() -> None:
    """Exits when the parent process has died, since nothing would receive the row."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _exit_reason(exit_code: int, lines: Sequence[str]) -> str:
    """The error message for a process that exited without a row, with the end of its output: the errors of C++ code,
    which a list of all flags may follow, or the last line."""
    last_lines = "; ".join([line for line in lines if re.match(r"[EF]\d{4} ", line)][-2:] or lines[-1:])
    if exit_code >= 0:
        reason = f"the process exited with status {exit_code}"
    else:
        name = signal.Signals(-exit_code).name
        reason = f"the process was killed by {name}" + (" (possibly out of host memory)" if name == "SIGKILL" else "")
    return f"{reason}; its last output: {last_lines}" if last_lines else reason
