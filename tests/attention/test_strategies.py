"""Strategies x kernels x masks x mesh against the oracle: the cases of support.py, and what only some have."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention import attend, halo
from tests.attention import support
from tests.attention.cases import assert_rows_match, inputs, oracle, sharded, split_mesh
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error

strategies = pytest.mark.parametrize("strategy", support.STRATEGIES)


@pytest.mark.parametrize("case", support.covering(), ids=lambda case: " ".join(map(str, case)))
def test_matches_the_oracle_or_says_what_it_cannot_do(case: support.Case):
    packed, causal, window = support.MASKS[case.mask]
    num_heads, num_kv_heads = support.HEADS[case.heads]
    what = dict(packed=packed, causal=causal, window=window, dtype=jnp.dtype(case.dtype))
    heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads)
    how = dict(strategy=case.strategy, kernel=case.kernel, ulysses_ranks=case.ulysses_degree)
    if case.limit is not None:
        with pytest.raises(NotImplementedError, match=case.limit):
            sharded(split_mesh(**case.axes), **what, **how, heads=heads)
        return
    tolerance = FLOAT32_PARITY if case.dtype == "float32" else BFLOAT16_ATTENTION
    assert_rows_match(sharded(split_mesh(**case.axes), **what, **how, heads=heads), oracle(**what, **heads), tolerance)


def test_the_page_is_the_table_that_is_tested():
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert page.read_text() == support.matrix(), "python -m tests.attention.support > docs/support.md"


@strategies
def test_bitwise_the_same_when_run_again(strategy):
    how = dict(strategy=strategy, ulysses_ranks=2 if strategy == "hybrid" else None)
    first, second = (sharded(split_mesh(context=4), **how) for _ in range(2))
    for mine, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_a_window_sends_its_halo_and_no_more(strategy):
    """Of a chunk of 12 tokens, the 4 before it: K and V packed, to both neighbours."""
    q, k, v, _ = inputs()
    mesh = split_mesh(context=4)
    jaxpr = jax.make_jaxpr(lambda *qkv: attend(*qkv, mesh=mesh, strategy=strategy, window=5))(q, k, v)
    sent = [line for line in str(jaxpr).splitlines() if "ppermute[" in line or "all_gather[" in line]
    assert len(sent) == 4 and all("ppermute" in line for line in sent), sent  # K/V and masks, two directions
    assert sum("f32[6,4,2,32]" in line for line in sent) == 2, sent


@pytest.fixture
def without_the_fold(monkeypatch: pytest.MonkeyPatch):
    """The last rank's second chunk does not see the first one before it."""
    honest = halo._predecessors

    def broken(pair, ranks):
        lo, hi = pair
        return honest((lo, hi), ranks)[0], jnp.zeros_like(hi)

    monkeypatch.setattr(halo, "_predecessors", broken)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_without_the_fold_parity_is_lost(without_the_fold):
    """The comparison can fail."""
    got = sharded(split_mesh(context=2), packed=False, window=5)
    assert max_relative_error(got[0], oracle(packed=False, window=5)[0]) > 0.1


@pytest.mark.parametrize("settings", [dict(window=0), dict(window=5, causal=False)], ids=str)
def test_windows_that_mean_nothing_are_refused(settings):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=f"window={settings['window']} with causal="):
        attend(q, k, v, mesh=split_mesh(context=2), **settings)


def test_a_cut_is_for_hybrid_only():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="ulysses_ranks=2 is for strategy 'hybrid', and this is 'ring'"):
        attend(q, k, v, mesh=split_mesh(context=4), strategy="ring", ulysses_ranks=2)


def test_hybrid_needs_a_cut_that_divides_the_context():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="ulysses_degree=3 does not divide context=4"):
        attend(q, k, v, mesh=split_mesh(context=4), strategy="hybrid", ulysses_ranks=3)
