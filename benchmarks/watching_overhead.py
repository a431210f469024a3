"""Measures what the watchdog, the comparison of processes and the metrics cost: rounds of runs of
quickstart.

    python -m benchmarks.watching_overhead --rounds=6 --out=runs/watching_overhead

Each round has three runs, in turn in the reverse order. off: without the watchdog and measurements
of devices, and with a row of metrics every 10 steps. rows: a row at each step. all: also the
watchdog, and a measurement of the devices every 10 steps. Evaluation and checkpoints are after the
last step. Prints the wall time and CPU time of a step, from step 20 to the last, and the means of
the ratios to off with their 95% intervals. A last run, all, times the functions and threads of each
part inside the process; its values are the CPU time per step of the whole run.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

# the first measurement of the devices, at step 10, compiles its program
_FIRST_STEP, _STEPS = 20, 50
_ALL = {"train.steps": _STEPS, "train.eval_every_steps": 0, "train.eval_sequences": 1}
_OFF = {
    "runtime.straggler_every_steps": 0,
    "runtime.watchdog_factor": 0,
    "train.log_every_steps": 10,
}
_SETTINGS = {
    "off": _OFF,
    "rows": _OFF | {"train.log_every_steps": 1},
    "all": {"runtime.straggler_every_steps": 10},
}
_CONFIG = """
import atexit
import collections
import json
import os
import time
from pathlib import Path

from jaxlc.config import read_config
from jaxlc.runtime.watchdog import Watchdog
from jaxlc.train.reports.metrics import MetricsLog
from jaxlc.train.reports.metrics import PendingMetrics
from jaxlc.train.stragglers import Stragglers

fetch, close, seconds = PendingMetrics.fetch, Watchdog.close, collections.Counter()


def time_calls(part, owner, *names):
    for name in names:

        def timed(*args, call=getattr(owner, name), **options):
            start = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                seconds[part] += time.thread_time() - start

        setattr(owner, name, timed)


def timed_close(self):
    seconds["thread of the watchdog"] += time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
    close(self)


def timed_fetch(self, until):
    fetched = fetch(self, until)
    with (Path(__file__).parent / "times.txt").open("a") as out:
        print(until, time.perf_counter(), time.process_time(), file=out)
    return fetched


PendingMetrics.fetch = timed_fetch
if "WATCHING_INSIDE" in os.environ:
    time_calls("calls of the watchdog", Watchdog, "_enter", "_add_duration", "_seconds_allowed")
    time_calls("rows of metrics", MetricsLog, "write")
    time_calls("comparison and measurement of devices", Stragglers, "measure")
    Watchdog.close = timed_close
    atexit.register(lambda: Path(__file__).with_name("inside.json").write_text(json.dumps(seconds)))


def get_config(variant):
    return read_config("quickstart")
"""
_STUDENT_T = {
    2: 12.7,
    3: 4.3,
    4: 3.18,
    5: 2.78,
    6: 2.57,
    7: 2.45,
    8: 2.36,
    9: 2.31,
    10: 2.26,
    11: 2.23,
    12: 2.2,
}


def seconds_per_step(directory: Path, name: str, **variables: str) -> tuple[float, float]:
    """Trains in a new process with environment `variables`.

    Returns the wall time and CPU time of a step, means from `_FIRST_STEP` to the last.
    """
    directory.mkdir(parents=True)
    (directory / "config.py").write_text(_CONFIG)
    settings = _ALL | _SETTINGS[name]
    command = [
        sys.executable,
        "-m",
        "jaxlc.train",
        f"--config={directory}/config.py",
        f"--workdir={directory}/run",
    ]
    command += [f"--config.{path}={value}" for path, value in settings.items()]
    with (directory / "log.txt").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env=os.environ | variables)
    rows = [
        tuple(map(float, line.split()))
        for line in (directory / "times.txt").read_text().splitlines()
    ]
    times = {int(step): (wall, cpu) for step, wall, cpu in rows}
    wall, cpu = (
        (last - first) / (_STEPS - _FIRST_STEP)
        for first, last in zip(times[_FIRST_STEP], times[_STEPS])
    )
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=6, choices=sorted(_STUDENT_T), help="rounds (default: 6)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/watching_overhead"), help="a new directory"
    )
    flags = parser.parse_args()
    import jax

    print(
        f"{datetime.date.today()}: Python {platform.python_version()}, JAX {jax.__version__}, quickstart",
        flush=True,
    )
    ratios: dict[str, list[tuple[float, float]]] = {"rows": [], "all": []}
    for number in range(flags.rounds):
        names = list(_SETTINGS)[:: 1 if number % 2 == 0 else -1]
        seconds = {
            name: seconds_per_step(flags.out.absolute() / f"{number}-{name}", name)
            for name in names
        }
        for name, values in ratios.items():
            (wall, cpu), (off_wall, off_cpu) = seconds[name], seconds["off"]
            values.append((wall / off_wall, cpu / off_cpu))
        cells = (f"{name} {wall:.4f} s, CPU {cpu:.4f} s" for name, (wall, cpu) in seconds.items())
        print("; ".join(cells), flush=True)
    for name, values in ratios.items():
        for kind, of_kind in zip(("wall time", "CPU time"), zip(*values)):
            interval = _STUDENT_T[len(of_kind)] * statistics.stdev(of_kind) / len(of_kind) ** 0.5
            print(f"{name} / off, {kind}: {statistics.mean(of_kind):.4f} +- {interval:.4f}")
    _, cpu = seconds_per_step(flags.out.absolute() / "inside", "all", WATCHING_INSIDE="1")
    print(f"inside a run of all, whose step takes {cpu:.3f} s of CPU time, ms per step:")
    for part, value in json.loads((flags.out / "inside" / "inside.json").read_text()).items():
        print(f"  {part}: {1e3 * value / _STEPS:.3f}")


if __name__ == "__main__":
    main()
