"""The block ranges that kernels loop over, compared with the dense mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention.key_ranges import (
    MAX_BLOCK_RANGES,
    BlockMask,
    kv_block_ranges,
    query_block_ranges,
)

QUERY_BLOCK, KV_BLOCK = 4, 8


def _mask(num_queries=50, num_keys=50, causal=True, window=None) -> BlockMask:
    return BlockMask(
        causal=causal,
        window=window,
        num_queries=num_queries,
        num_keys=num_keys,
        query_block=QUERY_BLOCK,
        kv_block=KV_BLOCK,
    )


def _reduce_blocks(mask_TS: np.ndarray, reduce) -> np.ndarray:
    """[query blocks, KV blocks]: `reduce` over each pair of blocks."""
    rows = [mask_TS[i : i + QUERY_BLOCK] for i in range(0, mask_TS.shape[0], QUERY_BLOCK)]
    return np.array(
        [
            [reduce(row[:, j : j + KV_BLOCK]) for j in range(0, row.shape[1], KV_BLOCK)]
            for row in rows
        ]
    )


def _num_uses(ranges: np.ndarray, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of blocks is used (with mask, without mask), from ranges [own blocks,
    ranges, 3].
    """
    masked, full = np.zeros((2, len(ranges), num_blocks), int)
    for own, own_ranges in enumerate(ranges):
        for start, middle, end in own_ranges:
            masked[own, start:middle] += 1
            full[own, middle:end] += 1
    return masked, full


def _dense(mask: BlockMask, ranges) -> np.ndarray:
    start, end = (
        mask.implicit_range(np.arange(mask.num_queries))
        if ranges is None
        else (np.asarray(x[0]) for x in ranges)
    )
    keys = np.arange(mask.num_keys)
    is_after = keys >= (0 if start is None else start[:, None])
    return (
        is_after
        & (keys < (mask.num_keys if end is None else end[:, None]))
        & np.ones((mask.num_queries, 1), bool)
    )


def _ranges(
    positions=None, segments=None, causal=True, window=None, num_tokens=50
) -> tuple[jax.Array, jax.Array]:
    """(start, end) [1, num_tokens] of contiguous documents, by comparing all pairs."""
    positions = np.arange(num_tokens) if positions is None else positions
    mask_TS = np.ones((num_tokens, num_tokens), bool)
    if segments is not None:
        mask_TS = (segments[:, None] == segments) & (segments[:, None] != 0)
    age = positions[:, None] - positions
    mask_TS &= ((age >= 0) & (age < (window or num_tokens))) | (not causal)
    end = np.where(mask_TS, np.arange(num_tokens) + 1, 0).max(axis=1)
    start = np.where(mask_TS.any(axis=1), mask_TS.argmax(axis=1), 0)
    return tuple(jnp.asarray(x[None], jnp.int32) for x in (start, end))


def _check(mask: BlockMask, ranges, exact: bool) -> None:
    """Each pair of blocks that is not fully masked is used once, and without the mask only if it is
    fully visible.
    """
    mask_TS = _dense(mask, ranges)
    some, every = _reduce_blocks(mask_TS, np.any), _reduce_blocks(mask_TS, np.all)
    kv_ranges, query_ranges = (f(ranges, mask)[0] for f in (kv_block_ranges, query_block_ranges))
    for name, uses, is_whole in (
        ("keys", _num_uses(np.asarray(kv_ranges), some.shape[1]), mask.num_keys % KV_BLOCK == 0),
        ("queries", _num_uses(np.asarray(query_ranges), some.shape[0]), None),
    ):
        masked, full = uses if name == "keys" else (x.T for x in uses)
        assert (masked + full <= 1).all() and (masked + full)[some].all(), name
        assert not full[~every].any(), name
        if exact:
            np.testing.assert_array_equal(masked + full, some, name)
            assert full.sum() >= every[:-1, :-1].sum(), name
        if is_whole is False:
            assert not full[:, -1].any(), "an incomplete KV block needs the mask"


@pytest.mark.parametrize("num_queries", [50, 49, 20, 70])  # of 50 keys
@pytest.mark.parametrize("window", [None, 1, 13, 1000])
def test_implicit_positions_give_exact_ranges(num_queries, window):
    _check(_mask(num_queries=num_queries, window=window), None, exact=True)


def test_full_attention_ranges_contain_all_blocks():
    _check(_mask(causal=False), None, exact=True)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_give_sufficient_ranges(window, causal):
    if not causal and window:
        return
    segments = np.repeat([1, 2, 3, 0], [19, 2, 25, 4])
    _check(_mask(), _ranges(segments=segments, causal=causal, window=window), exact=False)


@pytest.mark.parametrize("window", [None, 13])
def test_zigzag_order_gives_exact_ranges(window):
    """Queries in the zigzag order of 3 ranks: chunks 0 5 1 4 2 3, of 8 tokens; keys in natural
    order.
    """
    queries = np.arange(48).reshape(6, 8)[[0, 5, 1, 4, 2, 3]].reshape(48)
    _check(
        _mask(48, 48), [x[:, queries] for x in _ranges(window=window, num_tokens=48)], exact=True
    )


def test_more_ranges_than_the_list_holds_use_no_block_twice():
    """Blocks of queries attend alternately to the first and to the last keys: the last range
    contains all remaining blocks, and none is used twice."""
    start = jnp.asarray(np.arange(320)[None] // QUERY_BLOCK % 2 * 160, jnp.int32)
    mask, ranges = _mask(320, 320), (start, start + 160)
    assert query_block_ranges(ranges, mask).shape[2] == MAX_BLOCK_RANGES < 320 // QUERY_BLOCK // 2
    _check(mask, ranges, exact=False)


def test_blocks_with_padding_give_exact_ranges():
    """All blocks are padding except for three tokens."""
    segments = np.zeros(50, int)
    segments[30:33] = 7
    _check(_mask(), _ranges(segments=segments), exact=True)
    all_padding = kv_block_ranges(_ranges(segments=0 * segments), _mask())
    assert (all_padding[..., 0] == all_padding[..., 2]).all()


@pytest.mark.parametrize("start", [0, 1, 8, 9])
def test_bounds_at_borders_of_blocks_give_exact_ranges(start):
    for end in (15, 16, 17, 49, 50):
        bounds = (jnp.full((1, 50), bound, jnp.int32) for bound in (start, end))
        _check(_mask(), tuple(bounds), exact=True)


def test_random_ranges_give_sufficient_ranges():
    """Any range per query, also those that no order of documents has; a quarter of them is empty."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        start, end = np.sort(rng.integers(0, 51, (2, 1, 50)), axis=0) * (rng.random((1, 50)) < 0.75)
        _check(_mask(), (jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)), exact=False)
