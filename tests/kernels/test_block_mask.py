"""The runs of tiles that kernels visit, against the mask written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.kernels.block_mask import MAX_RUNS, Rule, Tokens, runs_of_keys, runs_of_queries

TILE_T, TILE_S = 4, 8


def _rule(num_queries=50, num_keys=50, causal=True, window=None) -> Rule:
    return Rule(causal=causal, window=window, num_queries=num_queries, num_keys=num_keys, tile_T=TILE_T, tile_S=TILE_S)


def _tiles(seen_TS: np.ndarray, reduce) -> np.ndarray:
    """[query tiles, key tiles]: `reduce` over each tile's pairs."""
    rows = [seen_TS[i : i + TILE_T] for i in range(0, seen_TS.shape[0], TILE_T)]
    return np.array([[reduce(row[:, j : j + TILE_S]) for j in range(0, row.shape[1], TILE_S)] for row in rows])


def _visits(runs: np.ndarray, num_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """(visits under the mask, visits without it) of each pair of tiles, from runs [own tiles, runs, 3]."""
    masked, full = np.zeros((2, len(runs), num_tiles), int)
    for own, row in enumerate(runs):
        for start, middle, end in row:
            masked[own, start:middle] += 1
            full[own, middle:end] += 1
    return masked, full


def _check(rule: Rule, queries: Tokens, keys: Tokens, exact: bool) -> None:
    """Each tile in which anybody sees anything is visited once, and without the mask only if all see all."""
    q, k = (
        (np.arange(offset, offset + count) if tokens.positions_BT is None else tokens.positions_BT[0])
        for tokens, offset, count in ((queries, rule.first_query, rule.num_queries), (keys, 0, rule.num_keys))
    )
    segments = [None, None]
    if queries.segments_BT is not None:
        segments = [np.asarray(queries.segments_BT[0])[:, None], np.asarray(keys.segments_BT[0])[None, :]]
    seen_TS = rule.sees(np.asarray(q)[:, None], np.asarray(k)[None, :], *segments)
    seen_TS = np.ones((len(q), len(k)), bool) if seen_TS is None else seen_TS
    some, every = _tiles(seen_TS, np.any), _tiles(seen_TS, np.all)
    for name, visits, is_whole in (
        ("keys", _visits(np.asarray(runs_of_keys(queries, keys, rule))[0], some.shape[1]), rule.num_keys % TILE_S == 0),
        ("queries", _visits(np.asarray(runs_of_queries(queries, keys, rule))[0], some.shape[0]), None),
    ):
        masked, full = visits if name == "keys" else (x.T for x in visits)
        assert (masked + full <= 1).all() and (masked + full)[some].all(), name
        assert not full[~every].any(), name
        if exact:
            np.testing.assert_array_equal(masked + full, some, name)
            assert full.sum() >= every[:-1, :-1].sum(), name
        if is_whole is False:
            assert not full[:, -1].any(), "an incomplete tile of keys needs its mask"


@pytest.mark.parametrize("num_queries", [50, 49, 20, 70])  # of 50 keys
@pytest.mark.parametrize("window", [None, 1, 13, 1000])
def test_by_index(num_queries, window):
    _check(_rule(num_queries=num_queries, window=window), Tokens(None, None), Tokens(None, None), exact=True)


def test_full_attention_visits_everything():
    _check(_rule(causal=False), Tokens(None, None), Tokens(None, None), exact=True)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents(window, causal):
    if not causal and window:
        return
    segments = jnp.asarray(np.repeat([1, 2, 3, 0], [19, 2, 25, 4])[None], jnp.int32)
    row = Tokens(None, segments)
    _check(_rule(causal=causal, window=window), row, row, exact=False)


@pytest.mark.parametrize("window", [None, 13])
def test_zigzag_order(window):
    """Positions in the order of a ring of 3: chunks 0 5 1 4 2 3, of 8 tokens."""
    positions = jnp.asarray(np.arange(48).reshape(6, 8)[[0, 5, 1, 4, 2, 3]].reshape(1, 48), jnp.int32)
    row = Tokens(positions, None)
    _check(_rule(48, 48, window=window), row, row, exact=True)


def test_more_runs_than_there_is_room_for():
    """Documents that alternate tile by tile: the last run takes what is left, and no tile comes twice."""
    segments = jnp.asarray(np.arange(320)[None] // TILE_S % 2 + 1, jnp.int32)
    rule, row = _rule(320, 320), Tokens(None, segments)
    assert runs_of_keys(row, row, rule).shape[2] == MAX_RUNS < 320 // TILE_S // 2
    _check(rule, row, row, exact=False)


def test_padding_hides_no_tile_of_its_neighbours_from_the_list():
    """A tile that is padding but for one token."""
    segments = jnp.zeros((1, 50), jnp.int32).at[0, 30:33].set(7)
    row = Tokens(None, segments)
    _check(_rule(), row, row, exact=True)
    nothing = Tokens(None, 0 * segments)
    runs = runs_of_keys(nothing, nothing, _rule())
    assert (runs[..., 0] == runs[..., 2]).all()


def test_random_rows():
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed), 2)
        row = Tokens(jax.random.randint(keys[0], (1, 50), 0, 60), jax.random.randint(keys[1], (1, 50), 0, 3))
        _check(_rule(window=20), row, row, exact=False)
