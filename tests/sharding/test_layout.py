"""Zigzag order: a permutation, its inverse, and the balance it exists for."""

import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import natural_order, zigzag_order


def test_two_ranks_written_out():
    np.testing.assert_array_equal(zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])


def test_one_rank_is_the_natural_order():
    np.testing.assert_array_equal(zigzag_order(6, 1), np.arange(6))


@pytest.mark.parametrize("context", [1, 2, 3, 4, 6, 8])
def test_inverse_and_balance(context):
    order = zigzag_order(48, context)
    np.testing.assert_array_equal(order[natural_order(order)], np.arange(48))
    visible_keys = (order + 1).reshape(context, -1).sum(axis=1)  # causal: token t sees t + 1 keys
    assert len(set(visible_keys)) == 1


def test_a_length_that_does_not_split_is_named():
    with pytest.raises(UserError, match="10 tokens does not split into 2 x 4 equal chunks; use a multiple of 8"):
        zigzag_order(10, 4)
