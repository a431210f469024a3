"""The picture of 2026-11-22-calibration.md: published over estimated time of all runs."""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.calibration_fit import Fold
from jaxlc.core import plot_style
from jaxlc.core.plot_style import BLUE, RED, SILVER


def write(rows: Sequence[dict], folds: Sequence[Fold], path: Path) -> None:
    """Draws a row for each run: its ratio, and the 80% interval from the other sources as a bar."""
    figure = plot_style.new_figure(9, 0.23 * len(rows) + 1.2)
    axes = figure.subplots()
    plot_style.style_axes(axes, "x")
    fit_of = {fold.source: fold.fit for fold in folds}
    for place, row in enumerate(rows):
        fit = fit_of[row["source"]]
        low, high = (math.exp(fit.log_scale + sign * fit.spread) for sign in (-1, 1))
        axes.barh(place, high - low, left=low, height=0.7, color=SILVER, alpha=0.5, linewidth=0)
        is_covered = low <= row["time_ratio"] <= high
        axes.plot(row["time_ratio"], place, "o", color=BLUE if is_covered else RED, markersize=5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(rows)), [f"{row['source']}: {row['name']}" for row in rows], fontsize=7
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.4, 2, 2.8, 4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(
        "published time / estimated time; bar: 80% interval from the other sources", fontsize=8
    )
    axes.set_title("Estimated step times against published runs", fontsize=10, loc="left")
    figure.savefig(path, dpi=130)
