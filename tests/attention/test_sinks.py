"""Attention sinks against a softmax with one more column, over strategies, kernels, masks and
meshes.
"""

import functools
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.attention import attend, contract, make
from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels import reference
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from tests.attention.cases import TOKENS, assert_rows_match, inputs, ranges, segments, split_mesh
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY, max_relative_error

HEADS = dict(num_heads=8, num_kv_heads=4)
SINKS = np.array([-2.0, 0.5, 3.0, 6.0, -30.0, 1.0, 0.0, 30.0], np.float32)


def results_of(attend_fn, dtype=jnp.float32):
    """(out, lse) and the gradients of q, k, v and the sinks; the objective depends on out and on
    lse.
    """
    q, k, v, dout = inputs(dtype=dtype, **HEADS)
    dlse = jax.random.normal(jax.random.key(9), (q.shape[0], q.shape[2], q.shape[1]))

    def objective(q, k, v, sinks_N):
        out, lse = attend_fn(q, k, v, sinks_N)
        return (out.astype(jnp.float32) * dout).sum() + (lse * dlse).sum(), (out, lse)

    gradients, results = jax.jit(jax.grad(objective, (0, 1, 2, 3), has_aux=True))(
        q, k, v, jnp.asarray(SINKS)
    )
    return results, gradients


@functools.cache
def oracle(packed: bool, window: int | None):
    """As transformers: the sink is one more column of scores, which the softmax includes and the
    output does not.
    """
    mask_BTS = jnp.tri(TOKENS, dtype=bool)[None]
    if packed or window:
        mask_BTS = ranges(packed, AttentionSpec(window=window)).dense_mask_BTS(TOKENS)

    def dense(q, k, v, sinks_N):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / q.shape[-1] ** 0.5
        scores_BNTS = jnp.where(mask_BTS[:, None], scores_BNTS, -jnp.inf)
        column_BNT1 = jnp.broadcast_to(sinks_N[:, None, None], (*scores_BNTS.shape[:3], 1))
        scores_BNTX = jnp.concatenate([scores_BNTS, column_BNT1], axis=-1)
        out = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTX, axis=-1)[..., :-1], v)
        return out, jax.nn.logsumexp(scores_BNTX, axis=-1)

    return results_of(dense)


def assert_matches(actual, expected, tolerance=FLOAT32_PARITY) -> None:
    (out, lse), (*gradients, dsinks) = actual
    (expected_out, expected_lse), (*expected_gradients, expected_dsinks) = expected
    assert_rows_match((out, *gradients), (expected_out, *expected_gradients), tolerance)
    assert max_relative_error(lse, expected_lse) <= tolerance
    assert max_relative_error(dsinks, expected_dsinks) <= tolerance
    # of small ones, too
    np.testing.assert_allclose(dsinks, expected_dsinks, rtol=100 * tolerance, atol=1e-4)


CASES = [  # strategy, axes of the mesh, packed, window, kernel
    ("ring", dict(context=4), False, None, "reference"),
    ("ring", dict(context=3, tensor=2), True, None, "reference"),
    ("all_gather", dict(context=4), True, None, "reference"),
    ("ulysses", dict(context=2, tensor=2), True, None, "blockwise"),
    ("hybrid", dict(context=4, tensor=2), True, 40, "reference"),
]
MORE_CASES = [
    ("ring", dict(context=1), True, None, "blockwise"),
    ("ring", dict(context=4), True, 5, "pallas"),
    ("all_gather", dict(context=4), True, None, "pallas"),
    ("ulysses", dict(context=4), False, 40, "reference"),
    ("hybrid", dict(context=4, fsdp=2), False, None, "blockwise"),
]


def attend_on(strategy, axes, packed, window, kernel):
    return functools.partial(
        attend, mesh=split_mesh(**axes), strategy=strategy, window=window, kernel=kernel, return_lse=True,
        ulysses_ranks=2 if strategy == "hybrid" else None,
        segment_ids=jnp.asarray(segments()) if packed else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE_CASES)],
    ids=lambda case: " ".join(map(str, case)),
)
def test_sinks_match_softmax_with_one_more_column(case):
    attend_fn = attend_on(*case)
    actual = results_of(lambda q, k, v, sinks_N: attend_fn(q, k, v, sinks=sinks_N))
    assert_matches(actual, oracle(*case[2:4]))


@pytest.mark.full
def test_sinks_in_bfloat16_match_softmax_with_one_more_column():
    attend_fn = attend_on("ring", dict(context=4), True, None, "blockwise")
    actual = results_of(lambda q, k, v, sinks_N: attend_fn(q, k, v, sinks=sinks_N), jnp.bfloat16)
    expected, tolerance = oracle(True, None), BFLOAT16_ATTENTION
    errors = jax.tree.map(max_relative_error, actual, expected)
    assert max(jax.tree.leaves(errors)) <= tolerance, errors


def test_sinks_in_shard_map_match_softmax_with_one_more_column():
    def local(q, k, v, segments_bt, sinks_N):
        return attend(
            q, k, v, segment_ids=segments_bt, sinks=sinks_N, context_axis="context", return_lse=True
        )

    tokens, lse = PartitionSpec(None, "context"), PartitionSpec(None, None, "context")
    specs = (tokens, tokens, tokens, tokens, PartitionSpec())
    split = jax.shard_map(
        local, mesh=split_mesh(context=4), in_specs=specs, out_specs=(tokens, lse), check_vma=False
    )
    actual = results_of(lambda q, k, v, sinks_N: split(q, k, v, jnp.asarray(segments()), sinks_N))
    assert_matches(actual, oracle(True, None))


@pytest.mark.parametrize("context", [1, 4])
def test_sink_in_each_ring_step_does_not_match(context, monkeypatch):
    """Mutation test: a sink in each kernel call is right on one rank, and counted once per block on
    several ranks.
    """

    def forward(*operands):
        return contract.join(*reference.forward(*operands), jnp.asarray(SINKS))

    kernel = SimpleNamespace(
        forward=forward, backward=reference.backward, unsupported=reference.unsupported
    )
    monkeypatch.setitem(KERNELS, "reference", kernel)
    q, k, v, _ = inputs(**HEADS)
    out, _ = attend_on("ring", dict(context=context), False, None, "reference")(q, k, v)
    error = max_relative_error(out, oracle(False, None)[0][0])
    assert error <= FLOAT32_PARITY if context == 1 else error > 0.1


@functools.cache
def calls_on_h100(kind: str) -> Counter:
    """The attention kernel calls of each pass, in a ring of four."""
    mesh = make_mesh(topology("h100:1x4"), MeshConfig(context=4))
    attention = make(AttentionConfig(kernel="cudnn"), mesh)
    attend_fn = {
        "without": lambda q, k, v, sinks_N: attention(q, k, v)[0],
        "with": lambda q, k, v, sinks_N: attention(q, k, v, None, sinks_N)[0],
        "differentiated": lambda q, k, v, sinks_N: contract.join(*attention(q, k, v), sinks_N)[0],
    }[kind]
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    q, k = (jax.ShapeDtypeStruct((1, 4096, n, 64), jnp.bfloat16, sharding=sharding) for n in (8, 4))
    sinks_N = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

    def gradients(q, k, v, sinks_N, dout):
        return jax.vjp(attend_fn, q, k, v, sinks_N)[1](dout)

    compiled = (
        jax.jit(gradients).lower(q, k, k, sinks_N, q).compile(compiler_options=dict(WITHOUT_GPU))
    )
    counts = Counter()
    for counted in analyze(compiled.as_text()).attention_calls:
        counts[counted.call.pass_name] += counted.times
    return counts


@pytest.mark.gpu_compiler
@pytest.mark.jax_version
def test_sinks_add_no_kernel_call():
    assert calls_on_h100("with") == calls_on_h100("without") == dict(forward=4, backward=4)


@pytest.mark.full
@pytest.mark.gpu_compiler
def test_differentiating_the_factor_of_sinks_adds_backward_calls():
    assert calls_on_h100("differentiated")["backward"] > 4


def test_attend_with_wrong_number_of_sinks_raises():
    q, k, v, _ = inputs(**HEADS)
    with pytest.raises(
        UserError, match=r"invalid shape \(4,\) for sinks: expected one per query head, \(8,\)"
    ):
        attend(q, k, v, mesh=split_mesh(context=2), sinks=jnp.zeros(4))
