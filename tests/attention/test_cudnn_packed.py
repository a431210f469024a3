"""cuDNN's packed calls without a GPU: a stand-in computes what their operands say
(cudnn_stand_in.py).

Not tested: the results that cuDNN itself computes on a GPU, and whether it accepts different
offsets of queries and keys. scripts/gpu_first_contact.py compares those with the reference.
"""

import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc import _jax_internals
from jaxlc.attention import choose, make
from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import cudnn, cudnn_packed, packed_check, reference
from jaxlc.attention.kernels.packed_check import check_packed
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.core.scopes import RING_STEP
from jaxlc.hlo import parse
from jaxlc.hlo.parser import is_data_dependent, is_in
from jaxlc.sharding.document_layout import document_order
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from tests.attention import cudnn_stand_in
from tests.attention.cases import TOKENS, assert_rows_match, inputs, oracle, segments, split_mesh
from tests.attention.test_query_tiles import Case, run
from tests.tolerances import FLOAT32_PARITY

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """The stand-in in place of cuDNN, and buckets for up to 96, 24 and 6 tokens."""
    cudnn_stand_in.install(monkeypatch)
    monkeypatch.setattr(cudnn_packed, "MIN_BUCKET_TOKENS", 4)
    monkeypatch.setattr(cudnn, "unsupported", lambda problem: None)
    jax.clear_caches()  # programs with cuDNN's calls
    yield
    jax.clear_caches()


def random_segments(num_sequences: int, num_tokens: int) -> np.ndarray:
    """[num_sequences, num_tokens]: documents of random lengths, many of them short, and padding
    between them.
    """
    generator = np.random.default_rng(0)
    lengths = np.minimum(
        generator.geometric(1 / 8, (num_sequences, num_tokens)), generator.integers(1, 60)
    )
    ids = np.stack([np.repeat(np.arange(1, num_tokens + 1), row)[:num_tokens] for row in lengths])
    return np.where(ids % 5 == 0, 0, ids).astype(np.int32)


def own_ranges(segments_BT) -> KeyRanges:
    """The ranges of causal attention of a sequence in natural order."""
    positions = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
    tokens = TokenInfo(positions, jnp.asarray(segments_BT))
    return key_ranges(tokens, tokens, AttentionSpec())


def float64_oracle(q, k, v, segments_BT, dout, dlse):
    """(out, lse, dq, dk, dv) of causal attention within segments, by NumPy in float64."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    in_document = (segments_BT[:, :, None] == segments_BT[:, None, :]) & (
        segments_BT[:, :, None] != 0
    )
    mask = (in_document & np.tri(segments_BT.shape[1], dtype=bool))[:, None]
    scores = np.where(mask, scale * np.einsum("BTNH,BSNH->BNTS", q, k), -np.inf)
    largest = np.where(mask.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
    weights = np.exp(scores - largest)
    with np.errstate(divide="ignore"):
        lse = largest[..., 0] + np.log(weights.sum(-1))
    p = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("BNTS,BSNH->BTNH", p, v)
    dlse = np.where(np.isneginf(lse), 0, dlse)
    delta = np.einsum("BTNH,BTNH->BNT", dout, out) - dlse
    ds = scale * p * (np.einsum("BTNH,BSNH->BNTS", dout, v) - delta[..., None])
    dk, dv = np.einsum("BNTS,BTNH->BSNH", ds, q), np.einsum("BNTS,BTNH->BSNH", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (dk, dv))
    return out, lse, np.einsum("BNTS,BSNH->BTNH", ds, k), dk, dv


@functools.cache
def expected():
    """The oracle's results for the cases and three random packings."""
    segments_BT = np.concatenate([segments(), random_segments(3, TOKENS)])
    q, k, v, dout = inputs(batch=len(segments_BT))
    dlse = jax.random.normal(jax.random.key(9), (len(segments_BT), q.shape[2], TOKENS))
    return (q, k, v), segments_BT, (dout, dlse), float64_oracle(q, k, v, segments_BT, dout, dlse)


def _assert_matches(actual, expected, tolerance=FLOAT32_PARITY):
    lse, expected_lse = actual[1], expected[1]
    assert (np.isneginf(lse) == np.isneginf(expected_lse)).all()
    finite = (np.where(np.isneginf(x), 0, x) for x in (lse, expected_lse))
    assert_rows_match((actual[0], *actual[2:]), (expected[0], *expected[2:]), tolerance)
    assert_rows_match(*finite, tolerance)


def _results(attend, qkv, cotangents):
    results, vjp = jax.vjp(attend, *qkv)
    return *results, *vjp(cotangents)


STRATEGIES = {
    "one rank": dict(context=1, strategy="ring"),
    "ring of 2": dict(context=2, strategy="ring"),
    "ring of 4": dict(context=4, strategy="ring"),
    "ring of 3": dict(context=3, strategy="ring"),
    "ring of 8": dict(context=8, strategy="ring"),
    "ulysses": dict(context=2, strategy="ulysses"),
    "hybrid": dict(context=4, strategy="hybrid", ulysses_degree=2),
}
_FULL = ("ring of 2", "ring of 3", "ring of 4", "ring of 8", "ulysses")


def assert_strategy_matches_oracle(kernel: str, context: int, **settings) -> None:
    """The lse's gradient is compared, too."""
    qkv, segments_BT, cotangents, oracle = expected()
    attend_split = make(
        AttentionConfig(kernel=kernel, **settings),
        split_mesh(context=context),
        token_order="natural",
    )

    def attend_packed(q, k, v):
        return attend_split(
            q, k, v, attend_split.prepare(None, jnp.asarray(segments_BT), jax.typeof(q))
        )

    actual = jax.jit(functools.partial(_results, attend_packed))(qkv, cotangents)
    _assert_matches(actual, oracle)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(x, id=name, marks=pytest.mark.full if name in _FULL else ())
        for name, x in STRATEGIES.items()
    ],
)
def test_packed_strategy_matches_float64_oracle(stand_in, settings):
    """Documents of one token, over all ranks, on one; padding; ring steps without work."""
    assert_strategy_matches_oracle("cudnn", **settings)


@pytest.mark.parametrize("case", [
    Case("ring", dict(context=2), 4, kernel="cudnn", kv_tokens_per_step=12),
    pytest.param(Case("ring", dict(context=1), 4, kernel="cudnn", kv_tokens_per_step=24), marks=pytest.mark.full),
    pytest.param(Case("hybrid", dict(context=4), 2, kernel="cudnn", ulysses_degree=2), marks=pytest.mark.full),
    pytest.param(Case("ulysses", dict(context=2), 2, kernel="cudnn"), marks=pytest.mark.full),
], ids=str)  # fmt: skip
def test_packed_tiles_match_reference(stand_in, case):
    """Each KV block step is a lower triangle or a rectangle, also where a step has several
    sub-chunks of keys.
    """
    assert_rows_match(run(case), oracle(packed=True, **case.heads), FLOAT32_PARITY)


@pytest.fixture
def check(stand_in, monkeypatch):
    """The check before training with 128 tokens and two buckets, and with 256 tokens in the large problem.

    Args:
      problem: the only problem to compute: 0 is a rank's own KV block, 1 a ring step, 2 the large problem. None: all.
    """
    monkeypatch.setattr(cudnn_packed, "MIN_BUCKET_TOKENS", 16)
    problems = packed_check._problems
    device, heads = jax.devices()[0], dict(num_heads=4, num_kv_heads=2, head_dim=8)

    def run(problem=None, documents=(25, -1, 58, -1, 1, 3, 12, -2, 14, -2, 9)) -> str:
        def selected(*args):
            return problems(*args)[0][problem : None if problem is None else problem + 1], ""

        packed_check._Problem.results.clear_cache()  # the stand-in may have changed
        monkeypatch.setattr(packed_check, "_problems", selected)
        settings = dict(document_tokens=documents, large_elements=256 * 4 * 8)
        return check_packed("cudnn", device, **heads, dtype=jnp.float32, **settings)

    return run


def test_check_before_training_passes_in_memory_filled_with_nan(check, monkeypatch):
    """Three problems, each of them after the memory is filled. On a CPU only little is filled."""
    events = []

    def traced(name, function):
        def call(*args, **settings):
            events.append(name)
            return function(*args, **settings)

        return call

    monkeypatch.setattr(packed_check, "_nan_array", traced("fill", packed_check._nan_array))
    monkeypatch.setattr(cudnn, "forward", traced("call", cudnn.forward))
    assert re.search(r"relative error .*e-0\d on cpu, measured now$", check())
    assert events == 3 * ["fill", "call"]
    assert jnp.isnan(packed_check._nan_array(4)).all()


@pytest.mark.parametrize("error", [jnp.nan, jnp.inf, 1.0])
def test_error_that_is_large_or_nan_raises(error):
    comparisons = [(lambda: jnp.zeros(1), lambda results, x=x: x) for x in (0.0, error, 0.0)]
    with pytest.raises(UserError, match="wrong on .*: advice"):
        packed_check.measured_error(comparisons, jax.devices()[0], ("fails", "wrong"), "advice")


@pytest.mark.parametrize(
    ("max_arrays", "num_arrays"), [(100, 12), (5, 5)], ids=["free", "fragmented"]
)
def test_check_before_training_fills_the_pool_of_a_gpu(monkeypatch, max_arrays, num_arrays):
    """Four fifths of the free memory, or what can be allocated, in arrays that exist at the same
    time.
    """
    monkeypatch.setattr(packed_check, "_POISON_BYTES", 2**12)
    stats = dict(bytes_limit=9 * 2**13, bytes_in_use=2**13)
    alive, deleted = [], []

    def nan_array(size):
        if len(alive) == max_arrays:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        alive.append(2 * size)
        return SimpleNamespace(delete=lambda: deleted.append(sum(alive)))

    monkeypatch.setattr(packed_check, "_nan_array", nan_array)
    packed_check.fill_free_memory_with_nan(
        SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    )
    assert deleted == [num_arrays * 2**12] * num_arrays


_memories = cudnn_stand_in._memories


def _cumulated_q_offsets(q, k, q_lengths, kv_lengths, q_offsets, kv_offsets):
    """Documents of q one after the other, as in engines that derive their starts from lengths."""
    elements = jnp.cumsum(q_lengths.reshape(-1)) * q.shape[2] * q.shape[3]
    num_rows, documents = q_lengths.shape
    starts = q_offsets[0, 0] + jnp.pad(elements, (1, num_rows - 1)).reshape(num_rows, documents + 1)
    return _memories(q, k, q_lengths, kv_lengths, starts, kv_offsets)


def test_check_before_training_finds_ignored_offsets(check, monkeypatch):
    """Without gaps and descending offsets such an engine passes."""
    monkeypatch.setattr(cudnn_stand_in, "_memories", _cumulated_q_offsets)
    assert "relative error" in check(0, documents=(58, 1, 3, 12, 14, 9, 25, -6))
    for problem in (0, 2):
        with pytest.raises(
            UserError, match="cuDNN is wrong on packed documents .*attention.kernel=pallas"
        ):
            check(problem)


def test_check_before_training_finds_stale_memory_of_gaps(check, monkeypatch):
    """A backward that adds up memory between documents that it has not written: no error while that
    is zero.
    """
    stale_value = 0.0

    def stale(*args, **settings):
        dq, dk, dv = cudnn_stand_in.packed_backward(*args, **settings)
        rows = jnp.where(jnp.isnan(dk), stale_value, dk).reshape(-1, dk.shape[2] * dk.shape[3])
        return dq, dk + 0 * jnp.roll(rows, 1, axis=0).reshape(dk.shape), dv

    monkeypatch.setattr(cudnn_packed, "cudnn_packed_backward", stale)
    assert "relative error" in check(0)
    stale_value = jnp.nan
    with pytest.raises(UserError, match="cuDNN is wrong on packed documents .*relative error inf"):
        check(0)


def test_check_before_training_finds_wrong_and_failing_calls(check, monkeypatch):
    operands = cudnn_packed.packed_operands

    def shifted(*arguments):
        right = operands(*arguments)
        return right._replace(kv_offsets=jnp.maximum(right.kv_offsets - 16, 0))

    monkeypatch.setattr(cudnn_packed, "packed_operands", shifted)
    with pytest.raises(
        UserError, match="cuDNN is wrong on packed documents .*attention.kernel=pallas"
    ):
        check(1)
    monkeypatch.setattr(cudnn_packed, "cudnn_packed_forward", lambda *_, **__: _refuse())
    with pytest.raises(
        UserError, match="cuDNN fails on packed documents .*no plan.*attention.kernel=pallas"
    ):
        check()


def test_check_without_memory_skips_large_problem():
    """With it, the last document starts above 2^27 elements, and the first call has descending
    offsets.
    """
    stats = dict(bytes_limit=9 * 2**30, bytes_in_use=2**30)
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    sizes = (32, 8), 128, packed_check._DOCUMENT_TOKENS, packed_check._LARGE_ELEMENTS
    problems, note = packed_check._problems(gpu, *sizes)
    assert [x.num_tokens for x in problems] == [
        1024,
        1024,
    ] and "2^27 elements: only 8.0 GiB are free" in note
    stats["bytes_limit"] *= 4
    (*_, large), note = packed_check._problems(gpu, *sizes)
    assert note == "" and (large.num_tokens - large.lengths[-1]) * 32 * 128 > 2**27
    for problem in (problems[0], large):
        sizes = 1, problem.num_tokens, problem.num_tokens
        calls = cudnn_packed.calls_for(
            *sizes, causal=True, few_documents=problem.spec.few_documents
        )
        rows, *_ = cudnn_packed.document_table(
            *problem.ranges(), problem.num_tokens, calls, causal=True
        ).once
        # also a gap between them
        assert rows.q_start[0, 0] > rows.q_start[0, 1] + rows.q_length[0, 1]


def _refuse():
    raise ValueError("no plan")


def _kernel_results(segments_BT, q, k, v, dout, dlse, few_documents=False):
    """Forward and backward of one causal kernel call."""
    ranges, spec = own_ranges(segments_BT), AttentionSpec(few_documents=few_documents)
    out, lse = cudnn.forward(q, k, v, ranges, spec)
    return out, lse, *cudnn.backward(q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse))


def assert_ring_in_document_order_matches_oracle(
    kernel: str, packings: Sequence[tuple[int, ...]], context: int, few_documents: bool = True
) -> None:
    """Per-document sharding of rows with documents of these lengths."""
    segments_BT = np.zeros((len(packings), TOKENS), np.int32)
    order_BT = np.zeros((len(packings), TOKENS), np.int32)
    for row, lengths in enumerate(packings):
        segments_BT[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        order_BT[row] = document_order(segments_BT[row], context)
    q, k, v, dout = inputs(batch=len(packings))
    dlse = jax.random.normal(jax.random.key(9), (len(packings), q.shape[2], TOKENS))
    attend_ring = make(
        AttentionConfig(strategy="ring", kernel=kernel),
        split_mesh(context=context),
        few_documents=few_documents,
    )
    segments_in_order = jnp.asarray(np.take_along_axis(segments_BT, order_BT, axis=1))

    def attend_packed(q, k, v):
        return attend_ring(
            q, k, v, attend_ring.prepare(jnp.asarray(order_BT), segments_in_order, jax.typeof(q))
        )

    operands = [_reordered(x, order_BT) for x in (q, k, v)]
    cotangents = _reordered(dout, order_BT), _reordered(dlse, order_BT, axis=2)
    actual = jax.jit(functools.partial(_results, attend_packed))(operands, cotangents)
    inverse_BT = np.argsort(order_BT, axis=1)
    actual = [_reordered(x, inverse_BT, axis=2 if x.ndim == 3 else 1) for x in actual]
    _assert_matches(actual, float64_oracle(q, k, v, segments_BT, dout, dlse))


@pytest.mark.parametrize("few_documents", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("context", [pytest.param(2, marks=pytest.mark.full), 4])
def test_packed_ring_in_document_order_matches_float64_oracle(stand_in, context, few_documents):
    """Per-document sharding: pieces of a document on all ranks, whole and cut documents, other
    orders on ranks.

    With few documents, a ring step has two calls and no loop. Four ranks share all of eleven
    documents, ring steps of whole documents are empty, and the ring is unrolled.
    """
    packings = [
        (96,),
        (40, 3, 29, 24),
        (1,) * 96,
        (61,),
        (5, 1, 50, 2, 2, 20, 9),
        (32, 32, 32),
        (12,) * 8,
    ]
    packings += [(15, 5, 8, 6, 12, 11, 9, 5, 3, 4, 13), (1, 17, 9, 1, 1, 23, 2, 30, 4, 6)]
    assert_ring_in_document_order_matches_oracle("cudnn", packings, context, few_documents)


def test_two_calls_of_a_ring_step_match_reference(stand_in):
    """Eleven documents, three of them longer than a quarter of the tokens, a gap, and another order
    of the keys.
    """
    lengths = np.array([1, 13, -1, 13, 1, 1, 13, 1, 1, 1, 1, 1])
    segments_BT = np.repeat(np.where(lengths > 0, np.arange(1, 13), 0), abs(lengths))[None]
    q, k, v, dout = inputs(batch=1, num_tokens=48)
    spec = AttentionSpec(causal=False, few_documents=True)
    ranges = key_ranges(
        *(TokenInfo(None, jnp.asarray(x)) for x in (segments_BT, segments_BT[:, ::-1])), spec
    )

    @functools.partial(jax.jit, static_argnums=0)
    def results(kernel):
        out, lse = kernel.forward(q, k, v, ranges, spec)
        return (
            out,
            lse,
            *kernel.backward(
                q, k, v, ranges, spec, QueryResults(out, lse, dout, jnp.zeros_like(lse))
            ),
        )

    assert "while" not in str(jax.make_jaxpr(results, static_argnums=0)(cudnn))
    _assert_matches(*([np.asarray(x) for x in results(kernel)] for kernel in (cudnn, reference)))


def test_own_block_with_more_documents_than_two_calls_take_matches_oracle(stand_in):
    """Calls of three and of twelve documents, then a loop: with it, 33 documents, two of a quarter
    of the tokens.
    """
    lengths = (25, -3, 1, 24) + 15 * (2, 1) + (-5,)
    segments_BT = np.concatenate(
        [np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(lengths)]
    )[None]
    q, k, v, dout = inputs(batch=1, num_tokens=segments_BT.size)
    dlse = jnp.ones((1, q.shape[2], segments_BT.size))
    results = functools.partial(_kernel_results, segments_BT, few_documents=True)
    actual = jax.jit(results)(q, k, v, dout, dlse)
    _assert_matches(
        [np.asarray(x) for x in actual], float64_oracle(q, k, v, segments_BT, dout, dlse)
    )


def test_more_than_few_documents_give_nan(stand_in):
    """Calls of three and of eight documents take eleven, of which three have more than six of 24
    queries or keys.
    """
    spec = AttentionSpec(causal=False, few_documents=True)
    q, k, v, _ = inputs(batch=1, num_tokens=24)

    @jax.jit
    def has_nan(*segments):
        tokens = (TokenInfo(None, x[None]) for x in segments)
        return jnp.isnan(cudnn.forward(q, k, v, key_ranges(*tokens, spec), spec)[1]).any()

    def segments(*lengths) -> np.ndarray:
        return np.pad(np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, 24 - sum(lengths)))

    for lengths, key_lengths, is_nan in (
        (11 * [1], 11 * [1], False),
        (12 * [1], 12 * [1], True),
        ((7, 7, 5, 5), (5, 6, 7, 6), False),
        ((7, 7, 5, 5), (5, 5, 7, 7), True),
    ):
        assert bool(has_nan(segments(*lengths), segments(*key_lengths))) == is_nan


def _reordered(x, order_BT, axis: int = 1):
    """x with the tokens of each sequence in this order."""
    return jnp.stack(
        [jnp.take(row, order, axis=axis - 1) for row, order in zip(x, order_BT, strict=True)]
    )


# Changes of PackedOperands, for N = 4, K = 2 and head dim 16: a row of q has 64 elements, a row of
# k 32.
MUTATIONS = {
    "none": {},
    "q offsets one row later": dict(q_offsets=lambda x: x + 64),
    "kv offsets one row later": dict(kv_offsets=lambda x: x + 32),
    "kv offsets with the stride of q": dict(kv_offsets=lambda x: 2 * x),
    "one query less": dict(q_lengths_RM=lambda x: jnp.maximum(x - 1, 0)),
    "one key less": dict(kv_lengths_RM=lambda x: jnp.maximum(x - 1, 0)),
    "one key more": dict(kv_lengths_RM=lambda x: x + 1),
    "keys of another document": dict(kv_offsets=lambda x: x[:, ::-1]),
}


def test_packed_call_with_wrong_operand_differs(stand_in, monkeypatch):
    """The comparison with the oracle detects a wrong offset, stride or length."""
    lengths = (5, 1, -2, 9, 7)
    segments_BT = np.concatenate(
        [np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(lengths)]
    )[None]
    q, k, v, dout = inputs(batch=1, num_tokens=24)
    dlse = jnp.ones((1, q.shape[2], 24))
    oracle = float64_oracle(q, k, v, segments_BT, dout, dlse)
    correct = cudnn_packed.packed_operands
    # it cannot close over `mutation`
    monkeypatch.setattr(cudnn, "_fold_vmap_into_batch", lambda call: call)

    @jax.jit  # one program for all mutations
    def results(mutation):
        def mutated(*args):
            operands = correct(*args)
            versions = [
                operands._replace(
                    **{name: change(getattr(operands, name)) for name, change in changes.items()}
                )
                for changes in MUTATIONS.values()
            ]
            return jax.tree.map(lambda *values: jnp.stack(values)[mutation], *versions)

        monkeypatch.setattr(cudnn_packed, "packed_operands", mutated)
        return _kernel_results(segments_BT, q, k, v, dout, dlse)

    for mutation, name in enumerate(MUTATIONS):
        actual = [np.asarray(x) for x in results(mutation)]
        if name == "none":
            _assert_matches(actual, oracle)
        else:
            with pytest.raises(AssertionError):
                _assert_matches(actual, oracle)


def test_packed_call_under_vmap_matches_oracle(stand_in):
    segments_BT = np.repeat([[3, 0, 1], [1, 2, 4]], [9, 5, 10], axis=1)
    q, k, v, dout = inputs(batch=2, num_tokens=24)
    dlse = jnp.zeros((2, q.shape[2], 24))
    results = jax.vmap(lambda q: _kernel_results(segments_BT, q, k, v, dout, dlse))
    actual = jax.jit(results)(jnp.stack([q, -q]))
    for index, queries in enumerate((q, -q)):
        oracle = float64_oracle(queries, k, v, segments_BT, dout, dlse)
        _assert_matches([np.asarray(x[index]) for x in actual], oracle)


def test_packed_call_with_2_31_elements_raises():
    shape = jax.ShapeDtypeStruct((1, 2**19, 32, 128), jnp.bfloat16)
    ranges = jax.ShapeDtypeStruct((1, 2**19), jnp.int32)
    with pytest.raises(NotImplementedError, match="2147483648 elements .*fewer than 2\\^31"):
        jax.eval_shape(lambda q, x: cudnn.forward(q, q, q, (x, x), AttentionSpec()), shape, ranges)


def test_packed_call_with_window_raises():
    q, k, v, _ = inputs(batch=1)
    with pytest.raises(NotImplementedError, match="window of 7 tokens with packed documents"):
        cudnn.forward(q, k, v, own_ranges(segments()[:1]), AttentionSpec(window=7))


def test_workspace_bytes_of_packed_call_counts_documents():
    """As without documents, for each of two documents per row."""
    shapes = (1, 8192, 32, 128), (1, 8192, 8, 128)
    single = cudnn.workspace_bytes(*shapes, backward=True)
    assert single == 2**27 + 2**20 + 2**27
    assert cudnn.workspace_bytes(*shapes, backward=True, documents_per_row=2) == 2 * single
    assert cudnn.workspace_bytes(*shapes, backward=False, documents_per_row=2) == 0


def _h100(context: int = 1):
    return make_mesh(topology(f"h100:1x{context}"), MeshConfig(context=context))


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_packed_operands_in_lowered_program_are_unchanged():
    """JAX's own wrapper multiplies kv offsets by the stride of q in 0.10.1. N = 4, K = 2, head dim
    64.
    """
    operands = [
        jnp.asarray(x, jnp.int32)
        for x in ([[3, 4]], [[3, 2]], [[0, 768, 2048]], [[640, 128, 1024]])
    ]
    sharding = NamedSharding(_h100(), PartitionSpec())
    q, k = (
        jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.bfloat16, sharding=sharding) for heads in (4, 2)
    )
    lse = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32, sharding=sharding)
    settings = dict(scale=1.0, causal=False)

    def backward(q, k, lse):
        return _jax_internals.cudnn_packed_backward(q, k, k, operands, q, lse, q, **settings)

    forward = jax.jit(
        lambda q, k: _jax_internals.cudnn_packed_forward(q, k, k, operands, **settings)
    )
    assert [x.shape for x in forward.eval_shape(q, k)] == [(1, 8, 4, 64), (2, 4, 8)]
    texts = forward.lower(q, k).as_text(), jax.jit(backward).lower(q, k, lse).as_text()
    for text, num_before in zip(texts, (3, 6), strict=True):
        constants = dict(
            re.findall(r"(%\w+) = stablehlo.constant dense<(.*)> : tensor<.*xi32>", text)
        )
        (call,) = re.findall(r"custom_call @__cudnn\$fmhaSoftmax\w*\((.*?)\)", text)
        names = call.split(", ")[num_before:]
        assert [constants[name] for name in names] == [str(x.tolist()) for x in operands]


def _calls(program) -> set[tuple]:
    """(backward, mask, documents per row) of the cuDNN calls."""
    calls = set()
    for computation in program:
        for call in computation:
            target = call.attributes.get("custom_call_target", "").strip('"')
            if target in (FORWARD, BACKWARD):
                settings = call.backend_config["cudnn_fmha_backend_config"]
                calls.add(
                    (target == BACKWARD, settings["mask_type"], settings["max_seg_per_batch"])
                )
    return calls


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_packed_ring_on_h100s_has_expected_cudnn_calls():
    """Ring step 0 is causal, the others are rectangles, without a loop of calls. Head dim 256 needs
    Hopper.
    """
    mesh, config = _h100(8), AttentionConfig(strategy="ring", kernel="auto")
    assert choose(config, mesh, head_dim=256, dtype=jnp.bfloat16, packed=True).name == "cudnn"
    attend_ring = make(config, mesh, few_documents=True)
    sharding = NamedSharding(mesh, PartitionSpec(None, CONTEXT))
    q, k = (
        jax.ShapeDtypeStruct((1, 4096, heads, 256), jnp.bfloat16, sharding=sharding)
        for heads in (4, 2)
    )
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32, sharding=sharding)

    def loss(q, k, v, positions, segment_ids):
        out, _ = attend_ring(q, k, v, attend_ring.prepare(positions, segment_ids, jax.typeof(q)))
        return out.astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, tokens, tokens)
    program = parse(lowered.compile(compiler_options=dict(WITHOUT_GPU)).as_text())
    assert _calls(program) == {
        (backward, *call)
        for backward in (False, True)
        for call in (("PADDING_CAUSAL", 3), ("PADDING", 3), ("PADDING", 2))
    }
    loops = [x.op_name for computation in program for x in computation if x.opcode == "while"]
    assert [is_in(name, RING_STEP) for name in loops if is_data_dependent(name)] == 2 * [False]
