"""Held-out loss against its definition, also by position, on several meshes."""

import numpy as np
import pytest

from jaxlc.core.axes import CONTEXT
from jaxlc.sharding.layout import zigzag_order
from jaxlc.train.evaluation import Evaluator, position_edges
from tests.train.synthetic import TOKENS, make_batch, natural_rows, put_params, small_config, small_step


class _Sequences:
    """A stand-in for the packed sequences of a corpus."""

    num_sequences = 3

    def __getitem__(self, i):
        return natural_rows()[i % self.num_sequences]


@pytest.mark.parametrize("tokens", [1, 2, 96, 4096, 1_000_000])
def test_position_edges_cover_every_position_once(tokens):
    edges = position_edges(tokens)
    assert edges[0] == 0 and edges[-1] == tokens and (np.diff(edges) > 0).all()


@pytest.mark.parametrize("axes", [dict(), dict(data=2, context=2, tensor=2)], ids=str)
def test_evaluator_returns_mean_loss_and_loss_by_position(axes):
    """Three sequences on two ranks: the fourth is a repeated one with weight 0."""
    alone = small_step(small_config(train=dict(global_batch_size=4)))
    params = alone.init().params
    batch = make_batch(alone, natural_rows())
    losses = np.asarray(alone.objective.token_losses(params, type(batch)(*(x[0] for x in batch))))
    weights = np.asarray(batch.loss_weights)[0]
    losses, weights, positions = losses[:3], weights[:3], np.asarray(batch.positions)[0, :3]

    step = small_step(small_config(mesh=axes, train=dict(global_batch_size=4)))
    evaluate = Evaluator(step, _Sequences(), 8, zigzag_order(TOKENS, step.mesh.shape[CONTEXT]))
    assert evaluate.num_sequences == 3
    evaluation = evaluate(put_params(step, params))
    np.testing.assert_allclose(evaluation.loss, (weights * losses).sum() / weights.sum(), rtol=1e-5)
    for b, (begin, end) in enumerate(zip(evaluation.edges[:-1], evaluation.edges[1:])):
        inside = weights * ((positions >= begin) & (positions < end))
        np.testing.assert_allclose(evaluation.sums.weight[b], inside.sum(), rtol=1e-6)
        np.testing.assert_allclose(evaluation.sums.loss[b], (inside * losses).sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(evaluation.sums.loss_squared[b], (inside * losses**2).sum(), rtol=1e-4, atol=1e-5)
