"""Reads the device events of a trace that `jax.profiler` wrote (.xplane.pb), with `jax.profiler.ProfileData`.

GPUs: one plane per device, "/device:GPU:0", with one line per CUDA stream, "Stream #13(Compute)". Kernels and copies
have the statistics hlo_op (the HLO instruction), hlo_module and name (the path of the JAX operation); copies are named
MemcpyH2D, MemcpyD2H, MemcpyD2D or MemcpyP2P. CPU: the threads of "/host:CPU" have events with hlo_op and
device_ordinal. Ranges of `jax.profiler.StepTraceAnnotation` have the statistic step_num.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxlc.core.errors import UserError

_GPU_PLANE, _CPU_PLANE = re.compile(r"/device:GPU:\d+"), "/host:CPU"
_STREAM = "Stream #"
_SUFFIX = ".xplane.pb"


class TraceEvent(NamedTuple):
    """A kernel, a copy or a CPU operation."""

    name: str
    instruction: str  # the HLO instruction; "" if the profiler does not name it
    module: str  # the HLO module; "" as above
    op_name: str  # path of the JAX operation; "" as above
    start_seconds: float
    end_seconds: float


class Trace(NamedTuple):
    devices: dict[str, list[TraceEvent]]  # by device, ordered by start
    steps: tuple[int, ...]  # numbers of the steps that have a range, in order


def find(path: Path) -> Path:
    """The trace file at `path`, or the newest one in the directory `path`. Raises UserError if there is none."""
    if path.is_file():
        return path
    paths = sorted(path.rglob(f"*{_SUFFIX}"), key=lambda path: (path.parent.name, path.name), reverse=True)
    if not paths:
        raise UserError(f"no trace: {path} has no *{_SUFFIX} file; trace steps with --config.profile.steps=10:13")
    newest = [other for other in paths if other.parent == paths[0].parent]
    return min(newest)  # the first of several hosts


def read(path: Path) -> Trace:
    """The trace in a .xplane.pb file. Raises UserError if it cannot be read or has no device events."""
    try:
        data = ProfileData.from_file(str(path))
    except Exception as error:  # the parser raises its own types
        raise UserError(f"cannot read the trace {path}: {error}") from error
    return of_profile(data, str(path))


def of_profile(data: ProfileData, name: str) -> Trace:
    """The trace in `data`; `name` is for error messages. Planes and events are valid as long as `data` is."""
    devices: dict[str, list[TraceEvent]] = defaultdict(list)
    steps: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on a type of JAX 0.12, at its first use
        _collect(list(data.planes), devices, steps)
    ordered = {  # a device without events was not used by the traced program
        device: sorted(events, key=lambda event: event.start_seconds) for device, events in devices.items() if events
    }
    if not ordered:
        raise UserError(f"the trace {name} has no events of devices: it was recorded while no program ran")
    return Trace(ordered, tuple(sorted(steps)))


def _collect(planes: list[Any], devices: dict[str, list[TraceEvent]], steps: set[int]) -> None:
    """Adds the events and steps of `planes`. Events of the CPU count only where there is no GPU."""
    is_gpu = any(_GPU_PLANE.fullmatch(plane.name) for plane in planes)
    for plane in planes:
        if _GPU_PLANE.fullmatch(plane.name):
            for line in plane.lines:
                if line.name.startswith(_STREAM):
                    devices[plane.name].extend(_event(event, dict(event.stats)) for event in line.events)
        elif plane.name == _CPU_PLANE:
            for event, stats in _with_stats(plane):
                if "step_num" in stats:
                    steps.add(int(stats["step_num"]))
                elif "hlo_op" in stats and not is_gpu:
                    devices[f"/device:CPU:{stats.get('device_ordinal', 0)}"].append(_event(event, stats))


def _with_stats(plane: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if stats:
                yield event, stats


def _event(event: Any, stats: dict[str, Any]) -> TraceEvent:
    start_seconds = event.start_ns / 1e9
    return TraceEvent(
        name=event.name,
        instruction=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        op_name=str(stats.get("name", "")),
        start_seconds=start_seconds,
        end_seconds=start_seconds + event.duration_ns / 1e9,
    )
