"""The command line: runs parts in processes of their own, so that no row can stop the others.

After a row that crashes, hangs or leaves a GPU that no longer works, a new process continues with
the next row.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from benchmarks.first_contact import (
    constants,
    expert_rows,
    fa3_rows,
    host_rows,
    kernel_rows,
    long_rows,
    long_run_rows,
    loop_rows,
    rate_rows,
    recurrence_rows,
    ring_rows,
    rows,
    step_rows,
)
from benchmarks.first_contact.rows import Row, RowFile
from benchmarks.first_contact.sizes import DRY_RUN, Sizes
from jaxlc.config import RuntimeConfig
from jaxlc.runtime.start import start

CONSTANTS_FILE = "constants.json"
_SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_first_contact.py"
_MIN_SECONDS = 20  # a process is not started for less
_POLL_SECONDS = 0.5
_DEVICE_FAILED = 75  # exit status of a process whose GPU no longer works; the row has its error


class Part(NamedTuple):
    # called with the sizes and the directory of the output file
    rows: Callable[[Sizes, Path], Iterator[Row]]
    # for rows that need a new process: its variables, or the memory that JAX has reserved
    has_process_per_row: bool
    environment: Mapping[str, str] = MappingProxyType({})  # variables of a process with all rows


def _part(
    make_rows: Callable[[Sizes], Iterator[Row]],
    has_process_per_row: bool = False,
    **environment: str,
) -> Part:
    return Part(lambda sizes, _: make_rows(sizes), has_process_per_row, environment)


PARTS = {  # the most important first
    "env": _part(kernel_rows.environment_rows),
    "fa3": _part(fa3_rows.fa3_rows, XLA_FLAGS=rows.FLAGS_WITHOUT_TRITON),
    "kernels": _part(kernel_rows.kernel_rows, XLA_FLAGS=rows.FLAGS_WITHOUT_TRITON),
    "rates": _part(rate_rows.rate_rows, XLA_FLAGS=rows.FLAGS_WITHOUT_TRITON),
    "basics": _part(rate_rows.basic_rows),
    "profile": Part(step_rows.profile_rows, True),
    "more_kernels": _part(kernel_rows.more_kernel_rows, XLA_FLAGS=rows.FLAGS_WITHOUT_TRITON),
    "more_rates": _part(rate_rows.more_rate_rows, XLA_FLAGS=rows.FLAGS_WITHOUT_TRITON),
    "experts": _part(expert_rows.expert_rows),
    "recurrence": _part(recurrence_rows.recurrence_rows),
    "steps": _part(step_rows.step_rows, True),
    "ring": _part(ring_rows.ring_rows),
    "workspace": _part(long_rows.workspace_rows),
    "long": _part(long_rows.long_rows),
    "memory": _part(step_rows.memory_rows, True),
    "compile": _part(step_rows.compile_rows, True),
    "host": _part(host_rows.host_rows, True),
    "hoststep": _part(host_rows.host_step_rows, True),
    "save": _part(loop_rows.save_rows, True),
    "long_run": _part(long_run_rows.long_run_rows, True),
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    names = ", ".join(PARTS)
    flags.DEFINE_list(
        "parts", list(PARTS), f"parts to run, in this order, of {names}", flag_values=values
    )
    flags.DEFINE_string(
        "out",
        "runs/first_contact/rows.jsonl",
        "file to which rows are appended",
        flag_values=values,
    )
    flags.DEFINE_float(
        "seconds",
        540.0,
        "no row is started that would not end within this time",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "dry_run", False, "small shapes in one process, on any device", flag_values=values
    )
    flags.DEFINE_string("child", "", "of a started process: the part it runs", flag_values=values)
    flags.DEFINE_integer("row", 0, "the index of the first row of each part", flag_values=values)


def main(_: Sequence[str]) -> None:
    values = flags.FLAGS
    logging.set_verbosity(logging.WARNING)  # JAX notes each change of its cache directory
    deadline_seconds = float("inf") if values.dry_run else time.monotonic() + values.seconds
    out = Path(values.out).absolute()
    sizes = DRY_RUN if values.dry_run else Sizes()
    file = RowFile(out, dict(dry_run=True) if values.dry_run else None)
    unknown = [name for name in values.parts if name not in PARTS]
    if unknown:
        sys.exit(f"error: unknown part {unknown[0]!r}: expected some of {', '.join(PARTS)}")
    if values.child:
        _run_child(values.child, values.row, sizes, file, out.parent, deadline_seconds)
        return
    # ends the processes, writes constants
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if values.dry_run:
        start(RuntimeConfig(simulated_devices=1))
    try:
        for name in values.parts:
            if values.dry_run:
                rows.run(
                    name,
                    PARTS[name].rows(sizes, out.parent),
                    file,
                    deadline_seconds,
                    first=values.row,
                )
            elif PARTS[name].has_process_per_row:
                _run_rows_in_processes(name, values.row, sizes, file, out, deadline_seconds)
            else:
                _run_part(name, values.row, file, out, deadline_seconds)
    finally:
        file.clear_started()
        _write_constants(out.parent, values.dry_run)
        print(f"{out}, {out.parent / CONSTANTS_FILE}")


def _write_constants(directory: Path, is_dry_run: bool) -> None:
    """Writes the constants of the rows in `directory`, except that a dry run and a measurement do
    not mix.
    """
    measured = rows.read(sorted(directory.glob("*.jsonl")))
    values = constants.from_rows(row for row in measured if row.get("dry_run", False) == is_dry_run)
    (directory / CONSTANTS_FILE).write_text(json.dumps(values, indent=1) + "\n")


def _run_child(
    name: str, index: int, sizes: Sizes, file: RowFile, directory: Path, deadline_seconds: float
) -> None:
    part = PARTS[name]
    if not part.has_process_per_row:
        start(RuntimeConfig())
        all_rows = part.rows(sizes, directory)
        rows.run(
            name, all_rows, file, deadline_seconds, first=index, after_error=_exit_if_device_failed
        )
        return
    row = list(part.rows(sizes, directory))[index]
    rows.run(name, [row], file, float("inf"))  # the starting process has checked the time


def _exit_if_device_failed() -> None:
    """After some errors, such as an illegal address, every later operation of the process on the
    GPU fails.
    """
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except jax.errors.JaxRuntimeError:
        sys.exit(_DEVICE_FAILED)


def _run_part(name: str, first: int, file: RowFile, out: Path, deadline_seconds: float) -> None:
    """Runs the rows of a part in one process, and those after a row that ends it in the next one."""
    next_row: int | None = first
    while next_row is not None:
        last = _run_process(
            name, next_row, {}, dict(PARTS[name].environment), file, out, deadline_seconds
        )
        next_row = None if last is None else last + 1


def _run_rows_in_processes(
    name: str, first: int, sizes: Sizes, file: RowFile, out: Path, deadline_seconds: float
) -> None:
    for index, row in itertools.islice(enumerate(PARTS[name].rows(sizes, out.parent)), first, None):
        left_seconds = deadline_seconds - time.monotonic()
        if row.seconds > left_seconds:
            file.write(
                name,
                row.labels,
                dict(skipped=f"takes about {row.seconds:.0f} s of {left_seconds:.0f} s left"),
            )
        else:
            _run_process(
                name, index, row.labels, dict(row.environment), file, out, deadline_seconds
            )


def _run_process(
    name: str,
    index: int,
    labels: dict,
    environment: dict[str, str],
    file: RowFile,
    out: Path,
    deadline_seconds: float,
) -> int | None:
    """Runs a part from a row on, or one row of it. An abnormal end becomes a row with the end of its messages.

    Returns:
      The index of the row that ended the process; None if it ended normally, or before its first row.
    """
    left_seconds = deadline_seconds - time.monotonic()
    if left_seconds < _MIN_SECONDS:
        file.write(name, labels, dict(skipped=f"{left_seconds:.0f} s left"))
        return None
    command = [sys.executable, str(_SCRIPT), f"--child={name}", f"--row={index}", f"--out={out}"]
    command.append(f"--seconds={left_seconds}")
    log = out.with_suffix(".stderr.log")
    file.clear_started()
    with log.open("ab") as messages:
        start = messages.tell()
        # A session of its own: the runs that a row starts are killed with it, and free the GPU's
        # memory.
        process = subprocess.Popen(
            command, env=os.environ | environment, stderr=messages, start_new_session=True
        )
        try:
            status = _wait(process, file, deadline_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes of the session have ended
                os.killpg(process.pid, signal.SIGKILL)
    if status == 0:
        return None
    started = file.started()
    if status != _DEVICE_FAILED:
        tail = log.read_bytes()[start:].decode(errors="replace")[-rows.MAX_ERROR_CHARS :]
        row_labels = labels if started is None else started.labels
        file.write(name, row_labels, dict(error=f"process ended with {status}", messages=tail))
    return None if started is None else started.index


def _wait(process: subprocess.Popen, file: RowFile, deadline_seconds: float) -> int | str:
    """The exit status of the process, or why its time is over."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        now, started = time.monotonic(), file.started()
        if now > deadline_seconds:
            return "killed: out of time"
        if started is not None and now - started.start_seconds > _limit_seconds(started.seconds):
            return f"killed: the row took more than {_limit_seconds(started.seconds):.0f} s"


def _limit_seconds(estimated_seconds: float) -> float:
    """The time after which a row hangs, much more than the estimate, which is an upper limit."""
    return 60 + 2 * estimated_seconds


if __name__ == "__main__":
    define_flags()
    app.run(main)
