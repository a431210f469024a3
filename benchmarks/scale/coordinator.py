"""Process 0 of a run of many processes: its connections, and the requests to JAX's coordination
service.

The service, the rendezvous of jaxlc and all clients are real; the clients are threads of a few
programs on this machine. CPU seconds are those of process 0, so they do not depend on how long the
clients take.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax._src.lib import _jax

from jaxlc.config import RuntimeConfig
from jaxlc.preflight.findings import read_facts
from jaxlc.runtime import rendezvous
from jaxlc.runtime.rendezvous import Member
from jaxlc.runtime.watchdog import Row
from jaxlc.train.stragglers import COPY, PRODUCT, Times

_SECONDS = 600
_NUM_PROGRAMS = 8
_kept: list[Any] = []  # JAX aborts this program when its service ends
_PHASES = ("data", "callback", "export", "checkpoint copy", "checkpoint write")


def rows_of(process_id: int) -> dict[str, str]:
    """What a process of 8 GPUs publishes, by the use of the row."""
    host, place = f"gpu-node-{process_id:04}", "my_data.py:190 read_next_document"
    phases = Row(process_id, host, "devices", 123_456, 12.345678, place, time.time())
    times = Times(
        process_id, host, 123_456, 80.123456, {PRODUCT: [0.000412] * 8, COPY: [0.000212] * 8},
        dict.fromkeys(_PHASES, 1.234567),
    )  # fmt: skip
    return dict(phases=json.dumps(phases), times=json.dumps(times), facts=read_facts().to_json())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mib() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:"))


def connect(address: str, process_id: int) -> Any:
    """A client of the coordination service, as `jax.distributed.initialize` makes it."""
    client = _jax.get_distributed_runtime_client(
        address, process_id, init_timeout=_SECONDS, use_compression=True, heartbeat_timeout=10**7
    )
    client.connect()
    return client


def measure(
    num_processes: int, port: int, num_programs: int = _NUM_PROGRAMS
) -> list[dict[str, Any]]:
    """One row per part of the start; `num_processes` clients in `num_programs` programs, and
    process 0 here.
    """
    address, rows = f"127.0.0.1:{port}", []
    config = RuntimeConfig(
        num_processes=num_processes,
        process_id=0,
        coordinator_address=address,
        start_timeout_seconds=_SECONDS,
    )
    others = range(1, num_processes)
    parts = [others[index::num_programs] for index in range(num_programs)]
    programs = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.scale.coordinator",
                "worker",
                address,
                str(num_processes),
                *map(str, ids),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        for ids in parts
    ]
    for program in programs:  # all have imported JAX before the first measurement
        assert program.stdout is not None and program.stdout.readline() == "imported\n"

    def timed(what: str, function: Callable[[], Any], requests: int) -> Any:
        before = open_files(), resident_mib(), time.process_time(), time.perf_counter()
        result = function()
        seconds, cpu = time.perf_counter() - before[3], time.process_time() - before[2]
        size = len(result) if isinstance(result, bytes) else 0
        rows.append(
            dict(
                part=what,
                processes=num_processes,
                requests=requests,
                seconds=round(seconds, 2),
                cpu_seconds=round(cpu, 2),
                mib=round(resident_mib() - before[1], 1),
                open_files=open_files() - before[0],
                answer_kib=round(size / 1024),
            )  # fmt: skip
        )
        return result

    def start() -> None:
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("\n")
            program.stdin.flush()

    try:
        start()
        me = Member(0, num_processes, "node0", "0")
        links = timed("rendezvous", lambda: rendezvous.gather(config, me, print), num_processes - 1)
        service = _jax.get_distributed_runtime_service(
            address, num_processes, heartbeat_timeout=10**7
        )
        client = timed("connect to JAX's service", lambda: connect(address, 0), num_processes)

        def barrier(name: str) -> None:
            client.wait_at_barrier(name, 1000 * _SECONDS)

        def read(name: str) -> bytes:
            values = client.key_value_dir_get(f"{name}/")
            assert len(values) == num_processes
            return "".join(value for _, value in values).encode()

        barrier("ready")
        timed("barrier", lambda: barrier("barrier"), num_processes)
        for name, value in rows_of(0).items():
            client.key_value_set(f"{name}/0", value)
            timed(
                f"publish {name}", lambda name=name: barrier(f"{name} published"), 2 * num_processes
            )
            timed(f"read {name}", lambda name=name: read(name), 1)
        barrier("before hang")
        timed("all processes read phases", lambda: barrier("hang"), 2 * num_processes)
        _kept.extend([links, service, client])
    finally:
        for program in programs:
            program.kill()
    return rows


def _be_process(address: str, num_processes: int, process_id: int, end: threading.Event) -> None:
    """The counterpart of `measure`."""
    config = RuntimeConfig(
        num_processes=num_processes,
        process_id=process_id,
        coordinator_address=address,
        start_timeout_seconds=_SECONDS,
    )
    link = rendezvous.join(config, Member(process_id, num_processes, "node1", "0"), print)
    client = connect(address, process_id)
    for name in ("ready", "barrier"):
        client.wait_at_barrier(name, 1000 * _SECONDS)
    for name, value in rows_of(process_id).items():
        client.key_value_set(f"{name}/{process_id}", value)
        client.wait_at_barrier(f"{name} published", 1000 * _SECONDS)
    client.wait_at_barrier("before hang", 1000 * _SECONDS)
    client.key_value_dir_get("phases/")
    client.wait_at_barrier("hang", 1000 * _SECONDS)
    end.wait()
    del link


def main(arguments: list[str]) -> None:
    if arguments[0] != "worker":
        num_processes, port, num_programs = map(int, arguments)
        for row in measure(num_processes, port, num_programs):
            print(json.dumps(row), flush=True)
        os._exit(0)
    _, address, count, *ids = arguments
    print("imported", flush=True)
    sys.stdin.readline()
    end = threading.Event()
    with ThreadPoolExecutor(len(ids)) as pool:
        for future in [
            pool.submit(_be_process, address, int(count), int(process_id), end)
            for process_id in ids
        ]:
            future.result()


if __name__ == "__main__":
    main(sys.argv[1:])
