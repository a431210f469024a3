"""The choice of the order of tokens, and the order itself."""

import numpy as np
import pytest

from jaxlc.config import AttentionConfig
from jaxlc.sharding.document_layout import document_order, zigzag_order
from jaxlc.step import batch
from tests.step.synthetic import HYBRID, TOKENS, natural_rows, small_config

LENGTHS = (40, 3, 1, 29, 23)
(PACKED,) = natural_rows(documents=[LENGTHS])


def test_default_order_is_that_of_documents():
    chosen = batch.choose_order(small_config(), 4)
    assert chosen.description == "tokens in the order of per-document sharding"
    np.testing.assert_array_equal(chosen.of(PACKED), document_order(PACKED["segment_ids"], 4))
    (other,) = natural_rows(documents=[(80, 16)])
    assert (chosen.of(other) != chosen.of(PACKED)).any()


@pytest.mark.parametrize(
    "sections, reason",
    [
        (dict(attention=dict(document_mask=False)), "attention.document_mask=False"),
        (dict(attention=dict(document_sharding=False)), "attention.document_sharding=False"),
        (dict(attention=dict(strategy="ulysses")), "each rank attends over whole sequences"),
        (
            dict(attention=dict(strategy="hybrid", ulysses_degree=4)),
            "each rank attends over whole sequences",
        ),
        (
            dict(model=dict(layer_kinds=("sliding", "full"), window=20)),
            "sliding windows of 20 tokens are too long for pieces of documents on 24 tokens",
        ),
        (
            dict(model=HYBRID, memory=dict(tile_tokens=24, remat="full")),
            "gated_delta_net layers with memory.tile_tokens, whose tiles have a part of each fragment of a rank",
        ),
        (
            dict(model=HYBRID | dict(layer_kinds=("gated_delta_net",))),
            "no layer has more work on one rank than on another",
        ),
        (
            dict(model=dict(layer_kinds=("sliding",), window=3)),
            "sliding windows have nearly equal work on all ranks",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_zigzag_order_remains_with_reason(sections, reason):
    chosen = batch.choose_order(small_config(**{"mesh": dict(context=4)} | sections), 4)
    assert chosen.description == f"tokens in zigzag order ({reason})"
    np.testing.assert_array_equal(chosen.of(PACKED), zigzag_order(TOKENS, 4))


def test_order_of_models_with_states_has_fragments():
    chosen = batch.choose_order(small_config(model=HYBRID), 4)
    expected = "tokens in the order of per-document sharding, at most 5 documents of a sequence on all ranks"
    assert chosen.description == expected and chosen.few_documents
    arrays, order_T = chosen.arranged(PACKED)
    np.testing.assert_array_equal(order_T, chosen.of(PACKED))
    assert (order_T != zigzag_order(TOKENS, 4)).any()
    np.testing.assert_array_equal(
        arrays["fragment_ids"][order_T], chosen.chained(PACKED).fragments_T
    )


def test_order_of_documents_with_room_for_windows():
    config = small_config(model=dict(layer_kinds=("sliding", "full"), window=3))
    chosen = batch.choose_order(config, 4)
    assert chosen.description == "tokens in the order of per-document sharding"
    order_T = chosen.of(PACKED)
    assert sorted(order_T) == list(range(TOKENS))
    assert (order_T != zigzag_order(TOKENS, 4)).any()


def test_tiles_have_both_pieces_of_documents():
    """A tile has a sub-chunk of each half of a rank's tokens, at mirrored indices."""
    config = small_config(mesh=dict(context=4), memory=dict(tile_tokens=12, remat="full"))
    (row,) = natural_rows(documents=[(64, 8, 8, 8, 8)])
    order_T = batch.choose_order(config, 4).of(row)
    assert sorted(order_T) == list(range(TOKENS))
    for rank, halves in enumerate(order_T.reshape(4, 2, 12)):
        lo, hi = ([token for token in half if token < 64] for half in halves)
        assert lo == list(range(8 * rank, 8 * rank + 8)) == list(halves[0][:8])
        assert hi == list(range(56 - 8 * rank, 64 - 8 * rank)) == list(halves[1][-8:])


def test_hybrid_groups_have_documents_and_ranks_zigzag_order():
    config = small_config(mesh=dict(context=4), attention=dict(strategy="hybrid", ulysses_degree=2))
    order_T = batch.choose_order(config, 4).of(PACKED)
    groups = document_order(PACKED["segment_ids"], 2).reshape(2, -1)
    expected = [group[zigzag_order(TOKENS // 2, 2)] for group in groups]
    np.testing.assert_array_equal(order_T.reshape(2, -1), expected)


def test_settings_have_per_document_sharding_by_default():
    # also for configs that are stored in old checkpoints
    assert AttentionConfig().document_sharding
