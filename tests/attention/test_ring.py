"""Ring attention and argument checks; test_strategies.py compares all contexts and masks with the
reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention import attend, make
from jaxlc.attention.strategies import ring
from jaxlc.config import AttentionConfig, MemoryConfig
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.step.remat import make_remat
from tests.attention.cases import (
    BATCH,
    TOKENS,
    assert_rows_match,
    inputs,
    oracle,
    positions,
    segments,
    sequence_positions,
    sharded,
    split_mesh,
)
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "axes",
    [
        dict(context=2, tensor=2),
        dict(context=2, tensor=4),  # tensor > K
        dict(data=2, context=2, tensor=2),
        dict(fsdp=2, context=3),
    ],
    ids=str,
)
def test_ring_with_other_mesh_axes_matches_reference(axes):
    assert_rows_match(sharded(split_mesh(**axes)), oracle(), FLOAT32_PARITY)


def test_make_in_layout_order_matches_reference():
    order = zigzag_order(TOKENS, 2)
    attention = make(
        AttentionConfig(query_block_tokens=16, key_block_tokens=8), split_mesh(context=2)
    )
    q, k, v, _ = (x[:, order] for x in inputs())
    ranges = jax.jit(attention.prepare)(
        jnp.asarray(positions()[:, order]), jnp.asarray(segments()[:, order])
    )
    out, lse = jax.jit(attention)(q, k, v, ranges)
    assert lse.dtype == jnp.float32 and lse.shape == (BATCH, 4, TOKENS)
    assert_rows_match(out, oracle()[0][:, order], FLOAT32_PARITY)


def test_ring_is_bitwise_reproducible():
    first, second = sharded(split_mesh(context=4)), sharded(split_mesh(context=4))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("context", [1, 2, 4, 8])
def test_ring_bfloat16_error_is_independent_of_size(context):
    """The tolerance is the same for every size, since partial results are merged in float32."""
    actual = sharded(split_mesh(context=context), packed=False, dtype=jnp.bfloat16)
    assert_rows_match(actual, oracle(packed=False, dtype=jnp.bfloat16), BFLOAT16_ATTENTION)


def _inner_jaxprs(eqn):
    for param in jax.tree.leaves(
        eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
        param = getattr(param, "jaxpr", param)
        if hasattr(param, "eqns"):
            yield param


def _count(jaxpr, primitive: str) -> int:
    """The number of equations with a primitive in a jaxpr and its inner jaxprs."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == primitive
        count += sum(_count(inner, primitive) for inner in _inner_jaxprs(eqn))
    return count


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "remat, rings", [("none", 1), ("attention", 1), ("matmuls", 1), ("full", 2)]
)
def test_remat_recomputes_forward_ring_only_if_full(remat, rings):
    context = 4
    attention = make(AttentionConfig(), split_mesh(context=context))
    q, k, v, dout = inputs()
    ranges = attention.prepare(sequence_positions()[:, zigzag_order(TOKENS, context)], None)

    @make_remat(MemoryConfig(remat=remat)).wrap_layer
    def layer(q, k, v):
        return attention(2.0 * q, k, v, ranges)[0] * dout

    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: layer(*x).sum(), (0, 1, 2)))(q, k, v).jaxpr
    # Permutes in the jaxpr. Forward: the first send and that of the loop body. Backward: the same two for K/V, two for
    # dK/dV, and one that sends dK/dV back to the owner rank.
    forward, backward = 2, 2 + 3
    assert _count(jaxpr, "ppermute") == rings * forward + backward


def _largest_array(jaxpr) -> int:
    """The size of the largest output of any equation in a jaxpr and its inner jaxprs."""
    largest = 0
    for eqn in jaxpr.eqns:
        largest = max([largest, *(getattr(v.aval, "size", 0) for v in eqn.outvars)])
        for inner in _inner_jaxprs(eqn):
            largest = max(largest, _largest_array(inner))
    return largest


@pytest.mark.jax_version
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("remat", ["none", "attention"])
def test_scan_over_layers_saves_no_dense_mask(packed, remat):
    """Masks are the same in every layer. Differentiation would hoist the dense masks of all blocks
    out of the loop.
    """
    num_tokens = 4096
    attention = make(
        AttentionConfig(query_block_tokens=64, key_block_tokens=64), split_mesh(context=4)
    )
    positions = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (1, num_tokens))
    ranges = attention.prepare(positions, positions) if packed else None

    def loss(x):
        @make_remat(MemoryConfig(remat=remat)).wrap_layer
        def layer(x, _):
            return x + attention(2 * x, 3 * x, 4 * x, ranges)[0], None

        return jax.lax.scan(layer, x, length=3)[0].sum()

    x = jax.ShapeDtypeStruct((1, num_tokens, 1, 8), jnp.float32)
    assert (
        _largest_array(jax.make_jaxpr(jax.grad(loss))(x).jaxpr) <= 4 * x.size
    )  # the dense masks of all blocks have 32 times the size of x


@pytest.fixture
def without_sends(monkeypatch: pytest.MonkeyPatch):
    """Every rank keeps its own KV block. Caches are cleared before and after, so that no traces are
    reused.
    """
    monkeypatch.setattr(ring.RingState, "send", lambda self, x, distance=1: x)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_ring_without_sends_does_not_match_reference(without_sends):
    """Mutation test: the comparison with the reference can fail."""
    assert (
        max_relative_error(sharded(split_mesh(context=2), packed=False)[0], oracle(packed=False)[0])
        > 0.1
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(num_tokens=94), "94 tokens do not split over context=4; use a multiple of 8"),
        (
            dict(num_heads=3, num_kv_heads=3),
            "3 query and 3 key/value heads do not split over tensor=2",
        ),
        (dict(num_heads=4, num_kv_heads=3), "4 query heads are not a multiple of 3"),
    ],
    ids=["tokens", "tensor", "groups"],
)
def test_attend_with_indivisible_shape_raises(change, words):
    q, k, v, _ = inputs(**change)
    with pytest.raises(UserError, match=words):
        attend(q, k, v, mesh=split_mesh(context=4, tensor=2))


def test_attend_with_invalid_segment_ids_shape_raises():
    q, k, v, _ = inputs()
    with pytest.raises(
        UserError, match=r"invalid shape \(6, 99\) for segment_ids: expected \[B, T\] = \(6, 96\)"
    ):
        attend(q, k, v, mesh=split_mesh(context=2), segment_ids=jnp.ones((6, 99), jnp.int32))
    with pytest.raises(
        UserError, match="invalid segment_ids from 1 to 4294967297: expected 32-bit integers"
    ):
        segment_ids = np.repeat([1, 2**32 + 1], 48)[None].repeat(6, axis=0)
        attend(q, k, v, mesh=split_mesh(context=2), segment_ids=segment_ids)


def test_attend_with_segments_not_contiguous_raises():
    q, k, v, _ = inputs(batch=2)
    segments = jnp.asarray(np.repeat([[1, 1, 2, 2], [1, 0, 2, 1]], TOKENS // 4, axis=1), jnp.int32)
    order = zigzag_order(TOKENS, 2)
    for ids, token_order in ((segments, "natural"), (segments[:, order], "zigzag")):
        with pytest.raises(Unsupported, match="segment 1 of sequence 1 is not contiguous"):
            attend(q, k, v, mesh=split_mesh(context=2), segment_ids=ids, token_order=token_order)


@pytest.mark.jax_version
def test_attend_with_explicit_mesh_axes_raises():
    """Explicit axes are the default of `jax.make_mesh`."""
    q, k, v, _ = inputs()
    axis_types = (jax.sharding.AxisType.Explicit,) * 4
    mesh = jax.make_mesh((1, 1, 2, 1), ("data", "fsdp", "context", "tensor"), axis_types=axis_types)
    with pytest.raises(UserError, match="Explicit .* create it with axis_types="):
        attend(q, k, v, mesh=mesh)


def test_attend_with_indivisible_batch_raises():
    q, k, v, _ = inputs(batch=3)
    with pytest.raises(UserError, match="a batch of 3 does not split over data x fsdp = 2"):
        attend(q, k, v, mesh=split_mesh(data=2, context=2))


@pytest.mark.parametrize("argument", ["strategy", "kernel"])
def test_attend_with_unknown_name_raises(argument):
    q, k, v, _ = inputs()
    with pytest.raises(UserError, match=f"unknown attention {argument} 'rnig'; known: "):
        attend(q, k, v, mesh=split_mesh(context=2), **{argument: "rnig"})
