"""Held-out loss against its definition, also by position, on several meshes."""

import jax
import numpy as np
import pytest

from jaxlc.evals.document_loss import position_edges
from jaxlc.train.evaluation import Evaluator
from tests.step.synthetic import (
    documents_evaluation,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
)


class _Sequences:
    """A stand-in for the packed sequences of a corpus."""

    num_sequences = 3

    def __getitem__(self, i):
        return natural_rows()[i % self.num_sequences]


@pytest.mark.parametrize(
    "axes",
    [pytest.param({}, marks=pytest.mark.full), dict(data=2, context=2, tensor=2)],
    ids=str,
)
def test_evaluator_returns_mean_loss_and_loss_by_position(axes):
    """Three sequences on two ranks: the fourth repeats the first one and does not count."""
    alone = small_step(small_config(train=dict(global_batch_size=4)))
    params = alone.init().params
    batch = make_batch(alone, natural_rows())
    first_microbatch = jax.tree.map(lambda x: x[0], batch)
    losses = np.asarray(jax.jit(alone.objective.token_losses)(params, first_microbatch))
    weights = np.asarray(batch.loss_weights)[0]
    losses, weights, positions = losses[:3], weights[:3], np.asarray(batch.positions)[0, :3]
    segments = np.asarray(batch.segment_ids)[0, :3]

    step = small_step(small_config(mesh=axes, train=dict(global_batch_size=4)))
    evaluate = Evaluator(step, _Sequences(), 8)
    assert evaluate.num_sequences == 3
    evaluation = evaluate(put_params(step, params))
    np.testing.assert_allclose(evaluation.loss, (weights * losses).sum() / weights.sum(), rtol=1e-5)
    for b, (begin, end) in enumerate(zip(evaluation.edges[:-1], evaluation.edges[1:])):
        inside = weights * ((positions >= begin) & (positions < end))
        np.testing.assert_allclose(evaluation.sums.weight[b], inside.sum(), rtol=1e-6)
        np.testing.assert_allclose(
            evaluation.sums.loss[b], (inside * losses).sum(), rtol=1e-4, atol=1e-5
        )
    # Six of seven documents have a target: a document of one token has none.
    documents = [(0, 1), (1, 1), (1, 2), (1, 4), (1, 5), (2, 1)]  # sequence, segment id
    assert evaluation.documents.num_documents == len(documents)
    for d, (s, segment) in enumerate(documents):
        inside = weights[s] * (segments[s] == segment)
        np.testing.assert_allclose(evaluation.documents.weight[d].sum(), inside.sum(), rtol=1e-6)
        np.testing.assert_allclose(
            evaluation.documents.loss[d].sum(), (inside * losses[s]).sum(), rtol=1e-4
        )


def test_evaluation_repr_is_one_line_and_html_is_a_table():
    edges = position_edges(512)
    evaluation = documents_evaluation(edges, np.full((6, len(edges) - 1), 2.0))
    assert (
        repr(evaluation)
        == f"Evaluation(loss=2.000, 4 sequences, 6 documents, {6 * (len(edges) - 1)} tokens)"
    )
    page = evaluation._repr_html_()
    assert (
        len(page.splitlines()) == 2 + len(evaluation.by_position()["loss"])
        and "first_position" in page
    )
