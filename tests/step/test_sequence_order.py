"""The choice of the order of tokens, and the order itself."""

import numpy as np
import pytest

from jaxlc.config import AttentionConfig
from jaxlc.sharding.document_layout import document_layout
from jaxlc.sharding.layout import zigzag_order
from jaxlc.step import sequence_order
from tests.step.synthetic import TOKENS, natural_rows, small_config

LENGTHS = (40, 3, 1, 29, 23)
(PACKED,) = natural_rows(documents=[LENGTHS])


def test_default_order_is_that_of_documents():
    chosen = sequence_order.choose(small_config(), 4)
    assert chosen.description == "tokens in the order of per-document sharding"
    np.testing.assert_array_equal(chosen.of(PACKED), document_layout(LENGTHS, TOKENS, 4).order)
    (other,) = natural_rows(documents=[(80, 16)])
    assert (chosen.of(other) != chosen.of(PACKED)).any()


@pytest.mark.parametrize(
    "sections, reason",
    [
        (dict(attention=dict(document_mask=False)), "attention.document_mask=False"),
        (dict(attention=dict(document_sharding=False)), "attention.document_sharding=False"),
        (dict(attention=dict(strategy="ulysses")), "each rank attends over whole sequences"),
        (dict(attention=dict(strategy="hybrid", ulysses_degree=4)), "each rank attends over whole sequences"),
        (
            dict(model=dict(layer_kinds=("sliding", "full"), window=20)),
            "per-document sharding is unsupported with sliding windows",
        ),
        (dict(memory=dict(tile_tokens=12)), "per-document sharding is unsupported with memory.tile_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_zigzag_order_remains_with_reason(sections, reason):
    chosen = sequence_order.choose(small_config(**{"mesh": dict(context=4)} | sections), 4)
    assert chosen.description == f"tokens in zigzag order ({reason})"
    np.testing.assert_array_equal(chosen.of(PACKED), zigzag_order(TOKENS, 4))


def test_hybrid_groups_have_documents_and_ranks_zigzag_order():
    config = small_config(mesh=dict(context=4), attention=dict(strategy="hybrid", ulysses_degree=2))
    order_T = sequence_order.choose(config, 4).of(PACKED)
    groups = document_layout(LENGTHS, TOKENS, 2).order.reshape(2, -1)
    expected = [group[zigzag_order(TOKENS // 2, 2)] for group in groups]
    np.testing.assert_array_equal(order_T.reshape(2, -1), expected)


def test_settings_have_per_document_sharding_by_default():
    assert AttentionConfig().document_sharding  # also for configs that are stored in old checkpoints
