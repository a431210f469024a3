"""Training and held-out documents, also if there are too few documents to hold one out."""

import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.data.sequences.packing import PackedSequences, split_documents
from jaxlc.data.tokens.store import TokenStore


def make_store(lengths: list[int], split_hashes: list[float]) -> TokenStore:
    """Documents of the given lengths; all tokens differ."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return TokenStore(
        tokens=np.arange(1, offsets[-1] + 1, dtype=np.uint32),
        offsets=offsets,
        split_hashes=np.array(split_hashes),
        fingerprint="test",
    )


def tokens_of(store: TokenStore, ids: np.ndarray) -> list[int]:
    return [k for d in ids for k in store.tokens[store.offsets[d] : store.offsets[d + 1]].tolist()]


def test_split_enough_documents_follows_hash():
    store = make_store([5, 6, 7], [0.5, 0.01, 0.06])
    split = split_documents(store, 0.05)
    assert split.store is store and split.tail_tokens == 0
    assert split.train_ids.tolist() == [0, 2] and split.heldout_ids.tolist() == [1]


@pytest.mark.parametrize("split_hash", [0.01, 0.9])
def test_split_single_document_holds_out_its_tail(split_hash):
    store = make_store([101], [split_hash])
    split = split_documents(store, 0.05)
    assert split.tail_tokens == 6  # ceil(101 x 0.05)
    assert tokens_of(split.store, split.train_ids) == list(range(1, 96))
    assert tokens_of(split.store, split.heldout_ids) == list(range(96, 102))
    assert len(split.store.split_hashes) == len(split.store.offsets) - 1 == 2


@pytest.mark.parametrize("split_hash", [0.01, 0.9])
def test_split_few_documents_holds_out_tail_of_longest(split_hash):
    split = split_documents(make_store([30, 100, 100, 20], [split_hash] * 4), 0.1)
    assert tokens_of(split.store, split.heldout_ids) == list(range(121, 131))
    assert tokens_of(split.store, split.train_ids) == [*range(1, 121), *range(131, 251)]


def test_split_tail_is_never_a_training_target():
    split = split_documents(make_store([100], [0.9]), 0.1)
    train = PackedSequences(split.store, split.train_ids, 16, seed=0)
    sequences = [train[i] for i in range(train.num_sequences)]
    targets = np.concatenate([s["targets"][s["loss_weights"] > 0] for s in sequences])
    assert sorted(targets) == list(range(2, 91))


@pytest.mark.parametrize(
    "lengths, eval_fraction", [([3], 0.5), ([2, 2], 0.05), ([100], 0.001), ([100], 0.999)]
)
def test_split_too_little_text_is_refused(lengths, eval_fraction):
    with pytest.raises(UserError, match="too little text to hold out data.eval_fraction"):
        split_documents(make_store(lengths, [0.9995] * len(lengths)), eval_fraction)
