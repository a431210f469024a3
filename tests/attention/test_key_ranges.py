"""Key ranges against dense masks of all pairs of tokens, for the pairs of blocks that the
strategies compute.
"""

import jax
import numpy as np
import pytest

from jaxlc.attention.contract import AttentionSpec, KeyRanges, implicit_ranges
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.sharding.document_layout import document_order, zigzag_order

TOKENS, CONTEXT = 192, 4
SPECS = {
    "causal": AttentionSpec(),
    "window": AttentionSpec(window=7),
    "wide_window": AttentionSpec(window=100),
    "documents": AttentionSpec(causal=False),
}
ranges_of = jax.jit(key_ranges, static_argnums=2)


def dense_mask(q: TokenInfo, k: TokenInfo, spec: AttentionSpec) -> np.ndarray:
    """[B, T, S] by the definition, in numpy."""
    mask_BTS = np.ones(
        (*(q.segments_BT if q.positions_BT is None else q.positions_BT).shape, 1), bool
    )
    if q.segments_BT is not None:
        segments_BT1 = q.segments_BT[:, :, None]
        mask_BTS = (segments_BT1 == k.segments_BT[:, None, :]) & (segments_BT1 != 0)
    if spec.causal:
        age_BTS = q.positions_BT[:, :, None] - k.positions_BT[:, None, :]
        mask_BTS = mask_BTS & (age_BTS >= 0) & (age_BTS < (spec.window or np.inf))
    return mask_BTS


def packed(seed: int, rank_order: str):
    """(positions, segments) [CONTEXT, tokens of a rank], with documents of 1 to TOKENS tokens and
    some padding.
    """
    rng = np.random.default_rng(seed)
    lengths, budget, longest = (
        [],
        TOKENS - int(rng.integers(0, 20)),
        int(TOKENS ** rng.uniform(0.1, 1.0)),
    )
    while budget:
        lengths.append(min(int(rng.integers(1, longest + 1)), budget))
        budget -= lengths[-1]
    padding = (0, TOKENS - sum(lengths))
    segments = np.pad(rng.permutation(np.arange(1, len(lengths) + 1)).repeat(lengths), padding)
    positions = np.pad(np.concatenate([np.arange(length) for length in lengths]), padding)
    order = np.arange(TOKENS)
    if rank_order == "documents":
        order = document_order(segments, CONTEXT)
    return tuple(x[order].reshape(CONTEXT, -1).astype(np.int32) for x in (positions, segments))


def check(q, k, spec):
    """q and k: (positions, segments) [pairs of blocks, tokens]."""
    q, k = TokenInfo(*q), TokenInfo(*k)
    ranges = ranges_of(q, k, spec)
    np.testing.assert_array_equal(ranges.dense_mask_BTS(k[0].shape[1]), dense_mask(q, k, spec))
    return jax.tree.map(np.asarray, ranges)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_key_ranges_equal_dense_mask(spec):
    for seed in range(10):
        ranks = packed(seed, "documents")
        q, k = (
            tuple(x[index] for x in ranks)
            for index in np.indices((CONTEXT, CONTEXT)).reshape(2, -1)
        )
        check(q, k, spec)  # ring steps
        natural = packed(seed, "natural")
        # ulysses
        check(
            tuple(x.reshape(1, -1) for x in natural), tuple(x.reshape(1, -1) for x in natural), spec
        )
        tiles = tuple(x[:, 16:32] for x in natural)
        halos = tuple(np.concatenate([x[:-1, -12:], x[1:]], axis=1) for x in natural)
        check(tuple(x[1:] for x in tiles), halos, spec)


def test_ring_steps_are_one_rectangle_per_document():
    for seed in range(20):
        positions, segments = packed(seed, "documents")
        pairs = np.array([(q, k) for q in range(CONTEXT) for k in range(CONTEXT) if q != k])
        q, k = ((positions[index], segments[index]) for index in pairs.T)
        ranges = check(q, k, SPECS["causal"])
        for pair in range(len(pairs)):
            start, end = ranges.start_BT[pair], ranges.end_BT[pair]
            for document in set(q[1][pair].tolist()) - {0}:
                (queries,) = np.nonzero((q[1][pair] == document) & (end > start))
                if len(queries):
                    assert queries[-1] - queries[0] + 1 == len(queries)
                    assert len(set(start[queries])) == 1 and len(set(end[queries])) == 1


def test_key_ranges_without_segments_equal_dense_mask():
    order = zigzag_order(TOKENS, CONTEXT).reshape(CONTEXT, -1).astype(np.int32)
    index = np.indices((CONTEXT, CONTEXT)).reshape(2, -1)
    for spec in (SPECS["causal"], SPECS["window"]):
        check((order[index[0]], None), (order[index[1]], None), spec)
    tokens = TokenInfo(order, None)
    assert key_ranges(tokens, tokens, SPECS["documents"]) is None  # nothing is masked


@pytest.mark.parametrize("lengths", [(8, 8), (3, 8), (8, 3)], ids=str)
def test_implicit_ranges_equal_ranges_of_last_queries(lengths):
    q, k = (TokenInfo(np.arange(length)[None] - length, None) for length in lengths)
    for spec in (SPECS["causal"], SPECS["window"], SPECS["documents"]):
        start_T, end_T = (
            default if x is None else x
            for x, default in zip(implicit_ranges(spec, *lengths), (0, lengths[1]))
        )
        bounds = (np.broadcast_to(x, (1, lengths[0])) for x in (start_T, end_T))
        dense = KeyRanges(*bounds).dense_mask_BTS(lengths[1])
        np.testing.assert_array_equal(dense, np.broadcast_to(dense_mask(q, k, spec), dense.shape))


def test_ranges_within_part_of_keys_equal_part_of_dense_mask():
    positions, segments = (x.reshape(1, -1) for x in packed(3, "natural"))
    for spec in SPECS.values():
        tokens = TokenInfo(positions, segments)
        ranges = key_ranges(tokens, tokens, spec)
        for first, num_keys in ((0, 5), (17, 100), (TOKENS - 40, 40)):
            part = ranges.within(first, num_keys)
            expected = ranges.dense_mask_BTS(TOKENS)[:, :, first : first + num_keys]
            np.testing.assert_array_equal(part.dense_mask_BTS(num_keys), expected)
            assert (np.asarray(part.start_BT)[~expected.any(axis=2)] == 0).all()
