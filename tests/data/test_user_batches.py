"""User-provided batches: arrays that are derived, and errors for invalid ones."""

import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.data.sequences.loader import ALWAYS
from jaxlc.data.sequences.user_batches import complete_batch
from tests.trees import arrays_of


def test_complete_batch_derives_the_missing_arrays():
    tokens = np.arange(12).reshape(2, 6)
    batch = complete_batch(
        dict(tokens=tokens, segment_ids=[[1, 1, 1, 2, 2, 0]] * 2), (2, 6), 20, "batch 0"
    )
    assert batch["positions"][0].tolist() == [0, 1, 2, 0, 1, 0]
    assert batch["targets"][1].tolist() == [7, 8, 0, 10, 0, 0]
    assert batch["loss_weights"][0].tolist() == [1, 1, 0, 1, 0, 0]
    targets, weights = [[2, -100, 3, 4, 5, 6]] * 2, [[1, 0, 1, 1, 1, 1]] * 2
    masked = complete_batch(
        dict(tokens=tokens, targets=targets, loss_weights=weights), (2, 6), 20, "batch 0"
    )
    assert masked["targets"][0].tolist() == [2, 0, 3, 4, 5, 6]
    plain = complete_batch(dict(tokens=tokens), (None, 6), 20, "batch 0")
    assert (
        plain["loss_weights"][0].tolist() == [1, 1, 1, 1, 1, 0] and plain["segment_ids"].min() == 1
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "invalid batch 3: list; expected a dictionary with 'tokens'"),
        (
            dict(tokens=[[1, 2]], labels=[[1, 2]]),
            r"invalid batch 3: \['labels', 'tokens'\]; expected",
        ),
        (dict(tokens=[[1, 2, 3]]), r"tokens is int64\[1, 3\], expected int32\[1, 2\]"),
        (dict(tokens=[[1.0, 2.0]]), r"tokens is float64\[1, 2\], expected int32"),
        (dict(tokens=np.zeros((0, 2), int)), r"tokens is int64\[0, 2\], expected int32\[1, 2\]"),
        (dict(tokens=[[1, 20]]), r"token 20, expected 0 to 19 \(config.model.vocab_size\)"),
        (
            dict(tokens=[[1, 2]], targets=[[-100, 0]]),
            r"target -100, expected 0 to 19 .*; set loss_weights to 0 where",
        ),
        (
            dict(tokens=[[1, 2]], loss_weights=[[1.0, np.nan]]),
            "loss_weights are not all finite and at least 0",
        ),
        (
            dict(tokens=[[1, 2]], positions=[[4, 4]]),
            "positions 4, 4 of segment id 1 of sequence 0: expected positions",
        ),
        (
            dict(tokens=[[1, 2]], positions=np.array([[5, 3]], np.uint8)),
            "positions 5, 3 of segment id 1",
        ),
        (
            dict(tokens=[[1, 2]], positions=[[7, 9]]),
            "a position is 2 after the first .* at most 1; set config.data.seq",
        ),
        (
            dict(tokens=[[1, 2]], segment_ids=[[1, 2**32 + 1]]),
            "segment id 4294967297, expected 0 to 2147483647",
        ),
        (dict(tokens=[[1, 2]], segment_ids=[[-1, -1]]), "segment id -1, expected 0 to"),
    ],
)
def test_complete_batch_with_invalid_arrays_raises(batch, message):
    with pytest.raises(UserError, match=message):
        complete_batch(batch, (1, 2), 20, "batch 3")


def test_complete_batch_with_interleaved_documents_raises():
    segments = [[1, 1, 2, 0, 0, 3], [3, 0, 2, 2, 0, 3]]
    with pytest.raises(
        UserError, match="segment id 3 of sequence 1 are not contiguous; give each document"
    ):
        complete_batch(
            dict(tokens=np.ones((2, 6), int), segment_ids=segments), (2, 6), 20, "batch 3"
        )


@pytest.mark.parametrize("shift", [0, 64, 1_000_003, 2**40, -5])
def test_positions_of_a_batch_count_from_the_first_of_each_document(shift):
    segments = [[1, 1, 2, 2, 2, 0]]
    positions = np.array([[0, 1, 0, 2, 5, 9]]) + shift
    batch = dict(tokens=np.ones((1, 6), int), segment_ids=segments, positions=positions)
    assert complete_batch(batch, (1, 6), 20, "batch 0")["positions"].tolist() == [
        [0, 1, 0, 2, 5, 0]
    ]
    if 0 <= shift < 2**31:
        kept = complete_batch(batch, (1, 6), 20, "batch 0", absolute_positions=True)["positions"]
        assert kept.tolist() == positions.tolist()
    else:
        with pytest.raises(UserError, match="invalid batch 0: position"):
            complete_batch(batch, (1, 6), 20, "batch 0", absolute_positions=True)


def test_prefixes_of_the_caller_become_all_prefixes_of_a_document():
    """A batch names the last one; positions count on from each."""
    documents = [(3, 0), (2, 1), (1, 2), (2, 3), (1, 2), (2, 1), (1, 6), (2, 0), (1, 8)]
    num_tokens, num_levels = 17, 4
    expected = arrays_of(documents, num_tokens, num_levels)
    numbers = np.arange(1, len(documents) + 1)
    lengths, parents = zip(*documents)
    ids = np.pad(np.repeat([numbers, parents], lengths, axis=1), [(0, 0), (0, 2)])
    batch = dict(tokens=np.ones((1, 17), int), segment_ids=ids[:1], prefix_ids=ids[1:])
    dtypes = ALWAYS | dict(prefix_ids=np.dtype(("i4", (num_levels,))))
    completed = complete_batch(batch, (1, num_tokens), 20, "batch 0", dtypes)
    for name, x in expected.items():
        np.testing.assert_array_equal(completed[name][0], x, err_msg=name)
    positions = expected["positions"].copy()
    positions[6] = 5  # the first token of document 4 continues position 5
    with pytest.raises(UserError, match="positions 5, 5 of segment id 4"):
        complete_batch(batch | dict(positions=positions[None]), (1, 17), 20, "batch 0", dtypes)


def test_positions_of_branches_continue_those_of_their_prefix():
    """Also by default: a branch from 0 would not attend to the whole prefix."""
    dtypes = ALWAYS | dict(prefix_ids=np.dtype(("i4", (1,))))
    batch = dict(
        tokens=np.ones((1, 7), int),
        segment_ids=[[1, 1, 2, 2, 3, 4, 0]],
        prefix_ids=[[0, 0, 1, 1, 1, 0, 0]],
    )
    expected = [[0, 1, 2, 3, 2, 0, 0]]
    assert complete_batch(batch, (1, 7), 20, "batch 0", dtypes)["positions"].tolist() == expected
    shifted = batch | dict(positions=np.array(expected) + 100)
    assert complete_batch(shifted, (1, 7), 20, "batch 0", dtypes)["positions"].tolist() == expected
    with pytest.raises(
        UserError, match="positions 1, 1 of segment id 2 of sequence 0: .* also from its prefix on"
    ):
        complete_batch(
            batch | dict(positions=[[0, 1, 1, 2, 2, 0, 0]]), (1, 7), 20, "batch 0", dtypes
        )
