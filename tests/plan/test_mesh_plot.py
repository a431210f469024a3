"""Figures of meshes: one square per GPU, the ring over context, and the links of each axis. Nothing is compiled."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import GRAY
from jaxlc.plan import mesh_figure
from jaxlc.plan.figures import mesh_plot
from jaxlc.plan.summary import CollectiveStats
from jaxlc.simulate.topology import topology


def texts_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def legend_of(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("mesh, name, num_domains", [
    (dict(context=8), "h100:1x8", 1),
    (dict(context=8, tensor=8), "h100:8x8", 8),
    (dict(fsdp=8, context=9), "gb200:1x72", 1),
    (dict(data=2, fsdp=2, context=4, tensor=4), "h100:8x8", 8),
])  # fmt: skip
def test_mesh_figure_has_all_gpus_domains_and_ring(mesh, name, num_domains):
    figure = mesh_figure(mesh, name)
    patches = figure.axes[0].patches
    labels = [text for text in texts_of(figure) if text.startswith("c")]
    assert len(labels) == topology(name).num_gpus == len(set(labels))
    outlines = [x for x in patches if isinstance(x, FancyBboxPatch) and to_hex(x.get_edgecolor()) == GRAY]
    assert len([x for x in outlines if x.get_linewidth() == 0.9]) == num_domains
    assert sum(isinstance(patch, FancyArrowPatch) for patch in patches) == mesh["context"]


def test_mesh_figure_names_the_link_of_each_axis():
    context, tensor = legend_of(mesh_figure(dict(context=8, tensor=8), "h100:8x8"))
    assert context == "context: rings of 8 across domains, over the network"
    assert tensor == "tensor: groups of 8 within a domain, over NVLink"
    (context,) = legend_of(mesh_figure(dict(context=8), "h100:1x8"))
    assert context == "context: rings of 8 within a domain, over NVLink"


def test_mesh_figure_adds_bytes_of_collectives():
    def stats(kind, *axes):
        return CollectiveStats(kind, axes, "NCCL", "", 1, 2**30, False)

    mesh = dict(data=1, fsdp=2, context=2, tensor=2)
    collectives = (stats("all-to-all", "context"), stats("all-gather", "fsdp", "context"))
    figure = mesh_plot.mesh_figure(mesh, topology("h100:1x8"), collectives)
    legend = legend_of(figure)
    assert "context: groups of 2 within a domain, over NVLink; 1.0 GiB per GPU and step (all-to-all)" in legend
    assert "fsdp + context: 1.0 GiB per GPU and step (all-gather)" in legend
    assert not any(isinstance(patch, FancyArrowPatch) for patch in figure.axes[0].patches)  # no ring


def test_mesh_figure_ring_arrows_avoid_squares():
    """No point of an arrow is inside of a square; 72 ranks are on several lines."""
    figure = mesh_figure(dict(context=72), "gb200:1x72")
    patches = figure.axes[0].patches
    squares = [x.get_x() + 1j * x.get_y() for x in patches if isinstance(x, FancyBboxPatch) and x.get_width() == 0]
    assert len(squares) == 72
    for arrow in (patch for patch in patches if isinstance(patch, FancyArrowPatch)):
        points = arrow._path_original.vertices
        for start, end in zip(points, points[1:], strict=False):
            line = start + np.linspace(0, 1, 50)[:, None] * (end - start)
            for square in squares:
                inside = (np.abs(line - [square.real, square.imag]) < 0.37).all(axis=1)
                assert not inside.any()


def test_mesh_figure_of_many_gpus_draws_the_first_domains():
    figure = mesh_figure(dict(fsdp=4, context=512), "h100:256x8")
    labels = [text for text in texts_of(figure) if text.startswith("c")]
    assert len(labels) == 256 and "drawn: the first 32 of 256 NVLink domains" in legend_of(figure)
    assert sum(isinstance(patch, FancyArrowPatch) for patch in figure.axes[0].patches) == 255


@pytest.mark.parametrize("mesh, name, words", [
    (dict(context=4), "h100:1x8", "h100:1x8 has 8 GPUs and the mesh .*context=4.* has 4"),
    (dict(contxt=8), "h100:1x8", "unknown mesh axis 'contxt': expected data, fsdp, context, tensor"),
])  # fmt: skip
def test_mesh_figure_of_invalid_mesh_raises_user_error(mesh, name, words):
    with pytest.raises(UserError, match=words):
        mesh_figure(mesh, name)
