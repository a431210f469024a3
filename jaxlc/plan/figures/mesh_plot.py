"""Draws a mesh on its nodes and NVLink domains, and which GPUs communicate with each other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path

from jaxlc.core import plot_style
from jaxlc.core.axes import CONTEXT, DATA, FSDP, TENSOR, mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import AMBER, BLUE, GRAY, RED, SILVER, TEAL
from jaxlc.plan.summary import CollectiveStats
from jaxlc.simulate.topology import Topology

_AXIS_COLORS = {DATA: GRAY, FSDP: AMBER, CONTEXT: BLUE, TENSOR: TEAL}
_RANK_COLORS = LinearSegmentedColormap.from_list("ranks", ["#d3e3f3", "#8fb4dc", "#1f5fa8", "#12325a"])
_MAX_GPUS = 256  # of a figure: it shows the first domains of a larger cluster
_MAX_COLUMNS, _MAX_HEIGHT = 16, 14.0  # GPUs per line of a domain; units of domains above each other
_SQUARE, _MARGIN = 0.76, 0.24  # in units of the distance between GPUs
_LINE_PITCH, _DOMAIN_GAP = 1.12, 0.42
_INCHES = 0.42  # per unit


class _Layout(NamedTuple):
    centers: np.ndarray  # [GPUs, 2]
    columns: int  # GPUs per line
    gpus_per_domain: int
    gpus_per_node: int

    @property
    def has_nodes(self) -> bool:
        """Whether nodes are drawn: a domain has several, and each is on one line."""
        return self.gpus_per_node < self.gpus_per_domain and self.columns % self.gpus_per_node == 0

    def boxes(self, size: int) -> Iterator[tuple[float, float, float, float]]:
        """(left, bottom, width, height) around the centers of every `size` consecutive GPUs."""
        for first in range(0, len(self.centers), size):
            members = self.centers[first : first + size]
            low, high = members.min(axis=0), members.max(axis=0)
            yield (*low, *(high - low))


def mesh_figure(mesh: Mapping[str, int], gpus: Topology, collectives: Sequence[CollectiveStats] = ()) -> Figure:
    """The mesh on its hardware: squares are GPUs, colored by context rank, in nodes and NVLink domains.

    Lines and outlines are drawn for the groups of GPU 0; the other rings over context are drawn fainter. Of more than
    256 GPUs only the first domains are drawn, and the legend says so.

    Args:
      mesh: sizes of the mesh axes, slowest first.
      collectives: those of a plan, which add the bytes per axis and show whether context is a ring. Empty: a ring
        is assumed.
    Raises:
      UserError: the mesh and `gpus` have different numbers of devices.
    """
    if math.prod(mesh.values()) != gpus.num_gpus:
        raise UserError(
            f"{gpus} has {gpus.num_gpus} GPUs and the mesh {mesh_text(mesh)} has {math.prod(mesh.values())}"
        )
    layout = _layout(mesh, gpus)
    active = {axis: size for axis, size in mesh.items() if size > 1}
    handles = [_handle(axis, mesh, gpus, collectives) for axis in active]
    others = _other_lines(collectives) + _shown_line(layout, gpus)
    width, height = np.ptp(layout.centers, axis=0) + [3.4, 2.0]
    inches = _INCHES * np.array([width, height]) + [0, 0.5 + 0.2 * (len(handles) + len(others))]
    scale = min(1.0, 9.5 / inches[0])
    figure = plot_style.new_figure(max(6.8, scale * inches[0]), scale * inches[1])
    axes = figure.subplots()
    _draw_boxes(axes, layout)
    _draw_gpus(axes, layout, mesh, scale)
    if active.get(CONTEXT) and _is_ring(collectives):
        _draw_rings(axes, layout, mesh)
    axes.set(aspect="equal", xlim=_limits(layout, 0), ylim=_limits(layout, 1))
    axes.set_axis_off()
    if layout.has_nodes:
        handles.append(Patch(color=SILVER, alpha=0.3, linewidth=0, label=f"nodes of {layout.gpus_per_node} GPUs"))
    handles += [Line2D([], [], linestyle="", label=line) for line in others]
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=8, handlelength=2.2)
    domains = f"{gpus.num_domains} NVLink domain{'s' * (gpus.num_domains > 1)} of {gpus.gpus_per_domain} GPUs"
    sizes = mesh_text(active) or "1 GPU"
    plot_style.set_title(figure, f"{sizes} on {gpus}: {domains}")
    return figure


def _layout(mesh: Mapping[str, int], gpus: Topology) -> _Layout:
    """Consecutive GPUs are neighbors on a line. Lines hold whole groups of the fastest mesh axes, if possible."""
    per_domain = gpus.gpus_per_domain
    sizes = [size for size in range(1, min(per_domain, _MAX_COLUMNS) + 1) if per_domain % size == 0]
    group = 1
    for size in reversed(mesh.values()):
        if group * size > _MAX_COLUMNS or per_domain % (group * size):
            break
        group *= size
    columns = max([size for size in sizes if size % group == 0], default=sizes[-1])
    lines = per_domain // columns
    height = (lines - 1) * _LINE_PITCH + 1 + _DOMAIN_GAP
    num_domains = min(gpus.num_domains, max(1, _MAX_GPUS // per_domain))
    num_columns = math.ceil(num_domains * height / _MAX_HEIGHT)
    domains_per_column = math.ceil(num_domains / num_columns)
    index = np.arange(num_domains * per_domain)
    domain, place = index // per_domain, index % per_domain
    x = place % columns + (domain // domains_per_column) * (columns + 2.2)
    y = (place // columns) * _LINE_PITCH + (domain % domains_per_column) * height
    gpus_per_node = min(gpus.gpus_per_node, per_domain)
    return _Layout(np.stack([x, -y], axis=1), columns, per_domain, gpus_per_node)


def _limits(layout: _Layout, dim: int) -> tuple[float, float]:
    values = layout.centers[:, dim]
    low, high = ((1.7, 1.7), (1.0, 1.0))[dim]
    return values.min() - low, values.max() + high


def _draw_boxes(axes: Axes, layout: _Layout) -> None:
    """NVLink domains, and the nodes in them."""
    half = _SQUARE / 2
    if layout.has_nodes:
        for box in layout.boxes(layout.gpus_per_node):
            _outline(axes, box, half + 0.08, color=SILVER, alpha=0.3, fill=True)
    for number, box in enumerate(layout.boxes(layout.gpus_per_domain)):
        _outline(axes, box, half + _MARGIN, color=GRAY, linewidth=0.9)
        left, bottom, width, height = box
        name = f"{'node' if layout.gpus_per_node == layout.gpus_per_domain else 'domain'} {number}"
        axes.annotate(name, (left + width + half + _MARGIN, bottom + height / 2), (4, 0), textcoords="offset points",
                      fontsize=6.5, color=GRAY, va="center", ha="left")  # fmt: skip


def _outline(axes: Axes, box: tuple[float, ...], pad: float, *, fill: bool = False, **options) -> None:
    left, bottom, width, height = box
    style = f"round,pad={pad},rounding_size=0.14"
    facecolor = options["color"] if fill else "none"
    edge = dict(linewidth=0) if fill else {}
    color = options.pop("color")
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=style, facecolor=facecolor,
                                  edgecolor=color, zorder=1, **options, **edge))  # fmt: skip


def _draw_gpus(axes: Axes, layout: _Layout, mesh: Mapping[str, int], scale: float) -> None:
    """Squares with the ranks of each GPU, and outlines of the groups of GPU 0 over axes other than context."""
    ranks = np.stack(np.unravel_index(np.arange(len(layout.centers)), tuple(mesh.values())), axis=1)
    names = list(mesh)
    active = [index for index, axis in enumerate(names) if mesh[axis] > 1]
    context = ranks[:, names.index(CONTEXT)] if CONTEXT in names else np.zeros(len(ranks), int)
    num_shades = max(2, mesh.get(CONTEXT, 1))
    for gpu, center in enumerate(layout.centers):
        shade = context[gpu] / (num_shades - 1)
        _outline(axes, (*center, 0, 0), _SQUARE / 2, color=_RANK_COLORS(shade), fill=True)
        texts = [f"{names[index][0]}{ranks[gpu, index]}" for index in active if names[index] != CONTEXT]
        lines = [f"c{context[gpu]}"] if mesh.get(CONTEXT, 1) > 1 else []
        lines += [" ".join(texts[first : first + 2]) for first in range(0, len(texts), 2)]
        widest = max(map(len, lines), default=1)
        fontsize = scale * min(6.4, 27 / max(widest, 1.4 * len(lines)))
        color = "white" if shade > 0.5 else "#12325a"
        text = "\n".join(lines) or "0"
        axes.text(*center, text, fontsize=fontsize, color=color, ha="center", va="center", linespacing=1.0, zorder=4)
    for index in active:
        if names[index] != CONTEXT:
            others = np.delete(ranks, index, axis=1)
            members = np.flatnonzero((others == 0).all(axis=1))  # those that are drawn
            _outline_group(
                axes, layout, members, _AXIS_COLORS.get(names[index], RED), pad=0.03 + 0.07 * active.index(index)
            )


def _outline_group(axes: Axes, layout: _Layout, members: np.ndarray, color: str, pad: float) -> None:
    """An outline around the members of a group that are neighbors on a line, and one around every other member."""
    for run in np.split(members, np.flatnonzero(np.diff(members) != 1) + 1):
        for line in np.split(run, np.flatnonzero(np.diff(run // layout.columns)) + 1):
            low, high = layout.centers[line].min(axis=0), layout.centers[line].max(axis=0)
            _outline(axes, (*low, *(high - low)), _SQUARE / 2 + pad, color=color, linewidth=1.6)


def _is_ring(collectives: Sequence[CollectiveStats]) -> bool:
    return not collectives or any(stats.kind == "collective-permute" and CONTEXT in stats.axes for stats in collectives)


def _draw_rings(axes: Axes, layout: _Layout, mesh: Mapping[str, int]) -> None:
    """Arrows from each context rank to the next in the ring of GPU 0; faint lines between neighbors in the others."""
    devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    num_drawn = len(layout.centers)
    rings = np.moveaxis(devices, list(mesh).index(CONTEXT), -1).reshape(-1, mesh[CONTEXT])
    for sender, receiver in zip(rings[0], np.roll(rings[0], -1), strict=True):
        if max(sender, receiver) >= num_drawn:
            continue
        path = Path(_route(layout.centers[sender], layout.centers[receiver]))
        axes.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=8, color=RED, linewidth=1.4,
                                       joinstyle="round", shrinkA=0, shrinkB=0, zorder=3))  # fmt: skip
    hops = []
    for ring in rings[1:]:
        centers = layout.centers[ring[ring < num_drawn]]
        is_short = np.hypot(*np.diff(centers, axis=0).T) < 1.8
        pairs = zip(centers[:-1][is_short], centers[1:][is_short], strict=True)
        hops += [_shortened(start, end) for start, end in pairs]
    axes.add_collection(LineCollection(hops, colors=RED, linewidths=0.9, alpha=0.4, zorder=2))


def _route(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Points of a line from square to square: straight between neighbors, otherwise through gaps around squares."""
    (dx, dy), half, gap = end - start, _SQUARE / 2, _SQUARE / 2 + 0.17
    if math.hypot(dx, dy) < 1.8 and min(abs(dx), abs(dy)) < 0.1:
        return _shortened(start, end)
    (x0, y0), (x1, y1) = start, end
    side = 0.17  # arrows leave a square on one side of its center and arrive on the other, so that they do not overlap
    if abs(dy) < 0.1:  # forward above the line, backward below it
        up = 1 if dx > 0 else -1
        x0, x1 = x0 + up * side, x1 - up * side
        return np.array([(x0, y0 + up * half), (x0, y0 + up * gap), (x1, y1 + up * gap), (x1, y1 + up * half)])
    if -1.8 < dy < 0:  # to the next line
        return np.array([(x0, y0 - half), (x0, y0 - gap), (x1, y0 - gap), (x1, y1 + half)])
    outside = min(x0, x1) - 0.95  # left of the domains
    return np.array([(x0, y0 - half), (x0, y0 - gap), (outside, y0 - gap), (outside, y1 + side),
                     (x1 - half, y1 + side)])  # fmt: skip


def _shortened(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The line between the edges of two neighboring squares."""
    step = (end - start) / np.hypot(*(end - start)) * (_SQUARE / 2 + 0.02)
    return np.array([start + step, end - step])


def _handle(axis: str, mesh: Mapping[str, int], gpus: Topology, collectives: Sequence[CollectiveStats]) -> Line2D:
    """The legend of one axis: its size, its link, and the bytes of its collectives."""
    is_ring = axis == CONTEXT and _is_ring(collectives)
    link = "across domains, over the network" if _crosses(axis, mesh, gpus) else "within a domain, over NVLink"
    label = f"{axis}: {'rings' if is_ring else 'groups'} of {mesh[axis]} {link}"
    sent = [stats for stats in collectives if stats.axes == (axis,)]
    if sent:
        label += f"; {_bytes_of(sent)}"
    if axis == CONTEXT:
        color = RED if is_ring else BLUE
        marker = ">" if is_ring else "s"
        return Line2D([], [], color=color, marker=marker, linestyle="-" if is_ring else "", markersize=5, label=label)
    return Line2D([], [], color=_AXIS_COLORS.get(axis, RED), marker="s", markerfacecolor="none", markersize=8,
                  markeredgewidth=1.6, linestyle="", label=label)  # fmt: skip


def _other_lines(collectives: Sequence[CollectiveStats]) -> list[str]:
    """A line for the collectives of each combination of several axes."""
    combinations = dict.fromkeys(stats.axes for stats in collectives if len(stats.axes) > 1)
    by_axes = {names: [stats for stats in collectives if stats.axes == names] for names in combinations}
    return [
        f"{' + '.join(names)}: {_bytes_of(sent)}"
        for names, sent in by_axes.items()
        if sum(stats.bytes for stats in sent) >= 2**28
    ]


def _shown_line(layout: _Layout, gpus: Topology) -> list[str]:
    """A line that says how much of a large cluster is drawn."""
    num_domains = len(layout.centers) // gpus.gpus_per_domain
    return (
        []
        if num_domains == gpus.num_domains
        else [f"drawn: the first {num_domains} of {gpus.num_domains} NVLink domains"]
    )


def _bytes_of(collectives: Sequence[CollectiveStats]) -> str:
    kinds = ", ".join(dict.fromkeys(stats.kind for stats in collectives if stats.bytes >= 2**20))
    return f"{sum(stats.bytes for stats in collectives) / 2**30:,.1f} GiB per GPU and step ({kinds})"


def _crosses(axis: str, mesh: Mapping[str, int], gpus: Topology) -> bool:
    """Whether groups over the axis contain GPUs of several NVLink domains."""
    names = list(mesh)
    devices = np.arange(gpus.num_gpus).reshape(tuple(mesh.values()))
    groups = np.moveaxis(devices, names.index(axis), -1).reshape(-1, mesh[axis]) // gpus.gpus_per_domain
    return bool((groups != groups[:, :1]).any())
