"""Counts of computed pairs, compared with dense masks."""

import numpy as np
import pytest

from benchmarks import causal_work
from benchmarks.causal_work import imbalance
from jaxlc.sharding.document_layout import zigzag_order

TOKENS = 48


def pairs_of_dense_mask(queries_T, keys_S, tile: int) -> int:
    """tile^2 for every tile with a visible pair."""
    visible_TS = queries_T[:, None] >= keys_S[None, :]
    tiles = [visible_TS[i : i + tile, j : j + tile]
             for i in range(0, len(queries_T), tile) for j in range(0, len(keys_S), tile)]  # fmt: skip
    return tile**2 * sum(mask.any() for mask in tiles)


@pytest.mark.parametrize("context", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", [2, 5])  # 5 divides no block: the last tile is partial
def test_computed_pairs_match_dense_mask(monkeypatch: pytest.MonkeyPatch, context, tile):
    monkeypatch.setattr(causal_work, "TILE", tile)
    order_RT = zigzag_order(TOKENS, context).reshape(context, -1)
    own = causal_work.computed_pairs(TOKENS, context, TOKENS // context, TOKENS // context)
    assert own == [pairs_of_dense_mask(queries_T, queries_T, tile) for queries_T in order_RT]
    all_keys = causal_work.computed_pairs(TOKENS, context, TOKENS // context, TOKENS)
    assert all_keys == [
        pairs_of_dense_mask(queries_T, order_RT.reshape(-1), tile) for queries_T in order_RT
    ]


def test_computed_pairs_after_all_to_all_equal_in_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal_work, "TILE", 5)
    first, second = causal_work.computed_pairs(TOKENS, 2, TOKENS // 2, TOKENS)
    assert first != second
    assert causal_work.computed_pairs(TOKENS, 4, TOKENS // 2, TOKENS) == [
        first,
        first,
        second,
        second,
    ]
    whole = causal_work.computed_pairs(TOKENS, 1, TOKENS, TOKENS)
    assert causal_work.computed_pairs(TOKENS, 4, TOKENS, TOKENS) == whole * 4


def test_document_pairs_match_dense_mask():
    assert causal_work.document_pairs([TOKENS], 4) == [causal_work.causal_pairs(TOKENS) // 4] * 4
    documents = [20, 3, 25]
    pairs = causal_work.document_pairs(documents, 4)
    assert sum(pairs) == sum(causal_work.causal_pairs(length) for length in documents)
    starts_T = np.repeat([0, 20, 23], documents)
    order_RT = zigzag_order(TOKENS, 4).reshape(4, -1)
    expected = [(queries_T - starts_T[queries_T] + 1).sum() for queries_T in order_RT]
    assert pairs == expected and imbalance(pairs) > 1
