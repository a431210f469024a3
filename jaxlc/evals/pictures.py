"""Draws what evaluations have stored: scores against length, maps of depth and length, and loss by position."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxlc.config.checks.eval_checks import NEEDLE, PASSKEY
from jaxlc.core import extras
from jaxlc.core.atomic_files import replacing
from jaxlc.evals.document_loss import stored_losses
from jaxlc.evals.score_rows import ScoreRow, read_scores

_MAPS = {NEEDLE: "Needle in a haystack", PASSKEY: "Pass key"}


def draw_maps(rows: Sequence[ScoreRow], out: Path) -> list[Path]:
    """Writes needle.png and passkey.png of the scores of one model; returns the files, none without matplotlib."""
    if not extras.is_installed("matplotlib"):
        return []
    from jaxlc.evals import score_plots

    figures = {
        f"{task}.png": score_plots.depth_figure(found, title)
        for task, title in _MAPS.items()
        if (found := [row for row in rows if row.task == task])
    }
    return _saved(figures, out)


def draw_overlays(directories: Mapping[str, Path], out: Path) -> list[Path]:
    """Writes scores.png and loss_by_position.png, with one line for each model; returns the files.

    Args:
      directories: label -> the directory of its scores.
    """
    if not extras.is_installed("matplotlib"):
        return []
    from jaxlc.evals import score_plots

    figures = {}
    scores = {label: [row for row in read_scores(path) if row.unit == "%"] for label, path in directories.items()}
    if scores := {label: rows for label, rows in scores.items() if rows}:
        figures["scores.png"] = score_plots.score_figure(scores)
    losses = {label: stored_losses(path) for label, path in directories.items()}
    if longest := {label: lengths[-1] for label, lengths in losses.items() if lengths}:
        figures["loss_by_position.png"] = score_plots.loss_figure(longest)
    return _saved(figures, out)


def _saved(figures: Mapping, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with replacing(out / name) as file:
            figure.savefig(file, format="png")
    return [out / name for name in figures]
