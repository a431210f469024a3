"""Attention by tiles against the reference: put, forward, backward and take, called tile by tile as
in a layer.
"""

import functools
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.attention.kernels import reference
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.kv_blocks import GroupState
from jaxlc.attention.query_tiles import TiledAttention, layout_of, make_tiled, tiles_of
from jaxlc.config import AttentionConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.sharding.document_layout import zigzag_order
from tests.attention.cases import (
    TOKENS,
    assert_rows_match,
    inputs,
    oracle,
    positions,
    segments,
    sequence_positions,
    split_mesh,
    tiled_results,
)
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
    kv_tokens_per_step: int | None = 1000  # more than half a block has
    window: int | None = None
    sinks_N: tuple[float, ...] | None = None

    def tiled(self) -> TiledAttention:
        config = AttentionConfig(
            strategy=self.strategy, kernel=self.kernel, ulysses_degree=self.ulysses_degree
        )
        return make_tiled(
            config,
            split_mesh(**self.axes),
            tiles=self.tiles,
            num_kv_heads=self.num_kv_heads,
            window=self.window,
            kv_tokens_per_step=self.kv_tokens_per_step,
        )

    @property
    def heads(self) -> dict[str, int]:
        return dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)


def run(case: Case, dtype=jnp.float32):
    """(out, (dq, dk, dv, dsinks_1N)) of `cases.inputs`, in natural order."""
    tiled, order = case.tiled(), zigzag_order(TOKENS, case.axes.get(CONTEXT, 1))
    masks = (positions(), segments()) if case.packed else (np.asarray(sequence_positions()), None)
    ranges = jax.jit(tiled.prepare)(
        *(None if x is None else jnp.asarray(x[:, order]) for x in masks)
    )

    out, *gradients = tiled_results(
        tiled, order, ranges, inputs(dtype=dtype, **case.heads), case.sinks_N
    )
    return out, tuple(gradients)


SINKS = (-2.0, 0.5, 3.0, 6.0)
CASES = [
    Case("ring", dict(context=1), 4, kernel="blockwise"),
    Case("ring", dict(context=1), 8, kv_tokens_per_step=12),  # two sub-chunks per step
    Case("ring", dict(context=2), 4, kv_tokens_per_step=1),  # always one sub-chunk
    Case("ring", dict(context=3), 2, packed=False, kernel="blockwise"),
    Case("ring", dict(context=3), 4, kv_tokens_per_step=8),
    Case("ring", dict(context=4), 3, 24, 6, kernel="blockwise"),
    Case("ring", dict(context=8), 1, packed=False),
    Case("ring", dict(context=2, tensor=2), 2, kernel="blockwise", sinks_N=SINKS),
    Case("ring", dict(context=2, tensor=4), 4),  # tensor > K
    Case("ring", dict(data=2, context=2, tensor=2), 2, packed=False),
    Case("ring", dict(fsdp=2, context=3), 2, kv_tokens_per_step=8),
    Case("ring", dict(context=2), 2, kernel="pallas"),
    Case("ulysses", dict(context=3), 2, 24, 6, kv_tokens_per_step=16),
    Case("ulysses", dict(context=4), 2, 8, 4, packed=False, kernel="blockwise"),
    Case("ulysses", dict(context=8), 2, 8, 8, kv_tokens_per_step=12),
    Case("ulysses", dict(context=2, tensor=2), 2, 8, 4, kernel="blockwise"),
    Case("hybrid", dict(context=4), 2, ulysses_degree=2, kernel="blockwise"),
    Case("hybrid", dict(context=4), 4, packed=False, ulysses_degree=2, kv_tokens_per_step=6),
    Case("hybrid", dict(context=6), 2, 12, 3, ulysses_degree=3),
    Case(
        "hybrid",
        dict(context=6),
        4,
        4,
        2,
        ulysses_degree=2,
        kernel="blockwise",
        kv_tokens_per_step=4,
    ),
    Case("hybrid", dict(context=8), 3, 8, 4, ulysses_degree=4, kv_tokens_per_step=4),
    Case("hybrid", dict(context=4, tensor=2), 2, 8, 4, ulysses_degree=2, packed=False),
    Case("ring", dict(context=1), 4, window=7, kernel="blockwise", sinks_N=SINKS),
    Case("ring", dict(context=4), 3, window=7, sinks_N=SINKS),
    Case("ring", dict(context=2), 2, window=70, packed=False),  # more than a chunk
    Case("ulysses", dict(context=2), 2, window=10, packed=False),
    Case(
        "hybrid", dict(context=6), 2, window=20, ulysses_degree=2, kernel="blockwise", sinks_N=SINKS
    ),
]


_FULL = (
    4,
    7,
    10,
    15,
    16,
    18,
    22,
    24,
    25,
    26,
)  # other cases have their strategy, mesh axes and kernel, in other combinations


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if index in _FULL else ())
        for index, case in enumerate(CASES)
    ],
    ids=lambda case: " ".join(map(str, case)),
)
def test_tiled_attention_matches_reference(case: Case):
    expected = oracle(packed=case.packed, window=case.window, sinks_N=case.sinks_N, **case.heads)
    assert_rows_match(run(case), expected, FLOAT32_PARITY)


def test_tiled_attention_in_bfloat16_matches_reference():
    case = Case(
        "hybrid",
        dict(context=4),
        4,
        packed=False,
        ulysses_degree=2,
        kv_tokens_per_step=6,
        kernel="blockwise",
    )
    expected = oracle(packed=False, dtype=jnp.bfloat16, **case.heads)
    assert_rows_match(run(case, jnp.bfloat16), expected, BFLOAT16_ATTENTION)


@pytest.mark.parametrize("context, tiles", [(1, 4), (2, 3), (8, 2)])
def test_tiles_of_pairs_mirrored_subchunks(context, tiles):
    order_T = zigzag_order(TOKENS, context)
    tiles_MBt = tiles_of(jnp.asarray(order_T)[None], context, tiles)
    np.testing.assert_array_equal(layout_of(tiles_MBt, context)[0], order_T)
    indices = np.asarray(tiles_MBt).reshape(tiles, context, 2, -1)
    assert (np.sort(indices[:, :, 1]) == TOKENS - 1 - np.sort(indices[:, :, 0])[..., ::-1]).all()
    work = (indices + 1).sum(axis=(2, 3))  # keys that queries attend to
    assert len(np.unique(work)) == 1


def test_tiles_of_has_no_collectives():
    mesh = split_mesh(context=4)
    natural, tiled = (
        NamedSharding(mesh, PartitionSpec(*dims))
        for dims in ((None, CONTEXT), (None, None, CONTEXT))
    )
    tokens_BT = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=natural)
    tokens_MBt = jax.ShapeDtypeStruct((3, 1, TOKENS // 3), jnp.int32, sharding=tiled)
    to_tiles = jax.jit(lambda x: tiles_of(x, 4, 3), out_shardings=tiled).lower(tokens_BT)
    from_tiles = jax.jit(lambda x: layout_of(x, 4), out_shardings=natural).lower(tokens_MBt)
    for lowered in (to_tiles, from_tiles):
        program = analyze(lowered.compile().as_text())
        assert not program.collectives


def _calls(jaxpr, times=1) -> Counter:
    """The number of kernel calls in a jaxpr for each (name, queries, keys)."""
    counts = Counter()
    for eqn in jaxpr.eqns:
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        assert eqn.primitive.name not in ("while", "cond")  # every rank and tile does the same work
        if eqn.params.get("name") in ("kernel_forward", "kernel_backward"):
            queries, keys = (eqn.invars[i].aval.shape[1] for i in (0, 1))
            counts[eqn.params["name"], queries, keys] += times
            continue
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            param = getattr(param, "jaxpr", param)
            if hasattr(param, "eqns"):
                counts += _calls(param, times * rounds)
    return counts


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
def test_number_and_size_of_kernel_calls(case: Case, keys: int, monkeypatch: pytest.MonkeyPatch):
    """No kernel call exceeds the limit of keys, and together they compute exactly causal attention."""

    def kernel_forward(q, k, v, ranges, spec):
        return reference.forward(q, k, v, ranges, spec)

    def kernel_backward(q, k, v, ranges, spec, results):
        return reference.backward(q, k, v, ranges, spec, results)

    named = (jax.jit(function, static_argnums=4) for function in (kernel_forward, kernel_backward))
    kernel = SimpleNamespace(
        **dict(zip(("forward", "backward"), named)), unsupported=lambda problem: None
    )
    monkeypatch.setitem(KERNELS, "reference", kernel)
    case = case._replace(kv_tokens_per_step=keys)
    tiled, context = case.tiled(), case.axes[CONTEXT]
    q_BtNH = jnp.zeros((1, TOKENS // case.tiles, case.num_heads, 8))
    kv, lse_BNt = (
        tiled.empty(1, TOKENS, 8, jnp.float32),
        jnp.zeros((1, case.num_heads, q_BtNH.shape[1])),
    )
    calls = _calls(jax.make_jaxpr(lambda tile: tiled.forward(q_BtNH, kv, tile, None))(0).jaxpr)
    results = q_BtNH, lse_BNt, q_BtNH
    backward = _calls(
        jax.make_jaxpr(lambda tile: tiled.backward(q_BtNH, kv, kv, tile, *results, None))(0).jaxpr
    )
    assert {call[1:]: times for call, times in calls.items()} == {
        call[1:]: t for call, t in backward.items()
    }

    ranks = context if case.strategy == "ulysses" else case.ulysses_degree
    ring_steps = context // ranks - 1
    subchunk = TOKENS // (2 * context * case.tiles)
    block_subchunks, per_step = 2 * ranks * case.tiles, keys // subchunk
    long_steps = ranks * (
        block_subchunks // per_step - 1 + ring_steps * block_subchunks // per_step
    )
    diagonals, short_steps = 2 * ranks, ranks * (per_step - 1)
    assert calls == {
        ("kernel_forward", subchunk, keys): long_steps,
        ("kernel_forward", subchunk, subchunk): diagonals + short_steps,
    }
    pairs = (
        case.tiles
        * context
        // ranks
        * subchunk**2
        * (long_steps * per_step + short_steps + diagonals)
    )
    # diagonal sub-chunks count as full squares
    assert pairs == TOKENS**2 / 2 + TOKENS * subchunk / 2


@pytest.mark.parametrize(
    "tile_tokens, num_kv_heads, context, keys",
    [
        (32_768, 8, 1, 65_536),
        (8192, 8, 1, 16_384),
        (32_768, 32, 1, 32_768),
        (32_768, 8, 8, 262_144),
    ],
)
def test_keys_of_a_call_follow_from_memory(tile_tokens, num_kv_heads, context, keys):
    """Of 1,048,576 tokens per device: grouped queries have smaller keys; after an exchange, a rank
    has fewer heads.
    """
    config, mesh = AttentionConfig(strategy="ulysses"), split_mesh(context=context)
    tiled = make_tiled(config, mesh, tiles=1_048_576 // tile_tokens, num_kv_heads=num_kv_heads)
    q_BtNH = jax.ShapeDtypeStruct((1, context * tile_tokens, 32, 128), jnp.bfloat16)
    assert tiled._subchunks_per_step(q_BtNH) * tile_tokens // 2 == keys


@pytest.fixture
def wrong_index_in_block(monkeypatch: pytest.MonkeyPatch):
    """Sub-chunks of the tile have the index of another sub-chunk in the block."""
    monkeypatch.setattr(
        GroupState,
        "index_in_block",
        lambda self, index: jnp.minimum(index * self.num_tiles + self.tile, 1),
    )


def test_wrong_index_in_block_does_not_match_reference(wrong_index_in_block):
    """Mutation test: the comparison with the reference can fail."""
    actual = run(Case("ring", dict(context=2), 2, packed=False))
    assert max_relative_error(actual[0], oracle(packed=False)[0]) > 0.1


@pytest.mark.parametrize(
    "case, words",
    [
        (
            Case("all_gather", dict(context=2), 2),
            r"unsupported: strategy all_gather with layer tiles \(supported: ring, ulysses, hybrid\)",
        ),
        (
            Case("ulysses", dict(context=4), 2),
            "unsupported: 2 key/value heads per rank do not split over 4 ulysses ranks, with layer tiles; use a number",
        ),
        (
            Case("hybrid", dict(context=4, tensor=2), 2, ulysses_degree=2),
            "unsupported: 1 key/value heads per rank do not split over 2 ulysses ranks, with layer tiles; use a number",
        ),
    ],
    ids=["all_gather", "ulysses", "hybrid"],
)
def test_make_tiled_if_unsupported_raises(case: Case, words):
    with pytest.raises(NotImplementedError, match=words):
        case.tiled()


def test_indivisible_length_raises():
    make = functools.partial(make_tiled, mesh=split_mesh(context=2), tiles=3, num_kv_heads=2)
    with pytest.raises(
        UserError,
        match="100 tokens do not split into 3 tiles of 2 x 2 equal sub-chunks; use a multiple",
    ):
        make(AttentionConfig()).empty(1, 100, 16, jnp.float32)
