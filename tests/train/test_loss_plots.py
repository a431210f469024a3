"""The figures: what they draw, and that they are drawn for few, many and missing data."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxlc.core.plot_style import line_styles
from jaxlc.evals.document_loss import DocumentSums, position_edges
from jaxlc.train.evaluation import ContextGain, Evaluation
from jaxlc.train.reports.plots import (
    loss_by_position_figure,
    loss_figure,
    optimizer_figure,
    reward_figure,
)
from tests.helpers import png_size
from tests.step.synthetic import documents_evaluation


def save(figure: Figure, path: Path) -> tuple[int, int]:
    """Writes the figure; returns its width and height in pixels."""
    figure.savefig(path, bbox_inches="tight")
    return png_size(path)


def training_rows() -> list[dict]:
    rows = [dict(step=step, loss=5.0 / step) for step in range(1, 21)]
    rows[4]["loss"] = None  # not finite
    return [*rows, dict(step=10, eval_loss=0.75), dict(step=20, eval_loss=0.5)]


def evaluation(num_tokens: int, loss_at, num_documents: int = 40) -> Evaluation:
    """Documents of num_tokens tokens whose loss is 0.1 above or below `loss_at(positions)`; bin 3
    has no token.

    Bin 4 has tokens of 4 documents only.
    """
    edges = position_edges(num_tokens)
    counts, positions = np.diff(edges), np.arange(num_tokens)
    means = np.add.reduceat(loss_at(positions), edges[:-1]) / counts
    losses = means + np.where(np.arange(num_documents) % 2, 0.1, -0.1)[:, None]
    weight = np.tile(counts, (num_documents, 1)).astype(np.float64)
    weight[:, 3] = weight[4:, 4] = 0
    return documents_evaluation(edges, losses, weight)


def with_gain(evaluation: Evaluation, gain: float) -> Evaluation:
    """The gain is `gain` 0.1 more or less per document, from position 512 on."""
    (first,) = np.flatnonzero(evaluation.edges == 512)
    weight = evaluation.documents.weight[:, first:]
    losses = gain + np.where(np.arange(len(weight)) % 2, 0.1, -0.1)[:, None]
    sums = DocumentSums(edges=evaluation.edges[first:], weight=weight, loss=weight * losses)
    return dataclasses.replace(evaluation, context_gain=ContextGain(documents=sums))


def test_loss_figure_draws_every_curve(tmp_path):
    figure = loss_figure(training_rows())
    width, height = save(figure, tmp_path / "loss.png")
    assert 800 < width < 1600 and 500 < height < 1000
    [axes] = figure.axes
    train, heldout = axes.lines
    assert list(train.get_xdata()) == [1, 2, 3, 4, *range(6, 21)]
    assert list(heldout.get_xdata()) == [10, 20] and list(heldout.get_ydata()) == [0.75, 0.5]
    assert "0.50" in axes.get_legend().get_texts()[1].get_text()
    assert "nats" in axes.get_ylabel() and axes.get_xlabel() == "step"


@pytest.mark.parametrize(
    "rows", [[], [dict(step=1, loss=3.0)], [dict(step=1, loss=None), dict(step=1, eval_loss=None)]]
)
def test_loss_figure_with_few_rows_is_drawn(tmp_path, rows):
    assert save(loss_figure(rows), tmp_path / "loss.png")[0] > 800


def test_optimizer_figure_draws_gradient_norm_and_learning_rate(tmp_path):
    rows = [
        dict(step=step, loss=3.0, grad_norm=2.0 / step, learning_rate=1e-4 * step)
        for step in range(1, 6)
    ]
    rows[2]["grad_norm"] = None  # not finite
    figure = optimizer_figure(rows)
    assert save(figure, tmp_path / "optimizer.png")[0] > 800
    norms, rates = (axes.lines[0] for axes in figure.axes)
    assert list(norms.get_xdata()) == [1, 2, 4, 5] and list(norms.get_ydata())[0] == 2.0
    np.testing.assert_allclose(rates.get_ydata(), [1e-4, 2e-4, 3e-4, 4e-4, 5e-4])
    assert save(optimizer_figure([dict(step=1, loss=3.0)]), tmp_path / "empty.png")[0] > 800


def test_reward_figure_shows_quantiles_and_what_differs():
    row = {"ratio": 1.0, "rollouts/policy_age": 0.0, "rollouts/reward_p10": 0.0}
    rows = [
        row | {"step": step, "rollouts/reward": mean, "rollouts/reward_p90": 2 * mean}
        for step, mean in enumerate(np.linspace(0.1, 0.4, 9))
    ]
    rows = [row | {"rollouts/answer_tokens": 2.9 + 0.1 * (row["step"] % 2)} for row in rows]
    figure = reward_figure(rows)
    rewards, tokens = figure.axes
    (band,) = rewards.collections
    assert band.get_datalim(rewards.transData).intervaly.tolist() == [0.0, 0.8]
    low, high = tokens.get_ylim()
    assert tokens.get_ylabel() == "tokens of an answer" and 2.8 < low < high < 3.1
    assert "ratio 1" in rewards.get_title(loc="left") and "age in steps 0" in rewards.get_title(
        loc="left"
    )
    # a band that never changes, as of rewards that are 0 or 1, would fill the panel
    constant = reward_figure([row | {"rollouts/reward_p90": 1.0} for row in rows])
    assert not constant.axes[0].collections and not constant.legends


def test_lines_of_a_figure_differ():
    styles = [tuple(style.values()) for style in itertools.islice(line_styles(), 28)]
    assert len(set(styles)) == 28


def test_figure_without_interval_has_no_legend_for_it():
    for num_documents, labels in ((40, 2), (3, 1)):
        axes = loss_by_position_figure(
            evaluation(512, lambda positions: 2.0 + 0 * positions, num_documents)
        ).axes[0]
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        assert len(texts) == labels and ("95% interval, bootstrap over documents" in texts) == (
            num_documents == 40
        )


def test_loss_by_position_figure_has_no_panel_of_equal_numbers_of_documents(tmp_path):
    edges = position_edges(4096)
    losses, weight = np.full((8, len(edges) - 1), 2.0), np.tile(np.diff(edges), (8, 1))
    equal = documents_evaluation(edges, losses, weight.astype(np.float64))
    figure = loss_by_position_figure(with_gain(equal, 0.1))
    assert save(figure, tmp_path / "position.png")[0] > 800
    assert [len(axes.patches) for axes in figure.axes] == [0, 0]
    assert all("earlier tokens" in axes.get_xlabel() for axes in figure.axes)


def test_loss_by_position_figure_draws_mean_of_each_bin(tmp_path):
    figure = loss_by_position_figure(evaluation(512, lambda positions: 2.0 + 1.0 / (1 + positions)))
    width, height = save(figure, tmp_path / "position.png")
    assert 800 < width < 1600 and 500 < height < 1000
    axes, below = figure.axes
    curve, without_band = axes.lines
    x, y = curve.get_data()
    assert len(x) == len(position_edges(512)) - 2  # the empty bin is skipped
    # 0 is drawn at sqrt(0.15) on the logarithmic axis
    np.testing.assert_allclose(x[:3], [np.sqrt(0.15), 1.0, 2.0])
    np.testing.assert_allclose(y[:3], [3.0, 2.5, 2 + 1 / 3])
    assert list(without_band.get_xdata()) == [x[3]]  # 4 documents
    paths = axes.collections[0].get_paths()
    band = np.concatenate([path.vertices for path in paths])
    at_zero = band[np.isclose(band[:, 0], x[0]), 1]
    half_width = 1.96 * 0.1 / np.sqrt(40)  # the deviation of 40 documents is 0.1
    np.testing.assert_allclose(
        [at_zero.min(), at_zero.max()], [3 - half_width, 3 + half_width], atol=0.25 * half_width
    )
    assert not np.isclose(band[:, 0], x[3]).any()
    assert [bar.get_height() for bar in below.patches[:4]] == [40, 40, 40, 4]
    labels = [below.xaxis.get_major_formatter()(tick, 0) for tick in below.get_xticks()]
    assert labels == ["0", "1", "10", "100"]
    assert "nats" in axes.get_ylabel() and "earlier tokens" in below.get_xlabel()
    assert below.get_ylabel() == "documents"


@pytest.mark.parametrize("num_documents", [1, 40])
@pytest.mark.parametrize("num_tokens", [16, 4096])
def test_loss_by_position_figure_keeps_flat_loss_in_view(tmp_path, num_tokens, num_documents):
    figure = loss_by_position_figure(
        evaluation(num_tokens, lambda positions: 2.0 + 0 * positions, num_documents)
    )
    low, high = figure.axes[0].get_ylim()
    assert low < (2.0 if num_documents > 1 else 1.9) < high
    assert save(figure, tmp_path / "position.png")[0] > 800


def test_loss_by_position_figure_without_finite_loss_is_drawn(tmp_path):
    empty = documents_evaluation(position_edges(16), np.ones((0, 8)))
    nothing = evaluation(16, lambda positions: np.nan * positions)
    for case in (empty, nothing):
        assert save(loss_by_position_figure(case), tmp_path / "position.png")[0] > 800


@pytest.mark.parametrize("gain", [0.3, 0.0, -0.3])
def test_loss_by_position_figure_draws_gain_with_zero_line(tmp_path, gain):
    figure = loss_by_position_figure(
        with_gain(evaluation(4096, lambda positions: 2.0 + 0 * positions), gain)
    )
    assert save(figure, tmp_path / "position.png")[0] > 1400
    axes, below = figure.axes[1], figure.axes[3]
    zero, curve = axes.lines
    assert list(zero.get_ydata()) == [0, 0]
    low, high = axes.get_ylim()
    assert low < min(0, gain) <= max(0, gain) < high
    np.testing.assert_allclose(curve.get_ydata(), gain, atol=1e-12)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert gain - 0.06 < band.min() < gain < band.max() < gain + 0.06
    assert below.get_xticks()[0] == 512 and curve.get_xdata()[0] > 512
    assert f"{gain:.3f} [" in axes.get_title(loc="left")


def test_loss_plots_import_leaves_pyplot_unloaded():
    """pyplot would replace the matplotlib backend of a notebook."""
    code = "import jaxlc.train.reports.plots, sys; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
