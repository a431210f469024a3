"""Prints the tables of the dated page `*-scale.md`: what processes of a run of 1,024 do at its
start.

    python -m benchmarks.scale --processes=1024

It needs the GPU compiler (the extra `plan`), 2 GiB of memory and about four minutes on two idle
cores.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.scale import checkpoint_files, first_batch

_PORT = 27_500


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes", type=int, default=1024, help="clients of the coordination service"
    )
    parser.add_argument(
        "--parts", default="coordinator,data,checkpoint,compile", help="which tables"
    )
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if "coordinator" in parts:
        for count in (arguments.processes // 8, arguments.processes):
            print_rows(
                json_lines("benchmarks.scale.coordinator", str(count), str(_PORT + count), "8")
            )
    if "data" in parts:
        with tempfile.TemporaryDirectory() as directory:
            first_batch.write_stores(Path(directory))
            ids = ("0", "511", "1023")
            print_rows(
                [
                    row
                    for i in ids
                    for row in json_lines("benchmarks.scale.first_batch", directory, i)
                ]
            )
    if "checkpoint" in parts:
        print_rows(checkpoint_files.rows(_PORT, (1, 2, 4), arguments.processes))
    if "compile" in parts:
        print_rows([compile_step()])


def json_lines(module: str, *arguments: str) -> list[dict[str, object]]:
    """What a program of this package prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compile_step() -> dict[str, object]:
    """Ahead-of-time compilation of the step for all GPUs, which every process does at its start
    without a cache.
    """
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "jaxlc.plan",
        "--config=1m:h100",
        f"--topology={first_batch.TOPOLOGY}",
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "plan.json")
        subprocess.run(
            [*command, *first_batch.SETTINGS, f"--json={path}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        compile_seconds = json.loads(path.read_text())["compile_seconds"]
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return dict(
        gpus=first_batch.TOPOLOGY,
        compile_seconds=round(compile_seconds, 1),
        plan_seconds=round(time.perf_counter() - start, 1),
        cpu_seconds=round(usage.ru_utime + usage.ru_stime, 1),
        peak_gib=round(usage.ru_maxrss / 2**20, 2),
    )


def print_rows(rows: list[dict[str, object]]) -> None:
    """A Markdown table."""
    print("| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |")
    print("| " + " | ".join("---" for _ in rows[0]) + " |")
    for row in rows:
        print(
            "| "
            + " | ".join(f"{x:,}" if isinstance(x, (int, float)) else str(x) for x in row.values())
            + " |"
        )
    print(flush=True)


if __name__ == "__main__":
    main()
