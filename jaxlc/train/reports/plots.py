"""The figures of a run: loss, rewards and gradient norm over steps, and held-out loss by position.

Needs matplotlib, which is slow to import: import this module only where a figure is drawn.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from jaxlc.core.files import Arrays
from jaxlc.core.plot_style import BLUE, FAINT, GRAY, RED, TEAL, new_figure, style_axes
from jaxlc.evals.document_loss import MIN_DOCUMENTS
from jaxlc.train.evaluation import PIECE_TOKENS, ContextGain, Evaluation
from jaxlc.train.reports.metrics import History, Row

_ZERO_BIN = (0.3, 0.5)  # where the logarithmic axis shows the tokens at position 0
_NUMBER = FuncFormatter(lambda value, _: f"{value:g}")
_COUNT = FuncFormatter(lambda value, _: f"{value:,.0f}")


def loss_figure(rows: Sequence[Row]) -> Figure:
    """Training and held-out loss over steps.

    Args:
      rows: of metrics.jsonl.
    """
    figure = new_figure(7.5, 4.4, dpi=150)
    axes = figure.subplots()
    history = History(rows)
    axes.plot(*history.column("loss"), color=BLUE, linewidth=1.2, label="training")
    _draw_stages(axes, history)
    steps, losses = history.column("eval_loss")
    if len(losses):
        label = f"held out, {losses[-1]:.2f} at the end"
        axes.plot(steps, losses, "o:", color=RED, markersize=6, linewidth=1.0, label=label)
    axes.set(xlabel="step", ylabel=", ".join(filter(None, ["loss", history.loss_unit])))
    axes.set_title("Loss in training", loc="left")
    axes.legend(frameon=False)
    style_axes(axes, grid="y")
    return figure


def reward_figure(rows: Sequence[Row]) -> Figure:
    """Mean reward of the rollouts, with its 10% and 90% quantiles if these change, mean tokens of
    their answers, the ratio of new to old probabilities, and the age of the policy that made the
    rollouts, over steps.

    Args:
      rows: of metrics.jsonl.
    """
    labels = {
        "rollouts/reward": "reward",
        "rollouts/answer_tokens": "tokens of an answer",
        "ratio": "ratio",
    }
    if any("rollouts/policy_age" in row for row in rows):
        labels["rollouts/policy_age"] = "age in steps"
    figure, panels, history = _over_steps(rows, "Rewards of rollouts", labels)
    steps, low = history.column("rollouts/reward_p10")
    high = history.column("rollouts/reward_p90")[1]
    if np.ptp([low, high], axis=1).any():
        panels[0].fill_between(steps, low, high, color=FAINT, label="10% to 90% of the rewards")
        figure.legend(loc="outside lower right", frameon=False)
    return figure


def optimizer_figure(rows: Sequence[Row]) -> Figure:
    """Gradient norm before clipping, and learning rate, over steps.

    Args:
      rows: of metrics.jsonl.
    """
    labels = dict(grad_norm="gradient norm", learning_rate="learning rate")
    figure, panels, history = _over_steps(rows, "Gradient norm and learning rate", labels)
    if (history.column("grad_norm")[1] > 0).any():
        panels[0].set_yscale("log")
        panels[0].yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        panels[0].yaxis.set_major_formatter(_NUMBER)
    for axes in panels[1:]:
        axes.ticklabel_format(axis="y", scilimits=(-3, 3))
    _draw_stages(panels[0], history)
    return figure


def _over_steps(
    rows: Sequence[Row], title: str, labels: Mapping[str, str]
) -> tuple[Figure, Sequence[Axes], History]:
    """Panels with a column of metrics.jsonl each, over steps; the title names what is constant
    instead of a panel.

    Args:
      labels: of the y axes, by the name of the column.
    """
    history = History(rows)
    first, *others = labels
    shown = {first: labels[first]}
    constants = []
    for name in others:
        values = history.column(name)[1]
        if len(values) and np.ptp(values) > 0.01 * np.abs(values).max():
            shown[name] = labels[name]
        elif len(values):
            constants.append(f"{labels[name]} {values[-1]:.3g}")
    title = f"{title} (constant: {', '.join(constants)})" if constants else title
    num_more = len(shown) - 1
    figure = new_figure(7.5, 3.2 + 1.6 * num_more, dpi=150)
    panels = figure.subplots(
        1 + num_more, 1, sharex=True, height_ratios=(3, *[2] * num_more), squeeze=False
    )[:, 0]
    for axes, (name, label), color in zip(
        panels, shown.items(), itertools.chain([BLUE], itertools.repeat(TEAL))
    ):
        axes.plot(*history.column(name), color=color, linewidth=1.2)
        axes.set_ylabel(label)
        style_axes(axes, grid="y")
    panels[0].set_title(title, loc="left")
    panels[-1].set_xlabel("step")
    return figure, panels, history


def _draw_stages(axes: Axes, history: History) -> None:
    """Lines at the boundaries of stages, and the names of the stages at the top."""
    if "stage" not in history or not history.num_rows:
        return
    names = history["stage"]
    steps = history["step"]
    starts = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1)]
    for index in starts:
        boundary = steps[index - 1] + 0.5 if index else steps[0]
        if index:
            axes.axvline(boundary, color=GRAY, linewidth=0.9, zorder=1)
        axes.annotate(
            str(names[index]),
            (boundary, 1.0),
            (3, -3),  # points
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color=GRAY,
        )


def loss_by_position_figure(evaluation: Evaluation) -> Figure:
    """Held-out loss against the number of earlier tokens of the same document in the sequence.

    The band is the 95% interval of the mean, of a bootstrap over documents; means over fewer than 5
    documents have none and are hollow points. The bars show the number of documents per point, if
    it differs. A second panel shows the gain of full context over the last 256 to 511 tokens, if it
    was evaluated.
    """
    gain = evaluation.context_gain
    columns = evaluation.by_position()
    num_rows = 1 if len(set(columns["documents"])) == 1 else 2
    figure = new_figure(7.5 if gain is None else 10.4, 4.0 + 0.4 * num_rows, dpi=150)
    figure.get_layout_engine().set(hspace=0.02)
    panels = figure.subplots(
        num_rows,
        1 if gain is None else 2,
        sharex="col",
        squeeze=False,
        height_ratios=(5, 1)[:num_rows],
        width_ratios=None if gain is None else (3, 2),
    )
    axes = panels[0, 0]
    below = panels[-1, 0]
    _draw_means(axes, below, columns, columns["loss"], BLUE)
    axes.set_ylabel("held-out loss, nats per token")
    axes.set_title("Held-out loss by position in the document", loc="left", fontsize=11)
    below.set_xlabel("earlier tokens of the same document in the sequence")
    if below is not axes:
        below.set_ylabel("documents")
    if len(columns["loss"]):
        _show_zero(below, columns["last_position"][-1] + 0.5)
    if gain is not None:
        _draw_gain(panels[0, 1], panels[-1, 1], gain)
    for panel in panels.flat:
        style_axes(panel, grid="y")
    return figure


def _draw_gain(axes: Axes, below: Axes, gain: ContextGain) -> None:
    columns = gain.by_position()
    axes.axhline(0, color=GRAY, linewidth=0.9)
    _draw_means(axes, below, columns, columns["gain"], TEAL)
    low, high = axes.get_ylim()
    # with the line at zero in view
    axes.set_ylim(min(low, 0 - 0.1 * high), max(high, 0 - 0.1 * low))
    axes.set_ylabel("loss with limited - full context, nats per token")
    (mean,), (low,), (high,), _ = gain.overall
    interval = f" [{low:z.3f}, {high:z.3f}]" if np.isfinite(low) else ""
    axes.set_title(f"Gain of full context: {mean:z.3f}{interval}", loc="left", fontsize=11)
    below.set_xlabel("earlier tokens (limited context: the last 256 to 511)")
    last = columns["last_position"][-1] + 0.5
    below.set_xscale("log")
    below.set_xlim(0.95 * PIECE_TOKENS, 1.05 * last)
    powers = 2.0 ** np.arange(np.log2(PIECE_TOKENS), np.log2(last) + 0.01)
    below.xaxis.set(
        major_locator=FixedLocator(powers[:: 1 + len(powers) // 6]),
        major_formatter=_COUNT,
        minor_locator=NullLocator(),
    )


def _draw_means(axes: Axes, below: Axes, columns: Arrays, mean: np.ndarray, color: str) -> None:
    """Draws one point per bin with its band in `axes`, and the number of documents as bars in
    `below`, if that is another panel.
    """
    first = columns["first_position"]
    last = columns["last_position"]
    documents = columns["documents"]
    low = columns["low"]
    high = columns["high"]
    # half a token more on both sides, so that bars touch
    left = np.where(first == 0, _ZERO_BIN[0], first - 0.5)
    center = np.where(first == 0, np.sqrt(np.prod(_ZERO_BIN)), np.sqrt(first * last))
    has_band = np.isfinite(low)
    label = "95% interval, bootstrap over documents"
    if has_band.any():
        axes.fill_between(
            center, low, high, where=has_band, color=color, alpha=0.18, linewidth=0, label=label
        )
    axes.plot(center, mean, "o-", color=color, markersize=3.5, linewidth=1.3)
    if not has_band.all():
        label = f"no interval: fewer than {MIN_DOCUMENTS} documents"
        axes.plot(
            center[~has_band],
            mean[~has_band],
            "o",
            color="white",
            mec=color,
            markersize=4,
            label=label,
        )
    if len(mean):
        axes.legend(frameon=False, fontsize=8)
    limits = _limits(mean, low, high)
    if limits is not None:
        axes.set_ylim(*limits)
    if below is axes:
        return
    below.bar(
        left,
        documents,
        width=last + 0.5 - left,
        align="edge",
        color=FAINT,
        edgecolor="white",
        linewidth=0.8,
    )
    below.set(yscale="log", ylim=(0.5, 2 * max(documents, default=1)))
    below.yaxis.set(major_formatter=_COUNT, minor_locator=NullLocator())
    axes.tick_params(axis="x", length=0)


def _limits(mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, float] | None:
    """Limits of the loss axis; None if no mean is finite.

    Bins of few documents may have bands of several nats: they are clipped, so that they do not
    flatten the curve.
    """
    is_finite = np.isfinite(mean)
    has_band = np.isfinite(low)
    if not is_finite.any():
        return None
    lowest = mean[is_finite].min()
    highest = mean[is_finite].max()
    margin = max(0.15 * (highest - lowest), 1e-3)
    if has_band.any():
        clipped = 1.5 * np.median((high - low)[has_band])
        lowest = min(lowest, max(low[has_band].min(), lowest - clipped))
        highest = max(highest, min(high[has_band].max(), highest + clipped))
    return lowest - margin, highest + margin


def _show_zero(below: Axes, largest: float) -> None:
    """Makes the x axis logarithmic in token counts, and shows 0 on it too."""
    powers = 10.0 ** np.arange(0, np.log10(largest))
    below.set_xscale("log")
    below.set_xlim(0.9 * _ZERO_BIN[0], 1.1 * largest)
    below.xaxis.set(
        major_locator=FixedLocator([np.sqrt(np.prod(_ZERO_BIN)), *powers]),
        minor_locator=NullLocator(),
    )
    below.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "0")
    )
