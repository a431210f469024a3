"""The simulated events of one layer, forward and backward, as plain data that a plan stores."""

from typing import NamedTuple

from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.parser import Computation
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
    """The body of the loop over layers in one of LAYER_PASSES; None if there is no such loop.

    It is the outermost computation that runs attention of this pass only. Layers may contain loops, over tiles of
    tokens, and the loop over microbatches contains the layers of both passes.
    """
    own = {"forward": {"forward"}, "backward": {"backward", "recomputation"}}[pass_name]
    bodies = []
    for computation in program:
        passes = _attention_passes(program, computation)
        is_run = program.execution_counts[computation.name] and computation is not program.entry
        if is_run and pass_name in passes and passes <= own:
            bodies.append(computation)
    inner = {name for computation in bodies for instruction in computation for name in instruction.called}
    outermost = [computation for computation in bodies if computation.name not in inner]
    return max(outermost, key=lambda computation: program.execution_counts[computation.name], default=None)


def _attention_passes(program: AnalyzedProgram, computation: Computation) -> set[str]:
    """The passes whose attention kernels run in a computation and in those that it calls."""
    passes = set()
    for instruction in computation:
        call = program.attention_call_of.get(instruction)
        if call is not None:
            passes.add(call.pass_name)
        else:
            passes.update(*(_attention_passes(program, program.computations[name]) for name in instruction.called))
    return passes


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
