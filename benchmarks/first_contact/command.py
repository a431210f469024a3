"""The command line: runs parts in processes of their own, so that none of them can stop the others."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags, logging

from benchmarks.first_contact import (
    constants,
    host_rows,
    kernel_rows,
    long_rows,
    loop_rows,
    rate_rows,
    ring_rows,
    rows,
    step_rows,
)
from benchmarks.first_contact.rows import Row, RowFile
from benchmarks.first_contact.sizes import DRY_RUN, Sizes
from jaxlc import runtime
from jaxlc.config import RuntimeConfig

CONSTANTS_FILE = "constants.json"
_SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_first_contact.py"
_NO_ROW = -1
_MIN_SECONDS = 20  # a process is not started for less


class Part(NamedTuple):
    rows: Callable[[Sizes, Path], Iterator[Row]]  # of the sizes and the directory of the output file
    has_process_per_row: bool  # for rows that need a new process: its variables, or the memory that JAX has reserved


def _part(make_rows: Callable[[Sizes], Iterator[Row]], has_process_per_row: bool = False) -> Part:
    return Part(lambda sizes, _: make_rows(sizes), has_process_per_row)


PARTS = {
    "env": _part(kernel_rows.environment_rows),
    "kernels": _part(kernel_rows.kernel_rows),
    "workspace": _part(long_rows.workspace_rows),
    "ring": _part(ring_rows.ring_rows),
    "rates": _part(rate_rows.rate_rows),
    "long": _part(long_rows.long_rows),
    "basics": _part(rate_rows.basic_rows),
    "steps": _part(step_rows.step_rows, True),
    "compile": _part(step_rows.compile_rows, True),
    "memory": _part(step_rows.memory_rows, True),
    "profile": Part(step_rows.profile_rows, True),
    "host": _part(host_rows.host_rows, True),
    "hoststep": _part(host_rows.host_step_rows, True),
    "save": _part(loop_rows.save_rows, True),
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    names = ", ".join(PARTS)
    flags.DEFINE_list("parts", list(PARTS), f"parts to run, in this order, of {names}", flag_values=values)
    flags.DEFINE_string("out", "runs/first_contact/rows.jsonl", "file to which rows are appended", flag_values=values)
    flags.DEFINE_float("seconds", 540.0, "no row is started that would not end within this time", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "small shapes in one process, on any device", flag_values=values)
    flags.DEFINE_string("child", "", "of a started process: the part it runs", flag_values=values)
    flags.DEFINE_integer("row", _NO_ROW, "of a started process: the index of its only row", flag_values=values)


def main(_: Sequence[str]) -> None:
    values = flags.FLAGS
    logging.set_verbosity(logging.WARNING)  # JAX notes each change of its cache directory
    deadline_seconds = time.monotonic() + values.seconds
    out = Path(values.out).absolute()
    sizes, file = DRY_RUN if values.dry_run else Sizes(), RowFile(out)
    unknown = [name for name in values.parts if name not in PARTS]
    if unknown:
        sys.exit(f"error: unknown part {unknown[0]!r}: expected some of {', '.join(PARTS)}")
    if values.child:
        _run_child(values.child, values.row, sizes, file, out.parent, deadline_seconds)
        return
    if values.dry_run:
        runtime.start(RuntimeConfig(simulated_devices=1))
    for name in values.parts:
        if values.dry_run:
            rows.run(name, PARTS[name].rows(sizes, out.parent), file, deadline_seconds)
        elif PARTS[name].has_process_per_row:
            _run_rows_in_processes(name, sizes, file, out, deadline_seconds)
        else:
            _run_process(name, _NO_ROW, {}, {}, file, out, deadline_seconds)
    measured = constants.from_rows(rows.read(sorted(out.parent.glob("*.jsonl"))))
    (out.parent / CONSTANTS_FILE).write_text(json.dumps(measured, indent=1) + "\n")
    print(f"{out}, {out.parent / CONSTANTS_FILE}")


def _run_child(name: str, index: int, sizes: Sizes, file: RowFile, directory: Path, deadline_seconds: float) -> None:
    part = PARTS[name]
    if not part.has_process_per_row:
        runtime.start(RuntimeConfig())
        rows.run(name, part.rows(sizes, directory), file, deadline_seconds)
        return
    row = list(part.rows(sizes, directory))[index]
    rows.run(name, [row], file, float("inf"))  # the starting process has checked the time


def _run_rows_in_processes(name: str, sizes: Sizes, file: RowFile, out: Path, deadline_seconds: float) -> None:
    for index, row in enumerate(PARTS[name].rows(sizes, out.parent)):
        left_seconds = deadline_seconds - time.monotonic()
        if row.seconds > left_seconds:
            file.write(name, row.labels, dict(skipped=f"takes about {row.seconds:.0f} s of {left_seconds:.0f} s left"))
        else:
            _run_process(name, index, row.labels, dict(row.environment), file, out, deadline_seconds)


def _run_process(
    name: str, index: int, labels: dict, environment: dict[str, str], file: RowFile, out: Path, deadline_seconds: float
) -> None:
    """Runs a part, or one row of it. A process that ends abnormally becomes a row with the end of its messages."""
    left_seconds = deadline_seconds - time.monotonic()
    if left_seconds < _MIN_SECONDS:
        file.write(name, labels, dict(skipped=f"{left_seconds:.0f} s left"))
        return
    command = [sys.executable, str(_SCRIPT), f"--child={name}", f"--row={index}", f"--out={out}"]
    command.append(f"--seconds={left_seconds}")
    log = out.with_suffix(".stderr.log")
    with log.open("ab") as messages:
        start = messages.tell()
        try:
            status = subprocess.run(
                command, env=os.environ | environment, stderr=messages, timeout=left_seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = "killed: out of time"
    if status != 0:
        tail = log.read_bytes()[start:].decode(errors="replace")[-rows.MAX_ERROR_CHARS :]
        file.write(name, labels, dict(error=f"process ended with {status}", messages=tail))


if __name__ == "__main__":
    define_flags()
    app.run(main)
