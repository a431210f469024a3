"""Disturbs runs of several processes on this machine, and compares each with a run that is not
disturbed.

    python -m scripts.fault_drill --processes=2 --faults=stop,exception --out=runs/fault_drill

Trains a small model on CPU. The victim of each fault is process 0, and then the last process.
Prints one row per fault: the seconds until all processes that are not stopped have ended, their
statuses, whether the run, started again, ends with the same metrics and weights, bitwise, and the
last lines of the other processes than the victim, each once. The exit status is 1 if a row is not
as expected.
"""

import argparse
import contextlib
import datetime
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.kill_drill import differences

_HUNG = (75, -signal.SIGALRM)
# Name -> what happens in the victim after step 7, and the expected statuses of the processes that
# end.
FAULTS = {
    "stop": ("SIGSTOP", (75,)),  # the others can run Python code
    "exception": ("an exception", (1,)),
    "absent": ("does not enter the collectives of a step", _HUNG),
    "data": ("its data source blocks", _HUNG),
    "gil": ("a thread holds the interpreter lock", _HUNG),
    "directory": ("the directory of checkpoints becomes a file", (1,)),
    # Its writes fail at 16 KiB, as with `ulimit -f`, so the metrics and logs still fit.
    "disk": ("writes no more checkpoints", (1,)),
    "compile": ("compiles 45 s longer", (0,)),
    # Each process has a network namespace of its own, as if on a machine of its own.
    "network": ("its network interface is down", _HUNG),
}
DEADLINE_SECONDS = 15
_BRIDGE, _SUBNET, _INTERFACE = "jaxlc-drill", "10.213.77", "eth0"
_STEPS, _FAULT_STEP, _TIMEOUT_SECONDS = 24, 7, 300
_CONFIG = """
import ctypes
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

from jaxlc.config import defaults
from jaxlc.step.step import TrainStep
from jaxlc.train.step_profiler import StepProfiler

FAULT, OUT = os.environ.get("DRILL_FAULT", ""), Path(__file__).parent
IS_VICTIM = os.environ.get("DRILL_VICTIM") == os.environ["JAX_PROCESS_ID"]


def _block():
    (OUT / "disturbed").touch()
    while True:
        time.sleep(1)


def _disturb():
    (OUT / "disturbed").touch()
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "exception":
        raise RuntimeError("the fault of the drill")
    if FAULT == "absent":
        _block()
    if FAULT == "gil":
        ctypes.PyDLL(None).sleep(1000)
    if FAULT == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
    if FAULT == "network":
        subprocess.run(["ip", "link", "set", "{interface}", "down"], check=True)
    if FAULT == "directory":
        checkpoints = Path(os.environ["DRILL_WORKDIR"]) / "checkpoints"
        checkpoints.rename(checkpoints.with_name("moved"))
        checkpoints.touch()


def _patch():
    call, compile, batches = StepProfiler.__call__, TrainStep.compile, None

    def step(self, number, state, batch):
        time.sleep(0.2)
        if IS_VICTIM and number == {fault_step} + 1:
            _disturb()
        return call(self, number, state, batch)

    def slow_compile(self):
        compiled = compile(self)
        if IS_VICTIM and FAULT == "compile":
            time.sleep(45.0)
        return compiled

    StepProfiler.__call__, TrainStep.compile = step, slow_compile
    if IS_VICTIM and FAULT == "data":
        from jaxlc.train import loop

        def blocked(stream):
            for number, item in enumerate(stream, 1):
                if number == {fault_step} + 1:
                    _block()
                yield item

        phases = loop.watchdog.phases
        loop.watchdog.phases = lambda name, stream, **options: phases(name, blocked(stream), **options)


_patch()


def get_config(variant):
    config = defaults()
    config.model.update(vocab_size=257, num_layers=1, model_dim=32, ffn_dim=64)
    config.model.attention.update(num_heads=4, num_kv_heads=2, head_dim=8)
    num_processes = int(os.environ["JAX_NUM_PROCESSES"])
    config.mesh.fsdp = config.runtime.simulated_devices = num_processes
    config.train.global_batch_size = config.train.eval_sequences = num_processes
    config.data.sources = (str(OUT / "corpus"),)
    config.data.cache_dir = str(OUT / "cache")
    config.data.seq_len = 64
    config.data.eval_fraction = 0.3
    config.train.update(steps={steps}, eval_every_steps=12, checkpoint_every_steps=4)
    if {is_local}:
        config.train.update(local_checkpoints=str(OUT / "local"), local_checkpoint_every_steps=3)
    config.runtime.update(watchdog_factor=2.0, watchdog_floor_seconds={deadline}, heartbeat_seconds=10)
    return config
"""


class Row(NamedTuple):
    """The result of one fault."""

    fault: str
    victim: int
    seconds: float  # from the fault to the end of the last process
    statuses: tuple[int, ...]  # of the processes that ended
    last_lines: tuple[str, ...]  # of the other processes than the victim, without repetitions
    is_resumed_identical: bool

    @property
    def is_expected(self) -> bool:
        in_time = self.seconds < DEADLINE_SECONDS + 30 or self.fault == "compile"
        return (
            in_time
            and set(self.statuses) <= set(FAULTS[self.fault][1])
            and self.is_resumed_identical
        )


def prepare(out: Path, *, is_local: bool = False) -> None:
    """Writes the config and the corpus to `out`; with `is_local` for runs with local checkpoints."""
    (out / "corpus").mkdir(parents=True)
    for i in range(16):
        (out / "corpus" / f"{i}.txt").write_text(
            " ".join(f"{word} {(i * word) % 17}" for word in range(20 + 11 * i))
        )
    text = _CONFIG
    for name, value in (
        ("{fault_step}", _FAULT_STEP),
        ("{steps}", _STEPS),
        ("{deadline}", DEADLINE_SECONDS),
        ("{interface}", _INTERFACE),
        ("{is_local}", is_local),
    ):
        text = text.replace(name, str(value))
    (out / "config.py").write_text(text)


def run_undisturbed(out: Path, num_processes: int) -> Path:
    """Trains without a fault; returns the work directory."""
    workdir = out / "undisturbed"
    statuses = [process.wait(_TIMEOUT_SECONDS) for process in _start(out, workdir, num_processes)]
    assert not any(statuses), (out / "undisturbed-0.log").read_text()
    return workdir


def disturb(out: Path, fault: str, victim: int, num_processes: int, undisturbed: Path) -> Row:
    """Runs with a fault, and then again without it."""
    workdir, marker = out / f"{fault}-{victim}", out / "disturbed"
    marker.unlink(missing_ok=True)
    variables = dict(DRILL_FAULT=fault, DRILL_VICTIM=str(victim))
    with contextlib.ExitStack() as stack:
        if fault == "network":
            stack.enter_context(hosts(num_processes))
        processes = _start(out, workdir, num_processes, has_hosts=fault == "network", **variables)
        stack.callback(_kill, processes)
        if fault != "compile":
            _wait_for(marker, processes)
        start = time.monotonic()
        others = [process for i, process in enumerate(processes) if i != victim or fault != "stop"]
        statuses = tuple(process.wait(_TIMEOUT_SECONDS) for process in others)
        seconds = time.monotonic() - start
    logs = [out / f"{workdir.name}-{i}.log" for i in range(num_processes) if i != victim]
    last_lines = tuple(dict.fromkeys(log.read_text().splitlines()[-1] for log in logs))
    if fault == "directory":
        (workdir / "checkpoints").unlink(missing_ok=True)
        (workdir / "moved").rename(workdir / "checkpoints")
    statuses_again = [
        process.wait(_TIMEOUT_SECONDS)
        for process in _start(out, workdir, num_processes, logs="again")
    ]
    is_identical = not any(statuses_again) and not differences(undisturbed, workdir, _STEPS)
    return Row(fault, victim, seconds, statuses, last_lines, is_identical)


@contextlib.contextmanager
def hosts(num_processes: int) -> Iterator[None]:
    """A network namespace for each process, connected by a bridge; needs root and `ip` of iproute2.

    In it the name of this machine is the address of the namespace, which Gloo looks up.

    Raises:
      PermissionError: namespaces are not permitted here, or there is no `ip`.
    """

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)

    names = [f"{_BRIDGE}-{i}" for i in range(num_processes)]
    files = [Path("/etc/netns") / name / "hosts" for name in names]
    with contextlib.ExitStack() as stack:
        try:
            ip(f"link add {_BRIDGE} type bridge")
            stack.callback(ip, f"link del {_BRIDGE}")
            ip(f"link set {_BRIDGE} up")
            for i, (name, file) in enumerate(zip(names, files)):
                ip(f"netns add {name}")
                stack.callback(ip, f"netns del {name}")
                ip(f"link add jaxlc{i} type veth peer name {_INTERFACE} netns {name}")
                # at once; with its namespace it would be later
                stack.callback(ip, f"link del jaxlc{i}")
                ip(f"link set jaxlc{i} master {_BRIDGE} up")
                ip(f"-n {name} addr add {_SUBNET}.{i + 1}/24 dev {_INTERFACE}")
                ip(f"-n {name} link set {_INTERFACE} up")
                ip(f"-n {name} link set lo up")
                file.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(shutil.rmtree, file.parent)
                file.write_text(f"127.0.0.1 localhost\n{_SUBNET}.{i + 1} {socket.gethostname()}\n")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip()
            raise PermissionError(f"no network namespaces: {reason}") from None
        yield


def _start(
    out: Path,
    workdir: Path,
    num_processes: int,
    *,
    logs: str = "",
    has_hosts: bool = False,
    **variables: str,
) -> list[subprocess.Popen]:
    """Starts the processes of a run; with `has_hosts` in the namespaces of `hosts`."""
    command = [
        sys.executable,
        "-m",
        "jaxlc.train",
        f"--config={out / 'config.py'}",
        f"--workdir={workdir}",
    ]
    environment = {
        **os.environ,
        "JAX_NUM_PROCESSES": str(num_processes),
        "DRILL_WORKDIR": str(workdir),
        "JAX_COORDINATOR_ADDRESS": f"{f'{_SUBNET}.1' if has_hosts else '127.0.0.1'}:{_free_port()}",
        **variables,
    }
    processes = []
    for i in range(num_processes):
        with (out / f"{workdir.name}{logs}-{i}.log").open("w") as log:
            environment["JAX_PROCESS_ID"] = str(i)
            place = ["ip", "netns", "exec", f"{_BRIDGE}-{i}"] if has_hosts else []
            output = dict(stdout=log, stderr=subprocess.STDOUT)
            processes.append(subprocess.Popen([*place, *command], env=environment, **output))
    return processes


def _kill(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _wait_for(marker: Path, processes: Sequence[subprocess.Popen]) -> None:
    end = time.monotonic() + _TIMEOUT_SECONDS
    while not marker.exists():
        if time.monotonic() > end or all(process.poll() is not None for process in processes):
            raise RuntimeError("the fault did not happen")
        time.sleep(0.05)


def _free_port() -> int:
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}; default: all"
    )
    parser.add_argument(
        "--local", action="store_true", help="saves a local checkpoint every 3 steps as well"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fault_drill"), help="a new directory"
    )
    flags = parser.parse_args()
    out, last = flags.out.absolute(), flags.processes - 1
    import jax

    print(
        f"{datetime.date.today()}: {flags.processes} processes, Python {platform.python_version()},",
        end=" ",
    )
    print(f"JAX {jax.__version__}; deadline {DEADLINE_SECONDS} s", flush=True)
    prepare(out, is_local=flags.local)
    undisturbed = run_undisturbed(out, flags.processes)
    print("| fault | victim | seconds | statuses | resumed identical | last lines |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    are_expected = []
    for fault in flags.faults.split(","):
        for victim in (0, last):
            try:
                row = disturb(out, fault, victim, flags.processes, undisturbed)
            except PermissionError as error:
                print(f"| {fault} | {victim} | | | | skipped: {error} |", flush=True)
                continue
            are_expected.append(row.is_expected)
            statuses = ", ".join(map(str, row.statuses))
            identical = "yes" if row.is_resumed_identical else "no"
            note = "" if row.is_expected else " NOT EXPECTED"
            lines = "<br>".join(f"`{line}`" for line in row.last_lines)
            lines = lines.replace(str(out), "OUT").replace(socket.gethostname(), "HOST")
            print(
                f"| {fault} | {victim} | {row.seconds:.0f} | {statuses}{note} | {identical} | {lines} |",
                flush=True,
            )
    return 0 if all(are_expected) else 1


if __name__ == "__main__":
    sys.exit(main())
