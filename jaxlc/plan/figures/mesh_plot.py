"""Draws a mesh on its nodes and NVLink domains, and which GPUs communicate with each other."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from jaxlc.core import plot_style
from jaxlc.core.axes import CONTEXT, DATA, FSDP, TENSOR, mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import AMBER, FAINT, GRAY, RED, TEAL
from jaxlc.core.text import count_text
from jaxlc.plan.summary import CollectiveStats
from jaxlc.simulate.topology import Topology

_AXIS_COLORS = {DATA: GRAY, FSDP: AMBER, CONTEXT: RED, TENSOR: TEAL}
_RANK_COLORS = LinearSegmentedColormap.from_list("ranks", ["#d3e3f3", "#8fb4dc", "#1f5fa8", "#12325a"])
_MAX_GPUS = 256  # in a figure, which shows the first domains of a larger cluster
_MAX_COLUMNS, _MAX_LINES = 16, 14  # GPUs next to each other in a domain; lines of GPUs in domains above each other
_SQUARE, _WIDTH = 0.76, 8.5  # GPU, in units of the distance between two; figure, in inches
_LEGEND_CHARS = 120  # characters that fit a line of the legend


def mesh_figure(mesh: Mapping[str, int], gpus: Topology, collectives: Sequence[CollectiveStats] = ()) -> Figure:
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
    is_ring = not collectives or any(x.kind == "collective-permute" and CONTEXT in x.axes for x in collectives)
    lines = _legend(devices, list(active), gpus, collectives, is_ring)
    handles = [Patch(color=color, label="\n".join(textwrap.wrap(text, _LEGEND_CHARS))) for color, text in lines]
    width, height = np.ptp(centers, axis=0) + (2.6, 1.4)
    inches = min(0.5, _WIDTH / width)  # between two GPUs
    figure = plot_style.new_figure(_WIDTH, inches * height + 0.6 + 0.2 * len(handles))
    axes = figure.subplots()
    is_node = gpus.gpus_per_node >= gpus.gpus_per_domain
    for number, box in enumerate(_boxes(centers, gpus.gpus_per_domain, 0.58)):
        axes.add_patch(Rectangle(*box, fill=False, edgecolor=GRAY, linewidth=0.9))
        side = box[0] + (box[1] + 0.1, box[2] / 2)
        axes.text(*side, f"{'node' if is_node else 'domain'} {number}", fontsize=6.5, color=GRAY, va="center")
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
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=8, handlelength=0.9)
    domains = count_text(gpus.num_domains, "NVLink domain")
    plot_style.set_title(figure, f"{mesh_text(active) or '1 GPU'} on {gpus}: {domains} of {gpus.gpus_per_domain} GPUs")
    return figure


def _centers(active: Mapping[str, int], gpus: Topology) -> np.ndarray:
    """float [GPUs, 2]. The lines of a domain hold whole groups of the last mesh axis and whole nodes, if possible."""
    per_domain, last = gpus.gpus_per_domain, next(reversed(active.values()), 1)
    sizes = [size for size in range(1, min(per_domain, _MAX_COLUMNS) + 1) if per_domain % size == 0]
    columns = max(sizes, key=lambda size: (size % last == 0, size % min(gpus.gpus_per_node, per_domain) == 0, size))
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
        color, fontsize = "white" if shade > 0.5 else "#12325a", inches * 70 / max(5, *map(len, lines))
        axes.text(*centers[gpu], "\n".join(lines), fontsize=fontsize, color=color, ha="center", va="center", zorder=3)


def _draw_ring(axes: Axes, centers: np.ndarray, members: np.ndarray) -> None:
    """Arrows from each context rank to the next one; arrows to distant GPUs are arcs behind the squares."""
    for sender, receiver in zip(members, np.roll(members, -1)):
        if max(sender, receiver) < len(centers):
            distance = np.hypot(*(centers[receiver] - centers[sender]))
            shift = (centers[receiver] - centers[sender]) / distance * _SQUARE / 2
            arc = "arc3" if distance < 1.8 else "arc3,rad=-0.2"
            style = dict(arrowstyle="-|>", connectionstyle=arc, shrinkA=0, shrinkB=0, mutation_scale=8, clip_on=False)
            ends = centers[sender] + shift, centers[receiver] - shift
            axes.add_patch(FancyArrowPatch(*ends, color=RED, linewidth=1.4, zorder=1, **style))


def _legend(
    devices: np.ndarray, names: Sequence[str], gpus: Topology, collectives: Sequence[CollectiveStats], is_ring: bool
) -> Iterator[tuple[str, str]]:
    """(color, text) of each axis: its size, link, and bytes of collectives; and of combinations of axes."""
    for dim, axis in enumerate(names):
        domains = np.moveaxis(devices, dim, 0) // gpus.gpus_per_domain
        link = "across domains, over the network" if (domains != domains[0]).any() else "within a domain, over NVLink"
        text = f"{axis}: {'rings' if axis == CONTEXT and is_ring else 'groups'} of {len(domains)} {link}"
        yield _AXIS_COLORS[axis], "; ".join([text, *_sent((axis,), collectives)])
    for several in dict.fromkeys(stats.axes for stats in collectives if len(stats.axes) > 1):
        yield from (("none", f"{' + '.join(several)}: {text}") for text in _sent(several, collectives))
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
