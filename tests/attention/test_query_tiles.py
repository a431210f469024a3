"""Attention by tiles against the oracle: put, forward, backward and take, driven tile by tile as a layer does."""

import functools
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.attention import reference
from jaxlc.attention.choose import KERNELS
from jaxlc.attention.kv_blocks import Group
from jaxlc.attention.query_tiles import TiledAttention, layout_of, make_tiled, tiles_of
from jaxlc.config import AttentionConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.sharding.layout import natural_order, zigzag_order
from tests.attention.cases import TOKENS, assert_rows_match, inputs, oracle, segments, split_mesh
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error


class Case(NamedTuple):
    strategy: str
    axes: dict[str, int]
    tiles: int
    num_heads: int = 4
    num_kv_heads: int = 2
    packed: bool = True
    kernel: str = "reference"
    ulysses_degree: int = 1
    keys_per_visit: int = 1000  # tokens: as many as half a block has

    def tiled(self) -> TiledAttention:
        config = AttentionConfig(strategy=self.strategy, kernel=self.kernel, ulysses_degree=self.ulysses_degree)
        return make_tiled(
            config,
            split_mesh(**self.axes),
            tiles=self.tiles,
            num_kv_heads=self.num_kv_heads,
            keys_per_visit=self.keys_per_visit,
        )

    @property
    def heads(self) -> dict[str, int]:
        return dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)


def run(case: Case, dtype=jnp.float32):
    """(out, (dq, dk, dv)) in natural order, of `cases.inputs`."""
    tiled, context, tiles = case.tiled(), case.axes.get(CONTEXT, 1), case.tiles
    order = zigzag_order(TOKENS, context)
    segments_BT = jnp.asarray(segments()[:, order]) if case.packed else None

    @jax.jit
    def all_tiles(*operands):
        q_nBtNH, k_nBtKH, v_nBtKH, dout_nBtNH = (tiles_of(x[:, order], context, tiles) for x in operands)
        numbers = jnp.arange(tiles, dtype=jnp.int32)
        empty = tiled.empty(q_nBtNH.shape[1], TOKENS, q_nBtNH.shape[-1], dtype)
        kv, _ = lax.scan(lambda kv, tile: (tiled.put(kv, *tile), None), empty, (k_nBtKH, v_nBtKH, numbers))

        def through(dkv, tile):
            q_BtNH, dout_BtNH, number = tile
            out_BtNH, lse_BNt = tiled.forward(q_BtNH, kv, number, segments_BT)
            dq_BtNH, dkv = tiled.backward(q_BtNH, kv, dkv, number, out_BtNH, lse_BNt, dout_BtNH, segments_BT)
            return dkv, (out_BtNH, dq_BtNH)

        dkv = jnp.zeros(kv.shape, jnp.float32)
        dkv, (out_nBtNH, dq_nBtNH) = lax.scan(through, dkv, (q_nBtNH, dout_nBtNH, numbers))
        results = out_nBtNH, dq_nBtNH, *lax.map(lambda number: tiled.take(dkv, number), numbers)
        return [layout_of(x, context)[:, natural_order(order)] for x in results]

    out, *gradients = all_tiles(*inputs(dtype=dtype, **case.heads))
    return out, tuple(gradients)


CASES = [
    Case("ring", dict(context=1), 4, kernel="blockwise"),
    Case("ring", dict(context=1), 8, keys_per_visit=12),  # two pieces a visit
    Case("ring", dict(context=2), 4, keys_per_visit=1),  # one piece, always
    Case("ring", dict(context=3), 2, packed=False, kernel="blockwise"),
    Case("ring", dict(context=3), 4, keys_per_visit=8),
    Case("ring", dict(context=4), 3, 24, 6, kernel="blockwise"),
    Case("ring", dict(context=8), 1, packed=False),
    Case("ring", dict(context=2, tensor=2), 2, kernel="blockwise"),
    Case("ring", dict(context=2, tensor=4), 4),  # tensor > K
    Case("ring", dict(data=2, context=2, tensor=2), 2, packed=False),
    Case("ring", dict(fsdp=2, context=3), 2, keys_per_visit=8),
    Case("ring", dict(context=2), 2, kernel="pallas"),
    Case("ulysses", dict(context=3), 2, 24, 6, keys_per_visit=16),
    Case("ulysses", dict(context=4), 2, 8, 4, packed=False, kernel="blockwise"),
    Case("ulysses", dict(context=8), 2, 8, 8, keys_per_visit=12),
    Case("ulysses", dict(context=2, tensor=2), 2, 8, 4, kernel="blockwise"),
    Case("hybrid", dict(context=4), 2, ulysses_degree=2, kernel="blockwise"),
    Case("hybrid", dict(context=4), 4, packed=False, ulysses_degree=2, keys_per_visit=6),
    Case("hybrid", dict(context=6), 2, 12, 3, ulysses_degree=3),
    Case("hybrid", dict(context=6), 4, 4, 2, ulysses_degree=2, kernel="blockwise", keys_per_visit=4),
    Case("hybrid", dict(context=8), 3, 8, 4, ulysses_degree=4, keys_per_visit=4),
    Case("hybrid", dict(context=4, tensor=2), 2, 8, 4, ulysses_degree=2, packed=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_matches_the_oracle(case: Case):
    assert_rows_match(run(case), oracle(packed=case.packed, **case.heads), FLOAT32_PARITY)


def test_bfloat16():
    case = Case("hybrid", dict(context=4), 4, packed=False, ulysses_degree=2, keys_per_visit=6, kernel="blockwise")
    wanted = oracle(packed=False, dtype=jnp.bfloat16, **case.heads)
    assert_rows_match(run(case, jnp.bfloat16), wanted, BFLOAT16_ATTENTION)


@pytest.mark.parametrize("context, tiles", [(1, 4), (2, 3), (8, 2)])
def test_a_tile_is_a_lo_piece_and_its_mirror_image(context, tiles):
    order_T = zigzag_order(TOKENS, context)
    tiles_nBt = tiles_of(jnp.asarray(order_T)[None], context, tiles)
    np.testing.assert_array_equal(layout_of(tiles_nBt, context)[0], order_T)
    places_ncPt = np.asarray(tiles_nBt).reshape(tiles, context, 2, -1)
    assert (np.sort(places_ncPt[:, :, 1]) == TOKENS - 1 - np.sort(places_ncPt[:, :, 0])[..., ::-1]).all()
    work = (places_ncPt + 1).sum(axis=(2, 3))  # keys that queries see
    assert len(np.unique(work)) == 1


def test_putting_a_row_into_tiles_moves_nothing_between_ranks():
    mesh = split_mesh(context=4)
    natural, tiled = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in ((None, CONTEXT), (None, None, CONTEXT)))
    row_BT = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=natural)
    row_nBt = jax.ShapeDtypeStruct((3, 1, TOKENS // 3), jnp.int32, sharding=tiled)
    there = jax.jit(lambda x: tiles_of(x, 4, 3), out_shardings=tiled).lower(row_BT)
    back = jax.jit(lambda x: layout_of(x, 4), out_shardings=natural).lower(row_nBt)
    for lowered in (there, back):
        program = analyze(lowered.compile().as_text())
        assert not program.collectives


def _calls(jaxpr, times=1) -> Counter:
    """(name, queries, keys) of each kernel call of a jaxpr, and how often it is made."""
    counted = Counter()
    for eqn in jaxpr.eqns:
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        assert eqn.primitive.name not in ("while", "cond")  # every rank and tile does the same
        if eqn.params.get("name") in ("kernel_forward", "kernel_backward"):
            queries, keys = (eqn.invars[i].aval.shape[1] for i in (0, 1))
            counted[eqn.params["name"], queries, keys] += times
            continue
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            param = getattr(param, "jaxpr", param)
            if hasattr(param, "eqns"):
                counted += _calls(param, times * rounds)
    return counted


@pytest.mark.parametrize(
    "case, keys",
    [
        (Case("ring", dict(context=1), 4), 24),
        (Case("ring", dict(context=4), 3), 12),
        (Case("ulysses", dict(context=2), 8), 6),
        (Case("hybrid", dict(context=8), 3, 8, 4, ulysses_degree=4), 4),
    ],
    ids=str,
)
def test_kernel_calls_are_counted(case: Case, keys: int, monkeypatch: pytest.MonkeyPatch):
    """No kernel call sees more keys than asked for, and together they see what causal attention is, and no more."""

    def kernel_forward(q, k, v, masks, spec):
        return reference.forward(q, k, v, masks, spec)

    def kernel_backward(q, k, v, masks, spec, *rows):
        return reference.backward(q, k, v, masks, spec, *rows)

    named = (jax.jit(each, static_argnums=4) for each in (kernel_forward, kernel_backward))
    kernel = SimpleNamespace(**dict(zip(("forward", "backward"), named)), unsupported=lambda case: None)
    monkeypatch.setitem(KERNELS, "reference", kernel)
    case = case._replace(keys_per_visit=keys)
    tiled, context = case.tiled(), case.axes[CONTEXT]
    q_BtNH = jnp.zeros((1, TOKENS // case.tiles, case.num_heads, 8))
    kv, lse_BNt = tiled.empty(1, TOKENS, 8, jnp.float32), jnp.zeros((1, case.num_heads, q_BtNH.shape[1]))
    calls = _calls(jax.make_jaxpr(lambda tile: tiled.forward(q_BtNH, kv, tile, None))(0).jaxpr)
    rows = q_BtNH, lse_BNt, q_BtNH
    backward = _calls(jax.make_jaxpr(lambda tile: tiled.backward(q_BtNH, kv, kv, tile, *rows, None))(0).jaxpr)
    assert {call[1:]: times for call, times in calls.items()} == {call[1:]: t for call, t in backward.items()}

    ranks = context if case.strategy == "ulysses" else case.ulysses_degree
    hops = context // ranks - 1
    piece = TOKENS // (2 * context * case.tiles)
    places, many = 2 * ranks * case.tiles, keys // piece
    long_visits = ranks * (places // many - 1 + hops * places // many)
    diagonals, short_visits = 2 * ranks, ranks * (many - 1)
    assert calls == {
        ("kernel_forward", piece, keys): long_visits,
        ("kernel_forward", piece, piece): diagonals + short_visits,
    }
    pairs = case.tiles * context // ranks * piece**2 * (long_visits * many + short_visits + diagonals)
    assert pairs == TOKENS**2 / 2 + TOKENS * piece / 2  # a whole square for each piece on the diagonal


@pytest.fixture
def one_place_off(monkeypatch: pytest.MonkeyPatch):
    """A piece of the tile takes itself for its neighbour in the block."""
    monkeypatch.setattr(Group, "place_of", lambda self, piece: jnp.minimum(piece * self.tiles + self.tile, 1))


def test_with_pieces_out_of_place_parity_is_lost(one_place_off):
    """The comparison can fail."""
    got = run(Case("ring", dict(context=2), 2, packed=False))
    assert max_relative_error(got[0], oracle(packed=False)[0]) > 0.1


@pytest.mark.parametrize(
    "case, words",
    [
        (Case("all_gather", dict(context=2), 2), "all_gather does not attend by tiles; choose ring, ulysses or hybrid"),
        (Case("ulysses", dict(context=4), 2), "splits key/value heads over 4 ranks, and each of them has 2; choose a"),
        (
            Case("hybrid", dict(context=4, tensor=2), 2, ulysses_degree=2),
            "over 2 ranks, and each of them has 1; choose",
        ),
    ],
    ids=["all_gather", "ulysses", "hybrid"],
)
def test_what_it_cannot_do_is_named(case: Case, words):
    with pytest.raises(NotImplementedError, match=words):
        case.tiled()


def test_windows_and_lengths_that_do_not_split_are_named():
    make = functools.partial(make_tiled, mesh=split_mesh(context=2), tiles=3, num_kv_heads=2)
    with pytest.raises(NotImplementedError, match="sees all earlier tokens, and window is 5; choose 0"):
        make(AttentionConfig(window=5))
    with pytest.raises(UserError, match="100 tokens do not split into 3 tiles of 2 x 2 equal pieces; use a multiple"):
        make(AttentionConfig()).empty(1, 100, 16, jnp.float32)
