"""Per-document sharding: an exact partition, work as counted on a dense mask, and the balance of
every sequence.
"""

import itertools
from collections import Counter

import numpy as np
import pytest

from benchmarks.document_balance import packed, stdlib_lengths, zigzag_ring_work
from jaxlc.core.errors import UserError
from jaxlc.sharding import document_layout
from jaxlc.sharding.document_layout import (
    MAX_LONG_SHARED_DOCUMENTS,
    MAX_RING_COST,
    MAX_SHARED_DOCUMENTS,
    by_ring_step,
    chained_order,
    document_order,
    ring_cost,
    zigzag_order,
)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(document_layout, "_BLOCK_TOKENS", 4)


def segments_of(lengths, num_tokens: int) -> np.ndarray:
    """The segment ids of a sequence with padding at its end."""
    segments_T = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(segments_T, (0, num_tokens - len(segments_T)))


def balanced(lengths, num_tokens: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of `document_order`, and the work [ring steps, ranks] that its choice relies on."""
    lengths = np.asarray(lengths, np.int64)
    work = by_ring_step(
        document_layout._best_assignment(lengths, num_tokens, context).work_by_rank()
    )
    return document_order(segments_of(lengths, num_tokens), context), work


def dense_ring_work(lengths, num_tokens: int, context: int, order: np.ndarray) -> np.ndarray:
    """[ring steps, ranks], counted on the dense mask of the natural order."""
    segments_T = segments_of(lengths, num_tokens)
    mask_TS = np.tril(segments_T[:, None] == segments_T) & (segments_T[:, None] != 0)
    blocks = mask_TS[np.ix_(order, order)].reshape(context, num_tokens // context, context, -1)
    return by_ring_step(blocks.sum(axis=(1, 3)))


def random_lengths(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Documents of one token up to the whole sequence, with padding in half of the cases."""
    budget = num_tokens - int(rng.integers(0, 1 + num_tokens // 4) * rng.integers(0, 2))
    longest, lengths = int(num_tokens ** rng.uniform(0.1, 1.0)), []
    while budget:
        lengths.append(min(int(rng.integers(1, longest + 1)), budget))
        budget -= lengths[-1]
    return np.array(lengths)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("context", [1, 2, 3, 4, 8])
def test_document_order_partitions_and_counts_exactly(context):
    rng = np.random.default_rng(context)
    for _ in range(60):
        num_tokens = 2 * context * int(rng.integers(1, 25))
        lengths = random_lengths(rng, num_tokens)
        order_T, work = balanced(lengths, num_tokens, context)
        np.testing.assert_array_equal(np.sort(order_T), np.arange(num_tokens))
        np.testing.assert_array_equal(work, dense_ring_work(lengths, num_tokens, context, order_T))
        assert work.sum() == (lengths * (lengths + 1) // 2).sum()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("context", [2, 4])
def test_document_tokens_are_contiguous_on_each_rank(context):
    """The tokens that other ranks need come first."""
    rng = np.random.default_rng(context)
    for _ in range(40):
        num_tokens = context * 64
        lengths = random_lengths(rng, num_tokens)
        document_T = segments_of(lengths, num_tokens)
        orders = document_order(document_T, context).reshape(context, -1)
        ranks_of = [set() for _ in range(len(lengths) + 1)]
        for rank, order in enumerate(orders):
            documents = document_T[order]
            for document in set(documents.tolist()) - {0}:
                (at,) = np.nonzero(documents == document)
                assert at[-1] - at[0] + 1 == len(at) and (np.diff(order[at]) > 0).all()
                ranks_of[document].add(rank)
        num_ranks = np.array([len(ranks) for ranks in ranks_of])
        for order in orders:
            is_shared = num_ranks[document_T[order]] > 1
            assert (np.diff(is_shared.astype(int)) <= 0).all()


@pytest.mark.parametrize("context", [2, 3, 4, 8])
def test_chains_have_documents_in_sequence(context):
    """In a chain, first what ranks 0, 1, ... have first, then what ranks ..., 1, 0 have second."""
    rng = np.random.default_rng(context)
    num_cut = num_pieces = 0
    for _ in range(60):
        num_tokens, num_chains = 2 * context * int(rng.integers(2, 60)), int(rng.integers(2, 6))
        lengths = random_lengths(rng, num_tokens)
        segments_T = segments_of(lengths, num_tokens)
        min_tokens = min(int(rng.integers(1, 16)), num_tokens // context)
        order = chained_order(segments_T, context, num_chains=num_chains, min_tokens=min_tokens)
        parts = []
        for chain in range(num_chains):
            places = [(rank, 2 * chain) for rank in range(context)]
            for rank, fragment in [
                *places,
                *((rank, 2 * chain + 1) for rank in reversed(range(context))),
            ]:
                (at,) = np.nonzero(order.fragments_T.reshape(context, -1)[rank] == fragment)
                assert not len(at) or at[-1] - at[0] + 1 == len(at)
                parts.append(order.order_T.reshape(context, -1)[rank][at])
        tokens = np.concatenate(parts)
        np.testing.assert_array_equal(np.sort(tokens), np.arange(num_tokens))
        continues = (
            (segments_T > 0) & (segments_T == np.roll(segments_T, 1)) & (np.arange(num_tokens) > 0)
        )
        np.testing.assert_array_equal((np.diff(tokens, prepend=-2) == 1)[continues[tokens]], True)
        for part in parts:  # between others of its document
            is_between = len(part) and continues[part[0]] and len(set(segments_T[part])) == 1
            if is_between and part[-1] + 1 < num_tokens and continues[part[-1] + 1]:
                assert len(part) >= min_tokens
                num_pieces += 1
            num_cut += bool(is_between)
    assert num_cut > num_pieces > 0


def test_chains_have_no_short_pieces_between_others():
    """Next to the longer document on all ranks, each rank has space for 9 tokens of the other one."""
    segments_T = np.repeat([1, 2], [440, 72])
    for min_tokens, expected in ((9, {9}), (10, {0, 8, 64})):
        order = chained_order(segments_T, 8, num_chains=2, min_tokens=min_tokens)
        numbers = (segments_T[order.order_T].reshape(8, -1) == 2).sum(axis=1)
        assert set(numbers.tolist()) == expected


def mix(rng: np.random.Generator, num_tokens: int, longest: int) -> np.ndarray:
    """60% of the tokens in documents of at least 1/8 of the sequence, the rest in shorter ones;
    log-uniform.
    """
    lengths = []
    for share, low, high in ((0.6, num_tokens // 8, longest), (1.0, 256, num_tokens // 8)):
        while (budget := int(share * num_tokens) - sum(lengths)) > 0:
            lengths.append(min(int(np.exp(rng.uniform(np.log(low), np.log(high)))), budget))
    return rng.permutation(lengths)


def test_every_sequence_of_mix_is_balanced():
    rng, num_tokens, costs = np.random.default_rng(0), 524_288, []
    for _ in range(20):
        lengths = mix(rng, num_tokens, num_tokens)
        order_T, work = balanced(lengths, num_tokens, 8)
        costs.append(ring_cost(work))
        np.testing.assert_array_equal(order_T, document_order(segments_of(lengths, num_tokens), 8))
    # where more documents cannot be cut
    assert np.mean(costs) <= MAX_RING_COST and max(costs) <= 1.15


def test_every_sequence_of_standard_library_is_balanced():
    sequences = packed(stdlib_lengths(), 524_288, 12)
    costs = [ring_cost(balanced(lengths, 524_288, 8)[1]) for lengths in sequences]
    assert np.mean(costs) <= MAX_RING_COST and max(costs) <= 1.1, costs
    assert max(ring_cost(zigzag_ring_work(lengths, 524_288, 8)) for lengths in sequences) > 1.5


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("context", [2, 3, 16])
def test_two_ranks_share_few_documents(context):
    """Also of many documents, and of documents that are longer than a rank's tokens."""
    rng, num_tokens = np.random.default_rng(context), context * 64
    packings = [
        np.full(context * 64 // length, length)
        for length in (1, 9, 65, 70, num_tokens // 3, num_tokens // 4)
    ]
    packings += [
        num_tokens // 4 + np.array(extra)
        for extra in ((1, 0, 0, -1), (3, 1, -2, -2), (2, 2, 2, -9))
    ]
    for lengths in packings + [random_lengths(rng, num_tokens) for _ in range(30)]:
        order_T, work = balanced(lengths, num_tokens, context)
        documents_RT = segments_of(lengths, num_tokens)[order_T].reshape(context, -1)
        counts = [np.bincount(x, minlength=len(lengths) + 1)[1:] for x in documents_RT]
        tokens = np.stack(counts, axis=1)
        np.testing.assert_array_equal(tokens.sum(axis=1), lengths)
        np.testing.assert_array_equal(work, dense_ring_work(lengths, num_tokens, context, order_T))
        for pair in itertools.combinations(range(context), 2):
            is_shared = (tokens[:, pair] > 0).all(axis=1)
            assert is_shared.sum() <= MAX_SHARED_DOCUMENTS
            assert (
                4 * tokens[is_shared][:, pair].max(axis=1, initial=0) > 64
            ).sum() <= MAX_LONG_SHARED_DOCUMENTS


def test_zigzag_ring_work_equals_dense_mask():
    rng = np.random.default_rng(0)
    for context in (2, 3, 4):
        num_tokens = context * 24
        lengths = random_lengths(rng, num_tokens)
        expected = dense_ring_work(lengths, num_tokens, context, zigzag_order(num_tokens, context))
        np.testing.assert_array_equal(zigzag_ring_work(lengths, num_tokens, context), expected)


def test_document_order_of_padding_between_documents():
    """Padding is placed last; the documents have the order of the same sequence without padding
    between them.
    """
    segments_T = np.array([0, 0, 5, 5, 5, 5, 0, 2, 2, 2, 0, 9, 0, 0, 0, 0])
    order_T = document_order(segments_T, 4)
    np.testing.assert_array_equal(np.sort(order_T), np.arange(16))
    compact = np.array([2, 3, 4, 5, 7, 8, 9, 11, 0, 1, 6, 10, 12, 13, 14, 15])
    np.testing.assert_array_equal(order_T, compact[document_order(segments_of([4, 3, 1], 16), 4)])
    np.testing.assert_array_equal(
        order_T, document_order(np.where(segments_T == 9, 1, segments_T), 4)
    )
    np.testing.assert_array_equal(np.sort(document_order(np.zeros(16, int), 4)), np.arange(16))


def active_ring_steps(work):
    return np.flatnonzero(work.any(axis=1)).tolist()


@pytest.mark.usefixtures("small_blocks")
def test_one_document_has_equal_pieces():
    order_T, work = balanced([64], 64, 4)
    np.testing.assert_array_equal(order_T[:16], [*range(8), *range(56, 64)])  # zigzag order
    assert active_ring_steps(work) == [0, 1, 2, 3] and ring_cost(work) < 1.1


def test_short_documents_need_no_ring_step():
    _, work = balanced(np.full(32, 8), 256, 4)
    assert active_ring_steps(work) == [0] and ring_cost(work) == 1
    order_T, work = balanced(np.full(61, 13), 800, 4)
    assert active_ring_steps(work) == [0, 1]
    documents = segments_of(np.full(61, 13), 800)[order_T].reshape(4, -1)
    ranks_of = Counter(document for row in documents for document in {*row.tolist()} - {0})
    assert 1 <= sum(number > 1 for number in ranks_of.values()) <= 3  # one between two ranks


def test_all_padding_has_an_order():
    np.testing.assert_array_equal(document_order(np.zeros(16, np.int64), 4), np.arange(16))


def test_indivisible_length_is_refused():
    with pytest.raises(
        UserError, match="10 tokens does not split over 4 ranks; use a multiple of 4"
    ):
        document_order(np.ones(10, np.int64), 4)
