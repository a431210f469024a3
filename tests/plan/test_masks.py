import numpy as np
import pytest

from jaxlc.plan import masks
from jaxlc.program.work import imbalance
from jaxlc.sharding.layout import zigzag_order

TOKENS = 48


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "TILE", 2)


def by_hand(queries_T, keys_S) -> int:
    visible_TS = queries_T[:, None] >= keys_S[None, :]
    return 4 * sum(visible_TS[i : i + 2, j : j + 2].any() for i in range(0, len(queries_T), 2)
                   for j in range(0, len(keys_S), 2))  # fmt: skip


@pytest.mark.parametrize("context", [1, 2, 4])
def test_own_block_and_all_keys(small_tiles, context):
    order_RT = zigzag_order(TOKENS, context).reshape(context, -1)
    own = masks.visited_pairs(TOKENS, context, TOKENS // context, TOKENS // context)
    assert own == [by_hand(queries_T, queries_T) for queries_T in order_RT]
    all_keys = masks.visited_pairs(TOKENS, context, TOKENS // context, TOKENS)
    assert all_keys == [by_hand(queries_T, order_RT.reshape(-1)) for queries_T in order_RT]


def test_ranks_that_exchanged_heads_have_the_work_of_their_group(small_tiles):
    groups = masks.visited_pairs(TOKENS, 2, TOKENS // 2, TOKENS // 2)
    assert masks.visited_pairs(TOKENS, 4, TOKENS // 2, TOKENS // 2) == [groups[0], groups[0], groups[1], groups[1]]
    assert masks.visited_pairs(TOKENS, 4, TOKENS, TOKENS) == masks.visited_pairs(TOKENS, 1, TOKENS, TOKENS) * 4


def test_documents():
    assert masks.document_pairs([TOKENS], 4) == [masks.causal_pairs(TOKENS) // 4] * 4
    documents = [20, 3, 25]
    pairs = masks.document_pairs(documents, 4)
    assert sum(pairs) == sum(masks.causal_pairs(length) for length in documents)
    starts_T = np.repeat([0, 20, 23], documents)
    expected = [(each - starts_T[each] + 1).sum() for each in zigzag_order(TOKENS, 4).reshape(4, -1)]
    assert pairs == expected and imbalance(pairs) > 1
