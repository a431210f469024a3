"""Documents that share prefixes in a packed sequence, against a dense mask and against separate rows,
in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.first_contact import fa3_stand_in
from jaxlc.attention import make
from jaxlc.attention.contract import AttentionSpec, join
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.cudnn_packed import calls_for, document_table
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.query_tiles import make_tiled
from jaxlc.config import AttentionConfig
from jaxlc.sharding.document_layout import natural_order, tree_order, zigzag_order
from tests.attention import cudnn_stand_in
from tests.attention.cases import split_mesh, tiled_results
from tests.tolerances import max_relative_error
from tests.trees import arrays_of, random_documents, separate_rows

TOKENS = 128
# Two trees of one level of prefixes, two plain documents, and padding; and random trees.
ONE_LEVEL = [(11, 0), (43, 0), (19, 2), (1, 2), (12, 2), (9, 0), (7, 6), (5, 6), (14, 0)]
TREES = {"one level": (ONE_LEVEL, 1)}
TREES["two levels"] = random_documents(TOKENS, 2), 2
# Of two ranks, the second one starts with branches, whose prefixes all are on the first one.
BRANCHES = [(8, 0), (8, 1), (8, 2), (8, 3), (1, 4), (1, 3), (1, 2), (29, 1), (40, 0), (5, 9)]
TREES["branches"] = BRANCHES, 4
TREES |= {f"deep {seed}": (random_documents(TOKENS, 4, seed), 4) for seed in range(6)}


def sequence(trees: str) -> dict[str, np.ndarray]:
    """The arrays of the sequence [T] in natural order."""
    documents, num_levels = TREES[trees]
    return arrays_of(documents, TOKENS, num_levels)


def inputs() -> list[np.ndarray]:
    """q, k, v, the gradient of out, and the sinks."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, TOKENS, heads, 8)) for heads in (4, 2, 2, 4)]
    return [*arrays, rng.normal(size=4)]


def dense(is_seen, q, k, v, sinks_N=None):
    """Attention with a dense mask, [T, S] or [B, T, S]."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    is_seen = jnp.broadcast_to(is_seen, (len(q), *is_seen.shape[-2:]))[:, None]
    scores = jnp.where(is_seen, jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.where(is_seen, jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]), 0.0)
    return join(jnp.einsum("bnts,bsnh->btnh", p, v), lse, sinks_N)[0]


def _expected(trees: str, window: int | None, with_sinks: bool):
    """out and gradients with a dense mask."""
    *qkv, dout, sinks_N = inputs()
    positions, segments, prefixes_TD = sequence(trees).values()
    is_own = (segments[:, None] == segments) & (segments > 0)
    is_prefix = (prefixes_TD[:, None] == segments[:, None]) & (prefixes_TD > 0)[:, None]
    distance = positions[:, None] - positions
    is_near = (distance >= 0) & (distance < (window or TOKENS))
    attend = functools.partial(dense, (is_own | is_prefix.any(-1)) & is_near)
    out, vjp = jax.vjp(attend, *qkv, *[sinks_N][: 1 if with_sinks else 0])
    return out, *vjp(dout)


expected = functools.cache(_expected)


def results(
    trees: str,
    order_T: np.ndarray,
    context: int,
    window=None,
    kernel="blockwise",
    with_sinks=False,
    few_documents=False,
    **settings,
):
    """(out, gradients) in natural order; the arrays of the sequence are in the order `order_T`."""
    *qkv, dout, sinks_N = inputs()
    config = AttentionConfig(kernel=kernel, query_block_tokens=16, key_block_tokens=8, **settings)
    attend = make(
        config, split_mesh(context=context), window=window, shared_prefixes=TREES[trees][1],
        few_documents=few_documents,
    )  # fmt: skip
    tokens = [jnp.asarray(x[order_T])[None] for x in sequence(trees).values()]
    q_like = jax.ShapeDtypeStruct(qkv[0].shape, jnp.float64)

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
        assert x.dtype == np.float64
        assert max_relative_error(x, y) <= (1e-12 if y is desired[0] else 1e-11)


def full(*cases):
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch):
    """Sums are in float64, too."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        yield


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    cudnn_stand_in.install(monkeypatch)
    monkeypatch.setattr(cudnn, "unsupported", lambda problem: None)
    fa3_stand_in.install(monkeypatch)


ORDERS = {
    "zigzag": lambda trees, outer, inner: zigzag_order(TOKENS, outer * inner),
    "documents": lambda trees, outer, inner: tree_order(
        *(sequence(trees)[name] for name in ("segment_ids", "prefix_ids")), outer, inner
    ),
}


@pytest.mark.parametrize(
    "trees, order, strategy, outer, inner, kernel",
    [
        ("deep 0", "zigzag", "all_gather", 8, 1, "blockwise"),
        ("two levels", "documents", "ring", 2, 1, "cudnn"),
        ("deep 2", "documents", "hybrid", 2, 2, "blockwise"),
        *full(
            ("deep 1", "documents", "ring", 2, 1, "cudnn"),
            ("one level", "zigzag", "ring", 4, 1, "fa3"),
            ("two levels", "documents", "ring", 2, 1, "fa3"),
            ("one level", "zigzag", "ring", 4, 1, "cudnn"),
            ("one level", "zigzag", "ring", 1, 1, "blockwise"),
            ("one level", "zigzag", "all_gather", 8, 1, "blockwise"),
            ("one level", "documents", "ring", 2, 1, "cudnn"),
            ("one level", "documents", "hybrid", 2, 2, "blockwise"),
            ("deep 1", "zigzag", "ring", 1, 1, "reference"),
            ("deep 2", "zigzag", "ring", 4, 1, "cudnn"),
            ("deep 3", "zigzag", "ulysses", 1, 2, "cudnn"),
            ("deep 4", "documents", "ring", 8, 1, "blockwise"),
            ("deep 5", "documents", "all_gather", 4, 1, "reference"),
            ("deep 0", "documents", "hybrid", 4, 2, "cudnn"),
        ),
    ],
)
def test_trees_match_dense_mask(stand_in, trees, order, strategy, outer, inner, kernel):
    order_T = ORDERS[order](trees, outer, inner)
    degree = dict(ulysses_degree=inner) if strategy == "hybrid" else {}
    degree["few_documents"] = order == "documents"
    actual = results(
        trees, order_T, outer * inner, strategy=strategy, kernel=kernel, with_sinks=outer == 4, **degree
    )  # fmt: skip
    assert_matches(actual, expected(trees, None, outer == 4))


@pytest.mark.parametrize(  # windows that are longer than a branch, and longer than a prefix
    "trees, window, strategy, outer, inner",
    [
        ("one level", 25, "ring", 4, 1),
        ("branches", 8, "ring", 2, 1),
        ("deep 2", 4, "ring", 8, 1),
        *full(
            ("deep 0", 60, "all_gather", 4, 1),
            ("one level", 4, "ulysses", 1, 2),
            ("one level", 50, "ring", 1, 1),
            ("one level", 2, "ring", 2, 1),
            ("one level", 14, "hybrid", 2, 2),
            ("deep 1", 25, "ring", 4, 1),
            ("deep 2", 4, "ulysses", 1, 2),
            ("deep 3", 14, "hybrid", 2, 2),
            ("deep 4", 2, "ring", 2, 1),
            ("deep 5", 9, "ring", 8, 1),
        ),
    ],
)
def test_trees_in_sliding_windows_match_dense_mask(trees, window, strategy, outer, inner):
    context, degree = outer * inner, dict(ulysses_degree=inner) if strategy == "hybrid" else {}
    actual = results(
        trees, zigzag_order(TOKENS, context), context, window=window, strategy=strategy, **degree
    )
    assert_matches(actual, expected(trees, window, False))


@pytest.mark.parametrize(
    "trees, window, strategy, outer, inner, tiles",
    [
        ("one level", 14, "hybrid", 2, 2, 2),
        ("deep 0", 4, "ring", 1, 1, 4),  # on one rank, the keys of a prefix are anywhere before
        ("branches", 8, "ring", 2, 1, 2),
        *full(
            ("deep 2", 25, "ring", 4, 1, 2),
            ("one level", 4, "ring", 1, 1, 4),
            ("one level", 25, "ring", 4, 1, 2),
            ("one level", 60, "ring", 2, 1, 4),  # longer than all documents
            ("one level", 1, "ring", 2, 1, 2),
            ("deep 1", 60, "ring", 2, 1, 4),
            ("deep 2", 4, "ring", 4, 1, 2),
            ("deep 3", 2, "ring", 2, 1, 2),
            ("deep 4", 50, "ulysses", 1, 2, 4),
            ("deep 5", 8, "ring", 8, 1, 2),
            ("deep 1", 14, "hybrid", 2, 2, 2),
            ("deep 2", None, "ring", 2, 1, 2),
        ),
    ],
)
def test_trees_in_tiles_match_dense_mask(trees, window, strategy, outer, inner, tiles):
    """Of the branches in a sub-chunk, the prefix ends before it, or is in it, or both for two
    trees.
    """
    order_T, sinks_N = zigzag_order(TOKENS, outer * inner), inputs()[-1]
    config = AttentionConfig(
        kernel="blockwise", key_block_tokens=8, strategy=strategy, ulysses_degree=inner
    )
    mesh = split_mesh(context=outer * inner)
    tiled = make_tiled(
        config, mesh, tiles=tiles, num_kv_heads=2, window=window, shared_prefixes=TREES[trees][1]
    )
    arrays = sequence(trees).values()
    positions, segments, prefixes = (jnp.asarray(x[order_T])[None] for x in arrays)
    ranges = jax.jit(tiled.prepare)(positions, segments, None, prefixes)
    *actual, dsinks_1N = tiled_results(tiled, order_T, ranges, inputs()[:4], sinks_N)
    assert_matches((*actual, dsinks_1N[0]), expected(trees, window, True))


@pytest.mark.parametrize("trees", ["one level", "deep 2"])
def test_dense_mask_equals_separate_rows(trees):
    """Each document after copies of its prefixes is a row of its own, with later padding."""
    *qkv, dout, _ = inputs()
    documents, _ = TREES[trees]
    places = separate_rows(documents)
    size = max(map(len, places))
    rows = np.stack([np.pad(row, (0, size - len(row))) for row in places])
    is_own = np.stack(
        [
            (np.arange(size) >= len(row) - length) & (np.arange(size) < len(row))
            for row, (length, _) in zip(places, documents)
        ]
    )
    attend = functools.partial(dense, np.tri(size, dtype=bool))
    separate, vjp = jax.vjp(attend, *(x[0, rows] for x in qkv))
    gradients = vjp(jnp.where(is_own[..., None, None], dout[0, rows], 0))
    joined, *totals = (np.zeros(x.shape[1:]) for x in expected(trees, None, False))
    joined[rows[is_own]] = np.asarray(separate)[is_own]
    for total, x in zip(totals, gradients):
        np.add.at(total, rows, x)
    assert_matches([joined, *totals], [np.asarray(x)[0] for x in expected(trees, None, False)])


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


@pytest.mark.parametrize(
    "documents, most",
    [
        # trees that fit on a rank, and a tree whose documents are longer than a rank's tokens
        ([x for i in range(0, 90, 3) for x in [(20 + i, 0), (30, i + 1), (20, i + 1)]], 1.15),
        ([(1500, 0), (500, 1), (130, 2), (130, 2), (500, 1), (130, 5)], 1.1),
    ],
    ids=["small", "large"],
)
def test_work_of_trees_is_balanced(documents, most):
    """The sum over ring steps of the largest number of pairs of a rank, relative to the mean."""
    context, num_tokens = 8, 4096
    arrays = arrays_of(documents, num_tokens, 2)
    order_T = tree_order(arrays["segment_ids"], arrays["prefix_ids"], context)
    assert sorted(order_T) == list(range(num_tokens))
    rank_T = np.empty(num_tokens, int)
    rank_T[order_T] = np.arange(num_tokens) // (num_tokens // context)
    work = np.zeros((context, context), int)
    for (length, _), row in zip(documents, separate_rows(documents)):
        seen = np.eye(context, dtype=int)[rank_T[row]].cumsum(0)[-length:]
        np.add.at(work, rank_T[row[-length:]], seen)
    by_step = [[work[rank, rank - step] for rank in range(context)] for step in range(context)]
    assert np.max(by_step, axis=1).sum() <= most * work.sum() / context
    for rank in order_T.reshape(context, -1):
        assert (np.diff(rank) > 0).all()
