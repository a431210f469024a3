"""Names slow processes and devices. Collectives make the step times of all processes equal, so they
do not show which one the others wait for.

Every few steps each process times a fixed product and a copy to the host on each of its devices,
without a collective, and publishes these and the seconds that it spent on data, callbacks and
checkpoints, in the key-value store of JAX's coordinator. Process 0 reads them at the next
measurement, when all of them are there.
"""

import json
import math
import socket
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc._jax_internals import coordination_client
from jaxlc.config import RuntimeConfig
from jaxlc.core import Log
from jaxlc.interrupts import call_within
from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import DEVICES
from jaxlc.train.callbacks import is_period

TIMES_FILE = "process_times.jsonl"  # in the workdir
PRODUCT = "product"
COPY = "copy"
# The phases of a process that do not contain waiting for other processes.
_PHASES = ("data", "callback", "export")
# Events of Orbax, for the part of this process: name -> the time until a step can continue, and the
# time to write.
_COPIED = "checkpoint copy"
_WRITTEN = "checkpoint write"
_CHECKPOINT_EVENTS = {
    "/jax/orbax/write/blocking_d2h_duration_secs": _COPIED,
    "/jax/orbax/write/background_ts_duration_secs": _WRITTEN,
}
# Not DEVICES, in which the others wait for the slowest process. Not _WRITTEN: files are written in the background, so
# parts of one checkpoint can fall into two measurements.
_COMPARED = (*_PHASES, _COPIED, PRODUCT, COPY)
_PREFIX = "jaxlc/times/"
_SECONDS = 5.0  # limit of a call to the coordinator, which may hang
_MAX_SHARE = 1e-3  # of the time, for the measurements of devices
_REPEATS = 3
_DIGITS = 6  # after the decimal point of published seconds: the file has a row per process
NUM_PRODUCTS = 16  # one after the other, in one measurement
# Smaller differences are noise: in seconds (simulated devices share the cores), and as a share of
# the time.
_LEAST_CPU_SECONDS = 0.05
_LEAST_DEVICE_SECONDS = 2e-4
_LEAST_SHARE = 0.02
# Side and dtype of the square matrices. 8 MB on a GPU; 0.27 TFLOP take about 0.4 ms on an H100
# (estimated).
_CPU_OPERAND = (128, jnp.dtype(jnp.float32))
_GPU_OPERAND = (2048, jnp.dtype(jnp.bfloat16))


class Times(NamedTuple):
    """What a process publishes. Times are in seconds."""

    process_id: int
    host: str
    step: int
    seconds: float  # since the measurement before
    # PRODUCT, COPY -> time of each local device; empty: not measured
    devices: dict[str, list[float]]
    phases: dict[str, float]  # seconds in each phase since the measurement before


class Slow(NamedTuple):
    """A process that is slower than the median of all processes, or one of its devices."""

    times: Times
    cause: str  # a phase, PRODUCT or COPY
    device: int | None  # index among the devices of the process; None: a phase
    seconds: float
    median_seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / max(self.median_seconds, 1e-9)


class Stragglers:
    """Measures and compares the processes of a run; process 0 writes TIMES_FILE and logs which ones
    are slow.
    """

    def __init__(self, config: RuntimeConfig, workdir: Path, log: Log):
        """
        Args:
          log: prints a line.
        """
        self._every = config.straggler_every_steps
        self._factor = config.straggler_factor
        self._log = log
        self._client = coordination_client()
        self._path = workdir / TIMES_FILE
        self._host = socket.gethostname()
        self._number = 0
        self._published: Times | None = None
        self._checkpoint_seconds = dict.fromkeys(_CHECKPOINT_EVENTS.values(), 0.0)
        self._phases_before: dict[str, float] = {}
        self._last = self._last_probe = time.monotonic()
        self._probe_seconds = 0.0
        if self._every:
            jax.monitoring.register_event_duration_secs_listener(self._listen)

    def measure(self, step: int) -> dict[str, float]:
        """Called between steps, when the devices are idle; returns metrics of the slowest process,
        on process 0.

        At other steps than every n-th, such as the last one, it only compares what was published.
        """
        found = self._compare()
        if is_period(step, self._every):
            self._publish(self._own_times(step))
        if not found:
            return {}
        for slow in found:
            self._log(_line(slow))
        worst = max(found, key=lambda slow: slow.ratio)
        return {"slowest/process": worst.times.process_id, "slowest/ratio": worst.ratio}

    def close(self) -> None:
        if self._every:
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if (name := _CHECKPOINT_EVENTS.get(event)) is not None:
            self._checkpoint_seconds[name] += duration_secs

    def _own_times(self, step: int) -> Times:
        start = time.monotonic()
        devices: dict[str, list[float]] = {}
        if start - self._last_probe >= self._probe_seconds / _MAX_SHARE:
            devices = device_times(jax.local_devices())
            self._probe_seconds = time.monotonic() - start
            self._last_probe = time.monotonic()
        totals = (
            dict.fromkeys((*_PHASES, DEVICES), 0.0)
            | watchdog.phase_seconds()
            | self._checkpoint_seconds
        )
        names = (*_PHASES, DEVICES, _COPIED, _WRITTEN)
        phases = {name: totals[name] - self._phases_before.get(name, 0.0) for name in names}
        seconds = start - self._last
        self._phases_before = totals
        self._last = time.monotonic()
        devices = {
            name: [round(time, _DIGITS) for time in times] for name, times in devices.items()
        }
        phases = {name: round(time, _DIGITS) for name, time in phases.items()}
        return Times(
            jax.process_index(), self._host, step, round(seconds, _DIGITS), devices, phases
        )

    def _publish(self, times: Times) -> None:
        # Two keys in turn: a process writes one again after the devices of all have run more steps, and process 0
        # reads it before it dispatches these.
        self._number += 1
        self._published = times
        if (client := self._client) is not None:
            key = f"{_PREFIX}{self._number % 2}/{times.process_id}"
            call_within(
                _SECONDS, lambda: client.key_value_set(key, json.dumps(times), allow_overwrite=True)
            )

    def _compare(self) -> list[Slow]:
        """Compares what was published at the measurement before, on process 0; empty if none is
        slow.
        """
        own = self._published
        self._published = None
        if own is None or jax.process_index() != 0:
            return []
        rows = [own]
        if (client := self._client) is not None:
            values = (
                call_within(
                    _SECONDS, lambda: client.key_value_dir_get(f"{_PREFIX}{self._number % 2}/")
                )
                or []
            )
            rows = sorted(
                row
                for row in (Times(*json.loads(value)) for _, value in values)
                if row.step == own.step
            )
            rows = [_without_wait(row, rows[0]) for row in rows]
        with self._path.open("a") as out:
            out.write(json.dumps([row._asdict() for row in rows]) + "\n")
        return slow_ones(rows, self._factor, least_device_seconds(jax.default_backend()))


def slow_ones(rows: list[Times], factor: float, least_device_seconds: float) -> list[Slow]:
    """The slowest process or device of each kind of time, if it is slower than `factor` times the
    lower median.

    Args:
      least_device_seconds: smaller differences between devices do not count.
    """
    found = []
    for cause in _COMPARED:
        times = list(times_of(rows, cause))
        if len(times) < 2:
            continue
        median = statistics.median_low(seconds for _, _, seconds in times)
        row, device, seconds = max(times, key=lambda time: time[2])
        least = least_device_seconds if device is not None else _LEAST_SHARE * row.seconds
        if seconds > factor * median and seconds - median > least:
            found.append(Slow(row, cause, device, seconds, median))
    return found


def _without_wait(row: Times, first: Times) -> Times:
    """Without the time that the thread which writes a checkpoint waits for process 0, which makes
    the directory after its copy."""
    waited = max(0.0, first.phases[_COPIED] - row.phases[_COPIED])
    return row._replace(phases=row.phases | {_WRITTEN: max(0.0, row.phases[_WRITTEN] - waited)})


def times_of(rows: Iterable[Times], cause: str) -> Iterator[tuple[Times, int | None, float]]:
    """(process, its device or None, seconds) of each process, or of each device for PRODUCT and
    COPY.
    """
    for row in rows:
        if cause in row.phases:
            yield row, None, row.phases[cause]
        else:
            for device, seconds in enumerate(row.devices.get(cause, [])):
                yield row, device, seconds


def _line(slow: Slow) -> str:
    times = slow.times
    name = f"process {slow.times.process_id} on {slow.times.host}"
    if slow.device is not None:
        what = "a fixed matrix product" if slow.cause == PRODUCT else "a fixed copy to the host"
        took = f"{what} takes {1e3 * slow.seconds:.2f} ms, and {1e3 * slow.median_seconds:.2f} ms in the median"
        return f"step {times.step}: device {slow.device} of {name} is slow: {took} of all devices"
    took = f"{slow.cause} took {slow.seconds:.2f} s of the last {times.seconds:.1f} s"
    return f"step {times.step}: {name} is slow: {took}, and {slow.median_seconds:.2f} s in the median of all processes"


def least_device_seconds(platform: str) -> float:
    """Smaller differences between the times of devices are noise."""
    return _LEAST_CPU_SECONDS if platform == "cpu" else _LEAST_DEVICE_SECONDS


def operand(platform: str) -> tuple[int, np.dtype]:
    """Side and dtype of the square matrices that `device_times` multiplies and copies."""
    return _CPU_OPERAND if platform == "cpu" else _GPU_OPERAND


@jax.jit
def _products(x: jax.Array) -> jax.Array:
    """Products of square matrices, one after the other: [n, n]."""
    return jax.lax.fori_loop(0, NUM_PRODUCTS, lambda _, y: (y @ x) * (1.0 / x.shape[0]), x)


def device_times(devices: Iterable[jax.Device]) -> dict[str, list[float]]:
    """The least time of a few products and copies to the host on each device, one device after the
    other, in s.
    """
    times: dict[str, list[float]] = {PRODUCT: [], COPY: []}
    for device in devices:
        size, dtype = operand(device.platform)
        on_device = jax.device_put(np.ones((size, size), dtype), device)
        jax.block_until_ready(_products(on_device))  # compiles
        best = dict.fromkeys(times, math.inf)
        for _ in range(_REPEATS):
            start = time.perf_counter()
            result = jax.block_until_ready(_products(on_device))
            middle = time.perf_counter()
            jax.device_get(result)
            seconds = {PRODUCT: middle - start, COPY: time.perf_counter() - middle}
            best = {name: min(best[name], seconds[name]) for name in best}
        for name in best:
            times[name].append(best[name])
    return times
