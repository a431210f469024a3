"""The picture of `jaxlc data report`. Importing this module imports matplotlib."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jaxlc.core import plot_style
from jaxlc.data.report import CLASS_NAMES, StageShares, by_class
from jaxlc.data.sequences.source import SourceView


def report_figure(sources: Sequence[SourceView], stages: Sequence[StageShares]) -> Figure:
    """Tokens by document length of each source; shares of the tokens; and epochs in each stage."""
    names = [source.name for source in sources]
    figure = plot_style.new_figure(11, 2.3 + 0.34 * len(names) * max(1, len(stages)) ** 0.5)
    lengths, shares, epochs = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    _plot_lengths(lengths, sources)
    rows = np.arange(len(names))
    height = 0.8 / len(stages)
    styles = itertools.cycle(itertools.product(plot_style.HATCHES, plot_style.CYCLE))
    for number, (stage, (hatch, color)) in enumerate(zip(stages, styles)):
        style = dict(color=color, hatch=hatch, edgecolor="white", linewidth=0)
        by_name = {share.name: share for share in stage.shares}
        present = [by_name.get(name) for name in names]
        at = rows + (number - (len(stages) - 1) / 2) * height
        realized = [100 * share.realized_share if share else 0 for share in present]
        num_epochs = [share.num_epochs if share else 0 for share in present]
        shares.barh(at, realized, 0.9 * height, **style, label=stage.stage.name or "the run")
        bars = epochs.barh(at, num_epochs, 0.9 * height, **style)
        epochs.bar_label(
            bars, [f"{count:.3g}" if count else "" for count in num_epochs], padding=3, fontsize=8
        )
    for axes, label in (
        (lengths, "tokens"),
        (shares, "share of the tokens (%)"),
        (epochs, "epochs"),
    ):
        plot_style.style_axes(axes, grid="x")
        axes.set_xlabel(label)
    epochs.margins(x=0.15)
    if len(stages) > 1:
        _draw_legend(shares, "outside lower right", "stage")
    lengths.set_yticks(rows, names)
    lengths.invert_yaxis()
    plot_style.set_title(
        figure, "Tokens of each source by document length; shares and epochs of the run"
    )
    return figure


def _plot_lengths(axes: Axes, sources: Sequence[SourceView]) -> None:
    left = np.zeros(len(sources))
    shades = [str(shade) for shade in np.linspace(0.85, 0.15, len(CLASS_NAMES))]
    for number, name in enumerate(CLASS_NAMES):
        tokens = np.array([by_class(source.lengths)[1][number] for source in sources], float)
        if tokens.any():
            axes.barh(range(len(sources)), tokens, 0.7, left=left, color=shades[number], label=name)
        left += tokens
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _draw_legend(axes, "outside lower left", "document length in tokens")


def _draw_legend(axes: Axes, place: str, title: str) -> None:
    """A legend of the figure, in one line, for the bars of `axes`."""
    handles, _ = axes.get_legend_handles_labels()
    style = dict(fontsize=8, title_fontsize=8, frameon=False, alignment="left")
    axes.figure.legend(handles=handles, loc=place, ncols=max(1, len(handles)), title=title, **style)
