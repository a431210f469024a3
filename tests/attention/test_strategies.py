"""The strategies other than the ring, which has a suite of its own, against the oracle."""

import jax
import numpy as np
import pytest

from jaxlc.attention import attend
from tests.attention.cases import assert_rows_match, inputs, oracle, sharded, split_mesh
from tests.tolerances import FLOAT32_PARITY

CONTEXTS = (1, 2, 3, 4, 6, 8)
STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid")
strategies = pytest.mark.parametrize("strategy", STRATEGIES[1:])


def sizes(strategy: str, context: int) -> dict:
    """The arguments of `sharded`: heads that the strategy can split, and how hybrid cuts the context."""
    if strategy == "hybrid":
        inner = {1: 1, 2: 2, 3: 3, 4: 2, 6: 2, 8: 4}[context]  # 6 is a ring of 3, 3 is no ring
    else:
        inner = None
    # Key/value heads: as many as ranks or more, and fewer, which ulysses repeats.
    heads = dict(num_heads=24, num_kv_heads=6 if context == 3 else 2)
    return dict(strategy=strategy, heads=heads, ulysses_ranks=inner)


@strategies
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_mask_on_every_context(strategy, context):
    how = sizes(strategy, context)
    assert_rows_match(sharded(split_mesh(context=context), **how), oracle(**how["heads"]), FLOAT32_PARITY)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("window", [1, 5, 40, 1000])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_sliding_windows(strategy, context, window, packed):
    """Itself alone, less than a chunk, several chunks, more than the row."""
    how = sizes(strategy, context)
    got = sharded(split_mesh(context=context), packed, window=window, **how)
    assert_rows_match(got, oracle(packed, window=window, **how["heads"]), FLOAT32_PARITY)


@strategies
@pytest.mark.parametrize("packed, causal", [(True, False), (False, True), (False, False)], ids=str)
def test_the_other_masks(strategy, packed, causal):
    got = sharded(split_mesh(context=4), packed, causal, strategy=strategy)
    assert_rows_match(got, oracle(packed, causal), FLOAT32_PARITY)


@strategies
@pytest.mark.parametrize("axes", [dict(context=2, tensor=2), dict(fsdp=2, context=2)], ids=str)
def test_other_mesh_axes_beside_context(strategy, axes):
    assert_rows_match(sharded(split_mesh(**axes), strategy=strategy), oracle(), FLOAT32_PARITY)


@strategies
def test_bitwise_the_same_when_run_again(strategy):
    first, second = (sharded(split_mesh(context=4), strategy=strategy) for _ in range(2))
    for mine, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("context, heads", [(3, dict()), (8, dict()), (3, dict(num_heads=6, num_kv_heads=2))], ids=str)
def test_ulysses_says_what_it_cannot_split(context, heads):
    sizes = {**dict(num_heads=4, num_kv_heads=2), **heads}
    words = f"over {context} ranks, and each of them has {sizes['num_heads']} query and {sizes['num_kv_heads']} key"
    q, k, v, _ = inputs(**heads)
    with pytest.raises(NotImplementedError, match=words):
        attend(q, k, v, mesh=split_mesh(context=context), strategy="ulysses")
