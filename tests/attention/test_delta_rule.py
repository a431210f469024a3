"""The gated delta rule and its convolution against loops over tokens, on split sequences."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlc
from jaxlc.attention import gated_delta_rule, natural_order, short_convolution, zigzag_order
from jaxlc.attention.query_tiles import layout_of, tiles_of
from jaxlc.attention.recurrence import chunks, sharded_rule, tiled_recurrence
from jaxlc.attention.recurrence.sharded_recurrence import (
    Documents,
    Filter,
    Operands,
    ShardedRecurrence,
)
from jaxlc.attention.recurrence.tiled_recurrence import TiledRecurrence
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.document_layout import chained_order, zigzag_chain
from tests import trees
from tests.tolerances import FLOAT32_PARITY, max_relative_error

# borders inside chunks and between ranks; the last document is padding
LENGTHS = 5, 190, 61, 1, 1, 130, 100, 24
SEGMENTS = np.repeat([1, 2, 3, 4, 5, 6, 7, 0], LENGTHS)[None].astype(np.int32)
FLOAT64_PARITY = 1e-12
NAMES = "out", "q", "k", "v", "g", "beta"
CHAINS = 3
RULE = chunks.Rule(scale=8**-0.5)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that a rank has several chunks."""
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 64)


def mesh_of(context=1, tensor=1):
    return jaxlc.make_mesh(
        context=context, tensor=tensor, devices=jax.devices()[: context * tensor]
    )


def oracle(q, k, v, g, beta, segments):
    """The recurrence, token by token."""
    k, q = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (k, q * q.shape[-1] ** -0.5))
    is_first = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1] != segments

    def token(S, inputs):
        q, k, v, g, beta, is_first, segment = inputs
        S = jnp.where(is_first[:, None, None, None], 0, S * jnp.exp(g)[..., None, None])
        error = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, S))
        S = S + jnp.einsum("bhk,bhv->bhkv", k, error)
        return S, jnp.where(segment[:, None, None] == 0, 0, jnp.einsum("bhk,bhkv->bhv", q, S))

    batch, _, heads, value_dim = v.shape
    S = jnp.zeros((batch, heads, k.shape[-1], value_dim), v.dtype)
    inputs = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, g, beta, is_first, segments))
    return jax.lax.scan(token, S, inputs)[1].swapaxes(0, 1)


def operands(dtype, num_tokens=512, key_heads=2, heads=4, key_dim=8, value_dim=6):
    keys = jax.random.split(jax.random.key(0), 5)
    normal = functools.partial(jax.random.normal, dtype=dtype)
    q, k = (normal(key, (1, num_tokens, key_heads, key_dim)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -jax.nn.softplus(normal(keys[3], (1, num_tokens, heads))) * 0.3
    # of one document, so that the sums of the gates of a chunk are large
    forgets = jnp.arange(num_tokens) // 24 == 3
    g = jnp.where(forgets[:, None], -1000.0, g)
    return (
        q,
        k,
        normal(keys[2], (1, num_tokens, heads, value_dim)),
        g,
        jax.nn.sigmoid(normal(keys[4], g.shape)),
    )


def filters(dtype, num_taps=4, heads=4):
    """Of q, k and v, with the sizes of `operands`."""
    shapes = (num_taps, 2, 8), (num_taps, 2, 8), (num_taps, heads, 6)
    return [
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(jax.random.split(jax.random.key(1), 3), shapes)
    ]


def operands_of(q, k, v, g, beta, *filters):
    return Operands(q, k, v, g, beta, None, tuple(map(Filter, filters)))


def values_and_gradients(function, arrays):
    """The output, and the gradients of a weighted sum of it."""
    weights = jnp.sin(jnp.arange(arrays[2].size, dtype=arrays[2].dtype)).reshape(arrays[2].shape)

    def weighted(*arrays):
        out = function(*arrays)
        return (out * weights).sum(), out

    (_, out), grads = jax.jit(
        jax.value_and_grad(weighted, tuple(range(len(arrays))), has_aux=True)
    )(*arrays)
    return [out, *grads]


@functools.cache
def expected(dtype, is_packed):
    segments = SEGMENTS if is_packed else np.ones_like(SEGMENTS)
    return values_and_gradients(
        functools.partial(oracle, segments=jnp.asarray(segments)), operands(dtype)
    )


@pytest.mark.parametrize(
    "mesh, token_order, is_packed, group_tokens, dtype",
    [
        (dict(context=1), "natural", True, 512, "float64"),
        (dict(context=1), "zigzag", False, 128, "float64"),
        (dict(context=4), "natural", True, 1024, "float64"),
        (dict(context=8), "zigzag", True, 1024, "float64"),
        (dict(context=2, tensor=4), "zigzag", True, 64, "float32"),
    ],
)
def test_gated_delta_rule_equals_a_loop_over_tokens(
    monkeypatch, mesh, token_order, is_packed, group_tokens, dtype
):
    monkeypatch.setattr(sharded_rule, "GROUP_TOKENS", group_tokens)
    with jax.enable_x64(dtype == "float64"):
        mesh = mesh_of(**mesh)
        order = (
            zigzag_order(512, mesh.shape["context"]) if token_order == "zigzag" else np.arange(512)
        )
        segments = jnp.asarray(SEGMENTS[:, order]) if is_packed else None

        def ours(*arrays):
            arrays = (x[:, order] for x in arrays)
            out = gated_delta_rule(
                *arrays, mesh=mesh, segment_ids=segments, token_order=token_order
            )
            return out[:, natural_order(order)]

        actual = values_and_gradients(ours, operands(dtype))
        for name, a, b in zip(NAMES, actual, expected(dtype, is_packed), strict=True):
            bound = FLOAT64_PARITY if dtype == "float64" else FLOAT32_PARITY
            assert max_relative_error(a, b) < bound, name


@pytest.mark.parametrize(
    "mesh, tiles, dtype",
    [
        (dict(context=4), 4, "float64"),
        pytest.param(dict(context=1), 4, "float64", marks=pytest.mark.full),
        pytest.param(dict(context=2, tensor=2), 2, "float32", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tiles_equal_whole_sequences(monkeypatch, mesh, tiles, dtype):
    """The mixer, convolutions included; pieces are shorter than some documents, and of several
    groups.
    """
    monkeypatch.setattr(tiled_recurrence, "_TOKENS_AT_ONCE", 64)
    with jax.enable_x64(dtype == "float64"):
        mesh = mesh_of(**mesh)
        segments = jnp.asarray(SEGMENTS[:, zigzag_order(512, mesh.shape["context"])])
        documents = Documents(segments, None)
        arrays = (*operands(dtype), *filters(dtype))

        def whole(*arrays):
            return ShardedRecurrence(mesh, RULE)(*operands_of(*arrays), ranges=documents)

        def in_tiles(*arrays):
            net = TiledRecurrence(mesh, RULE, tiles, num_taps=4)
            return mixed_in_tiles(net, operands_of(*arrays), documents)

        actual, exact = (values_and_gradients(function, arrays) for function in (in_tiles, whole))
        for name, a, b in zip(
            (*NAMES, "filter_q", "filter_k", "filter_v"), actual, exact, strict=True
        ):
            bound = FLOAT64_PARITY if dtype == "float64" else FLOAT32_PARITY
            assert max_relative_error(a, b) < bound, name


def mixed_in_tiles(net: TiledRecurrence, operands: Operands, documents: Documents):
    """As `ShardedRecurrence`; tokens are in zigzag order."""
    context, filters = net.mesh.shape["context"], operands.filters
    tokens = jax.tree.map(lambda x: tiles_of(x, context, net.tiles), operands[:6])
    ranges = net.prepare(*documents)

    def before_tiles(x):
        before = net.tokens_before(x.reshape(*x.shape[:3], -1), ranges.prefixes_BtD)
        return net.before_tiles(before.reshape(*before.shape[:2], *x.shape[3:]))

    tiles = tokens, tuple(map(before_tiles, tokens[:3])), ranges
    maps = jax.lax.map(lambda tile: net.maps((*tile[0], filters), *tile[1:]), tiles)

    def outputs(tile):
        (tokens, before, ranges), states = tile
        return net.outputs((*tokens, filters), before, states, ranges)

    return layout_of(jax.lax.map(outputs, (tiles, net.states(maps))), context)


def orders_of(context):
    """Four sequences of documents, with their orders: sharded and cut documents; one document; more
    long documents than chains, which are cut in sequence; zigzag order."""
    documents = LENGTHS[:-1], (510,), (70, 67, 66, 65, 1, 80, 70, 73), LENGTHS[:-1]
    segments = [
        np.pad(np.repeat(np.arange(1, len(x) + 1), x), (0, 512 - sum(x))).astype(np.int32)
        for x in documents
    ]
    chained = functools.partial(chained_order, context=context, num_chains=CHAINS, min_tokens=3)
    return np.stack(segments), [*map(chained, segments[:3]), zigzag_chain(512, context)]


@pytest.mark.parametrize(
    "mesh, dtype",
    [
        pytest.param(dict(context=2), "float64", marks=pytest.mark.full),
        (dict(context=4), "float64"),
        pytest.param(dict(context=8), "float64", marks=pytest.mark.full),
        pytest.param(dict(context=2, tensor=2), "float32", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_order_of_documents_equals_natural_order_on_one_device(monkeypatch, mesh, dtype):
    """The mixer, convolutions included, with several groups of a fragment, on ranks with 2 x 3
    fragments.
    """
    monkeypatch.setattr(sharded_rule, "GROUP_TOKENS", 64)
    segments, orders = orders_of(mesh["context"])
    with jax.enable_x64(dtype == "float64"):
        *tokens, filter_q, filter_k, filter_v = (*operands(dtype), *filters(dtype))
        factors = jnp.linspace(0.5, 1, 4, dtype=dtype)
        tokens = [x * factors.reshape(4, *[1] * (x.ndim - 1)) for x in tokens]  # four sequences
        arrays = *tokens, filter_q, filter_k, filter_v

        def natural(*arrays):
            return ShardedRecurrence(mesh_of(), RULE)(
                *operands_of(*arrays), ranges=Documents(jnp.asarray(segments), None)
            )

        def by_document(*arrays):
            *tokens, filter_q, filter_k, filter_v = arrays
            net = ShardedRecurrence(mesh_of(**mesh), RULE, num_chains=CHAINS, num_taps=4)
            order_BT, fragments_BT = (jnp.stack(x) for x in zip(*orders))
            by_row = lambda x, order_BT: jax.vmap(lambda x, order_T: x[order_T])(x, order_BT)  # noqa: E731
            ranges = net.prepare(by_row(jnp.asarray(segments), order_BT), fragments_BT=fragments_BT)
            tokens = [by_row(x, order_BT) for x in tokens]
            out = net(*operands_of(*tokens, filter_q, filter_k, filter_v), ranges=ranges)
            return by_row(out, jnp.stack([natural_order(order.order_T) for order in orders]))

        actual, exact = (
            values_and_gradients(function, arrays) for function in (by_document, natural)
        )
        bound = FLOAT64_PARITY if dtype == "float64" else FLOAT32_PARITY
        for name, a, b in zip(
            (*NAMES, "filter_q", "filter_k", "filter_v"), actual, exact, strict=True
        ):
            assert max_relative_error(a, b) < bound, name


# Documents by their number of levels of prefixes; see `trees.Documents`. Several levels start in one
# chunk, and on other ranks; some documents are shorter than the convolutions reach.
TREES = {
    1: [
        (150, 0),
        (70, 1),
        (1, 1),
        (2, 1),
        (60, 1),
        (2, 0),
        (9, 6),
        (3, 6),
        (1, 0),
        (3, 9),
        (90, 0),
    ],
    4: [
        *[(71, 0), (33, 1), (1, 2), (2, 3), (1, 4), (45, 4), (1, 3), (20, 2)],
        *[(1, 1), (1, 9), (1, 10), (1, 11), (66, 1)],
        *[(1, 0), (2, 14), (1, 15), (2, 16), (3, 17), (1, 17), (77, 16), (1, 20)],
        *[(30, 0), (25, 22), (1, 23), (2, 24), (13, 25), (7, 22), (90, 0)],
    ],
}


def packed_trees(levels: int):
    """segments [1, 512] and prefixes [1, 512, levels] of TREES. With each document as a row of its own, after its
    prefixes: the places of the tokens of a row, padded with -1, and for each token a row that has it and the place
    there."""
    _, segments, prefixes = trees.arrays_of(TREES[levels], 512, levels).values()
    rows = trees.separate_rows(TREES[levels])
    index_RL = np.full((len(rows), max(map(len, rows))), -1)
    row_of_token = np.zeros((2, np.count_nonzero(segments)), int)
    for row, places in enumerate(rows):
        index_RL[row, : len(places)] = places
        row_of_token[:, places] = np.full(len(places), row), np.arange(len(places))
    return segments[None], prefixes[None], index_RL, row_of_token


def of_kind(kind: str, operands: Operands) -> tuple[chunks.Rule, Operands]:
    if kind == "mamba2":
        rule = chunks.Rule(scale=1.0, corrects=False)
        filters = tuple(x._replace(bias_hW=x.taps_PhW[0]) for x in operands.filters)
        return rule, operands._replace(skip_BTH=1 + operands.beta_BTH, filters=filters)
    if kind == "kimi_delta":
        by_channel = operands.g_BTH[..., None] * jnp.linspace(0, 3, 8)
        return RULE, operands._replace(g_BTH=by_channel)
    return RULE, operands


@pytest.mark.parametrize(
    "kind, context, tiles, levels, dtype",
    [
        # The heavy recurrent_oracle.py has trees of Mamba-2 and Kimi Delta Attention, not in tiles.
        pytest.param(
            *case, marks=[] if case == ("mamba2", 4, 16, 4, "float64") else pytest.mark.full
        )
        for case in [
            ("gated_delta_net", 4, 0, 4, "float64"),
            ("mamba2", 4, 0, 4, "float64"),
            ("kimi_delta", 1, 0, 1, "float64"),
            *(
                (kind, context, tiles, levels, dtype)
                for levels in TREES
                for kind, context, tiles, dtype in [
                    ("gated_delta_net", 1, 0, "float64"),
                    ("gated_delta_net", 4, 0, "float32"),
                    ("gated_delta_net", 4, 8, "float64"),
                    ("mamba2", 4, 16, "float64"),
                    ("mamba2", 1, 0, "float64"),
                    ("kimi_delta", 4, 0, "float64"),
                    ("kimi_delta", 1, 4, "float64"),
                    ("kimi_delta", 4, 8, "float32"),
                ]
            ),
        ]
    ],
)
def test_branches_equal_separate_rows(kind, context, tiles, levels, dtype):
    """Prefixes shorter and longer than a chunk and a piece of a tile."""
    segments, prefixes, index_RL, row_of_token = packed_trees(levels)
    with jax.enable_x64(dtype == "float64"):
        order = zigzag_order(512, context)
        arrays, mesh = (*operands(dtype), *filters(dtype)), mesh_of(context=context)

        def tree(*arrays):
            *tokens, filter_q, filter_k, filter_v = arrays
            documents = Documents(jnp.asarray(segments[:, order]), jnp.asarray(prefixes[:, order]))
            tokens = (x[:, order] for x in tokens)
            rule, operands = of_kind(kind, operands_of(*tokens, filter_q, filter_k, filter_v))
            if tiles:
                net = TiledRecurrence(mesh, rule, tiles, num_taps=4)
                return mixed_in_tiles(net, operands, documents)[:, natural_order(order)]
            out = ShardedRecurrence(mesh, rule)(*operands, ranges=documents)
            return out[:, natural_order(order)]

        def separate(*arrays):
            *tokens, filter_q, filter_k, filter_v = arrays
            tokens = (x[0, index_RL] for x in tokens)
            rule, operands = of_kind(kind, operands_of(*tokens, filter_q, filter_k, filter_v))
            documents = Documents(jnp.asarray(index_RL >= 0, jnp.int32), None)
            out = ShardedRecurrence(mesh_of(), rule)(*operands, ranges=documents)
            return jnp.zeros_like(arrays[2]).at[0, : row_of_token.shape[1]].set(out[*row_of_token])

        actual, exact = (values_and_gradients(function, arrays) for function in (tree, separate))
        bound = FLOAT64_PARITY if dtype == "float64" else FLOAT32_PARITY
        for name, a, b in zip(
            (*NAMES, "filter_q", "filter_k", "filter_v"), actual, exact, strict=True
        ):
            assert max_relative_error(a, b) < bound, name


def test_bytes_between_ranks_do_not_depend_on_the_length():
    mesh = mesh_of(context=4)

    def collectives(num_tokens):
        shapes = jax.eval_shape(functools.partial(operands, "float32", num_tokens))
        rule = jax.jit(functools.partial(gated_delta_rule, mesh=mesh, token_order="zigzag"))
        text = rule.lower(*shapes).as_text()
        return sorted(
            re.findall(
                r'"stablehlo\.(?:all_reduce|all_gather|all_to_all|collective_permute)".*', text
            )
        )

    lengths = [
        re.sub(r"%\w+|handle = \d+", "", "\n".join(collectives(num_tokens)))
        for num_tokens in (1024, 8192)
    ]
    assert lengths[0] == lengths[1] and "collective_permute" in lengths[0]


def test_inverse_of_equal_keys_is_exact():
    A = np.tril(np.ones((128, 128), np.float32), -1)
    exact = np.linalg.inv(np.eye(128) + A.astype(np.float64))
    assert max_relative_error(chunks.unit_lower_inverse(jnp.asarray(A)), exact) < FLOAT32_PARITY


def test_equal_keys_of_a_chunk_without_decay(monkeypatch):
    """Each token replaces the value of the one before, so it reads its own value."""
    monkeypatch.undo()
    size = chunks.CHUNK_TOKENS
    k = jnp.ones((1, size, 1, 4)) / 2
    v = jax.random.normal(jax.random.key(1), (1, size, 1, 4))
    out = gated_delta_rule(
        k, k, v, jnp.zeros((1, size, 1)), jnp.ones((1, size, 1)), mesh=mesh_of(), scale=1.0
    )
    assert max_relative_error(out, v) < 1e-4


@pytest.mark.parametrize(
    "context, token_order", [(1, "natural"), (4, "natural"), (4, "zigzag"), (8, "zigzag")]
)
def test_short_convolution_equals_numpy_per_document(context, token_order):
    with jax.enable_x64():
        x = jax.random.normal(jax.random.key(0), (1, 512, 6), jnp.float64)
        weights = jax.random.normal(jax.random.key(1), (4, 6), jnp.float64)
        mesh = mesh_of(context=context)
        order = zigzag_order(512, context) if token_order == "zigzag" else np.arange(512)

        def ours(x, weights):
            segments = jnp.asarray(SEGMENTS[:, order])
            out = short_convolution(
                x[:, order], weights, mesh=mesh, segment_ids=segments, token_order=token_order
            )
            return out[:, natural_order(order)]

        def theirs(x, weights):
            documents = jnp.split(x, np.cumsum(LENGTHS)[:-1], axis=1)
            padded = [jnp.pad(document, ((0, 0), (3, 0), (0, 0))) for document in documents]
            return jnp.concatenate(
                [sum(p[:, i : p.shape[1] - 3 + i] * weights[i] for i in range(4)) for p in padded],
                axis=1,
            )

        loss = lambda function: lambda x, weights: jnp.sin(function(x, weights)).sum()  # noqa: E731
        assert max_relative_error(ours(x, weights), theirs(x, weights)) < FLOAT64_PARITY
        for a, b in zip(*(jax.grad(loss(f), (0, 1))(x, weights) for f in (ours, theirs))):
            assert max_relative_error(a, b) < FLOAT64_PARITY


def test_gradients_of_short_convolution_in_bfloat16_round_once():
    keys = jax.random.split(jax.random.key(0), 3)
    x, dout = (jax.random.normal(key, (1, 512, 6), jnp.bfloat16) for key in keys[:2])
    weights = jax.random.normal(keys[2], (4, 6))
    convolution = functools.partial(
        short_convolution, mesh=mesh_of(context=2), segment_ids=jnp.asarray(SEGMENTS)
    )

    def gradients(dtype):
        return jax.vjp(convolution, x.astype(dtype), weights)[1](dout.astype(dtype))

    (dx, dweights), (wide, expected) = map(gradients, (jnp.bfloat16, jnp.float32))
    assert (dx != wide.astype(jnp.bfloat16)).mean() < 0.01  # order of sums in float32
    assert max_relative_error(dweights, expected) < FLOAT32_PARITY


def test_invalid_arguments_raise():
    q, k, v, g, beta = operands("float32")
    mesh = mesh_of(context=2)
    with pytest.raises(UserError, match="H a multiple of G"):
        gated_delta_rule(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3], mesh=mesh)
    with pytest.raises(UserError, match=r"expected q and k \[B, T, G, K\]"):
        gated_delta_rule(q, k, v, g[..., 0], beta, mesh=mesh)
    with pytest.raises(Unsupported, match="segment 1 of sequence 0 is not contiguous"):
        gated_delta_rule(
            q, k, v, g, beta, mesh=mesh, segment_ids=np.tile(np.int32([[1, 2]]), (1, 256))
        )
    with pytest.raises(UserError, match="invalid token_order='sorted'"):
        gated_delta_rule(q, k, v, g, beta, mesh=mesh, token_order="sorted")
    with pytest.raises(UserError, match=r"invalid shape \(1, 8\) for segment_ids"):
        short_convolution(q[..., 0], jnp.ones((4, 2)), mesh=mesh, segment_ids=np.ones((1, 8), "i4"))
    with pytest.raises(UserError, match="a convolution of 300 taps reaches beyond the 256 tokens"):
        short_convolution(q[..., 0], jnp.ones((300, 2)), mesh=mesh)
