"""Figures of a plan: the timeline of a layer, memory by kind, communication by link.

The page of a plan shows them as SVG, whose text and lines take the color of the page: it may be
dark.
"""

import io
import re
from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from jaxlc.core import gib, plot_style
from jaxlc.core.plot_style import AMBER, BLUE, FAINT, GRAY, RED, SILVER, SKY, TEAL, VIOLET
from jaxlc.plan.program import CollectiveStats, Memory
from jaxlc.plan.report import step_text
from jaxlc.simulate.roofline import seconds_text, two_digits
from jaxlc.simulate.timeline import KERNELS, LAYER_PASSES, LINKS, LayerEvent, Prediction

LINK_COLORS = {"NVLink": AMBER, "network": VIOLET, "host": SKY}
_KERNEL_COLORS = {"attention": BLUE, "matrix products": TEAL, "other kernels": SILVER}
_LANE_COLORS = {lane: LINK_COLORS[resource] for lane, resource in LINKS.items()}
_WAIT_COLOR = "#ecacb5"  # a pale red
_LANES = (KERNELS, *_LANE_COLORS)  # top to bottom


def timeline_figure(timeline: Sequence[LayerEvent], title: str, *, is_recomputed: bool) -> Figure:
    """Kernels and transfers of one layer over time; the kernels lane is red where kernels wait for
    a transfer.

    Args:
      timeline: see `layer_timeline`; must not be empty.
      is_recomputed: the backward contains a recomputation of the forward.
    """
    by_pass = {
        name: [event for event in timeline if event.pass_name == name] for name in LAYER_PASSES
    }
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
            f"{name}{recomputed}: {two_digits(factor * _end(pass_events))} {unit}{note}",
            loc="left",
            fontsize=9,
        )
    handles = [Patch(color=color, label=kind) for kind, color in _KERNEL_COLORS.items()]
    handles.append(Patch(color=_WAIT_COLOR, label="kernels wait (exposed)"))
    figure.legend(
        handles=handles, ncols=len(handles), loc="outside lower left", frameon=False, fontsize=8
    )
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
        y = -lanes.index(lane)
        low, high = y - 0.38, y + 0.38
        corners = [
            [(start, low), (start, high), (end, high), (end, low), (start, low)]
            for start, end in ((factor * start, factor * end) for start, end in intervals)
        ]
        # Events narrower than a pixel are visible by their edge.
        edge = 0 if color == _WAIT_COLOR else 0.3
        # one: a small SVG
        paths = Path.make_compound_path(*(Path(points, closed=True) for points in corners))
        axes.add_patch(PathPatch(paths, color=color, linewidth=edge))
    axes.set_yticks([-index for index in range(len(lanes))], lanes, fontsize=9)
    axes.set_ylim(-len(lanes) + 0.5, 0.5)
    axes.set_xlabel(unit, fontsize=8)
    axes.set_xlim(0, factor * _end(timeline))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    plot_style.style_axes(axes, "x")
    axes.spines["left"].set_visible(False)


def _waits(timeline: list[LayerEvent]) -> Iterator[tuple[float, float]]:
    """(start, end) in seconds of the gaps between kernels, in which the next kernel waits for a
    transfer.
    """
    now = 0.0
    kernels = [
        (event.start_seconds, event.end_seconds) for event in timeline if event.lane == KERNELS
    ]
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


_GIB = 2**30
_MAX_ROWS = 10  # rows of collectives; the rest is summed
_Parts = dict[str, tuple[float, str]]  # name -> (bytes, color)


def memory_figure(memory: Memory, title: str) -> Figure:
    """Stacked bars of device memory and, if the step uses it, of pinned host memory per node."""
    uses_host = memory.host_bytes_per_device > 0
    figure = plot_style.new_figure(9.5, 4.1 if uses_host else 1.95)
    figure.get_layout_engine().set(h_pad=0.09)
    device, *host = figure.subplots(2 if uses_host else 1, 1, squeeze=False).flat
    other_bytes = memory.device_arguments_bytes - memory.parameters_bytes - memory.optimizer_bytes
    _memory_bar(
        device,
        "GPU",
        {
            "parameters": (memory.parameters_bytes, BLUE),
            "optimizer state": (memory.optimizer_bytes, SKY),
            "batch and other arguments": (other_bytes, GRAY),
            "temporaries": (memory.device_temp_bytes, TEAL),
            "kernel workspaces": (memory.workspace_bytes, AMBER),
            "symmetric buffers": (memory.symmetric_bytes, RED),
            "NCCL buffers": (memory.nccl_bytes, VIOLET),
        },
        memory.usable_bytes,
        memory.device_capacity_bytes,
    )
    for axes in host:
        usable_bytes = memory.usable_host_bytes
        capacity_bytes = memory.host_capacity_per_node_bytes
        num_gpus = memory.host_bytes_per_node // memory.host_bytes_per_device
        parameters = num_gpus * memory.host_parameters_bytes
        optimizer = num_gpus * memory.host_optimizer_bytes
        _memory_bar(
            axes,
            "node: host memory",
            {
                "parameters": (parameters, BLUE),
                "optimizer state": (optimizer, SKY),
                "gradients and activations": (
                    memory.host_bytes_per_node - parameters - optimizer,
                    TEAL,
                ),
                "rest of the pools": (
                    max(0, memory.host_pools_per_node_bytes - memory.host_bytes_per_node),
                    GRAY,
                ),
                "checkpoint staging": (memory.staging_bytes_per_node, SILVER),
            },
            usable_bytes,
            capacity_bytes,
        )
    plot_style.set_title(figure, f"Peak memory per GPU: {title}")
    return figure


def _memory_bar(
    axes: Axes, name: str, parts: _Parts, usable_bytes: float, capacity_bytes: float
) -> None:
    used_bytes = sum(num_bytes for num_bytes, _ in parts.values())
    limit = max(1.02 * capacity_bytes, 1.02 * usable_bytes, 1.04 * used_bytes) / _GIB
    left = 0.0
    for part, (num_bytes, color) in parts.items():
        if num_bytes < 2**20:
            continue
        width = num_bytes / _GIB
        axes.barh(
            0,
            width,
            left=left,
            height=0.62,
            color=color,
            linewidth=0,
            label=f"{part} {gib(num_bytes)}",
        )
        if width > 0.06 * limit:
            axes.text(
                left + width / 2,
                0,
                gib(num_bytes),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
        left += width
    is_over = used_bytes > usable_bytes
    color = RED if is_over else GRAY
    axes.axvline(usable_bytes / _GIB, color=color, linestyle=(0, (4, 3)), linewidth=1.2)
    note = f"usable {gib(usable_bytes)} GiB"
    axes.annotate(note, (usable_bytes / _GIB, 0.42), (-4, 0), textcoords="offset points", ha="right", va="bottom",
                  fontsize=8, color=color)  # fmt: skip
    difference = f"{gib(abs(usable_bytes - used_bytes))} GiB {'too much' if is_over else 'free'}"
    axes.set_title(f"{name}: {gib(used_bytes)} GiB, {difference}", loc="left", fontsize=9)
    axes.set(xlim=(0, limit), ylim=(-0.42, 0.75), yticks=())
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, -0.26), frameon=False, fontsize=8, borderaxespad=0,
                handlelength=1.0, handleheight=0.9)  # fmt: skip
    plot_style.style_axes(axes, "x")
    axes.spines["left"].set_visible(False)


def links_figure(
    collectives: Sequence[CollectiveStats], predicted: Prediction, title: str
) -> Figure:
    """Left: bytes that each GPU sends in one step, by collective. Right: estimated hidden and
    exposed time by link.
    """
    by_name: dict[tuple[str, str], list[int]] = {}
    for stats in collectives:
        link = "network" if stats.crosses_domains else "NVLink"
        totals = by_name.setdefault(
            (f"{stats.kind}, {'+'.join(stats.axes) or 'all'}", link), [0, 0]
        )
        totals[0] += stats.bytes
        totals[1] += stats.count
    ranked = sorted(
        ((name, *totals, link) for (name, link), totals in by_name.items()), key=lambda row: -row[1]
    )
    rows = [row for row in ranked[:_MAX_ROWS] if row[1] >= 2**20]  # (name, bytes, count, link)
    if rest := ranked[len(rows) :]:
        rows.append(
            (f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest), "")
        )
    figure = plot_style.new_figure(9.5, 1.35 + 0.27 * max(len(rows), 3))
    sent, seconds = figure.subplots(1, 2, width_ratios=(3, 2))
    for place, (_, num_bytes, count, link) in enumerate(rows):
        sent.barh(
            place, num_bytes / _GIB, height=0.66, color=LINK_COLORS.get(link, SILVER), linewidth=0
        )
        sent.annotate(f"{num_bytes / _GIB:,.3g} GiB, {count:,} calls", (num_bytes / _GIB, place), (4, 0),
                      textcoords="offset points", va="center", fontsize=7.5, color=GRAY)  # fmt: skip
    largest = max((num_bytes for _, num_bytes, _, _ in rows), default=_GIB) / _GIB
    sent.set(xlim=(0, 1.42 * largest), ylim=(max(len(rows), 1) - 0.5, -0.5))
    sent.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    sent.set_title("sent by each GPU in one step", loc="left", fontsize=9)
    sent.set_xlabel("GiB", fontsize=8)
    _seconds_by_link(seconds, predicted)
    for axes in (sent, seconds):
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        plot_style.style_axes(axes, "x")
    links = dict.fromkeys(link for *_, link in rows if link)
    handles = [sent.barh(0, 0, color=LINK_COLORS[link], label=f"over {link}") for link in links]
    figure.legend(handles=handles + seconds.get_legend_handles_labels()[0], ncols=5, loc="outside lower left",
                  frameon=False, fontsize=8)  # fmt: skip
    plot_style.set_title(figure, f"Communication per step: {title}")
    return figure


def _seconds_by_link(axes: Axes, predicted: Prediction) -> None:
    """For each link: seconds of its transfers, and the part in which kernels wait for them."""
    totals = predicted.transfer_seconds_by_resource
    median = predicted.interval.median
    links = [link for link in LINK_COLORS if totals.get(link)]
    for place, link in enumerate(links):
        exposed = median * predicted.seconds_by_resource.get(link, 0.0)
        hidden = max(0.0, median * totals[link] - exposed)
        first = place == 0
        axes.barh(
            place, hidden, height=0.5, color=SILVER, linewidth=0, label="hidden" if first else None
        )
        axes.barh(
            place,
            exposed,
            left=hidden,
            height=0.5,
            color=RED,
            linewidth=0,
            label="exposed" if first else None,
        )
        note = f"{seconds_text(hidden + exposed)}, {seconds_text(exposed)} exposed"
        axes.annotate(
            note,
            (hidden + exposed, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=GRAY,
        )
    longest = median * max((totals[link] for link in links), default=1.0)
    axes.set(xlim=(0, 1.6 * longest), ylim=(max(len(links), 1) - 0.5, -0.5))
    axes.set_yticks(range(len(links)), links, fontsize=8)
    axes.set_title(f"estimated; step: {step_text(predicted)}", loc="left", fontsize=9)
    axes.set_xlabel("s", fontsize=8)


_SMALLER = (  # (pattern, replacement): they halve the size of matplotlib's SVG
    (r"<metadata>.*?</metadata>", ""),
    (r"<!--.*?-->", ""),
    (r'<g id="[^"]*">', "<g>"),
    (r' ?font-family: [^;"]*;?', ""),  # text has the font of the element
    (r"(\d\.\d{2})\d+", r"\1"),  # hundredths of a point
    (r"\s*\n\s*", " "),
)


def svg(figure: Figure) -> str:
    """A figure as an SVG element with a transparent background, whose black text and lines take the
    page's color.
    """
    text = io.StringIO()
    # text as text; reproducible ids
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxlc"}):
        figure.savefig(
            text, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    element = text.getvalue()
    style = "width:100%;height:auto;display:block;overflow:visible;fill:currentColor;font-family:system-ui,sans-serif"
    element = f'<svg style="{style}"' + element[element.index("<svg") + len("<svg") :]
    for pattern, replacement in _SMALLER:
        element = re.sub(pattern, replacement, element, flags=re.DOTALL)
    element = element.replace("stroke: #000000", "stroke: currentColor")
    return element.replace(f"stroke: {FAINT}", "stroke: rgba(128,128,128,0.28)").replace(
        GRAY, "#808894"
    )
