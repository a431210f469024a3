"""The gain of full context: known losses, and a model whose context is cut by other means."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlc.train.evaluation import Evaluator, in_pieces
from tests.step.synthetic import natural_rows, put_params, small_config, small_step


class _Sequences:
    """Packed sequences of documents of these lengths, padded to `num_tokens`."""

    def __init__(self, num_tokens: int, *sequences: tuple[int, ...]):
        self._rows = [
            natural_rows(seed=i, documents=[(*lengths, sum(lengths) - num_tokens)])[0]
            for i, lengths in enumerate(sequences)
        ]
        self.num_sequences = len(sequences)

    def __getitem__(self, i):
        return self._rows[i]


class _Windows:
    """One sequence for each `window` (sequence, begin, end): only those tokens, as a document; the
    rest is padding.
    """

    def __init__(self, sequences: _Sequences, windows: list[tuple[int, int, int]]):
        self._sequences, self._windows, self.num_sequences = sequences, windows, len(windows)

    def __getitem__(self, i):
        sequence, begin, end = self._windows[i]
        row = self._sequences[sequence]
        padded = {name: np.zeros_like(values) for name, values in row.items()}
        for name in ("tokens", "targets", "loss_weights"):
            padded[name][: end - begin] = row[name][begin:end]
        padded["positions"][: end - begin] = np.arange(end - begin)
        padded["segment_ids"][: end - begin] = 1
        return padded


def _fake_step(token_losses, num_tokens: int):
    """A step whose loss is a known function of the batch."""
    config = small_config(
        data=dict(seq_len=num_tokens), attention=dict(query_block_tokens=256, key_block_tokens=256)
    )
    step = small_step(config)
    return SimpleNamespace(
        model=None,
        transport=None,
        config=config,
        mesh=step.mesh,
        sequence_order=step.sequence_order,
        compile_evaluation=lambda: jax.jit(lambda params, batch: token_losses(batch)),
    )


def _evaluate(step, sequences):
    """(the evaluator, the evaluation with gain) with parameters that are not used."""
    evaluator = Evaluator(step, sequences, 8)
    return evaluator, evaluator.with_context_gain(None, evaluator(None))


def test_pieces_restart_positions_and_number_segments():
    sequences = _Sequences(1600, (900, 2, 600))
    first, second = (in_pieces(sequences[0], offset) for offset in (0, 256))
    lengths = [np.bincount(pieces["segment_ids"])[1:].tolist() for pieces in (first, second)]
    assert lengths == [[512, 388, 2, 512, 88], [256, 512, 132, 2, 256, 344]]
    for pieces in (first, second):
        assert (pieces["segment_ids"][1502:] == 0).all()
        for segment in range(1, pieces["segment_ids"].max() + 1):
            inside = pieces["segment_ids"] == segment
            np.testing.assert_array_equal(pieces["positions"][inside], np.arange(inside.sum()))
        for name in ("tokens", "targets", "loss_weights"):
            np.testing.assert_array_equal(pieces[name], sequences[0][name])
    positions = np.array([510, 511, 513, 514, 1025, 1026, 3, 4])  # of own batches, with gaps
    gaps = in_pieces(dict(positions=positions, segment_ids=np.repeat([1, 2], [6, 2])), 0)
    assert gaps["segment_ids"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert gaps["positions"].tolist() == [510, 511, 1, 2, 1, 2, 3, 4]


def test_context_gain_of_known_losses_is_exact():
    """The loss falls with the position; limited context gives position p the loss of position 256 +
    p % 256.
    """
    documents = (1400, 600, 300), (513,), (2304,)
    step = _fake_step(lambda batch: 5.0 - 0.001 * batch.positions, 2304)
    _, evaluation = _evaluate(step, _Sequences(2304, *documents))
    gain = evaluation.context_gain
    # the document of 513 tokens has no target
    targets = [np.arange(512, length - 1) for length in (1400, 600, 2304)]
    expected = [0.001 * (p - (256 + p % 256)) for p in targets]
    assert gain.documents.num_documents == 3
    np.testing.assert_array_equal(gain.documents.weight.sum(1), [len(p) for p in targets])
    np.testing.assert_allclose(
        gain.documents.loss.sum(1), [values.sum() for values in expected], rtol=1e-4
    )
    np.testing.assert_allclose(gain.overall.mean, np.concatenate(expected).mean(), rtol=1e-4)
    columns = gain.by_position()
    assert columns["first_position"][0] == 512 and columns["last_position"][-1] == 2303
    p, values = np.concatenate(targets), np.concatenate(expected)
    for i, (first, last) in enumerate(zip(columns["first_position"], columns["last_position"])):
        inside = (p >= first) & (p <= last)
        assert columns["tokens"][i] == inside.sum()
        np.testing.assert_allclose(columns["gain"][i], values[inside].mean(), rtol=1e-4)
    assert str(gain).startswith(
        f"{np.concatenate(expected).mean():.3f} nats per token, 3 documents"
    )
    assert repr(gain) in evaluation._repr_html_()


@pytest.mark.parametrize("axes", [dict(), dict(data=2, context=2, tensor=2)], ids=str)
def test_context_gain_of_model_equals_loss_of_cut_documents(axes):
    """Against the same model on sequences that contain nothing but the limited context."""
    num_tokens, documents = 1024, [(1024,), (200, 700)]
    sequences = _Sequences(num_tokens, *documents)
    config = dict(
        data=dict(seq_len=num_tokens), attention=dict(query_block_tokens=256, key_block_tokens=256)
    )
    alone = small_step(small_config(**config))
    params = jax.tree.map(lambda x: 5 * x, alone.init().params)  # attention far from uniform
    # their last 256, 256 and 188 tokens are scored
    windows = [(0, 256, 768), (0, 512, 1024), (1, 456, 900)]
    cut = Evaluator(alone, _Windows(sequences, windows), 3)(params)
    (start,) = np.flatnonzero(cut.edges == 256)
    limited = cut.documents.loss[:, start:].sum(1)

    step = small_step(small_config(mesh=axes, **config))
    evaluator = Evaluator(step, sequences, 2)
    params = put_params(step, params)
    progress = []
    evaluation = evaluator(params, lambda *done: progress.append(done))
    evaluation = evaluator.with_context_gain(
        params, evaluation, lambda *done: progress.append(done)
    )
    assert {total for _, total in progress} == {2, 4} and progress[-1] == (4, 4)
    assert (2, 2) in progress and sorted(progress, key=lambda x: x[::-1]) == progress
    full = evaluation.documents.loss[[0, 2], np.flatnonzero(evaluation.edges == 512)[0] :].sum(1)
    expected = np.array([limited[0] + limited[1], limited[2]]) - full
    np.testing.assert_allclose(evaluation.context_gain.documents.loss.sum(1), expected, rtol=1e-3)
    assert (np.abs(expected) > 1).all()  # the context matters to this model


def test_context_gain_without_long_documents_or_masks_is_none():
    def constant(batch):
        return 1.0 + 0.0 * batch.loss_weights

    for num_tokens, documents in ((512, (512,)), (1024, (512, 512)), (1024, (513, 300))):
        assert (
            _evaluate(_fake_step(constant, num_tokens), _Sequences(num_tokens, documents))[
                1
            ].context_gain
            is None
        )
    step = _fake_step(constant, 1024)
    sequences = _Sequences(1024, (1024,))
    assert _evaluate(step, sequences)[1].context_gain.overall.mean == 0
    config = small_config(data=dict(seq_len=1024), attention=dict(document_mask=False))
    step = SimpleNamespace(**vars(step) | dict(config=config))
    assert _evaluate(step, sequences)[1].context_gain is None
