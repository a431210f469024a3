import numpy as np
import pytest

from benchmarks import causal_work
from jaxlc.hlo.attention_flops import imbalance
from jaxlc.sharding.layout import zigzag_order

TOKENS = 48


def by_hand(queries_T, keys_S, tile: int) -> int:
    visible_TS = queries_T[:, None] >= keys_S[None, :]
    tiles = [visible_TS[i : i + tile, j : j + tile]
             for i in range(0, len(queries_T), tile) for j in range(0, len(keys_S), tile)]  # fmt: skip
    return tile**2 * sum(each.any() for each in tiles)


@pytest.mark.parametrize("context", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", [2, 5])  # 5 fits nowhere, and leaves tiles of one token
def test_own_block_and_all_keys(monkeypatch: pytest.MonkeyPatch, context, tile):
    monkeypatch.setattr(causal_work, "TILE", tile)
    order_RT = zigzag_order(TOKENS, context).reshape(context, -1)
    own = causal_work.visited_pairs(TOKENS, context, TOKENS // context, TOKENS // context)
    assert own == [by_hand(queries_T, queries_T, tile) for queries_T in order_RT]
    all_keys = causal_work.visited_pairs(TOKENS, context, TOKENS // context, TOKENS)
    assert all_keys == [by_hand(queries_T, order_RT.reshape(-1), tile) for queries_T in order_RT]


def test_ranks_that_exchanged_heads_have_the_work_of_their_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal_work, "TILE", 5)
    first, second = causal_work.visited_pairs(TOKENS, 2, TOKENS // 2, TOKENS)
    assert first != second
    assert causal_work.visited_pairs(TOKENS, 4, TOKENS // 2, TOKENS) == [first, first, second, second]
    whole = causal_work.visited_pairs(TOKENS, 1, TOKENS, TOKENS)
    assert causal_work.visited_pairs(TOKENS, 4, TOKENS, TOKENS) == whole * 4


def test_documents():
    assert causal_work.document_pairs([TOKENS], 4) == [causal_work.causal_pairs(TOKENS) // 4] * 4
    documents = [20, 3, 25]
    pairs = causal_work.document_pairs(documents, 4)
    assert sum(pairs) == sum(causal_work.causal_pairs(length) for length in documents)
    starts_T = np.repeat([0, 20, 23], documents)
    expected = [(each - starts_T[each] + 1).sum() for each in zigzag_order(TOKENS, 4).reshape(4, -1)]
    assert pairs == expected and imbalance(pairs) > 1
