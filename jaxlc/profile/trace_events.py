"""Reads the device events of a trace that `jax.profiler` wrote (.xplane.pb), with
`jax.profiler.ProfileData`.

GPUs: one plane per device, "/device:GPU:0", with one line per CUDA stream, "Stream #13(Compute)".
Kernels and copies have the statistics hlo_op (the HLO instruction), hlo_module and name (the path
of the JAX operation); copies are named MemcpyH2D, MemcpyD2H, MemcpyD2D or MemcpyP2P. CPU: the
threads of "/host:CPU" have events with hlo_op and device_ordinal. Ranges of
`jax.profiler.StepTraceAnnotation` have the statistic step_num.

The class of an event is attention, matrix products, other kernels, communication or host copies.
With the text of the compiled step, it is the class of the event's instruction, so that measured and
estimated classes agree. Without it, it follows from the names of kernels, copies and JAX
operations; so does the class of kernels which a CUDA graph launches, since the profiler names the
graph or nothing as their instruction.
"""

import re
import warnings
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxlc.core import UserError
from jaxlc.core.scopes import EXPERTS
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.kernel_costs import MOSAIC, expert_kernel, kernel_cost
from jaxlc.hlo.parser import COLLECTIVES, Computation, Instruction, components, is_in_attention

_GPU_PLANE = re.compile(r"/device:GPU:\d+")
_CPU_PLANE = "/host:CPU"
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
    """The trace file at `path`, or the newest one in the directory `path`. Raises UserError if
    there is none.
    """
    if path.is_file():
        return path
    paths = sorted(
        path.rglob(f"*{_SUFFIX}"), key=lambda path: (path.parent.name, path.name), reverse=True
    )
    if not paths:
        raise UserError(
            f"no trace: {path} has no *{_SUFFIX} file; trace steps with --config.profile.steps=10:13"
        )
    newest = [other for other in paths if other.parent == paths[0].parent]
    return min(newest)  # the first of several hosts


def read(path: Path) -> Trace:
    """The trace in a .xplane.pb file. Raises UserError if it cannot be read or has no device
    events.
    """
    try:
        data = ProfileData.from_file(str(path))
    except Exception as error:  # the parser raises its own types
        raise UserError(f"cannot read the trace {path}: {error}") from error
    return trace_from(data, str(path))


def trace_from(data: ProfileData, name: str) -> Trace:
    """The trace in `data`; `name` is for error messages. Planes and events are valid as long as
    `data` is.
    """
    devices: dict[str, list[TraceEvent]] = defaultdict(list)
    steps: set[int] = set()
    with warnings.catch_warnings():
        # Python 3.12 on a type of JAX 0.12, at its first use
        warnings.simplefilter("ignore", DeprecationWarning)
        # Events of the CPU count only where there is no GPU.
        planes = list(data.planes)
        is_gpu = any(_GPU_PLANE.fullmatch(plane.name) for plane in planes)
        for plane in planes:
            if _GPU_PLANE.fullmatch(plane.name):
                for line in plane.lines:
                    if line.name.startswith(_STREAM):
                        devices[plane.name].extend(
                            _event(event, dict(event.stats)) for event in line.events
                        )
            elif plane.name == _CPU_PLANE:
                for event in (event for line in plane.lines for event in line.events):
                    stats = dict(event.stats)
                    if "step_num" in stats:
                        steps.add(int(stats["step_num"]))
                    elif "hlo_op" in stats and not is_gpu:
                        devices[f"/device:CPU:{stats.get('device_ordinal', 0)}"].append(
                            _event(event, stats)
                        )
    ordered = {  # a device without events was not used by the traced program
        device: sorted(events, key=lambda event: event.start_seconds)
        for device, events in devices.items()
        if events
    }
    if not ordered:
        raise UserError(
            f"the trace {name} has no events of devices: it was recorded while no program ran"
        )
    return Trace(ordered, tuple(sorted(steps)))


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


ATTENTION = "attention"
MATMUL = "matrix products"
OTHER = "other kernels"
# instead of by the copy engines, which need no multiprocessors
HOST_COPY_KERNEL = "host copies by kernels"
COMMUNICATION = "communication"
HOST_COPY = "host copies"
# If several events are in flight, the time counts for the first class of this order.
CLASSES = (ATTENTION, MATMUL, OTHER, HOST_COPY_KERNEL, COMMUNICATION, HOST_COPY)

# ranges around other events on CPU
_CONTROL_FLOW = ("while", "conditional", "call", "async-start", "async-done")
_HOST_MEMCPY = re.compile(r"Memcpy(H2D|D2H)")
_PEER_MEMCPY = re.compile(r"MemcpyP2P")
_EVENT_CLASSES_SUFFIX = re.compile(r"(-start|-done|-update)$")
_NUMBER = re.compile(r"(\.\d+)?$")
_BY_NAME = (  # names of kernels and HLO instructions, if the program is unknown
    (
        COMMUNICATION,
        re.compile(
            rf"nccl|nvshmem|{'|'.join(COLLECTIVES)}|ppermute|psum|all_gather|all_to_all", re.I
        ),
    ),
    (
        ATTENTION,
        re.compile(r"fmha|flash_|flash::|sdpa|cudnn.*attention|compute_dot_do_o|convert_dq", re.I),
    ),
    (MATMUL, re.compile(r"gemm|nvjet|cutlass|cublas|\bdot\b|xmma|Cijk_", re.I)),
)


class EventClasses:
    """The classes of the events of one compiled step."""

    def __init__(self, program: AnalyzedProgram | None):
        """
        Args:
          program: the compiled step. None: it is unknown.
        """
        self._program = program

    def class_of(self, event: TraceEvent) -> str | None:
        """One of CLASSES; None for the range of a loop, which contains other events."""
        if _HOST_MEMCPY.search(event.name):
            return HOST_COPY
        if _PEER_MEMCPY.search(event.name):
            return COMMUNICATION
        name = self.instruction_of(event)
        if name is not None:
            kind = self._class_of_instruction(name)
            if kind == HOST_COPY and not (event.name.startswith("Memcpy") or _is_range(event)):
                return HOST_COPY_KERNEL
            return kind
        if event.instruction.partition(".")[0] in _CONTROL_FLOW and _is_range(event):
            return None
        if MOSAIC in event.name:
            # Products of experts, or attention; where both are Mosaic kernels, JAX names those of
            # experts "body".
            has_experts, has_attention = self._mosaic_uses
            if EXPERTS in components(event.op_name) or has_experts > has_attention:
                return MATMUL
            if is_in_attention(event.op_name) or has_attention > has_experts:
                return ATTENTION
            return MATMUL if event.name.startswith("body") else ATTENTION
        if is_in_attention(event.op_name) and re.search(
            r"pallas_call|dot_general|fmha", event.op_name
        ):
            return ATTENTION
        text = f"{event.name} {event.instruction}"
        return next((kind for kind, pattern in _BY_NAME if pattern.search(text)), OTHER)

    def instruction_of(self, event: TraceEvent) -> str | None:
        """The name of the event's instruction in the program; None if it is not in it.

        The profiler names some asynchronous collectives without "-start". Kernels that a CUDA graph
        launches may have the graph, a call, as their instruction; the compiler names its kernels
        after their instructions.
        """
        start = _NUMBER.sub(lambda number: f"-start{number[0]}", event.instruction, count=1)
        known = next((name for name in (event.instruction, start) if name in self._locations), None)
        if known and (_is_range(event) or self._locations[known][1].opcode != "call"):
            return known
        return self._by_kernel_name.get(event.name)

    @cached_property
    def _mosaic_uses(self) -> tuple[bool, bool]:
        """Whether experts, and whether attention, are Mosaic kernels in the program."""
        calls = self._program.attention_calls if self._program else ()
        has_experts = any(
            expert_kernel(instruction) == "mosaic" for _, instruction in self._locations.values()
        )
        return has_experts, any(counted.call.kernel == "mosaic" for counted in calls)

    @cached_property
    def _by_kernel_name(self) -> dict[str, str]:
        return {re.sub(r"[.-]", "_", name): name for name in self._locations}

    @cached_property
    def _locations(self) -> dict[str, tuple[Computation, Instruction]]:
        """By name of the instruction, which is unique in a module."""
        return {
            instruction.name: (computation, instruction)
            for computation in self._program or ()
            for instruction in computation
        }

    @cached_property
    def _attention(self) -> set[str]:
        """Instructions of attention kernels: custom calls, and the instructions inside of loops."""
        names = set()
        computations = []
        for counted in self._program.attention_calls if self._program else ():
            names.add(counted.call.instruction.name)
            computations += counted.call.instruction.called
        while computations:
            for instruction in self._program.computations[computations.pop()]:
                names.add(instruction.name)
                computations += instruction.called
        return names

    @cached_property
    def _host_copies(self) -> set[str]:
        copies = (
            [copy for copies in self._program.host_copies.values() for copy in copies]
            if self._program
            else []
        )
        return {instruction.name for copy in copies for instruction in (copy.start, copy.done)}

    def _class_of_instruction(self, name: str) -> str | None:
        computation, instruction = self._locations[name]
        if _collective(self._program, instruction):
            return COMMUNICATION
        if name in self._host_copies:
            return HOST_COPY
        if instruction.opcode in _CONTROL_FLOW:
            return None
        if name in self._attention:
            return ATTENTION
        cost = kernel_cost(self._program, computation, instruction)
        return MATMUL if cost is not None and cost.flops else OTHER


def _collective(program: AnalyzedProgram, instruction: Instruction) -> bool:
    if _EVENT_CLASSES_SUFFIX.sub("", instruction.opcode) in COLLECTIVES:
        return True
    if instruction.opcode != "async-start":
        return False
    return any(
        inner.opcode in COLLECTIVES
        for name in instruction.called
        for inner in program.computations[name]
    )


def _is_range(event: TraceEvent) -> bool:
    """Whether the event is its instruction, as on CPU, and not a kernel that the instruction
    launches.
    """
    return event.name == event.instruction
