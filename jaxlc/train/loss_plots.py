"""The two plots at the end of a run. Imported only then, because matplotlib is slow to import."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which would replace the backend of a notebook
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from jaxlc.train.evaluation import Evaluation
from jaxlc.train.metrics import Row

_MODEL, _HELDOUT, _QUIET, _FAINT = "#1f5fa8", "#d1495b", "#6b7280", "#dde1e6"
_ZERO_BIN = (0.3, 0.5)  # where the logarithmic axis shows the tokens at position 0


def plot_loss(rows: list[Row], baselines: dict[str, float], path: Path) -> None:
    """Plots training and held-out loss over steps, with the losses of n-gram models as baselines.

    Args:
      rows: of metrics.jsonl.
      baselines: name -> held-out loss in nats.
    """
    figure = Figure(figsize=(7.5, 4.4), dpi=150)
    axes = figure.subplots()
    axes.plot(*_points(rows, "loss"), color=_MODEL, linewidth=1.2, label="training")
    steps, losses = _points(rows, "eval_loss")
    if losses:
        label = f"held out, {losses[-1]:.2f} at the end"
        axes.plot(steps, losses, "o:", color=_HELDOUT, markersize=6, linewidth=1.0, label=label)
    for name, loss in baselines.items():
        axes.axhline(loss, color=_QUIET, linewidth=0.9, linestyle=(0, (5, 4)), zorder=1)
        is_highest = loss == max(baselines.values())
        axes.annotate(
            f"{name} {loss:.2f}",
            (1.0, loss),
            (
                5,
                1 if is_highest else -1,
            ),  # points; one label above its line and one below
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="bottom" if is_highest else "top",
            fontsize=9,
            color=_QUIET,
        )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.set_title("Loss in training", loc="left")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_loss_by_position(evaluation: Evaluation, path: Path) -> None:
    """Plots held-out loss against the number of earlier tokens of the same document in the sequence.

    The band is two standard errors of the mean, as if token losses were independent; the bars below show the number of
    tokens per point.
    """
    is_used = np.asarray(evaluation.sums.weight) > 0
    weight, loss, loss_squared = (np.asarray(sums)[is_used] for sums in evaluation.sums)
    mean = loss / weight
    error = np.sqrt(np.maximum(loss_squared / weight - mean**2, 0.0) / weight)
    first, last = evaluation.edges[:-1][is_used], evaluation.edges[1:][is_used] - 1  # earlier tokens in each bin
    left = np.where(first == 0, _ZERO_BIN[0], first - 0.5)  # half a token more on both sides, so that bars touch
    right = last + 0.5
    center = np.where(first == 0, np.sqrt(np.prod(_ZERO_BIN)), np.sqrt(first * last))

    figure = Figure(figsize=(7.5, 4.8), dpi=150)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1), gridspec_kw=dict(hspace=0.08))
    axes.fill_between(center, mean - 2 * error, mean + 2 * error, color=_MODEL, alpha=0.15, linewidth=0)
    axes.plot(center, mean, "o-", color=_MODEL, markersize=3.5, linewidth=1.3)
    # Bins of few tokens have bands of several nats: they are clipped, so that they do not flatten the curve.
    margin = max(0.15 * np.ptp(mean), 3 * np.median(error))
    axes.set(ylim=(mean.min() - margin, mean.max() + margin), ylabel="held-out loss, nats per token")
    axes.set_title("Held-out loss by position in the document", loc="left")
    below.bar(left, weight, width=right - left, align="edge", color=_FAINT, edgecolor="white", linewidth=0.8)
    below.set(yscale="log", ylim=(0.5, 2 * weight.max()), ylabel="tokens")
    below.set_xlabel("earlier tokens of the same document in the sequence")
    below.yaxis.set(major_formatter=_COUNT, minor_locator=NullLocator())
    _count_axis(axes, below, right.max())
    _save(figure, path)


_COUNT = FuncFormatter(lambda value, _: f"{value:,.0f}")


def _points(rows: list[Row], name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have a finite value."""
    finite_rows = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in finite_rows], [row[name] for row in finite_rows]


def _count_axis(axes: Axes, below: Axes, largest: float) -> None:
    """Gives both axes a logarithmic x axis of token counts on which 0 is shown too."""
    powers = 10.0 ** np.arange(0, np.log10(largest))
    below.set_xscale("log")
    below.set_xlim(0.9 * _ZERO_BIN[0], 1.1 * largest)
    below.xaxis.set(major_locator=FixedLocator([np.sqrt(np.prod(_ZERO_BIN)), *powers]), minor_locator=NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "0"))
    axes.tick_params(axis="x", length=0)


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path, bbox_inches="tight")
