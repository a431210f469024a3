"""Loss by position: sums per document, and intervals whose samples are documents."""

import numpy as np
import pytest

from jaxlc.evals.document_loss import (
    DocumentSums,
    concatenate,
    estimate,
    position_edges,
    sum_documents,
)


@pytest.mark.parametrize("tokens", [1, 2, 96, 4096, 1_000_000])
def test_position_edges_cover_every_position_once(tokens):
    edges = position_edges(tokens)
    assert edges[0] == 0 and edges[-1] == tokens and (np.diff(edges) > 0).all()


def test_sum_documents_separates_segments_and_skips_weight_zero():
    """Two documents with targets, one without, and padding; tokens in any order."""
    sequence = dict(
        loss_weights=np.array([0.5, 1, 1, 0, 1, 0, 0, 0], np.float32),
        positions=np.array([0, 1, 2, 3, 0, 1, 0, 0], np.int32),
        segment_ids=np.array([1, 1, 1, 1, 3, 3, 2, 0], np.int32),
    )
    losses = np.array([2, 3, 5, np.nan, 7, np.inf, 100, 100], np.float32)
    edges = np.array([0, 1, 8])
    expected_weight, expected_loss = [[0.5, 2], [1, 0]], [[1, 8], [7, 0]]
    for order in (np.arange(8), np.random.default_rng(0).permutation(8)):
        sums = sum_documents(
            {name: values[order] for name, values in sequence.items()}, losses[order], edges
        )
        np.testing.assert_array_equal(sums.weight, expected_weight)
        np.testing.assert_array_equal(sums.loss, expected_loss)


def test_sum_documents_of_padding_has_no_documents():
    padding = dict(
        loss_weights=np.zeros(4), positions=np.zeros(4, int), segment_ids=np.zeros(4, int)
    )
    sums = sum_documents(padding, np.ones(4), np.array([0, 4]))
    assert sums.num_documents == concatenate([sums, sums]).num_documents == 0
    assert all(len(column) == 0 for column in sums.by_position("loss").values())


def test_estimate_matches_resampling_of_documents():
    """Against a direct bootstrap with a loop; 400 equal documents, for which the corrections are
    negligible.
    """
    rng = np.random.default_rng(3)
    weight = np.full((400, 1), 7.0)
    loss = weight * rng.exponential(2.0, (400, 1))
    mean, low, high, documents = estimate(loss, weight)
    means = []
    for _ in range(4000):
        picks = rng.integers(400, size=400)
        means.append(loss[picks].sum() / weight[picks].sum())
    width = np.std(means)
    assert documents == 400 and mean == pytest.approx(loss.sum() / weight.sum())
    np.testing.assert_allclose(
        [low[0], high[0]], np.quantile(means, [0.025, 0.975]), atol=0.15 * width
    )


@pytest.mark.parametrize("num_documents, minimum", [(5, 0.88), (8, 0.91), (30, 0.92)])
def test_estimate_interval_has_stated_coverage(num_documents, minimum):
    """Skewed document means and documents of unequal length; plain percentiles reach 0.81 with 5
    and 0.86 with 8.
    """
    rng = np.random.default_rng(0)
    hits, num_trials = 0, 400
    for _ in range(num_trials):
        weight = rng.integers(1, 257, (num_documents, 1)).astype(np.float64)
        loss = weight * np.exp(rng.normal(-1, 0.5, weight.shape)) + np.sqrt(weight) * rng.normal(
            0, 1.5, weight.shape
        )
        _, low, high, _ = estimate(loss, weight, num_resamples=1000)
        hits += low[0] <= np.exp(-1 + 0.125) <= high[0]
    assert minimum <= hits / num_trials <= 0.985, hits / num_trials


def test_estimate_with_few_documents_has_no_interval():
    """Four documents of a million tokens have none; five have one. An empty column has no mean
    either.
    """
    weight = np.full((5, 3), 1e6)
    weight[4, 1], weight[:, 2] = 0, 0
    loss = weight * np.linspace(1, 2, 5)[:, None]
    mean, low, high, documents = estimate(loss, weight)
    assert list(documents) == [5, 4, 0]
    assert low[0] < mean[0] < high[0] and np.isfinite(mean[1]) and np.isnan(mean[2])
    assert np.isnan([low[1:], high[1:]]).all()


def test_estimate_with_more_tokens_has_equal_interval():
    rng = np.random.default_rng(1)
    weight = rng.integers(1, 9, (20, 2)).astype(np.float64)
    loss = weight * rng.normal(2, 1, weight.shape)
    few, many = estimate(loss, weight), estimate(1000 * loss, 1000 * weight)
    np.testing.assert_allclose(few.low, many.low)
    np.testing.assert_allclose(few.high, many.high)


def test_estimate_of_loss_that_is_not_finite_has_no_interval():
    weight = np.ones((6, 2))
    loss = np.ones((6, 2))
    loss[0, 1] = np.nan
    mean, low, high, _ = estimate(loss, weight)
    assert (mean[0], low[0], high[0]) == (1, 1, 1) and np.isnan([mean[1], low[1], high[1]]).all()


def test_by_position_returns_columns_without_empty_bins():
    weight = np.array([[1.0, 0, 2]] * 6 + [[1, 0, 0]])
    sums = DocumentSums(edges=np.array([0, 1, 4, 9]), weight=weight, loss=3 * weight)
    columns = sums.by_position("loss")
    assert {name: list(column) for name, column in columns.items()} == dict(
        first_position=[0, 4],
        last_position=[0, 8],
        tokens=[7, 12],
        documents=[7, 6],
        loss=[3, 3],
        low=[3, 3],
        high=[3, 3],
    )
