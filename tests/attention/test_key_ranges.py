"""Key ranges against the dense mask of the contract, for the pairs of blocks that the strategies compute."""

import jax
import numpy as np
import pytest

from jaxlc.attention.contract import AttentionSpec, Masks
from jaxlc.attention.key_ranges import key_ranges
from jaxlc.sharding.document_layout import document_layout
from jaxlc.sharding.layout import zigzag_order

TOKENS, CONTEXT = 192, 4
SPECS = {
    "causal": AttentionSpec(),
    "window": AttentionSpec(window=7),
    "wide_window": AttentionSpec(window=100),
    "documents": AttentionSpec(causal=False),
}
ranges_of = jax.jit(key_ranges, static_argnums=(1, 2))
dense_of = jax.jit(Masks.dense_mask_BTS, static_argnums=1)


def packed(seed: int, rank_order: str):
    """(positions, segments) [CONTEXT, tokens of a rank], with documents of 1 to TOKENS tokens and some padding."""
    rng = np.random.default_rng(seed)
    lengths, budget, longest = [], TOKENS - int(rng.integers(0, 20)), int(TOKENS ** rng.uniform(0.1, 1.0))
    while budget:
        lengths.append(min(int(rng.integers(1, longest + 1)), budget))
        budget -= lengths[-1]
    padding = (0, TOKENS - sum(lengths))
    segments = np.pad(rng.permutation(np.arange(1, len(lengths) + 1)).repeat(lengths), padding)
    positions = np.pad(np.concatenate([np.arange(length) for length in lengths]), padding)
    order = np.arange(TOKENS)
    if rank_order == "documents":
        order = document_layout(np.array(lengths), TOKENS, CONTEXT, block_tokens=4).order
    return tuple(x[order].reshape(CONTEXT, -1).astype(np.int32) for x in (positions, segments))


def check(q, k, spec):
    """q and k: (positions, segments) [pairs of blocks, tokens]."""
    masks = Masks(q[0], k[0], q[1], k[1])
    ranges = ranges_of(masks, spec, k[0].shape[1])
    np.testing.assert_array_equal(ranges.dense_mask_BTS(k[0].shape[1]), dense_of(masks, spec))
    return jax.tree.map(np.asarray, ranges)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_key_ranges_equal_dense_mask(spec):
    for seed in range(10):
        ranks = packed(seed, "documents")
        q, k = (tuple(x[index] for x in ranks) for index in np.indices((CONTEXT, CONTEXT)).reshape(2, -1))
        check(q, k, spec)  # ring steps
        natural = packed(seed, "natural")
        check(tuple(x.reshape(1, -1) for x in natural), tuple(x.reshape(1, -1) for x in natural), spec)  # ulysses
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
        masks = Masks(order[index[0]], order[index[1]], None, None)
        ranges = ranges_of(masks, spec, TOKENS // CONTEXT)
        np.testing.assert_array_equal(ranges.dense_mask_BTS(TOKENS // CONTEXT), dense_of(masks, spec))
    with pytest.raises(ValueError, match="masks nothing"):
        key_ranges(Masks(None, None, None, None), SPECS["documents"], 4)
