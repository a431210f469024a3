"""The block ranges that kernels loop over, compared with the dense mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.kernels.block_mask import BlockMask, SeqInfo, kv_block_ranges, query_block_ranges
from jaxlc.kernels.tuning import MAX_BLOCK_RANGES

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
    return np.array([[reduce(row[:, j : j + KV_BLOCK]) for j in range(0, row.shape[1], KV_BLOCK)] for row in rows])


def _num_uses(ranges: np.ndarray, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of blocks is used (with mask, without mask), from ranges [own blocks, ranges, 3]."""
    masked, full = np.zeros((2, len(ranges), num_blocks), int)
    for own, own_ranges in enumerate(ranges):
        for start, middle, end in own_ranges:
            masked[own, start:middle] += 1
            full[own, middle:end] += 1
    return masked, full


def _check(mask: BlockMask, queries: SeqInfo, keys: SeqInfo, exact: bool) -> None:
    """Each pair of blocks that is not fully masked is used once, and without the mask only if it is fully visible."""
    q, k = (
        (np.arange(offset, offset + count) if tokens.positions_BT is None else tokens.positions_BT[0])
        for tokens, offset, count in ((queries, mask.first_query, mask.num_queries), (keys, 0, mask.num_keys))
    )
    segments = [None, None]
    if queries.segments_BT is not None:
        segments = [np.asarray(queries.segments_BT[0])[:, None], np.asarray(keys.segments_BT[0])[None, :]]
    mask_TS = mask.dense_mask(np.asarray(q)[:, None], np.asarray(k)[None, :], *segments)
    mask_TS = np.ones((len(q), len(k)), bool) if mask_TS is None else mask_TS
    some, every = _reduce_blocks(mask_TS, np.any), _reduce_blocks(mask_TS, np.all)
    kv_ranges, query_ranges = (f(queries, keys, mask)[0] for f in (kv_block_ranges, query_block_ranges))
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
    _check(_mask(num_queries=num_queries, window=window), SeqInfo(None, None), SeqInfo(None, None), exact=True)


def test_full_attention_ranges_contain_all_blocks():
    _check(_mask(causal=False), SeqInfo(None, None), SeqInfo(None, None), exact=True)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_give_sufficient_ranges(window, causal):
    if not causal and window:
        return
    segments = jnp.asarray(np.repeat([1, 2, 3, 0], [19, 2, 25, 4])[None], jnp.int32)
    row = SeqInfo(None, segments)
    _check(_mask(causal=causal, window=window), row, row, exact=False)


@pytest.mark.parametrize("window", [None, 13])
def test_zigzag_order_gives_exact_ranges(window):
    """Positions in the zigzag order of 3 ranks: chunks 0 5 1 4 2 3, of 8 tokens."""
    positions = jnp.asarray(np.arange(48).reshape(6, 8)[[0, 5, 1, 4, 2, 3]].reshape(1, 48), jnp.int32)
    row = SeqInfo(positions, None)
    _check(_mask(48, 48, window=window), row, row, exact=True)


def test_more_ranges_than_the_list_holds_use_no_block_twice():
    """Documents alternate from block to block: the last range contains all remaining blocks, and none is used twice."""
    segments = jnp.asarray(np.arange(320)[None] // KV_BLOCK % 2 + 1, jnp.int32)
    mask, row = _mask(320, 320), SeqInfo(None, segments)
    assert kv_block_ranges(row, row, mask).shape[2] == MAX_BLOCK_RANGES < 320 // KV_BLOCK // 2
    _check(mask, row, row, exact=False)


def test_blocks_with_padding_give_exact_ranges():
    """One block is padding except for one token."""
    segments = jnp.zeros((1, 50), jnp.int32).at[0, 30:33].set(7)
    row = SeqInfo(None, segments)
    _check(_mask(), row, row, exact=True)
    all_padding = SeqInfo(None, 0 * segments)
    ranges = kv_block_ranges(all_padding, all_padding, _mask())
    assert (ranges[..., 0] == ranges[..., 2]).all()


def test_random_masks_give_sufficient_ranges():
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed), 2)
        row = SeqInfo(jax.random.randint(keys[0], (1, 50), 0, 60), jax.random.randint(keys[1], (1, 50), 0, 3))
        _check(_mask(window=20), row, row, exact=False)
