"""`attend` outside of jaxlc's trainer: meshes with other axes, token order, lse, transformations,
`shard_map`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention import attend, natural_order, zigzag_order
from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels import reference
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.strategies import sharded_attention
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.mesh import Ranks
from tests.attention.cases import inputs
from tests.tolerances import FLOAT32_PARITY, max_relative_error

TOKENS = 48
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 0, 2]], TOKENS // 4, axis=1).astype(np.int32)
SHARDED = PartitionSpec("dp", "sp")
in_batch = dict(context_axis="sp", batch_axes="dp")


def mesh_of(**axes: int) -> Mesh:
    num_devices = np.prod(list(axes.values()))
    return Mesh(np.array(jax.devices()[:num_devices]).reshape(tuple(axes.values())), tuple(axes))


def operands():
    """q, k, v, dout of two sequences."""
    return inputs(batch=2, num_tokens=TOKENS, head_dim=8)


def results_of(attend_fn):
    """(out, lse) and the gradients with respect to q, k and v; the objective depends on out and on
    lse.
    """
    q, k, v, dout = operands()

    def objective(q, k, v):
        out, lse = attend_fn(q, k, v)
        return (out * dout).sum() + jnp.sin(jnp.where(jnp.isneginf(lse), 0.0, lse)).sum(), (
            out,
            lse,
        )

    gradients, results = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
    return results, gradients


@functools.cache
def oracle(packed: bool = False, window: int | None = None):
    positions = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS))
    tokens, spec = (
        TokenInfo(positions, jnp.asarray(SEGMENTS) if packed else None),
        AttentionSpec(window=window),
    )
    return results_of(
        lambda q, k, v: reference.forward(q, k, v, key_ranges(tokens, tokens, spec), spec)
    )


def assert_matches(actual, expected) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        empty = np.isneginf(y)
        np.testing.assert_array_equal(np.isneginf(x), empty)
        assert max_relative_error(np.where(empty, 0, x), np.where(empty, 0, y)) <= FLOAT32_PARITY


@pytest.mark.parametrize(
    "axes, names",
    [
        (dict(dp=2, sp=4), in_batch),
        # more tensor ranks than key/value heads
        (dict(sp=2, tp=4), dict(context_axis="sp", head_axis="tp")),
        # jaxlc's own names are the defaults
        (dict(data=2, sp=2, tensor=2), dict(context_axis="sp")),
        (dict(replica=2, sp=3), dict(context_axis="sp")),  # replicated over an axis without role
    ],
    ids=["batch", "heads", "defaults", "replicated"],
)
def test_attend_on_other_mesh_matches_reference(axes, names):
    assert_matches(
        results_of(functools.partial(attend, mesh=mesh_of(**axes), return_lse=True, **names)),
        oracle(),
    )


@pytest.mark.parametrize(
    "strategy, window",
    [("ring", None), ("ring", 5), ("all_gather", None), ("ulysses", 5), ("hybrid", None)],
)
def test_attend_lse_of_packed_documents_matches_reference(strategy, window):
    settings = dict(
        strategy=strategy,
        ulysses_ranks=2 if strategy == "hybrid" else None,
        window=window,
        **in_batch,
    )
    attend_fn = functools.partial(
        attend, mesh=mesh_of(dp=2, sp=4), segment_ids=jnp.asarray(SEGMENTS), **settings
    )
    assert_matches(
        results_of(functools.partial(attend_fn, return_lse=True)),
        oracle(packed=True, window=window),
    )


def test_attend_in_zigzag_order_equals_natural_order():
    q, k, v, _ = operands()
    order, segments = zigzag_order(TOKENS, 4), jnp.asarray(SEGMENTS)
    settings = dict(mesh=mesh_of(dp=2, sp=4), return_lse=True, **in_batch)
    expected = attend(q, k, v, segment_ids=segments, **settings)
    qkv = (x[:, order] for x in (q, k, v))
    out, lse = attend(*qkv, segment_ids=segments[:, order], token_order="zigzag", **settings)
    back = natural_order(order)
    np.testing.assert_array_equal(out[:, back], expected[0])
    np.testing.assert_array_equal(lse[:, :, back], expected[1])


def collectives_of(**settings) -> list[str]:
    """The collectives of the compiled program, for arguments that are sharded on the mesh."""
    mesh = mesh_of(dp=2, sp=4)
    qkv = (jax.device_put(x, NamedSharding(mesh, SHARDED)) for x in operands()[:3])
    attend_fn = jax.jit(functools.partial(attend, mesh=mesh, **in_batch, **settings))
    text = attend_fn.lower(*qkv).compile().as_text()
    return re.findall(r" (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)


def test_natural_order_needs_permutes_only():
    """In zigzag order: one send before the loop of ring steps and one in each of its two steps,
    which are unrolled. In natural order: two per array more."""
    assert collectives_of(token_order="zigzag") == ["collective-permute"] * 3
    assert collectives_of(token_order="natural") == ["collective-permute"] * (3 + 2 * 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
def test_reorder_equals_zigzag_order(num_ranks):
    ranks, tokens = Ranks("sp", num_ranks), jnp.arange(6 * num_ranks)[None]

    def local(x):
        zigzag = sharded_attention.to_zigzag(x, ranks)
        return zigzag, sharded_attention.to_natural(zigzag, ranks)

    spec = PartitionSpec(None, "sp")
    zigzag, natural = jax.shard_map(
        local, mesh=mesh_of(sp=num_ranks), in_specs=spec, out_specs=spec
    )(tokens)
    np.testing.assert_array_equal(zigzag[0], zigzag_order(6 * num_ranks, num_ranks))
    np.testing.assert_array_equal(natural, tokens)


def test_attend_output_keeps_the_sharding_of_queries():
    mesh = mesh_of(dp=2, sp=4)
    qkv = (jax.device_put(x, NamedSharding(mesh, SHARDED)) for x in operands()[:3])
    out = jax.jit(functools.partial(attend, mesh=mesh, **in_batch))(*qkv)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, SHARDED), out.ndim)


def test_attend_under_vmap_matches_reference():
    def attend_fn(q, k, v):
        add_batch = [x[:, None] for x in (q, k, v)]
        over_batch = jax.vmap(
            functools.partial(attend, mesh=mesh_of(sp=2), context_axis="sp", return_lse=True)
        )
        return jax.tree.map(lambda x: x[:, 0], over_batch(*add_batch))

    assert_matches(results_of(attend_fn), oracle())


def test_attend_under_checkpoint_matches_reference():
    attend_fn = functools.partial(attend, mesh=mesh_of(dp=2, sp=2), return_lse=True, **in_batch)
    assert_matches(results_of(jax.checkpoint(attend_fn)), oracle())


@pytest.mark.parametrize("strategy", ["ring", "hybrid"])
def test_attend_with_current_mesh_matches_reference(strategy):
    """`hybrid` splits the context axis in two, so its mesh differs from the current one."""
    mesh = mesh_of(dp=2, sp=2)
    ulysses_ranks = 2 if strategy == "hybrid" else None
    attend_fn = functools.partial(
        attend, mesh=mesh, strategy=strategy, ulysses_ranks=ulysses_ranks, **in_batch
    )
    with jax.set_mesh(mesh):
        assert_matches(results_of(functools.partial(attend_fn, return_lse=True)), oracle())


def in_shard_map(mesh: Mesh, manual=frozenset(), **settings):
    """`attend` in the caller's `shard_map`; segment ids are an argument of it."""

    def local(q, k, v, segments):
        return attend(q, k, v, context_axis="sp", segment_ids=segments, return_lse=True, **settings)

    specs = (
        PartitionSpec(None if manual else "dp", "sp"),
        PartitionSpec(None if manual else "dp", None, "sp"),
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs[0],
        out_specs=specs,
        axis_names=manual or set(mesh.axis_names),
        check_vma=False,
    )


@pytest.mark.parametrize(
    "strategy, window", [("ring", None), ("ring", 5), ("all_gather", None), ("ulysses", None)]
)
def test_attend_in_shard_map_matches_reference(strategy, window):
    attend_fn = in_shard_map(mesh_of(dp=2, sp=4), strategy=strategy, window=window)
    actual = results_of(lambda q, k, v: attend_fn(q, k, v, jnp.asarray(SEGMENTS)))
    assert_matches(actual, oracle(packed=True, window=window))


@pytest.mark.parametrize(
    "manual", [frozenset(), frozenset(["sp"])], ids=["all_axes", "context_axis"]
)
def test_attend_in_shard_map_takes_zigzag_order(manual):
    order = zigzag_order(TOKENS, 2)
    attend_fn = in_shard_map(mesh_of(dp=2, sp=2), manual, token_order="zigzag")

    def reordered(q, k, v):
        out, lse = attend_fn(q[:, order], k[:, order], v[:, order], None)
        return out[:, natural_order(order)], lse[:, :, natural_order(order)]

    assert_matches(results_of(reordered), oracle())


def test_attend_in_shard_map_in_wrong_order_differs():
    """Mutation test: the comparison with the reference can fail."""
    attend_fn = in_shard_map(mesh_of(dp=2, sp=2), token_order="zigzag")
    (out, _), _ = results_of(lambda q, k, v: attend_fn(q, k, v, None))
    assert max_relative_error(out, oracle()[0][0]) > 0.1


def test_attend_with_unknown_axis_names_the_axes():
    q, k, v, _ = operands()
    for argument in ("context_axis", "batch_axes", "head_axis"):
        message = (
            rf"unknown {argument} 'seqq': the mesh has the axes dp, seq \(did you mean seq\?\)"
        )
        with pytest.raises(UserError, match=message):
            attend(q, k, v, mesh=mesh_of(dp=2, seq=2), **{"context_axis": "seq", argument: "seqq"})
    with pytest.raises(
        UserError, match="unknown context_axis 'context': the mesh has the axes dp, sp"
    ):
        attend(q, k, v, mesh=mesh_of(dp=2, sp=2))


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(mesh=None), "outside of shard_map needs a mesh"),
        (dict(batch_axes=("dp", "sp")), "overlap; a mesh axis splits one dimension"),
        (dict(token_order="zig"), "invalid token_order='zig': expected one of natural, zigzag"),
        (dict(head_axis="tp"), "unknown head_axis 'tp'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_attend_with_invalid_argument_raises(settings, words):
    q, k, v, _ = operands()
    with pytest.raises(UserError, match=words):
        attend(q, k, v, **{"mesh": mesh_of(dp=2, sp=2), "context_axis": "sp", **settings})


def test_attend_without_batch_dimension_raises():
    q, k, v, _ = operands()
    with pytest.raises(
        UserError, match=r"invalid shapes q \(48, 4, 8\), .* expected q \[B, T, N, H\]"
    ):
        attend(q[0], k[0], v[0], mesh=mesh_of(sp=2), context_axis="sp")


def test_attend_with_integer_arrays_raises():
    q, k, v, _ = operands()
    with pytest.raises(
        UserError, match="invalid dtypes float32, int32, float32 of q, k, v: expected floats"
    ):
        attend(q, k.astype("int32"), v, mesh=mesh_of(sp=2), context_axis="sp")


@pytest.mark.jax_version  # where JAX stores the axes over which a value varies
def test_attend_in_unsuitable_shard_map_raises():
    q, k, v, _ = operands()
    mesh = mesh_of(dp=2, sp=2)
    qkv, segments = (q, k, v), jnp.asarray(SEGMENTS)
    with pytest.raises(Unsupported, match="strategy hybrid inside shard_map"):
        in_shard_map(mesh, strategy="hybrid", ulysses_ranks=2)(*qkv, segments)
    with pytest.raises(UserError, match="a local shard of 3 tokens"):
        in_shard_map(mesh)(*(x[:, :6] for x in (*qkv, segments)))
    tracked = jax.shard_map(
        functools.partial(attend, context_axis="sp"), mesh=mesh, in_specs=SHARDED, out_specs=SHARDED
    )
    with pytest.raises(UserError, match="needs check_vma=False"):
        tracked(*qkv)
    other = jax.shard_map(
        functools.partial(attend, mesh=mesh, context_axis="sp"), mesh=mesh, in_specs=PartitionSpec("dp"),
        out_specs=PartitionSpec("dp"), axis_names={"dp"}, check_vma=False,
    )  # fmt: skip
    with pytest.raises(
        Unsupported, match="inside a shard_map over dp but not over context_axis='sp'"
    ):
        jax.jit(other)(*qkv)
