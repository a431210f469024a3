"""Zigzag order: the permutation, its inverse, and equal work per rank."""

import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.sharding.document_layout import natural_order, zigzag_order


def test_zigzag_order_two_ranks_equals_example():
    np.testing.assert_array_equal(zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])


def test_zigzag_order_one_rank_is_natural():
    np.testing.assert_array_equal(zigzag_order(6, 1), np.arange(6))


@pytest.mark.parametrize("context", [1, 2, 3, 4, 6, 8])
def test_zigzag_order_has_inverse_and_equal_work(context):
    order = zigzag_order(48, context)
    np.testing.assert_array_equal(order[natural_order(order)], np.arange(48))
    # causal: token t attends to t + 1 keys
    visible_keys = (order + 1).reshape(context, -1).sum(axis=1)
    assert len(set(visible_keys)) == 1


def test_zigzag_order_indivisible_length_is_refused():
    with pytest.raises(UserError, match="10 tokens into 2 x 4 equal chunks; use a multiple of 8"):
        zigzag_order(10, 4)
