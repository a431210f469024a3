import time

import numpy as np
import pytest

from jaxlc.data.packing import PackedSequences, best_fit
from jaxlc.data.store import TokenStore

S = 16


def make_store(lengths: list[int]) -> TokenStore:
    """Documents of the given lengths; every token of the corpus is another number, so any mix-up shows."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32)
    return TokenStore(tokens=tokens, offsets=offsets, split_hashes=np.zeros(len(lengths)), fingerprint="test")


LENGTHS = [2, 40, 16, 7, 17, 3, 2, 9, 33, 5, 32, 12, 2, 64, 1, 15]  # shorter, longer, and multiples of a row
STORE = make_store(LENGTHS)
IDS = np.array([d for d in range(len(LENGTHS)) if d not in (3, 11)])  # the others are held out
ROWS = PackedSequences(STORE, IDS, S, seed=7)


def brute_force_row(tokens: np.ndarray) -> dict[str, list]:
    """Everything else in a row, from its tokens: in this store token k + 1 follows token k."""
    starts, ends = set(STORE.offsets[:-1] + 1), set(STORE.offsets[1:])
    row = {"targets": [], "loss_weights": [], "positions": [], "segment_ids": []}
    position = segment = 0
    for at, token in enumerate(tokens.tolist()):
        new_piece = token != 0 and (at == 0 or token in starts or token != tokens[at - 1] + 1)
        segment, position = (segment + 1, 0) if new_piece else (segment, position + 1)
        has_next = token != 0 and token not in ends
        row["targets"].append(token + 1 if has_next else 0)
        row["loss_weights"].append(float(has_next))
        row["positions"].append(position if token else 0)
        row["segment_ids"].append(segment if token else 0)
    return row


@pytest.mark.parametrize("i", range(ROWS.num_sequences))
def test_row_against_brute_force(i: int):
    row = ROWS[i]
    assert set(row) == {"tokens", "targets", "loss_weights", "positions", "segment_ids"}
    assert all(array.dtype == (np.float32 if name == "loss_weights" else np.int32) for name, array in row.items())
    assert all(array.shape == (S,) for array in row.values())
    assert {name: row[name].tolist() for name in row if name != "tokens"} == brute_force_row(row["tokens"])
    padding = np.flatnonzero(row["tokens"] == 0)
    assert padding.tolist() == list(range(S - len(padding), S))


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_once_and_predicted_once_per_epoch(epoch: int):
    rows = [ROWS[epoch * ROWS.num_sequences + i] for i in range(ROWS.num_sequences)]
    tokens = np.concatenate([row["tokens"] for row in rows])
    targets = np.concatenate([row["targets"][row["loss_weights"] > 0] for row in rows])
    spans = [(STORE.offsets[d], STORE.offsets[d + 1]) for d in IDS]
    assert sorted(tokens[tokens > 0]) == [k + 1 for begin, end in spans for k in range(begin, end)]
    assert sorted(targets) == [k + 1 for begin, end in spans for k in range(begin + 1, end)]


def test_a_document_is_cut_only_where_it_must_be():
    num_pieces = dict.fromkeys(IDS, 0)
    for i in range(ROWS.num_sequences):
        tokens = ROWS[i]["tokens"]
        for document in np.unique(np.searchsorted(STORE.offsets, tokens[tokens > 0] - 1, "right") - 1):
            num_pieces[document] += 1
    assert num_pieces == {d: -(-LENGTHS[d] // S) for d in IDS}


def test_a_document_goes_on_in_another_row():
    rows = [PackedSequences(make_store([40]), np.array([0]), S, seed=None)[i] for i in range(3)]
    by_start = sorted(rows, key=lambda row: row["tokens"][0])
    assert [row["targets"][S - 1] for row in by_start] == [17, 33, 0]
    assert [row["loss_weights"].sum() for row in by_start] == [16, 16, 7]
    assert [row["positions"].max() for row in by_start] == [15, 15, 7]


def test_rows_are_pure():
    """Equal whatever was asked for before, and to numbers of another day, process and numpy."""
    again = PackedSequences(STORE, IDS, S, seed=7)
    indices = [30, 0, 3, 1000, 0, 17]
    expected = {i: ROWS[i] for i in sorted(indices)}
    for i in indices:
        for name, array in again[i].items():
            np.testing.assert_array_equal(array, expected[i][name])
    assert [int(ROWS[i]["tokens"][0]) for i in range(6)] == [97, 245, 151, 3, 19, 197]  # frozen: checkpoints rely on it


def first_tokens(rows: PackedSequences, epoch: int) -> list[int]:
    return [int(rows[epoch * rows.num_sequences + i]["tokens"][0]) for i in range(rows.num_sequences)]


def test_order_of_epochs_and_seeds():
    other_seed = PackedSequences(STORE, IDS, S, seed=8)
    orders = [first_tokens(ROWS, 0), first_tokens(ROWS, 1), first_tokens(other_seed, 0)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    fixed = PackedSequences(STORE, IDS, S, seed=None)
    assert first_tokens(fixed, 0) == first_tokens(fixed, 3) != sorted(first_tokens(fixed, 0))


def test_best_fit_decreasing():
    assert best_fit(np.array([3, 6, 4, 7]), 10).tolist() == [0, 1, 1, 0]
    assert best_fit(np.array([5, 5, 5, 10]), 10).tolist() == [1, 1, 2, 0]
    lengths = np.random.RandomState(0).randint(1, 101, 500)
    rows = best_fit(lengths, 100)
    assert np.bincount(rows, lengths).max() <= 100
    assert np.sort(np.bincount(rows, lengths)).tolist() == quadratic_best_fit(lengths.tolist(), 100)


def quadratic_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """How full the rows are, ascending: the same whichever of two equally good rows is taken."""
    filled = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(filled)) if filled[row] + length <= capacity]
        if fitting:
            filled[max(fitting, key=filled.__getitem__)] += length
        else:
            filled.append(length)
    return sorted(filled)


def test_a_hundred_thousand_documents_take_seconds():
    lengths = np.random.RandomState(0).geometric(1 / 2000, 100_000)
    store = TokenStore(
        tokens=np.broadcast_to(np.uint8(1), lengths.sum()),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        split_hashes=np.zeros(len(lengths)),
        fingerprint="large",
    )
    start = time.perf_counter()
    rows = PackedSequences(store, np.arange(len(lengths)), 1_000_000, seed=0)
    row = rows[5]
    assert time.perf_counter() - start < 10
    assert row["segment_ids"].max() > 100 and rows.num_sequences == -(-lengths.sum() // 1_000_000)
