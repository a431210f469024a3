"""Figures of stored scores: against length, maps of depth and length, and loss by position.

Importing this module does not import matplotlib; drawing does.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxlc.config.checks.stage_checks import NEEDLE, PASSKEY
from jaxlc.core import errors
from jaxlc.core.files import replacing
from jaxlc.core.plot_style import line_styles, new_figure, style_axes
from jaxlc.evals.document_loss import DocumentLosses, stored_losses
from jaxlc.evals.predictions import ScoreRow, read_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_WIDTHS = 4  # line widths


def _token_count(value: float, _: int) -> str:
    """The label of a tick."""
    return f"{value:,.0f}"


def depth_figure(rows: Sequence[ScoreRow], title: str) -> "Figure":
    """The scores of one task as a map of depth against length."""
    lengths, depths = (sorted({getattr(row, name) for row in rows}) for name in ("length", "depth"))
    scores = np.full((len(depths), len(lengths)), np.nan)
    for row in rows:
        scores[depths.index(row.depth), lengths.index(row.length)] = row.score
    figure = new_figure(2.2 + 0.8 * len(lengths), 1.6 + 0.45 * len(depths), dpi=150)
    axes = figure.subplots()
    # A map whose lightness increases: readers with any color vision, and gray prints, keep the
    # order.
    image = axes.imshow(scores, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (y, x), score in np.ndenumerate(scores):
        if not np.isnan(score):
            color = "white" if score < 45 else "black"
            axes.text(x, y, f"{score:.0f}", ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="length in tokens", ylabel="depth of the answer")
    axes.set_title(f"{title}, {rows[0].num_examples} examples each", loc="left", fontsize=10)
    figure.colorbar(image, label="correct, %")
    return figure


def score_figure(runs: Mapping[str, Sequence[ScoreRow]]) -> "Figure":
    """Scores against length, the mean over tasks, with standard errors; one line for each
    checkpoint or model.

    Args:
      runs: label -> its rows, in percent.
    """
    figure = new_figure(7.0, 4.2, dpi=150)
    axes = figure.subplots()
    for index, ((label, rows), line) in enumerate(zip(runs.items(), line_styles())):
        lengths = sorted({row.length for row in rows})
        groups = [[row for row in rows if row.length == length] for length in lengths]
        means = [np.mean([row.score for row in group]) for group in groups]
        errors = [
            np.sqrt(np.nansum([row.standard_error**2 for row in group])) / len(group)
            for group in groups
        ]
        # Later lines are thinner and their markers smaller, so that equal lines are seen one inside
        # the other.
        size = (len(runs) - 1 - index) % _NUM_WIDTHS
        axes.errorbar(
            lengths, means, yerr=errors, fmt="o", **line, capsize=3 + 2 * size,
            linewidth=1.2 + 1.8 * size, markersize=4 + 3 * size, label=label,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_token_count)
    tasks = sorted({row.task for rows in runs.values() for row in rows})
    axes.set(xlabel="length in tokens", ylabel="score, %", ylim=(-3, 103))
    axes.set_title(
        "Score by length, mean of " + (tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"),
        loc="left",
    )
    if len(runs) > 4:  # a longer legend would cover lines
        figure.legend(loc="outside right upper", frameon=False)
    else:
        axes.legend(frameon=False)
    style_axes(axes, grid="y")
    return figure


def loss_figure(runs: Mapping[str, DocumentLosses]) -> "Figure":
    """Loss against position, with its 95% interval if there are enough documents; one line per
    model.

    Args:
      runs: label -> its losses.
    """
    figure = new_figure(7.0, 4.2, dpi=150)
    axes = figure.subplots()
    has_interval = False
    for line, (label, losses) in zip(line_styles(), runs.items()):
        columns = losses.by_position.by_position("loss")
        has_interval |= np.isfinite(columns["low"]).any()
        # 1 is the first position
        center = np.sqrt((columns["first_position"] + 1) * (columns["last_position"] + 1))
        axes.fill_between(
            center, columns["low"], columns["high"], color=line["color"], alpha=0.18, linewidth=0
        )
        gains = [
            f"{losses.gain(limit).mean():+z.3f} nats over {limit:,}" for limit in losses.limited
        ]
        axes.plot(
            center,
            columns["loss"],
            "o",
            **line,
            markersize=3,
            linewidth=1.2,
            label="; ".join([label, *gains]),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_token_count)
    axes.set(xlabel="position in the document, in tokens", ylabel="loss, nats per token")
    lengths = sorted({losses.length for losses in runs.values()})
    counts = sorted({losses.by_position.num_documents for losses in runs.values()})
    title = f"Loss by position, {_either(counts)} documents of {_either(lengths)} tokens"
    if has_interval:
        title += ", 95% intervals"
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, title="gain of full context", title_fontsize=8)
    style_axes(axes, grid="y")
    return figure


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


_MAPS = {NEEDLE: "Needle in a haystack", PASSKEY: "Pass key"}


def draw_maps(rows: Sequence[ScoreRow], out: Path) -> list[Path]:
    """Writes needle.png and passkey.png of the scores of one model; returns the files, none without
    matplotlib.
    """
    if not errors.is_installed("matplotlib"):
        return []

    figures = {
        f"{task}.png": depth_figure(found, title)
        for task, title in _MAPS.items()
        if (found := [row for row in rows if row.task == task])
    }
    return _saved(figures, out)


def draw_overlays(directories: Mapping[str, Path], out: Path) -> list[Path]:
    """Writes scores.png and loss_by_position.png, with one line for each model; returns the files.

    Args:
      directories: label -> the directory of its scores.
    """
    if not errors.is_installed("matplotlib"):
        return []

    figures = {}
    scores = {
        label: [row for row in read_scores(path) if row.unit == "%"]
        for label, path in directories.items()
    }
    if scores := {label: rows for label, rows in scores.items() if rows}:
        figures["scores.png"] = score_figure(scores)
    losses = {label: stored_losses(path) for label, path in directories.items()}
    if longest := {label: lengths[-1] for label, lengths in losses.items() if lengths}:
        figures["loss_by_position.png"] = loss_figure(longest)
    return _saved(figures, out)


def _saved(figures: Mapping, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with replacing(out / name) as file:
            figure.savefig(file, format="png")
    return [out / name for name in figures]
