"""Prints the table of benchmarks/*-fuzz.md: `python -m tests.fuzz.table --cases=1000`.

Each reader runs in a process of its own, which ends it if it crashes.
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys

from tests.fuzz.cases import run_cases
from tests.fuzz.readers import READERS

_TIMEOUT_SECONDS = 3600


def _row(name: str, num_cases: int) -> str:
    command = [sys.executable, "-m", "tests.fuzz.table", f"--cases={num_cases}", f"--reader={name}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment
    )
    if run.returncode:
        print(f"{name}: {run.stderr[-3000:]}", file=sys.stderr)
        return f"| {name} | | | | | 1: status {run.returncode} |"
    return run.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=1000, help="of each reader; slow ones have fewer"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--reader", choices=READERS, help="only this one, in this process")
    flags = parser.parse_args()
    if flags.reader:
        outcome = run_cases(READERS[flags.reader], flags.cases)
        print(
            f"| {flags.reader} | {outcome.num_cases:,} | {outcome.num_errors:,} | {outcome.max_seconds:.2f} s |"
            f" {outcome.growth_mib:,.0f} MiB | 0 |"
        )
        return
    print(
        "| reader | cases | errors | slowest | memory | crashes |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    with concurrent.futures.ThreadPoolExecutor(flags.processes) as executor:
        for row in executor.map(lambda name: _row(name, flags.cases), READERS):
            print(row, flush=True)


if __name__ == "__main__":
    main()
