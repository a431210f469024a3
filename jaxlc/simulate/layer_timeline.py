"""The simulated events of one layer, forward and backward, as plain data that a plan stores."""

from collections import Counter
from typing import NamedTuple

from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.parser import Computation
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import KERNELS, Event, events

_MAX_EVENTS = 1000  # per pass; in longer timelines, short kernels are joined
LAYER_PASSES = ("forward", "backward")  # the backward of a layer includes its recomputation


class LayerEvent(NamedTuple):
    """A transfer, or one kernel or several adjacent ones (`_merged`). Times are relative to the start of the pass."""

    pass_name: str  # one of LAYER_PASSES
    lane: str  # "kernels", or a link: "NVLink", "network", "to host", "from host"
    kind: str  # kernels: "attention", "matrix products", "other kernels"; transfers: the opcode
    start_seconds: float  # since the start of the pass
    end_seconds: float  # since the start of the pass


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
    """Joins adjacent kernels of one kind: a layer has hundreds of kernels, or tens of thousands in tiles.

    In a long timeline, adjacent kernels of any kind are joined until they take a thousandth of its duration. Kinds are
    assigned so that the total of each kind is preserved up to that resolution.
    """
    merged = _join_kinds(timeline)
    if len(merged) <= _MAX_EVENTS:
        return merged
    return _join_kinds(_coarsen(merged, max(event.end_seconds for event in merged) / 1000))


def _join_kinds(timeline: list[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in timeline:
        last = _last_kernel(joined, event)
        if last is not None and joined[last].kind == event.kind:
            joined[last] = joined[last]._replace(end_seconds=event.end_seconds)
        else:
            joined.append(event)
    return joined


def _coarsen(timeline: list[Event], resolution_seconds: float) -> list[Event]:
    coarse: list[Event] = []
    missing_seconds: Counter[str] = Counter()  # by kind: time of kernels minus time that was assigned to the kind
    for event in timeline:
        if event.lane == KERNELS:
            missing_seconds[event.kind] += event.end_seconds - event.start_seconds
            last = _last_kernel(coarse, event)
            if last is not None and coarse[last].end_seconds - coarse[last].start_seconds < resolution_seconds:
                previous = coarse[last]
                missing_seconds[previous.kind] += previous.end_seconds - previous.start_seconds
                event = previous._replace(end_seconds=event.end_seconds)
                del coarse[last]
            (kind, _), *_ = missing_seconds.most_common(1)
            missing_seconds[kind] -= event.end_seconds - event.start_seconds
            event = event._replace(kind=kind)
        coarse.append(event)
    return coarse


def _last_kernel(timeline: list[Event], event: Event) -> int | None:
    """The index of the last kernel of `timeline`, if `event` is a kernel that starts at its end."""
    if event.lane == KERNELS:
        for index in range(len(timeline) - 1, -1, -1):
            if timeline[index].lane == KERNELS:
                return index if timeline[index].end_seconds == event.start_seconds else None
    return None
