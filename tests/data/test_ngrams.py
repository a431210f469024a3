import collections
import itertools
import math

import numpy as np
import pytest

from jaxlc.data.sequences import ngrams
from jaxlc.data.sequences.ngrams import ngram_losses
from jaxlc.data.sequences.packing import PackedSequences
from jaxlc.data.tokens.store import TokenStore

V = 12
ONCE = 10  # occurs once in training; token 11 never does
RNG = np.random.RandomState(0)
DOCUMENTS = [RNG.zipf(1.5, length).clip(1, V - 2) - 1 for length in (30, 1, 7, 50, 12, 3, 20, 25)]
DOCUMENTS[3][20] = ONCE
DOCUMENTS[5][:2] = (ONCE, 11)
DOCUMENTS[6][5] = ONCE
DOCUMENTS[7][9] = 11
STORE = TokenStore(
    tokens=np.concatenate(DOCUMENTS).astype(np.uint8),
    offsets=np.concatenate([[0], np.cumsum([len(document) for document in DOCUMENTS])]),
    split_hashes=np.zeros(len(DOCUMENTS)),
    fingerprint="test",
)
TRAIN = PackedSequences(STORE, np.array([0, 1, 2, 3, 4]), 16, seed=0)
HELDOUT = PackedSequences(STORE, np.array([5, 6, 7]), 16, seed=None)


def brute_force_losses(num_sequences: int) -> tuple[float, float]:
    pairs = collections.Counter((int(x), int(y)) for d in range(5) for x, y in itertools.pairwise(DOCUMENTS[d]))
    after = collections.Counter(y for _, y in pairs.elements())
    before = collections.Counter(x for x, _ in pairs.elements())
    distinct = collections.Counter(x for x, _ in pairs)
    losses = []
    for i in range(num_sequences):
        sequence = HELDOUT[i]
        for x, y, weight in zip(
            *(sequence[name].tolist() for name in ("tokens", "targets", "loss_weights")), strict=True
        ):
            unigram = (after[y] + 1) / (after.total() + V)
            bigram = (pairs[x, y] + distinct[x] * unigram) / (before[x] + distinct[x]) if before[x] else unigram
            losses += [(-math.log(unigram), -math.log(bigram))] if weight else []
    return tuple(np.mean(losses, axis=0))


@pytest.mark.parametrize("num_sequences", [1, HELDOUT.num_sequences])
@pytest.mark.parametrize("chunk_tokens", [20, 4_000_000])
def test_ngram_losses_equal_brute_force(num_sequences: int, chunk_tokens: int, monkeypatch):
    monkeypatch.setattr(ngrams, "_CHUNK_TOKENS", chunk_tokens)
    assert ngram_losses(TRAIN, HELDOUT, num_sequences, V) == pytest.approx(brute_force_losses(num_sequences), rel=1e-12)


def test_ngram_probabilities_sum_to_one():
    """Both models are distributions: for every x, the sum of p(y | x) over y is 1."""
    for x in range(V):
        losses = [ngram_losses(TRAIN, FixedSequence([x], [y], [1]), 1, V) for y in range(V)]
        assert np.exp(-np.array(losses)).sum(axis=0) == pytest.approx([1, 1])


class FixedSequence:
    def __init__(self, tokens: list[int], targets: list[int], weights: list[float]):
        self._sequence = {
            "tokens": np.array(tokens, np.int32),
            "targets": np.array(targets, np.int32),
            "loss_weights": np.array(weights, np.float32),
        }

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self._sequence


def test_ngram_losses_are_weighted():
    one, two = (ngram_losses(TRAIN, FixedSequence([1], [y], [1]), 1, V)[1] for y in (0, 3))
    assert ngram_losses(TRAIN, FixedSequence([1, 1], [0, 3], [1, 3]), 1, V)[1] == pytest.approx((one + 3 * two) / 4)


def test_ngram_counts_stop_at_token_limit(monkeypatch):
    monkeypatch.setattr(ngrams, "_MAX_TRAIN_TOKENS", len(DOCUMENTS[0]) + 5)
    capped = ngram_losses(TRAIN, HELDOUT, 2, V)
    store = TokenStore(
        tokens=STORE.tokens[:35], offsets=np.array([0, 30, 31, 35]), split_hashes=np.zeros(3), fingerprint="cut"
    )
    assert capped == ngram_losses(PackedSequences(store, np.arange(3), 16, seed=0), HELDOUT, 2, V)


def test_ngram_large_vocabulary_fits_in_memory():
    """No V x V array; x * V + y exceeds int32."""
    vocab_size, tokens = 200_000, np.array([150_000, 160_000] * 10, np.uint32)
    store = TokenStore(tokens=tokens, offsets=np.array([0, 20]), split_hashes=np.zeros(1), fingerprint="two tokens")
    train = PackedSequences(store, np.array([0]), 2, seed=None)
    unigram = 11 / (19 + vocab_size)
    expected = (-math.log(unigram), -math.log((10 + unigram) / (10 + 1)))
    assert ngram_losses(train, FixedSequence([150_000], [160_000], [1]), 1, vocab_size) == pytest.approx(expected)
