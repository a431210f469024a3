"""A picture of one layer's forward and backward: what runs, what travels meanwhile, and where kernels wait."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: it would take over the backend of a notebook
from matplotlib.patches import Patch

from jaxlc.config import Config
from jaxlc.hlo import Program
from jaxlc.hlo.attention_kernels import attention_kernel
from jaxlc.hlo.op_names import is_in_attention, pass_of
from jaxlc.hlo.parser import Computation, Instruction
from jaxlc.hlo.trip_counts import executions
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.timeline import DEFAULT_RATES, Event, events
from jaxlc.simulate.topology import Topology

_COLORS = {
    "attention": "#1f5fa8",
    "matrix products": "#2a9d8f",
    "other kernels": "#9aa5b1",
    "transfer": "#d1495b",
}
_FAINT = "#dde1e6"
_LANES = ("kernels", "NVLink", "network", "to host", "from host")  # from above


def plot_layer(program: Program, gpus: Topology, config: Config, path: Path, rates: Roofline = DEFAULT_RATES) -> None:
    """Writes the timeline of one layer of the step to `path`; its times are modelled, see `jaxlc.simulate.timeline`."""
    layers = {which: layer(program, which) for which in ("forward", "backward")}
    found = {
        which: events(program, gpus, config, computation, rates)
        for which, computation in layers.items()
        if computation is not None
    }
    lanes = [lane for lane in _LANES if any(event.lane == lane for each in found.values() for event in each)]
    figure = Figure(figsize=(11, 1.1 + 2 * (0.8 + 0.42 * len(lanes))), dpi=150)
    for axes, (which, each) in zip(figure.subplots(len(found), 1, squeeze=False).flat, found.items(), strict=True):
        _draw(axes, each, lanes)
        recomputes = " with its recomputation" if which == "backward" and config.memory.remat != "none" else ""
        axes.set_title(f"one layer, {which}{recomputes}: {1e3 * _end(each):,.1f} ms", loc="left", fontsize=10)
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False, fontsize=9)
    figure.suptitle(f"{config.data.seq_len:,} tokens on {gpus}: modelled, not measured", x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)


def layer(program: Program, which: str) -> Computation | None:
    """The body of the loop over layers whose attention is of pass `which`; None where there is no such loop."""
    times = executions(program)
    for computation in program:
        if not times[computation.name] or computation is program.entry:
            continue
        passes = {pass_of(each.op_name) for each in computation if _runs_attention(program, computation, each)}
        if which in passes and not any(is_in_attention(each.op_name) for each in _callers(program, computation)):
            return computation
    return None


def _runs_attention(program: Program, computation: Computation, instruction: Instruction) -> bool:
    if instruction.opcode == "while":
        return is_in_attention(instruction.op_name)
    return attention_kernel(program, computation, instruction) is not None


def _callers(program: Program, computation: Computation) -> list[Instruction]:
    return [each for caller in program for each in caller if computation.name in each.called]


def _draw(axes: Axes, found: list[Event], lanes: list[str]) -> None:
    for event in found:
        color = _COLORS.get(event.kind, _COLORS["transfer"])
        start, width = 1e3 * event.start_seconds, 1e3 * (event.end_seconds - event.start_seconds)
        # The edge shows what is narrower than a pixel.
        axes.broken_barh([(start, width)], (-lanes.index(event.lane) - 0.4, 0.8), color=color, linewidth=0.4)
    axes.set_yticks([-place for place in range(len(lanes))], lanes)
    axes.set_xlabel("ms", fontsize=9)
    axes.set_xlim(0, 1e3 * _end(found))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _end(found: list[Event]) -> float:
    return max(event.end_seconds for event in found)
