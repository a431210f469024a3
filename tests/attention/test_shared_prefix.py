"""Documents that share a prefix in a packed sequence, against a dense mask and against separate
rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention import make
from jaxlc.attention.contract import AttentionSpec, join
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.cudnn_packed import calls_for, document_table
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.query_tiles import make_tiled
from jaxlc.config import AttentionConfig
from jaxlc.sharding.document_layout import document_order, natural_order, zigzag_order
from tests.attention import cudnn_stand_in
from tests.attention.cases import split_mesh, tiled_results
from tests.tolerances import FLOAT32_PARITY, max_relative_error

# (length, number of the document whose tokens come before it; 0: none). Two trees, two plain
# documents, padding.
DOCUMENTS = [(11, 0), (43, 0), (19, 2), (1, 2), (12, 2), (9, 0), (7, 6), (5, 6), (14, 0)]
TOKENS = 128


def sequence() -> dict[str, np.ndarray]:
    """The arrays of the sequence [T] in natural order."""
    lengths, parents = zip(*DOCUMENTS)
    starts = [lengths[parent - 1] if parent else 0 for parent in parents]
    padding = TOKENS - sum(lengths)
    assert padding > 0
    arrays = dict(
        positions=np.concatenate(
            [start + np.arange(length) for start, length in zip(starts, lengths)]
        ),
        segment_ids=np.repeat(np.arange(1, len(lengths) + 1), lengths),
        prefix_ids=np.repeat(parents, lengths)[:, None],
    )
    return {
        name: np.pad(x, [(0, padding), (0, 0)][: x.ndim]).astype(np.int32)
        for name, x in arrays.items()
    }


def inputs() -> list[np.ndarray]:
    """q, k, v, the gradient of out, and the sinks."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, TOKENS, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)]
    return [*arrays, rng.normal(size=4).astype(np.float32)]


def _expected(window: int | None, with_sinks: bool):
    """out and gradients with a dense mask."""
    *qkv, dout, sinks_N = inputs()
    positions, segments, prefixes_T1 = sequence().values()
    prefixes = prefixes_T1[:, 0]
    is_own = (segments[:, None] == segments) & (segments > 0)
    is_seen = is_own | ((prefixes[:, None] == segments) & (prefixes[:, None] > 0))
    distance = positions[:, None] - positions
    is_seen &= (distance >= 0) & (distance < (window or TOKENS))

    def attend(q, k, v, sinks_N):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.where(is_seen, jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        p = jnp.where(
            is_seen, jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]), 0.0
        )
        out = jnp.einsum("bnts,bsnh->btnh", p, v)
        return join(out, lse, sinks_N if with_sinks else None)[0]

    out, vjp = jax.vjp(attend, *qkv, sinks_N)
    return out, *vjp(dout)[: 4 if with_sinks else 3]


expected = functools.cache(_expected)


def results(
    order_T: np.ndarray, context: int, window=None, kernel="blockwise", with_sinks=False, **settings
):
    """(out, gradients) in natural order; the arrays of the sequence are in the order `order_T`."""
    *qkv, dout, sinks_N = inputs()
    config = AttentionConfig(kernel=kernel, query_block_tokens=16, key_block_tokens=8, **settings)
    attend = make(config, split_mesh(context=context), window=window, shared_prefixes=1)
    tokens = [jnp.asarray(x[order_T])[None] for x in sequence().values()]
    q_like = jax.ShapeDtypeStruct(qkv[0].shape, jnp.float32)

    @jax.jit
    def run(qkv, dout, sinks_N):
        positions, segments, prefixes = tokens
        ranges = attend.prepare(positions, segments, q_like, prefixes)

        def attended(q, k, v, sinks_N):
            operands = (x[:, order_T] for x in (q, k, v))
            return attend(*operands, ranges, sinks_N if with_sinks else None)[0][
                :, natural_order(order_T)
            ]

        out, vjp = jax.vjp(attended, *qkv, sinks_N)
        return out, *vjp(dout)[: 4 if with_sinks else 3]

    return run(qkv, dout, sinks_N)


def assert_matches(actual, desired) -> None:
    for x, y in zip(actual, desired, strict=True):
        assert max_relative_error(x, y) <= FLOAT32_PARITY


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    cudnn_stand_in.install(monkeypatch)
    monkeypatch.setattr(cudnn, "unsupported", lambda problem: None)


ORDERS = {
    "zigzag": lambda outer, inner: zigzag_order(TOKENS, outer * inner),
    "documents": lambda outer, inner: document_order(
        sequence()["segment_ids"], outer, inner, ascending=True
    ),
}


@pytest.mark.parametrize(
    "order, strategy, outer, inner, kernel",
    [
        ("zigzag", "ring", 1, 1, "blockwise"),
        ("zigzag", "ring", 4, 1, "cudnn"),
        ("zigzag", "all_gather", 8, 1, "blockwise"),
        ("documents", "ring", 2, 1, "cudnn"),
        ("documents", "hybrid", 2, 2, "blockwise"),
        pytest.param("zigzag", "ulysses", 1, 2, "cudnn", marks=pytest.mark.full),
        pytest.param("documents", "ring", 8, 1, "blockwise", marks=pytest.mark.full),
        pytest.param("documents", "all_gather", 4, 1, "blockwise", marks=pytest.mark.full),
        pytest.param("documents", "hybrid", 4, 2, "cudnn", marks=pytest.mark.full),
    ],
)
def test_trees_match_dense_mask(stand_in, order, strategy, outer, inner, kernel):
    order_T = ORDERS[order](outer, inner)
    degree = dict(ulysses_degree=inner) if strategy == "hybrid" else {}
    actual = results(
        order_T, outer * inner, strategy=strategy, kernel=kernel, with_sinks=outer == 4, **degree
    )
    assert_matches(actual, expected(None, outer == 4))


@pytest.mark.parametrize(  # windows that are longer than a branch, and longer than a prefix
    "window, strategy, outer, inner",
    [
        (4, "ulysses", 1, 2),
        (50, "ring", 1, 1),
        (4, "ring", 8, 1),
        (25, "ring", 4, 1),
        (60, "all_gather", 4, 1),
        pytest.param(14, "hybrid", 2, 2, marks=pytest.mark.full),
        pytest.param(2, "ring", 2, 1, marks=pytest.mark.full),
    ],
)
def test_trees_in_sliding_windows_match_dense_mask(window, strategy, outer, inner):
    context, degree = outer * inner, dict(ulysses_degree=inner) if strategy == "hybrid" else {}
    actual = results(
        zigzag_order(TOKENS, context), context, window=window, strategy=strategy, **degree
    )
    assert_matches(actual, expected(window, False))


@pytest.mark.parametrize(
    "window, strategy, outer, inner, tiles",
    [
        (4, "ring", 1, 1, 4),  # on one rank, the keys of a prefix are anywhere before
        (25, "ring", 4, 1, 2),
        (60, "ring", 2, 1, 4),  # longer than all documents
        (14, "hybrid", 2, 2, 2),
        pytest.param(2, "ring", 2, 1, 2, marks=pytest.mark.full),
        pytest.param(50, "ulysses", 1, 2, 4, marks=pytest.mark.full),
        pytest.param(1, "ring", 2, 1, 2, marks=pytest.mark.full),
        pytest.param(8, "ring", 8, 1, 2, marks=pytest.mark.full),
        pytest.param(None, "ring", 2, 1, 2, marks=pytest.mark.full),
    ],
)
def test_trees_in_sliding_windows_of_tiles_match_dense_mask(window, strategy, outer, inner, tiles):
    """Of the branches in a sub-chunk, the prefix ends before it, or is in it, or both for two
    trees.
    """
    order_T, sinks_N = zigzag_order(TOKENS, outer * inner), inputs()[-1]
    config = AttentionConfig(
        kernel="blockwise", key_block_tokens=8, strategy=strategy, ulysses_degree=inner
    )
    mesh = split_mesh(context=outer * inner)
    tiled = make_tiled(config, mesh, tiles=tiles, num_kv_heads=2, window=window, shared_prefixes=1)
    positions, segments, prefixes = (jnp.asarray(x[order_T])[None] for x in sequence().values())
    ranges = jax.jit(tiled.prepare)(positions, segments, None, prefixes)
    *actual, dsinks_1N = tiled_results(tiled, order_T, ranges, inputs()[:4], sinks_N)
    assert_matches((*actual, dsinks_1N[0]), expected(window, True))


def test_dense_mask_equals_separate_rows():
    """Each branch with a copy of its prefix is a row of its own."""
    *qkv, _, _ = inputs()
    ends = np.cumsum([length for length, _ in DOCUMENTS])
    attend = make(AttentionConfig(kernel="reference"), split_mesh(context=1))
    out = np.asarray(expected(None, False)[0])
    for number, (length, parent) in enumerate(DOCUMENTS):
        rows = np.arange(ends[number] - length, ends[number])
        if parent:
            rows = np.concatenate(
                [np.arange(ends[parent - 1] - DOCUMENTS[parent - 1][0], ends[parent - 1]), rows]
            )
        separate = attend(*(x[:, rows] for x in qkv))[0]
        assert max_relative_error(separate[:, -length:], out[:, rows[-length:]]) <= FLOAT32_PARITY


def test_table_of_interleaved_branches_has_overlapping_keys():
    """Each document of a packed call has its own keys, so the branches of a prefix must be
    contiguous on a rank.
    """

    def overlaps(prefixes) -> bool:
        queries = TokenInfo(
            jnp.full((1, 8), 9), jnp.arange(1, 9)[None], jnp.asarray(prefixes)[None, :, None]
        )
        keys = TokenInfo(jnp.zeros((1, 8), int), jnp.repeat(jnp.array([11, 12]), 4)[None])
        spec = AttentionSpec(causal=False)
        ranges = key_ranges(queries, keys, spec).prefixes[0]
        table = document_table(
            *ranges, 8, calls_for(1, 8, 8, causal=False, few_documents=False), causal=False
        )
        used = np.zeros(8, int)
        for start, length in zip(table.repeated.kv_start, table.repeated.kv_length):
            used[int(start) : int(start + length)] += 1
        return bool((used > 1).any())

    assert not overlaps([11, 11, 11, 0, 12, 12, 12, 12])
    assert overlaps([11, 12, 11, 0, 12, 12, 12, 12])
