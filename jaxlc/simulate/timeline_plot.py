"""Plots the simulated timeline of one layer, forward and backward: kernels, transfers, and where kernels wait."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from jaxlc.core import plot_style
from jaxlc.core.plot_style import AMBER, BLUE, SILVER, SKY, TEAL, VIOLET
from jaxlc.simulate.interval import two_digits
from jaxlc.simulate.layer_timeline import LAYER_PASSES, LayerEvent
from jaxlc.simulate.timeline import KERNELS

LINK_COLORS = {"NVLink": AMBER, "network": VIOLET, "host": SKY}
_KERNEL_COLORS = {"attention": BLUE, "matrix products": TEAL, "other kernels": SILVER}
_LANE_COLORS = {
    "NVLink": LINK_COLORS["NVLink"],
    "network": LINK_COLORS["network"],
    "to host": LINK_COLORS["host"],
    "from host": LINK_COLORS["host"],
}
_WAIT_COLOR = "#ecacb5"  # a pale red
_LANES = (KERNELS, *_LANE_COLORS)  # top to bottom


def timeline_figure(timeline: Sequence[LayerEvent], title: str, *, is_recomputed: bool) -> Figure:
    """Kernels and transfers of one layer over time; the kernels lane is red where kernels wait for a transfer.

    Args:
      timeline: see `layer_timeline`; must not be empty.
      is_recomputed: the backward contains a recomputation of the forward.
    """
    by_pass = {name: [event for event in timeline if event.pass_name == name] for name in LAYER_PASSES}
    passes = {name: pass_events for name, pass_events in by_pass.items() if pass_events}
    lanes = [lane for lane in _LANES if any(event.lane == lane for event in timeline)]
    figure = plot_style.new_figure(9.5, 0.9 + len(passes) * (0.75 + 0.34 * len(lanes)))
    subplots = figure.subplots(len(passes), 1, squeeze=False).flat
    for axes, (name, pass_events) in zip(subplots, passes.items(), strict=True):
        _draw(axes, pass_events, lanes)
        factor, unit = _unit(pass_events)
        waiting = factor * sum(end - start for start, end in _waits(pass_events))
        note = f", of which kernels wait {two_digits(waiting)} {unit}" if waiting else ""
        recomputed = " with recomputation" if is_recomputed and name == "backward" else ""
        axes.set_title(
            f"{name}{recomputed}: {two_digits(factor * _end(pass_events))} {unit}{note}", loc="left", fontsize=9
        )
    handles = [Patch(color=color, label=kind) for kind, color in _KERNEL_COLORS.items()]
    handles.append(Patch(color=_WAIT_COLOR, label="kernels wait (exposed)"))
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower left", frameon=False, fontsize=8)
    plot_style.set_title(figure, title)
    return figure


def _draw(axes: Axes, timeline: list[LayerEvent], lanes: list[str]) -> None:
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (lane, color) -> intervals
    for event in timeline:
        color = _KERNEL_COLORS[event.kind] if event.lane == KERNELS else _LANE_COLORS[event.lane]
        bars.setdefault((event.lane, color), []).append((event.start_seconds, event.end_seconds))
    bars[KERNELS, _WAIT_COLOR] = list(_waits(timeline))
    factor, unit = _unit(timeline)
    for (lane, color), intervals in bars.items():
        corners = [[(factor * x, y - lanes.index(lane)) for x, y in _corners(*interval)] for interval in intervals]
        # Events narrower than a pixel are visible by their edge.
        edge = 0 if color == _WAIT_COLOR else 0.3
        paths = Path.make_compound_path(*(Path(points, closed=True) for points in corners))  # one: a small SVG
        axes.add_patch(PathPatch(paths, color=color, linewidth=edge))
    axes.set_yticks([-index for index in range(len(lanes))], lanes, fontsize=9)
    axes.set_ylim(-len(lanes) + 0.5, 0.5)
    axes.set_xlabel(unit, fontsize=8)
    axes.set_xlim(0, factor * _end(timeline))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    plot_style.style_axes(axes, "x")
    axes.spines["left"].set_visible(False)


def _corners(start: float, end: float) -> tuple[tuple[float, float], ...]:
    """The closed outline of a bar around y=0."""
    return (start, -0.38), (start, 0.38), (end, 0.38), (end, -0.38), (start, -0.38)


def _waits(timeline: list[LayerEvent]) -> Iterator[tuple[float, float]]:
    """(start, end) in seconds of the gaps between kernels, in which the next kernel waits for a transfer."""
    now = 0.0
    kernels = [(event.start_seconds, event.end_seconds) for event in timeline if event.lane == KERNELS]
    end = _end(timeline)
    for start, kernel_end in [*kernels, (end, end)]:
        if start - now > 1e-9:
            yield now, start
        now = max(now, kernel_end)


def _unit(timeline: list[LayerEvent]) -> tuple[float, str]:
    """(units per second, name): milliseconds, or seconds from 10 s on."""
    return (1.0, "s") if _end(timeline) >= 10 else (1e3, "ms")


def _end(timeline: list[LayerEvent]) -> float:
    return max(event.end_seconds for event in timeline)
