import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxlc.train.evaluation import Evaluation, PositionSums, position_edges
from jaxlc.train.loss_plots import plot_loss, plot_loss_by_position
from tests.helpers import png_size, record_figures

BASELINES = dict(unigram=3.25, bigram=2.5)


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that were saved."""
    return record_figures(monkeypatch)


def training_rows() -> list[dict]:
    rows = [dict(step=step, loss=5.0 / step) for step in range(1, 21)]
    rows[4]["loss"] = None  # not finite
    return [*rows, dict(step=10, eval_loss=0.75), dict(step=20, eval_loss=0.5)]


def evaluation(num_tokens: int, loss_at) -> Evaluation:
    """One document of num_tokens tokens, 4 times; bin 3 has no token."""
    edges = position_edges(num_tokens)
    positions = np.tile(np.arange(num_tokens), 4)
    losses = loss_at(positions) + np.repeat([-0.1, 0.1, -0.1, 0.1], num_tokens)
    sums = [np.histogram(positions, edges, weights=weights)[0] for weights in (losses * 0 + 1, losses, losses**2)]
    for values in sums:
        values[3] = 0
    return Evaluation(float(losses.mean()), edges, PositionSums(*sums))


def test_plot_loss_draws_every_curve(tmp_path, figures):
    plot_loss(training_rows(), BASELINES, tmp_path / "loss.png")
    width, height = png_size(tmp_path / "loss.png")
    assert 800 < width < 1600 and 500 < height < 1000
    [axes] = figures[0].axes
    train, heldout, *baselines = axes.lines
    assert list(train.get_xdata()) == [1, 2, 3, 4, *range(6, 21)]
    assert list(heldout.get_xdata()) == [10, 20] and list(heldout.get_ydata()) == [0.75, 0.5]
    assert sorted(line.get_ydata()[0] for line in baselines) == [2.5, 3.25]
    assert {text.get_text() for text in axes.texts} == {"unigram 3.25", "bigram 2.50"}
    assert "0.50" in axes.get_legend().get_texts()[1].get_text()
    assert "nats" in axes.get_ylabel() and axes.get_xlabel() == "step"


@pytest.mark.parametrize(
    "rows", [[], [dict(step=1, loss=3.0)], [dict(step=1, loss=None), dict(step=1, eval_loss=None)]]
)
def test_plot_loss_with_few_rows_writes_png(tmp_path, rows):
    plot_loss(rows, BASELINES, tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png")[0] > 800


def test_plot_loss_by_position_draws_mean_of_each_bin(tmp_path, figures):
    plot_loss_by_position(evaluation(512, lambda positions: 2.0 + 1.0 / (1 + positions)), tmp_path / "position.png")
    width, height = png_size(tmp_path / "position.png")
    assert 800 < width < 1600 and 500 < height < 1000
    axes, below = figures[0].axes
    [curve] = axes.lines
    x, y = curve.get_data()
    assert len(x) == len(position_edges(512)) - 2  # the empty bin is skipped
    np.testing.assert_allclose(x[:3], [np.sqrt(0.15), 1.0, 2.0])  # 0 is drawn at sqrt(0.15) on the logarithmic axis
    np.testing.assert_allclose(y[:3], [3.0, 2.5, 2 + 1 / 3])
    band = axes.collections[0].get_paths()[0].vertices
    at_zero = band[np.isclose(band[:, 0], x[0]), 1]
    np.testing.assert_allclose(
        [at_zero.min(), at_zero.max()], [2.9, 3.1]
    )  # two standard errors: deviation 0.1 over 4 tokens
    assert [bar.get_height() for bar in below.patches[:2]] == [4, 4]
    labels = [below.xaxis.get_major_formatter()(tick, 0) for tick in below.get_xticks()]
    assert labels == ["0", "1", "10", "100"]
    assert "nats" in axes.get_ylabel() and "earlier tokens" in below.get_xlabel()


@pytest.mark.parametrize("num_tokens", [16, 4096])
def test_plot_loss_by_position_with_flat_loss_keeps_it_in_view(tmp_path, num_tokens, figures):
    plot_loss_by_position(evaluation(num_tokens, lambda positions: 2.0 + 0 * positions), tmp_path / "position.png")
    low, high = figures[0].axes[0].get_ylim()
    assert low < 2.0 < high
    assert png_size(tmp_path / "position.png")[0] > 800


def test_loss_plots_import_leaves_pyplot_unloaded():
    """pyplot would replace the matplotlib backend of a notebook."""
    code = "import jaxlc.train.loss_plots, sys; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
