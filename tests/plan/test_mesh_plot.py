"""Figures of meshes: one square per GPU, the ring over context, and the links of each axis. Nothing
is compiled.
"""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import GRAY
from jaxlc.plan import figures, mesh_figure
from jaxlc.plan.program import CollectiveStats
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
    labels = [text for text in texts_of(figure) if not text.startswith(("node", "domain"))]
    assert len(labels) == topology(name).num_gpus == len(set(labels))
    outlines = [
        x for x in patches if isinstance(x, Rectangle) and to_hex(x.get_edgecolor()) == GRAY
    ]
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
    figure = figures.mesh_figure(mesh, topology("h100:1x8"), collectives)
    legend = legend_of(figure)
    assert (
        "context: groups of 2 within a domain, over NVLink; 1.0 GiB per GPU and step (all-to-all)"
        in legend
    )
    assert "fsdp + context: 1.0 GiB per GPU and step (all-gather)" in legend
    # no ring
    assert not any(isinstance(patch, FancyArrowPatch) for patch in figure.axes[0].patches)


def test_mesh_figure_legend_is_inside_the_figure():
    """Also a line with all kinds of collectives and their bytes."""
    kinds = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    collectives = [
        CollectiveStats(kind, ("context",), "NCCL", "", 1, 2**40, False) for kind in kinds
    ]
    figure = figures.mesh_figure(
        dict(data=1, fsdp=1, context=8, tensor=8), topology("h100:8x8"), collectives
    )
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and box.y0 >= 0
    assert "all-to-all)" in legend_of(figure)[0]


def test_mesh_figure_of_many_gpus_draws_the_first_domains():
    figure = mesh_figure(dict(fsdp=4, context=512), "h100:256x8")
    labels = [text for text in texts_of(figure) if text.startswith("f")]
    assert len(labels) == 256 and "drawn: the first 32 of 256 NVLink domains" in legend_of(figure)
    assert sum(isinstance(patch, FancyArrowPatch) for patch in figure.axes[0].patches) == 255


@pytest.mark.parametrize("mesh, name, words", [
    (dict(context=4), "h100:1x8", "h100:1x8 has 8 GPUs and the mesh .*context=4.* has 4"),
    (dict(contxt=8), "h100:1x8", "unknown mesh axis 'contxt': expected data, fsdp, context, tensor"),
])  # fmt: skip
def test_mesh_figure_of_invalid_mesh_raises_user_error(mesh, name, words):
    with pytest.raises(UserError, match=words):
        mesh_figure(mesh, name)
