"""The kernel fa3 without a GPU: a stand-in computes what the FFI calls say (fa3_stand_in.py); calls are
compiled for absent GPUs where the package is installed, on JAX 0.11.2 and later.

Not tested: the results of the kernels on a GPU. scripts/gpu_first_contact.py compares those with
the reference.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.first_contact import fa3_stand_in
from jaxlc.attention import choose, make
from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import cudnn_packed, fa3, packed_check, reference
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.core.scopes import RING_STEP
from jaxlc.hlo import analyze
from jaxlc.hlo.kernel_costs import attention_kernel
from jaxlc.hlo.parser import is_data_dependent, is_in
from jaxlc.plan.program import workspace_bytes
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from tests.attention.cases import TOKENS, assert_rows_match, inputs, oracle, segments, split_mesh
from tests.attention.test_cudnn_packed import (
    STRATEGIES,
    _assert_matches,
    _results,
    assert_ring_in_document_order_matches_oracle,
    assert_strategy_matches_oracle,
    float64_oracle,
    random_segments,
)
from tests.attention.test_query_tiles import Case, run
from tests.tolerances import FLOAT32_PARITY


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """The stand-in in place of the FFI calls, and sizes for documents of up to 96, 24 and 6 tokens."""
    fa3_stand_in.install(monkeypatch)
    monkeypatch.setattr(fa3, "MIN_DOCUMENT_TOKENS", 4)
    monkeypatch.setattr(fa3._CALLS, "min_tokens", 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


def both_passes(kernel, ranges, spec, q, k, v, dout, dlse):
    """(out, lse, dq, dk, dv)"""
    out, lse = kernel.forward(q, k, v, ranges, spec)
    return out, lse, *kernel.backward(q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse))


def assert_matches_reference(ranges, spec, q, k, v, dout):
    dlse = jax.random.normal(jax.random.key(9), (q.shape[0], q.shape[2], q.shape[1]))
    results = (
        jax.jit(functools.partial(both_passes, kernel, ranges, spec))(q, k, v, dout, dlse)
        for kernel in (fa3, reference)
    )
    _assert_matches(*([np.asarray(x) for x in parts] for parts in results))


@pytest.mark.parametrize(
    ("spec", "num_queries"),
    [
        (AttentionSpec(), 40),
        (AttentionSpec(scale=0.3), 25),
        (AttentionSpec(window=7), 25),
        (AttentionSpec(causal=False), 25),
    ],
    ids=["causal", "fewer queries", "window", "full"],
)
def test_implicit_masks_match_reference(stand_in, spec, num_queries):
    q, _, _, dout = inputs(batch=2, num_tokens=num_queries)
    _, k, v, _ = inputs(batch=2, num_tokens=40, seed=1)
    assert_matches_reference(None, spec, q, k, v, dout)


def test_more_queries_than_keys_raise():
    q, k, v, _ = inputs(batch=1)
    with pytest.raises(NotImplementedError, match="96 queries over 30 keys"):
        fa3.forward(q, k[:, :30], v[:, :30], None, AttentionSpec())


@pytest.mark.parametrize(
    "settings",
    [
        STRATEGIES["one rank"],
        *(pytest.param(STRATEGIES[x], marks=pytest.mark.full) for x in ("ring of 4", "hybrid")),
    ],
    ids=str,
)
def test_packed_strategy_matches_float64_oracle(stand_in, settings):
    """As cuDNN's: rows without keys, keys without queries, documents of one token, and loops."""
    assert_strategy_matches_oracle("fa3", **settings)


def test_packed_ring_in_document_order_matches_float64_oracle(stand_in):
    """Ranks have documents in different orders, so ring steps gather keys."""
    packings = [(96,), (40, 3, 29, 24), (61,), (15, 5, 8, 6, 12, 11, 9, 5, 3, 4, 13)]
    assert_ring_in_document_order_matches_oracle("fa3", packings, context=4)


def test_ring_step_with_keys_in_another_order_matches_reference(stand_in):
    lengths = np.array([1, 13, -1, 13, 1, 1, 13, 1, 1, 1, 1, 1])
    segments_BT = np.repeat(np.where(lengths > 0, np.arange(1, 13), 0), abs(lengths))[None]
    spec = AttentionSpec(causal=False, few_documents=True)
    ranges = key_ranges(
        *(TokenInfo(None, jnp.asarray(x)) for x in (segments_BT, segments_BT[:, ::-1])), spec
    )
    assert_matches_reference(ranges, spec, *inputs(batch=1, num_tokens=48))


@pytest.mark.parametrize("case", [
    Case("ring", dict(context=2), 4, kernel="fa3", kv_tokens_per_step=12),
    pytest.param(Case("ring", dict(context=1), 4, kernel="fa3", kv_tokens_per_step=24), marks=pytest.mark.full),
], ids=str)  # fmt: skip
def test_packed_tiles_match_reference(stand_in, case):
    assert_rows_match(run(case), oracle(packed=True, **case.heads), FLOAT32_PARITY)


@pytest.mark.parametrize(
    "window", [1, 7, *(pytest.param(x, marks=pytest.mark.full) for x in (2, 40))]
)
def test_windows_over_packed_documents_match_reference(stand_in, window):
    """On one rank: the keys of a document may begin before its first query's window."""
    segments_BT = jnp.asarray(np.concatenate([segments(), random_segments(2, TOKENS)]))
    positions = jnp.broadcast_to(jnp.arange(TOKENS), segments_BT.shape)
    tokens, spec = TokenInfo(positions, segments_BT), AttentionSpec(window=window)
    ranges = key_ranges(tokens, tokens, spec)
    assert_matches_reference(ranges, spec, *inputs(batch=len(segments_BT)))


@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.full)])
def test_window_of_one_document_over_ranks_matches_reference(stand_in, context):
    """Keys are a halo and the chunk's own ones, more than queries; the first chunk has an empty halo."""
    q, k, v, dout = inputs(batch=2)
    attend = make(
        AttentionConfig(strategy="ring", kernel="fa3"),
        split_mesh(context=context),
        window=30,
        token_order="natural",
    )
    cotangents = dout, jnp.zeros((2, q.shape[2], TOKENS))
    actual = jax.jit(functools.partial(_results, attend))((q, k, v), cotangents)
    spec = AttentionSpec(window=30)
    desired = both_passes(reference, None, spec, q, k, v, *cotangents)
    _assert_matches(*([np.asarray(x) for x in parts] for parts in (actual, desired)))


def test_segments_of_a_call_have_gaps_before_documents(stand_in):
    """Two documents of 3 and 2 tokens, one token of padding between them, and 2 at the end."""
    segments_BT = np.array([[1, 1, 1, 0, 2, 2, 0, 0]])
    positions = jnp.arange(8)[None]
    tokens = TokenInfo(positions, jnp.asarray(segments_BT))
    spec = AttentionSpec()
    ranges = key_ranges(tokens, tokens, spec)
    q, k, *_ = inputs(batch=1, num_tokens=8)
    block = cudnn_packed.Block.create(q, k, tuple(ranges), spec)
    offsets = fa3._Segments(block, block.table.once[0], spec).offsets
    assert [x.tolist() for x in offsets] == [
        [0, 0, 0, 3, 4, 4, 6, 8, 8],
        [0, 0, 0, 3, 3, 4, 6, 6, 8],
    ]


def test_workspace_bytes_are_accumulators_for_rows_of_scratch():
    """GPU4: 512 MiB of dq and 256 MiB of dk and dv at 32,768 tokens and 32/8 heads of 128."""
    q, k = (1, 32768, 32, 128), (1, 32768, 8, 128)
    padding = 128 * 2
    mebibytes = fa3.workspace_bytes(q, k, 32 * (32768 + padding)) / 2**20
    assert mebibytes == (512 + 256) * (32768 + padding) / 32768
    assert fa3.workspace_bytes(q, q, 32 * 32768) == 512 * 2**20


def test_smallest_size_of_documents_bounds_scratch():
    """3 segments a document, 128 rows each: at most 3/8 of the rows of the queries, and a constant."""
    for num_tokens in (4096, 32768, 131072, 2**20):
        sizes = cudnn_packed.buckets(1, num_tokens, num_tokens, fa3.MIN_DOCUMENT_TOKENS)
        rows = [fa3.SCRATCH_ROWS * (3 * size.num_documents + 3) for size in sizes]
        assert max(rows) <= 0.375 * num_tokens + 3 * fa3.SCRATCH_ROWS or len(sizes) == 1


def test_ranges_and_implicit_calls_agree_under_vmap(stand_in):
    segments_BT = np.repeat([[3, 0, 1], [1, 2, 4]], [9, 5, 10], axis=1)
    positions = jnp.broadcast_to(jnp.arange(24), segments_BT.shape)
    tokens = TokenInfo(positions, jnp.asarray(segments_BT))
    spec = AttentionSpec()
    ranges = key_ranges(tokens, tokens, spec)
    q, k, v, dout = inputs(batch=2, num_tokens=24)
    dlse = jnp.zeros((2, q.shape[2], 24))

    def results(q):
        return both_passes(fa3, KeyRanges(*ranges), spec, q, k, v, dout, dlse)

    actual = jax.jit(jax.vmap(results))(jnp.stack([q, -q]))
    for index, queries in enumerate((q, -q)):
        desired = float64_oracle(queries, k, v, segments_BT, dout, dlse)
        _assert_matches([np.asarray(x[index]) for x in actual], desired)


def test_check_before_training_finds_keys_of_another_order(stand_in, monkeypatch):
    """The check of a ring step; without the gather of keys, documents have those of others."""
    problems = packed_check._problems
    monkeypatch.setattr(packed_check, "_problems", lambda *args: (problems(*args)[0][1:2], ""))

    def check() -> str:
        packed_check._Problem.results.clear_cache()
        heads = dict(num_heads=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
        documents = dict(document_tokens=(9, -1, 20, 3, -5, 2), large_elements=1)
        return packed_check.check_packed("fa3", jax.devices()[0], **heads, **documents)

    assert re.search(r"kernel     fa3 on packed documents: relative error .*e-0\d on cpu", check())
    monkeypatch.setattr(fa3._Segments, "_moved", lambda self, x, *_: x)
    with pytest.raises(
        UserError, match="fa3 is wrong on packed documents .*attention.kernel=cudnn"
    ):
        check()


needs_package = pytest.mark.skipif(
    fa3.unavailable() is not None, reason=f"needs the package of fa3: {fa3.unavailable()}"
)


def compiled_calls(context: int, num_tokens: int, packed: bool, window: int | None = None):
    """(program, calls) of a gradient on absent H100s; 8 query and 2 key/value heads of 128."""
    mesh = make_mesh(topology(f"h100:1x{context}"), MeshConfig(context=context))
    config = AttentionConfig(strategy="ring", kernel="auto")
    settings = dict(head_dim=128, dtype=jnp.bfloat16, window=window)
    selection = choose(config, mesh, packed=packed, **settings)
    assert selection.name == "fa3" and "assumes dew_flash_attn 0.3.6" in selection.reason
    attend = make(config, mesh, few_documents=packed, window=window)
    sharding = NamedSharding(mesh, PartitionSpec(None, CONTEXT))
    q, k = (
        jax.ShapeDtypeStruct((1, num_tokens, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (8, 2)
    )
    tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32, sharding=sharding)

    def loss(q, k, v, positions, segments):
        ranges = attend.prepare(positions, segments, jax.typeof(q)) if packed else None
        return attend(q, k, v, ranges)[0].astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, tokens, tokens)
    text = lowered.compile(compiler_options=dict(WITHOUT_GPU)).as_text()
    program = analyze(text)
    calls = (
        attention_kernel(program, computation, instruction)
        for computation in program
        for instruction in computation
    )
    return program, [call for call in calls if call is not None]


@needs_package
@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_dense_calls_compile_for_an_h100_and_are_counted():
    program, calls = compiled_calls(1, 4096, packed=False)
    forward, backward = sorted(calls, key=lambda call: call.is_backward)
    assert not forward.is_backward and backward.is_backward
    for call, num_products in ((forward, 2), (backward, 5)):
        assert (call.kernel, call.head_dim, call.is_masked) == ("fa3", 128, True)
        assert tuple(call.sizes) == (8, 4096, 4096)
        assert call.full_flops == 2 * num_products * 8 * 4096**2 * 128
    dq, dk, _, scratch, _ = (array.dims for array in backward.instruction.arrays)
    assert (dq, dk) == ((1, 4096, 8, 128), (1, 4096, 2, 128))
    accumulators = 4 * 128 * (4096 + 256) * (8 + 2 * 2)
    assert fa3.workspace_bytes(dq, dk, *scratch) == accumulators
    assert workspace_bytes(program) == accumulators


@needs_package
@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_packed_ring_compiles_for_h100s_without_loops_in_ring_steps():
    program, calls = compiled_calls(8, 8 * 4096, packed=True)
    assert {call.kernel for call in calls} == {"fa3_packed"}
    sizes = {(call.is_backward, call.is_ring_step, *call.sizes[1:]) for call in calls}
    expected_sizes = {(4096, 4096), (1024, 1024)}
    assert {x[2:] for x in sizes if x[1]} == expected_sizes
    assert {x[2:] for x in sizes if not x[1]} == expected_sizes
    loops = [x.op_name for computation in program for x in computation if x.opcode == "while"]
    assert not any(is_in(name, RING_STEP) for name in loops if is_data_dependent(name))


@needs_package
@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_window_over_ranks_compiles_for_h100s():
    _, calls = compiled_calls(2, 8192, packed=False, window=1024)
    assert {call.kernel for call in calls} == {"fa3_packed"} and all(x.has_window for x in calls)
    # each rank's two chunks of 2,048 tokens, with a halo of 1,023
    assert {tuple(call.sizes) for call in calls} == {(16, 2048, 3071)}
