"""Plots the simulated timeline of one layer, forward and backward: kernels, transfers, and where kernels wait."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: it would take over the backend of a notebook
from matplotlib.patches import Patch

from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.op_names import is_in_attention, pass_of
from jaxlc.hlo.parser import Computation, Instruction
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import Event, events

_COLORS = {
    "attention": "#1f5fa8",
    "matrix products": "#2a9d8f",
    "other kernels": "#9aa5b1",
    "transfer": "#d1495b",
}
_FAINT = "#dde1e6"
_LANES = ("kernels", "NVLink", "network", "to host", "from host")  # top to bottom


def plot_layer(program: AnalyzedProgram, model: TimeModel, path: Path) -> None:
    """Writes the timeline of one layer of the step to `path`. Times are estimates; see `jaxlc.simulate.timeline`."""
    layers = {pass_name: layer(program, pass_name) for pass_name in ("forward", "backward")}
    timelines = {
        pass_name: events(program, model, computation)
        for pass_name, computation in layers.items()
        if computation is not None
    }
    used = {event.lane for timeline in timelines.values() for event in timeline}
    lanes = [lane for lane in _LANES if lane in used]
    figure = Figure(figsize=(11, 1.1 + 2 * (0.8 + 0.42 * len(lanes))), dpi=150)
    subplots = figure.subplots(len(timelines), 1, squeeze=False).flat
    for axes, (pass_name, timeline) in zip(subplots, timelines.items(), strict=True):
        _draw(axes, timeline, lanes)
        is_recomputed = pass_name == "backward" and model.config.memory.remat != "none"
        title = f"one layer, {pass_name}{' with its recomputation' if is_recomputed else ''}"
        axes.set_title(f"{title}: {1e3 * _end(timeline):,.1f} ms", loc="left", fontsize=10)
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False, fontsize=9)
    title = f"{model.config.data.seq_len:,} tokens on {model.gpus}: estimated, not measured"
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)


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


def _draw(axes: Axes, timeline: list[Event], lanes: list[str]) -> None:
    for event in timeline:
        color = _COLORS.get(event.kind, _COLORS["transfer"])
        start, width = 1e3 * event.start_seconds, 1e3 * (event.end_seconds - event.start_seconds)
        # Events narrower than a pixel are visible by their edge.
        axes.broken_barh([(start, width)], (-lanes.index(event.lane) - 0.4, 0.8), color=color, linewidth=0.4)
    axes.set_yticks([-index for index in range(len(lanes))], lanes)
    axes.set_xlabel("ms", fontsize=9)
    axes.set_xlim(0, 1e3 * _end(timeline))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _end(timeline: list[Event]) -> float:
    return max(event.end_seconds for event in timeline)
