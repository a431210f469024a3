"""Strategies x kernels x masks x mesh against the reference: the cases of
benchmarks/support_table.py, and others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import support_table
from jaxlc.attention import attend
from jaxlc.attention.strategies import window_exchange
from tests.attention.cases import assert_rows_match, inputs, oracle, sharded, split_mesh
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error

strategies = pytest.mark.parametrize("strategy", support_table.STRATEGIES)


def _is_sampled(case: support_table.Case) -> bool:
    """Whether other cases cover this one: rings of 1, 3 and 8 ranks cover blockwise rings of 2, 4 and 6, and
    Pallas with the other strategies covers a ring of one rank, which sends nothing.
    """
    contexts = dict(blockwise=(2, 4, 6), pallas=(1,)).get(case.kernel, ())
    return case.strategy == "ring" and case.context in contexts


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if _is_sampled(case) else ())
        for case in support_table.covering()
    ],
    ids=lambda case: " ".join(map(str, case)),
)
def test_strategy_matches_reference_or_raises(case: support_table.Case):
    packed, causal, window = support_table.MASKS[case.mask]
    num_heads, num_kv_heads = support_table.HEADS[case.heads]
    problem = dict(packed=packed, causal=causal, window=window, dtype=jnp.dtype(case.dtype))
    heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads)
    settings = dict(strategy=case.strategy, kernel=case.kernel, ulysses_ranks=case.ulysses_degree)
    if case.limit is not None:
        with pytest.raises(NotImplementedError, match=case.limit):
            sharded(split_mesh(**case.axes), **problem, **settings, heads=heads)
        return
    tolerance = FLOAT32_PARITY if case.dtype == "float32" else BFLOAT16_ATTENTION
    assert_rows_match(
        sharded(split_mesh(**case.axes), **problem, **settings, heads=heads),
        oracle(**problem, **heads),
        tolerance,
    )


@strategies
def test_strategy_is_bitwise_reproducible(strategy):
    settings = dict(strategy=strategy, ulysses_ranks=2 if strategy == "hybrid" else None)
    first, second = (sharded(split_mesh(context=4), **settings) for _ in range(2))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_window_sends_only_its_halo(strategy):
    """Of each chunk of 12 tokens, the last 4 are sent: K and V as one array, to both neighbors."""
    q, k, v, _ = inputs()
    mesh = split_mesh(context=4)
    jaxpr = jax.make_jaxpr(
        lambda *qkv: attend(*qkv, mesh=mesh, strategy=strategy, window=5, token_order="zigzag")
    )(q, k, v)
    sent = [
        line for line in str(jaxpr).splitlines() if "ppermute[" in line or "all_gather[" in line
    ]
    assert len(sent) == 2 and all("ppermute" in line for line in sent), sent  # two directions
    assert sum("f32[6,4,2,32]" in line for line in sent) == 2, sent


def test_window_on_one_rank_sends_nothing():
    """XLA keeps a permute without pairs, which the plan of a model with sliding layers cannot read."""
    q, k, v, _ = inputs()
    mesh = split_mesh(context=1)
    jaxpr = jax.make_jaxpr(lambda *qkv: attend(*qkv, mesh=mesh, window=5, token_order="zigzag"))(
        q, k, v
    )
    assert "ppermute" not in str(jaxpr)


@pytest.fixture
def without_the_fold(monkeypatch: pytest.MonkeyPatch):
    """The second chunk of the last rank does not attend to the first one, which precedes it."""
    predecessors = window_exchange.predecessors

    def broken(pair, ranks):
        return predecessors(pair, ranks)[0], jnp.zeros_like(pair[1])

    monkeypatch.setattr(window_exchange, "predecessors", broken)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_window_without_fold_does_not_match_reference(without_the_fold):
    """Mutation test: the comparison with the reference can fail."""
    actual = sharded(split_mesh(context=2), packed=False, window=5)
    assert max_relative_error(actual[0], oracle(packed=False, window=5)[0]) > 0.1


@pytest.mark.parametrize("settings", [dict(window=0), dict(window=5, causal=False)], ids=str)
def test_attend_with_invalid_window_raises(settings):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=f"invalid window={settings['window']} with causal="):
        attend(q, k, v, mesh=split_mesh(context=2), **settings)


def test_attend_with_ulysses_ranks_and_ring_raises():
    q, k, v, _ = inputs()
    with pytest.raises(
        ValueError, match="invalid ulysses_ranks=2 for strategy 'ring': expected None unless"
    ):
        attend(q, k, v, mesh=split_mesh(context=4), strategy="ring", ulysses_ranks=2)


def test_hybrid_with_indivisible_context_raises():
    q, k, v, _ = inputs()
    with pytest.raises(
        ValueError, match="invalid value 3 for ulysses_degree: expected a divisor of context=4"
    ):
        attend(q, k, v, mesh=split_mesh(context=4), strategy="hybrid", ulysses_ranks=3)
