"""The two pictures at the end of a run."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jaxlc.train.evaluation import Evaluation
from jaxlc.train.metrics import Row

_MODEL, _HELDOUT, _BASELINE, _QUIET = "#1f5fa8", "#d1495b", "#6b7280", "#e5e7eb"


def plot_loss(rows: list[Row], baselines: dict[str, float], path: Path) -> None:
    """Training and held-out loss over steps, with what counting tokens reaches, for comparison.

    Args:
      rows: of metrics.jsonl.
      baselines: name -> held-out loss in nats.
    """
    figure, axes = _new_figure()
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    heldout = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]
    axes.plot(*zip(*train), color=_MODEL, linewidth=1.2, label="training")
    if heldout:
        axes.plot(*zip(*heldout), "o-", color=_HELDOUT, markersize=5, linewidth=1.2, label="held out")
    for name, loss in baselines.items():
        axes.axhline(loss, color=_BASELINE, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name} {loss:.2f}", (1.0, loss), (-4, 3), ha="right", fontsize=8, color=_BASELINE,
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Loss")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_loss_by_position(evaluation: Evaluation, path: Path) -> None:
    """Held-out loss against the number of earlier tokens of the same document in the row: does long context pay?

    The band is two standard errors of the mean; below, how many tokens each point rests on.
    """
    weight, loss, loss_squared = evaluation.sums
    used = weight > 0
    counts = weight[used]
    mean = loss[used] / counts
    error = np.sqrt(np.maximum(loss_squared[used] / counts - mean**2, 0.0) / counts)
    centers = (np.sqrt(evaluation.edges[:-1] * (evaluation.edges[1:] - 1.0)) + 1.0)[used]  # + 1: 0 has a place on a log axis
    figure, (axes, below) = plt.subplots(
        2, 1, figsize=(7, 4.6), dpi=150, sharex=True, gridspec_kw=dict(height_ratios=(5, 1), hspace=0.08)
    )
    axes.fill_between(centers, mean - 2 * error, mean + 2 * error, color=_MODEL, alpha=0.18, linewidth=0)
    axes.plot(centers, mean, "o-", color=_MODEL, markersize=3.5, linewidth=1.3)
    axes.set(xscale="log", ylabel="held-out loss, nats per token", title="Loss by position")
    below.bar(centers, counts, width=0.28 * centers, color=_QUIET, edgecolor=_BASELINE, linewidth=0.4)
    below.set(yscale="log", ylabel="tokens", xlabel="earlier tokens of the same document in the row, plus 1")
    for each in (axes, below):
        _clean(each)
    _save(figure, path)


def _new_figure():
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    _clean(axes)
    return figure, axes


def _clean(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_QUIET, linewidth=0.6)
    axes.set_axisbelow(True)


def _save(figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
