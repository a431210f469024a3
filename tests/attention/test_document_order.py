"""Attention over a packed sequence in the order of per-document sharding, against natural order on
one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention import make, make_tiled
from jaxlc.config import AttentionConfig
from jaxlc.sharding.document_layout import document_order, natural_order
from tests.attention.cases import split_mesh, tiled_results

LENGTHS = [37, 3, 52, 1, 20, 11]  # and 4 tokens of padding
TOKENS = 128
SEGMENTS_T = np.pad(
    np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS), (0, TOKENS - sum(LENGTHS))
).astype(np.int32)
POSITIONS_T = np.pad(
    np.concatenate([np.arange(length) for length in LENGTHS]), (0, TOKENS - sum(LENGTHS))
)


def inputs() -> list[jax.Array]:
    """q, k, v and the weights of out in the loss."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(1, TOKENS, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4)
    ]


def config_with(**settings) -> AttentionConfig:
    return AttentionConfig(
        kernel="blockwise", query_block_tokens=16, key_block_tokens=8, **settings
    )


def results(order_T: np.ndarray, context: int, window: int | None = None, **settings):
    """(loss, gradients) in natural order; the arrays of the sequence are in the order `order_T`."""
    *qkv, weights_BTNH = inputs()
    attend = make(config_with(**settings), split_mesh(context=context), window=window)
    masks = (jnp.asarray(x[order_T], jnp.int32)[None] for x in (POSITIONS_T, SEGMENTS_T))

    def loss(*qkv):
        out_BTNH, lse_BNT = attend(*(x[:, order_T] for x in qkv), attend.prepare(*masks))
        out_BTNH, lse_BNT = (
            out_BTNH[:, natural_order(order_T)],
            lse_BNT[:, :, natural_order(order_T)],
        )
        lse_BNT = jnp.where(jnp.isfinite(lse_BNT), lse_BNT, 0.0)  # of padding: -inf
        return (out_BTNH * weights_BTNH).sum() + jnp.sin(lse_BNT).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv)


@functools.cache
def expected(window: int | None = None):
    return results(np.arange(TOKENS), context=1, window=window)


def assert_close(actual, desired):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "strategy, outer, inner, window",
    [
        pytest.param("ring", 2, 1, None, marks=pytest.mark.full),
        ("ring", 4, 1, None),
        ("ring", 8, 1, None),
        pytest.param("hybrid", 2, 2, None, marks=pytest.mark.full),
        ("hybrid", 4, 2, None),
        ("all_gather", 4, 1, None),
        ("ring", 4, 1, 4),
        pytest.param("hybrid", 2, 2, 6, marks=pytest.mark.full),
    ],
    ids=str,
)  # the number of groups of ranks in the ring, and the number of ranks in each
def test_document_order_equals_natural_order_on_one_device(strategy, outer, inner, window):
    order_T = document_order(SEGMENTS_T, outer, inner, window=window)
    assert order_T is not None
    split = dict(strategy=strategy, ulysses_degree=inner)
    assert_close(results(order_T, context=outer * inner, window=window, **split), expected(window))


@pytest.mark.parametrize(
    "outer, inner, tiles, window",
    [
        pytest.param(2, 2, 2, None, marks=pytest.mark.full),
        (2, 2, 4, 6),
        pytest.param(2, 1, 4, None, marks=pytest.mark.full),
        pytest.param(4, 1, 2, 4, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_document_order_in_tiles_equals_natural_order_on_one_device(outer, inner, tiles, window):
    order_T, context = (
        document_order(SEGMENTS_T, outer, inner, mirrored=True, window=window),
        outer * inner,
    )
    assert order_T is not None
    config = AttentionConfig(strategy="hybrid", ulysses_degree=inner, kernel="reference")
    tiled = make_tiled(
        config, split_mesh(context=context), tiles=tiles, num_kv_heads=2, window=window
    )
    masks = [jnp.asarray(x, jnp.int32)[None] for x in (POSITIONS_T, SEGMENTS_T)]
    ranges = jax.jit(tiled.prepare)(*(x[:, order_T] for x in masks))
    actual = tiled_results(tiled, order_T, ranges, inputs())

    *qkv, dout = inputs()
    attend = make(config_with(), split_mesh(context=1), window=window)
    out, backward = jax.vjp(jax.jit(lambda *qkv: attend(*qkv, attend.prepare(*masks))[0]), *qkv)
    assert_close(actual, (out, *backward(dout)))


@pytest.mark.parametrize(
    "lengths, are_needed",
    # of the second, the document of 18 tokens is on two ranks
    [(LENGTHS, True), ([30, 28, 26, 20, 18, 5], False)],
    ids=["long", "short"],
)
def test_ring_skips_steps_that_no_document_needs(lengths, are_needed):
    """Loss and gradients equal those of all steps bit by bit."""
    context, *qkv = 4, *inputs()[:3]
    segments_T = np.pad(
        np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, TOKENS - sum(lengths))
    ).astype(np.int32)
    order_T = document_order(segments_T, context, skips_ring_steps=True)
    assert any(
        len(set(np.flatnonzero(segments_T[order_T] == x) // 32)) > 1
        for x in range(1, len(lengths) + 1)
    )
    attend, all_steps = (
        make(config_with(), split_mesh(fsdp=2, context=context), skips_ring_steps=x)
        for x in (True, False)
    )
    positions_T = np.concatenate(
        [np.arange(length) for length in (*lengths, TOKENS - sum(lengths))]
    )
    masks = [jnp.asarray([x[order_T]] * 2, jnp.int32) for x in (positions_T, segments_T)]
    masks[1] = masks[1].at[1].set(0)  # the other replica has no documents
    ranges = jax.jit(attend.prepare)(*masks)
    assert ranges.are_needed.tolist() == [are_needed]

    def results(attend, ranges):
        def loss(*qkv):
            return jnp.sin(
                attend(*(jnp.concatenate([x[:, order_T]] * 2) for x in qkv), ranges)[0]
            ).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv)

    actual, expected = results(attend, ranges), results(all_steps, ranges.ranges)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    skipped = results(attend, ranges._replace(are_needed=jnp.array([False])))
    assert (np.abs(skipped[1][0] - expected[1][0]).max() > 1e-3) == are_needed


def test_layout_without_room_for_its_windows_is_not_used():
    """The windows of pieces of 4 tokens: with 8 tokens, the rank two before has more of them than
    there is room for.
    """
    segments_T = np.pad(np.repeat(np.arange(1, 8), 140), (0, 44))
    assert document_order(segments_T, 16, window=7) is not None
    assert document_order(segments_T, 16, window=8) is None
