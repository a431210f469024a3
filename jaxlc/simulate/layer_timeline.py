"""The simulated events of one layer, forward and backward, as plain data that a plan stores."""

from typing import NamedTuple

from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.op_names import is_in_attention, pass_of
from jaxlc.hlo.parser import Computation, Instruction
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import KERNELS, Event, events

LAYER_PASSES = ("forward", "backward")  # the backward of a layer includes its recomputation


class LayerEvent(NamedTuple):
    """A kernel, or several adjacent kernels of one kind, or a transfer. Times start with the layer's pass."""

    pass_name: str  # of LAYER_PASSES
    lane: str  # "kernels", or a link: "NVLink", "network", "to host", "from host"
    kind: str  # of kernels: "attention", "matrix products", "other kernels"; of a transfer: its opcode
    start_seconds: float
    end_seconds: float


def layer_timeline(program: AnalyzedProgram, model: TimeModel) -> tuple[LayerEvent, ...]:
    """The events of one layer, by pass and end. Empty if the program has no loop over layers."""
    timeline = []
    for pass_name in LAYER_PASSES:
        computation = layer(program, pass_name)
        if computation is not None:
            timeline += [LayerEvent(pass_name, *event) for event in _merged(events(program, model, computation))]
    return tuple(timeline)


def layer(program: AnalyzedProgram, pass_name: str) -> Computation | None:
    """The body of the loop over layers whose attention belongs to `pass_name`; None if there is no such loop."""
    for computation in program:
        if not program.execution_counts[computation.name] or computation is program.entry:
            continue
        passes = {pass_of(op.op_name) for op in computation if _runs_attention(program, op)}
        callers = (op for caller in program for op in caller if computation.name in op.called)
        if pass_name in passes and not any(is_in_attention(caller.op_name) for caller in callers):
            return computation
    return None


def _runs_attention(program: AnalyzedProgram, instruction: Instruction) -> bool:
    if instruction.opcode == "while":
        return is_in_attention(instruction.op_name)
    return instruction in program.attention_call_of


def _merged(timeline: list[Event]) -> list[Event]:
    """Joins each kernel that starts at the end of a kernel of its kind to that kernel: a layer has hundreds."""
    merged: list[Event] = []
    last_kernel = -1  # its index in `merged`
    for event in timeline:
        if event.lane == KERNELS:
            previous = merged[last_kernel] if last_kernel >= 0 else None
            if previous and previous.kind == event.kind and previous.end_seconds == event.start_seconds:
                merged[last_kernel] = previous._replace(end_seconds=event.end_seconds)
                continue
            last_kernel = len(merged)
        merged.append(event)
    return merged
