"""Figures of a plan: the mesh on its hardware, the timeline of a layer, memory by kind,
communication by link.

The page of a plan shows them as SVG, whose text and lines take the color of the page: it may be
dark.
"""

import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path

from jaxlc.core import plot_style
from jaxlc.core.axes import CONTEXT, DATA, FSDP, TENSOR, mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import AMBER, BLUE, FAINT, GRAY, RED, SILVER, SKY, TEAL, VIOLET
from jaxlc.core.text import count_text, gib
from jaxlc.plan.program import CollectiveStats, Memory
from jaxlc.plan.report import step_text
from jaxlc.simulate.roofline import seconds_text, two_digits
from jaxlc.simulate.timeline import KERNELS, LAYER_PASSES, LINKS, LayerEvent, Prediction
from jaxlc.simulate.topology import Topology

_AXIS_COLORS = {DATA: GRAY, FSDP: AMBER, CONTEXT: RED, TENSOR: TEAL}
_RANK_COLORS = LinearSegmentedColormap.from_list(
    "ranks", ["#d3e3f3", "#8fb4dc", "#1f5fa8", "#12325a"]
)
_MAX_GPUS = 256  # in a figure, which shows the first domains of a larger cluster
# GPUs next to each other in a domain; lines of GPUs in domains above each other
_MAX_COLUMNS, _MAX_LINES = 16, 14
_SQUARE, _WIDTH = 0.76, 8.5  # GPU, in units of the distance between two; figure, in inches
_LEGEND_CHARS = 120  # characters that fit a line of the legend


def mesh_figure(
    mesh: Mapping[str, int], gpus: Topology, collectives: Sequence[CollectiveStats] = ()
) -> Figure:
    """The mesh on its hardware: squares are GPUs, colored by context rank, in nodes and NVLink domains.

    Arrows and outlines show the groups of GPU 0. Of more than 256 GPUs only the first domains are drawn, and the legend
    says so.

    Args:
      mesh: sizes of the mesh axes, slowest first.
      collectives: the collectives of a plan, for the bytes per axis; they show whether context is a ring. Empty: a ring
        is assumed.
    Raises:
      UserError: the mesh and `gpus` have different numbers of devices.
    """
    if math.prod(mesh.values()) != gpus.num_gpus:
        raise UserError(
            f"{gpus} has {gpus.num_gpus} GPUs and the mesh {mesh_text(mesh)} has {math.prod(mesh.values())}"
        )
    active = {axis: size for axis, size in mesh.items() if size > 1}
    devices = np.arange(gpus.num_gpus).reshape(tuple(active.values()))
    centers = _centers(active, gpus)
    is_ring = not collectives or any(
        x.kind == "collective-permute" and CONTEXT in x.axes for x in collectives
    )
    lines = _legend(devices, list(active), gpus, collectives, is_ring)
    handles = [
        Patch(color=color, label="\n".join(textwrap.wrap(text, _LEGEND_CHARS)))
        for color, text in lines
    ]
    width, height = np.ptp(centers, axis=0) + (2.6, 1.4)
    inches = min(0.5, _WIDTH / width)  # between two GPUs
    figure = plot_style.new_figure(_WIDTH, inches * height + 0.6 + 0.2 * len(handles))
    axes = figure.subplots()
    is_node = gpus.gpus_per_node >= gpus.gpus_per_domain
    for number, box in enumerate(_boxes(centers, gpus.gpus_per_domain, 0.58)):
        axes.add_patch(Rectangle(*box, fill=False, edgecolor=GRAY, linewidth=0.9))
        side = box[0] + (box[1] + 0.1, box[2] / 2)
        axes.text(
            *side,
            f"{'node' if is_node else 'domain'} {number}",
            fontsize=6.5,
            color=GRAY,
            va="center",
        )
    for box in [] if is_node else _boxes(centers, gpus.gpus_per_node, 0.46):
        axes.add_patch(Rectangle(*box, facecolor=FAINT, linewidth=0, zorder=0))
    _draw_gpus(axes, centers, active, inches)
    for pad, axis in enumerate(active):
        members = np.moveaxis(devices, pad, 0).reshape(mesh[axis], -1)[:, 0]  # GPU 0's group
        if axis == CONTEXT and is_ring:
            _draw_ring(axes, centers, members)
            continue
        for box in _boxes(centers[members[members < len(centers)]], 1, 0.4 + 0.035 * pad):
            axes.add_patch(Rectangle(*box, fill=False, edgecolor=_AXIS_COLORS[axis], linewidth=1.5))
    axes.set_aspect("equal")
    axes.autoscale()
    axes.set_axis_off()
    figure.legend(
        handles=handles, loc="outside lower left", frameon=False, fontsize=8, handlelength=0.9
    )
    domains = count_text(gpus.num_domains, "NVLink domain")
    plot_style.set_title(
        figure,
        f"{mesh_text(active) or '1 GPU'} on {gpus}: {domains} of {gpus.gpus_per_domain} GPUs",
    )
    return figure


def _centers(active: Mapping[str, int], gpus: Topology) -> np.ndarray:
    """float [GPUs, 2]. The lines of a domain hold whole groups of the last mesh axis and whole
    nodes, if possible.
    """
    per_domain, last = gpus.gpus_per_domain, next(reversed(active.values()), 1)
    sizes = [size for size in range(1, min(per_domain, _MAX_COLUMNS) + 1) if per_domain % size == 0]
    columns = max(
        sizes,
        key=lambda size: (size % last == 0, size % min(gpus.gpus_per_node, per_domain) == 0, size),
    )
    height = per_domain // columns + 0.5
    num_domains = min(gpus.num_domains, max(1, _MAX_GPUS // per_domain))
    domains_per_column = math.ceil(num_domains / math.ceil(num_domains * height / _MAX_LINES))
    domain, place = np.divmod(np.arange(num_domains * per_domain), per_domain)
    x = place % columns + (domain // domains_per_column) * (columns + 2)
    return np.stack([x, -(place // columns) - (domain % domains_per_column) * height], axis=1)


def _boxes(centers: np.ndarray, size: int, pad: float) -> Iterator[tuple[np.ndarray, float, float]]:
    """(lower left corner, width, height) around every `size` consecutive GPUs."""
    for first in range(0, len(centers), size):
        members = centers[first : first + size]
        yield members.min(axis=0) - pad, *(np.ptp(members, axis=0) + 2 * pad)


def _draw_gpus(axes: Axes, centers: np.ndarray, active: Mapping[str, int], inches: float) -> None:
    """Squares with the ranks of each GPU, two on a line."""
    for gpu, box in enumerate(_boxes(centers, 1, _SQUARE / 2)):
        ranks = dict(zip(active, np.unravel_index(gpu, tuple(active.values()))))
        shade = ranks.get(CONTEXT, 0) / max(1, active.get(CONTEXT, 1) - 1)
        axes.add_patch(Rectangle(*box, facecolor=_RANK_COLORS(shade), linewidth=0, zorder=2))
        texts = [f"{axis[0]}{rank}" for axis, rank in ranks.items()] or ["0"]
        lines = [" ".join(texts[first : first + 2]) for first in range(0, len(texts), 2)]
        color, fontsize = (
            "white" if shade > 0.5 else "#12325a",
            inches * 70 / max(5, *map(len, lines)),
        )
        axes.text(
            *centers[gpu],
            "\n".join(lines),
            fontsize=fontsize,
            color=color,
            ha="center",
            va="center",
            zorder=3,
        )


def _draw_ring(axes: Axes, centers: np.ndarray, members: np.ndarray) -> None:
    """Arrows from each context rank to the next one; arrows to distant GPUs are arcs behind the
    squares.
    """
    for sender, receiver in zip(members, np.roll(members, -1)):
        if max(sender, receiver) < len(centers):
            distance = np.hypot(*(centers[receiver] - centers[sender]))
            shift = (centers[receiver] - centers[sender]) / distance * _SQUARE / 2
            arc = "arc3" if distance < 1.8 else "arc3,rad=-0.2"
            style = dict(
                arrowstyle="-|>",
                connectionstyle=arc,
                shrinkA=0,
                shrinkB=0,
                mutation_scale=8,
                clip_on=False,
            )
            ends = centers[sender] + shift, centers[receiver] - shift
            axes.add_patch(FancyArrowPatch(*ends, color=RED, linewidth=1.4, zorder=1, **style))


def _legend(
    devices: np.ndarray,
    names: Sequence[str],
    gpus: Topology,
    collectives: Sequence[CollectiveStats],
    is_ring: bool,
) -> Iterator[tuple[str, str]]:
    """(color, text) of each axis: its size, link, and bytes of collectives; and of combinations of
    axes.
    """
    for dim, axis in enumerate(names):
        domains = np.moveaxis(devices, dim, 0) // gpus.gpus_per_domain
        link = (
            "across domains, over the network"
            if (domains != domains[0]).any()
            else "within a domain, over NVLink"
        )
        text = f"{axis}: {'rings' if axis == CONTEXT and is_ring else 'groups'} of {len(domains)} {link}"
        yield _AXIS_COLORS[axis], "; ".join([text, *_sent((axis,), collectives)])
    for several in dict.fromkeys(stats.axes for stats in collectives if len(stats.axes) > 1):
        yield from (
            ("none", f"{' + '.join(several)}: {text}") for text in _sent(several, collectives)
        )
    if gpus.gpus_per_node < gpus.gpus_per_domain:
        yield FAINT, f"nodes of {gpus.gpus_per_node} GPUs"
    num_drawn = max(1, _MAX_GPUS // gpus.gpus_per_domain)
    if num_drawn < gpus.num_domains:
        yield "none", f"drawn: the first {num_drawn} of {gpus.num_domains} NVLink domains"


def _sent(names: tuple[str, ...], collectives: Sequence[CollectiveStats]) -> list[str]:
    """The bytes of the collectives over these axes, if there are 0.1 GiB or more."""
    large = [stats for stats in collectives if stats.axes == names and stats.bytes >= 2**20]
    kinds = ", ".join(dict.fromkeys(stats.kind for stats in large))
    gib = sum(stats.bytes for stats in large) / 2**30
    return [f"{gib:,.1f} GiB per GPU and step ({kinds})"] if gib >= 0.1 else []


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
        corners = [
            [(factor * x, y - lanes.index(lane)) for x, y in _corners(*interval)]
            for interval in intervals
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


def _corners(start: float, end: float) -> tuple[tuple[float, float], ...]:
    """The closed outline of a bar around y=0."""
    return (start, -0.38), (start, 0.38), (end, 0.38), (end, -0.38), (start, -0.38)


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
        usable_bytes, capacity_bytes = memory.usable_host_bytes, memory.host_capacity_per_node_bytes
        num_gpus = memory.host_bytes_per_node // memory.host_bytes_per_device
        parameters, optimizer = (
            num_gpus * memory.host_parameters_bytes,
            num_gpus * memory.host_optimizer_bytes,
        )
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
    rows = _collective_rows(collectives)
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


def _collective_rows(collectives: Sequence[CollectiveStats]) -> list[tuple[str, int, int, str]]:
    """(name, bytes, count, link) of the collectives with most bytes, and of all others together."""
    by_name: dict[tuple[str, str], list[int]] = {}
    for stats in collectives:
        link = "network" if stats.crosses_domains else "NVLink"
        totals = by_name.setdefault(
            (f"{stats.kind}, {'+'.join(stats.axes) or 'all'}", link), [0, 0]
        )
        totals[0] += stats.bytes
        totals[1] += stats.count
    rows = sorted(
        ((name, *totals, link) for (name, link), totals in by_name.items()), key=lambda row: -row[1]
    )
    large = [row for row in rows[:_MAX_ROWS] if row[1] >= 2**20]
    rest = rows[len(large) :]
    if rest:
        large.append(
            (f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest), "")
        )
    return large


def _seconds_by_link(axes: Axes, predicted: Prediction) -> None:
    """For each link: seconds of its transfers, and the part in which kernels wait for them."""
    totals, median = predicted.transfer_seconds_by_resource, predicted.interval.median
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
