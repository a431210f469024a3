import time

import numpy as np
import pytest

from jaxlc.data.sequences.packing import PackedSequences, best_fit
from jaxlc.data.tokens.store import TokenStore

S = 16


def make_store(lengths: list[int]) -> TokenStore:
    """Documents of the given lengths; all tokens of the corpus differ, so that any mix-up is
    detected.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32)
    return TokenStore(
        tokens=tokens, offsets=offsets, split_hashes=np.zeros(len(lengths)), fingerprint="test"
    )


# shorter, longer, and multiples of a sequence
LENGTHS = [2, 40, 16, 7, 17, 3, 2, 9, 33, 5, 32, 12, 2, 64, 1, 15]
STORE = make_store(LENGTHS)
IDS = np.array([d for d in range(len(LENGTHS)) if d not in (3, 11)])  # the others are held out
SEQUENCES = PackedSequences(STORE, IDS, S, seed=7)


def brute_force_sequence(tokens: np.ndarray) -> dict[str, list]:
    """The other arrays of a sequence, from its tokens: in this store token k + 1 follows token k."""
    starts, ends = set(STORE.offsets[:-1] + 1), set(STORE.offsets[1:])
    sequence = {"targets": [], "loss_weights": [], "positions": [], "segment_ids": []}
    position = segment = 0
    for at, token in enumerate(tokens.tolist()):
        is_new_chunk = token != 0 and (at == 0 or token in starts or token != tokens[at - 1] + 1)
        segment, position = (segment + 1, 0) if is_new_chunk else (segment, position + 1)
        has_next = token != 0 and token not in ends
        sequence["targets"].append(token + 1 if has_next else 0)
        sequence["loss_weights"].append(float(has_next))
        sequence["positions"].append(position if token else 0)
        sequence["segment_ids"].append(segment if token else 0)
    return sequence


@pytest.mark.parametrize("i", range(SEQUENCES.num_sequences))
def test_packing_sequence_equals_brute_force(i: int):
    sequence = SEQUENCES[i]
    assert set(sequence) == {"tokens", "targets", "loss_weights", "positions", "segment_ids"}
    assert all(
        array.dtype == (np.float32 if name == "loss_weights" else np.int32)
        for name, array in sequence.items()
    )
    assert all(array.shape == (S,) for array in sequence.values())
    assert {
        name: sequence[name].tolist() for name in sequence if name != "tokens"
    } == brute_force_sequence(sequence["tokens"])
    padding = np.flatnonzero(sequence["tokens"] == 0)
    assert padding.tolist() == list(range(S - len(padding), S))


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_packing_epoch_contains_every_token_once(epoch: int):
    sequences = [
        SEQUENCES[epoch * SEQUENCES.num_sequences + i] for i in range(SEQUENCES.num_sequences)
    ]
    tokens = np.concatenate([sequence["tokens"] for sequence in sequences])
    targets = np.concatenate(
        [sequence["targets"][sequence["loss_weights"] > 0] for sequence in sequences]
    )
    spans = [(STORE.offsets[d], STORE.offsets[d + 1]) for d in IDS]
    assert sorted(tokens[tokens > 0]) == [k + 1 for begin, end in spans for k in range(begin, end)]
    assert sorted(targets) == [k + 1 for begin, end in spans for k in range(begin + 1, end)]


def test_packing_sizes_count_an_epoch():
    assert SEQUENCES.num_documents == len(IDS)
    assert SEQUENCES.num_tokens == sum(LENGTHS[d] for d in IDS)
    num_weighted = sum(
        int((SEQUENCES[i]["tokens"] > 0).sum()) for i in range(SEQUENCES.num_sequences)
    )
    assert num_weighted == SEQUENCES.num_tokens


def test_packing_document_is_cut_only_if_longer():
    num_chunks = dict.fromkeys(IDS, 0)
    for i in range(SEQUENCES.num_sequences):
        tokens = SEQUENCES[i]["tokens"]
        for document in np.unique(
            np.searchsorted(STORE.offsets, tokens[tokens > 0] - 1, "right") - 1
        ):
            num_chunks[document] += 1
    assert num_chunks == {d: -(-LENGTHS[d] // S) for d in IDS}


def test_packing_cut_document_continues_in_targets():
    sequences = [
        PackedSequences(make_store([40]), np.array([0]), S, seed=None)[i] for i in range(3)
    ]
    by_start = sorted(sequences, key=lambda sequence: sequence["tokens"][0])
    assert [sequence["targets"][S - 1] for sequence in by_start] == [17, 33, 0]
    assert [sequence["loss_weights"].sum() for sequence in by_start] == [16, 16, 7]
    assert [sequence["positions"].max() for sequence in by_start] == [15, 15, 7]


def test_packing_sequence_is_pure_function_of_index():
    """Independent of the order of access, and equal to stored values of an earlier process and
    NumPy version.
    """
    again = PackedSequences(STORE, IDS, S, seed=7)
    indices = [30, 0, 3, 1000, 0, 17]
    expected = {i: SEQUENCES[i] for i in sorted(indices)}
    for i in indices:
        for name, array in again[i].items():
            np.testing.assert_array_equal(array, expected[i][name])
        np.testing.assert_array_equal(
            again.document_lengths(i), np.bincount(expected[i]["segment_ids"])[1:]
        )
    # must not change
    assert [int(SEQUENCES[i]["tokens"][0]) for i in range(6)] == [97, 245, 151, 3, 19, 197]


def first_tokens(sequences: PackedSequences, epoch: int) -> list[int]:
    indices = range(epoch * sequences.num_sequences, (epoch + 1) * sequences.num_sequences)
    return [int(sequences[i]["tokens"][0]) for i in indices]


def test_packing_order_depends_on_epoch_and_seed():
    other_seed = PackedSequences(STORE, IDS, S, seed=8)
    orders = [first_tokens(SEQUENCES, 0), first_tokens(SEQUENCES, 1), first_tokens(other_seed, 0)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    fixed = PackedSequences(STORE, IDS, S, seed=None)
    assert first_tokens(fixed, 0) == first_tokens(fixed, 3) != sorted(first_tokens(fixed, 0))


def test_best_fit_equals_quadratic_algorithm():
    assert best_fit(np.array([3, 6, 4, 7]), 10).tolist() == [0, 1, 1, 0]
    assert best_fit(np.array([5, 5, 5, 10]), 10).tolist() == [1, 1, 2, 0]
    lengths = np.random.RandomState(0).randint(1, 101, 500)
    bins = best_fit(lengths, 100)
    assert np.bincount(bins, lengths).max() <= 100
    assert np.sort(np.bincount(bins, lengths)).tolist() == quadratic_best_fit(lengths.tolist(), 100)


def quadratic_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The fill of each bin, sorted: it does not depend on how ties between bins are broken."""
    filled = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b in range(len(filled)) if filled[b] + length <= capacity]
        if fitting:
            filled[max(fitting, key=filled.__getitem__)] += length
        else:
            filled.append(length)
    return sorted(filled)


def test_packing_100_000_documents_takes_seconds():
    lengths = np.random.RandomState(0).geometric(1 / 2000, 100_000)
    store = TokenStore(
        tokens=np.broadcast_to(np.uint8(1), lengths.sum()),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        split_hashes=np.zeros(len(lengths)),
        fingerprint="large",
    )
    start = time.thread_time()  # CPU seconds, which do not depend on what else the machine does
    sequences = PackedSequences(store, np.arange(len(lengths)), 1_000_000, seed=0)
    sequence = sequences[5]
    assert time.thread_time() - start < 10
    assert sequence["segment_ids"].max() > 100 and sequences.num_sequences == -(
        -lengths.sum() // 1_000_000
    )
