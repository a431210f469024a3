"""What only the ring has; test_strategies.py compares it with the oracle on every context and mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention import attend, make, ring
from jaxlc.config import AttentionConfig, MemoryConfig
from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import zigzag_order
from jaxlc.train.remat import make_remat
from tests.attention.cases import (
    ROWS,
    TOKENS,
    assert_rows_match,
    inputs,
    oracle,
    positions,
    row_offsets,
    segments,
    sharded,
    split_mesh,
)
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error


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
def test_other_mesh_axes_beside_context(axes):
    assert_rows_match(sharded(split_mesh(**axes)), oracle(), FLOAT32_PARITY)


def test_tiles_smaller_than_a_chunk_in_layout_order():
    order = zigzag_order(TOKENS, 2)
    layout = make(AttentionConfig(query_block_tokens=16, key_block_tokens=8), split_mesh(context=2))
    q, k, v, _ = (x[:, order] for x in inputs())
    out, lse = jax.jit(layout)(q, k, v, jnp.asarray(positions()[:, order]), jnp.asarray(segments()[:, order]))
    assert lse.dtype == jnp.float32 and lse.shape == (ROWS, 4, TOKENS)
    assert_rows_match(out, oracle()[0][:, order], FLOAT32_PARITY)


def test_bitwise_the_same_when_run_again():
    first, second = sharded(split_mesh(context=4)), sharded(split_mesh(context=4))
    for mine, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("context", [1, 2, 4, 8])
def test_bfloat16_error_does_not_grow_with_the_ring(context):
    """The same bound for every size: partial results meet in float32."""
    got = sharded(split_mesh(context=context), packed=False, dtype=jnp.bfloat16)
    assert_rows_match(got, oracle(packed=False, dtype=jnp.bfloat16), BFLOAT16_ATTENTION)


def _inner_jaxprs(eqn):
    for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        param = getattr(param, "jaxpr", param)
        if hasattr(param, "eqns"):
            yield param


def _count(jaxpr, primitive: str) -> int:
    """How often a primitive stands in a jaxpr, inner jaxprs included."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == primitive
        count += sum(_count(inner, primitive) for inner in _inner_jaxprs(eqn))
    return count


@pytest.mark.parametrize("remat, rings", [("none", 1), ("attention", 1), ("matmuls", 1), ("full", 2)])
def test_remat_runs_the_forward_ring_again_only_when_asked_to(remat, rings):
    context = 4
    layout = make(AttentionConfig(), split_mesh(context=context))
    q, k, v, dout = inputs()
    positions = row_offsets()[:, zigzag_order(TOKENS, context)]

    @make_remat(MemoryConfig(remat=remat)).of_layer
    def layer(q, k, v):
        return layout(2.0 * q, k, v, positions, None)[0] * dout

    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: layer(*x).sum(), (0, 1, 2)))(q, k, v).jaxpr
    # Permutes as written: first hop and loop body forward; those, twice for dK/dV, and the way home backward.
    forward, backward = 2, 2 + 3
    assert _count(jaxpr, "ppermute") == rings * forward + backward


def _largest_array(jaxpr) -> int:
    """Entries of the largest array that anything in a jaxpr makes, inner jaxprs included."""
    largest = 0
    for eqn in jaxpr.eqns:
        largest = max([largest, *(getattr(v.aval, "size", 0) for v in eqn.outvars)])
        for inner in _inner_jaxprs(eqn):
            largest = max(largest, _largest_array(inner))
    return largest


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("remat", ["none", "attention"])
def test_a_scan_over_layers_keeps_no_mask(packed, remat):
    """Masks are the same in every layer; differentiation would take them out of the loop, all tiles at once."""
    num_tokens = 4096
    layout = make(AttentionConfig(query_block_tokens=64, key_block_tokens=64), split_mesh(context=4))
    positions = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (1, num_tokens))
    masks = (positions, positions) if packed else (None, None)

    def loss(x):
        @make_remat(MemoryConfig(remat=remat)).of_layer
        def layer(x, _):
            return x + layout(2 * x, 3 * x, 4 * x, *masks)[0], None

        return jax.lax.scan(layer, x, length=3)[0].sum()

    x = jax.ShapeDtypeStruct((1, num_tokens, 1, 8), jnp.float32)
    assert _largest_array(jax.make_jaxpr(jax.grad(loss))(x).jaxpr) <= 4 * x.size  # all tiles would be 32 times x


@pytest.fixture
def without_hops(monkeypatch: pytest.MonkeyPatch):
    """Every rank keeps its own block. Traces of the whole ring are dropped before, those of the broken one after."""
    monkeypatch.setattr(ring.RingState, "send", lambda self, x: x)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_without_the_hops_parity_is_lost(without_hops):
    """The comparison can fail."""
    assert max_relative_error(sharded(split_mesh(context=2), packed=False)[0], oracle(packed=False)[0]) > 0.1


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(num_tokens=94), "94 tokens do not split over context=4; use a multiple of 8"),
        (dict(num_heads=3, num_kv_heads=3), "3 query and 3 key/value heads do not split over tensor=2"),
        (dict(num_heads=4, num_kv_heads=3), "4 query heads are not a multiple of 3"),
    ],
    ids=["tokens", "tensor", "groups"],
)
def test_shapes_that_do_not_split_are_named(change, words):
    q, k, v, _ = inputs(**change)
    with pytest.raises(UserError, match=words):
        attend(q, k, v, mesh=split_mesh(context=4, tensor=2))


def test_segment_ids_of_another_shape_are_named():
    q, k, v, _ = inputs()
    with pytest.raises(UserError, match=r"segment_ids are \(6, 99\) and must be \[B, T\] = \(6, 96\)"):
        attend(q, k, v, mesh=split_mesh(context=2), segment_ids=jnp.ones((6, 99), jnp.int32))


def test_a_mesh_with_explicit_axes_is_refused():
    """`jax.make_mesh` makes such axes unless told otherwise."""
    q, k, v, _ = inputs()
    axis_types = (jax.sharding.AxisType.Explicit,) * 4
    mesh = jax.make_mesh((1, 1, 2, 1), ("data", "fsdp", "context", "tensor"), axis_types=axis_types)
    with pytest.raises(UserError, match="Explicit .* make it with axis_types="):
        attend(q, k, v, mesh=mesh)


def test_rows_that_do_not_split_are_named():
    q, k, v, _ = inputs(batch=3)
    with pytest.raises(UserError, match="3 rows do not split over data x fsdp = 2"):
        attend(q, k, v, mesh=split_mesh(data=2, context=2))


@pytest.mark.parametrize("what", ["strategy", "kernel"])
def test_unknown_names_are_refused(what):
    q, k, v, _ = inputs()
    with pytest.raises(UserError, match=f"no attention {what} 'rnig'; known: "):
        attend(q, k, v, mesh=split_mesh(context=2), **{what: "rnig"})
