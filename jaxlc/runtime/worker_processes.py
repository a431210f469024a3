"""Runs a function on configs, each in its own process, so that a crash or an exception fails only
that config.

Imports no jax, so that a worker process can set the environment before it imports jax.
"""

import contextlib
import os
import pickle
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Config
from jaxlc.core import processes
from jaxlc.core.errors import UserError

Row = dict[str, Any]
# a module-level function, or a partial of one: it is pickled by name
Work = Callable[[Config], Row]

# Host memory of one compilation: an 8B step for 64 GPUs took 0.65 GB (jax 0.10.1, kernel pallas);
# others take more.
_COMPILE_BYTES = 2 * 2**30


def run_in_processes(
    configs: Sequence[Config],
    work: Work,
    num_workers: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Row]]:
    """Runs `work` on every config, `num_workers` at a time; yields (index, row) in order of
    completion.

    Every row has a `status`: "done"; "refused" after a UserError; "failed" after any other
    exception, or if the process died. `reason` is the error message, empty if done.

    Args:
      is_over: called about twice a second; when it is true, running processes are killed and have
        no rows.
    """
    pickled_work = pickle.dumps(work)
    calls = [(config, pickled_work) for config in configs]
    with contextlib.closing(processes.run(_rows, calls, num_workers, is_over=is_over)) as results:
        for index, row in filter(None, results):
            if isinstance(row, processes.Died):
                row = dict(
                    status="failed", reason=_exit_reason(row.exit_code, row.output.splitlines())
                )
            yield index, row


def default_num_workers() -> int:
    """The number of concurrent compilations that cores and available host memory allow."""
    # /proc exists on Linux only; elsewhere use the number of cores
    with contextlib.suppress(FileNotFoundError):
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available_bytes = 1024 * int(memory["MemAvailable"].split()[0])
        return max(1, min(_num_cores(), available_bytes // _COMPILE_BYTES))
    return _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rows(config: Config, pickled_work: bytes) -> Iterator[Row]:
    """The row of a config. Unpickling `work` imports its module, so its errors are caught too."""
    start_seconds = time.perf_counter()
    try:
        row = dict(status="done", reason="", **pickle.loads(pickled_work)(config))
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
