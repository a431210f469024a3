"""Kernels of recurrences over chunks (Pallas on Triton): one for the factors of a chunk, one for
the scan over chunks.

Both compute what `chunks.py` describes, with one launch for all chunks. A program of the first
kernel owns one chunk and value head. Where it is differentiated, it saves the inverse of I + A and
the scores, arrays [C, C]; its backward computes the rest of the chunk again. A program of the
second one owns some columns of one head's state, and keeps them in registers.

Products of float32 factors are sums of six products of bfloat16 factors. Those are in shared memory;
of TF32 factors, each thread would have copies in its registers. Triton's sizes are powers of 2.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxlc.core.errors import Unsupported

# Less than `chunks.CHUNK_TOKENS`, which it divides: a program has about ten arrays [C, K] or [C, C]
# of float32 in its registers.
KERNEL_TOKENS = 64
# Stages are loads in flight, each with shared memory of its own.
_FACTOR_PARAMS = dict(num_warps=8, num_stages=1)
_SCAN_PARAMS = dict(num_warps=4, num_stages=2)
_SCAN_COLUMNS = 32
_COLUMNS = 64  # of one step of a loop over the columns of keys or values


def check_devices(devices: Iterable[jax.Device]) -> None:
    """Raises Unsupported if a device is a GPU that Triton's products do not support."""
    for device in devices:
        capability = getattr(device, "compute_capability", None)  # a string; CPUs have none
        if capability is not None and float(capability) < 8:
            raise Unsupported(
                "config.runtime.delta_kernel='pallas' needs GPUs of compute capability 8.0 or higher, and"
                f" {device.device_kind} has {capability}; use --config.runtime.delta_kernel=xla"
            )


class Operands(NamedTuple):
    """One chunk of one head inside of a kernel; or arrays of all chunks, or references to them."""

    q: jax.Array  # [C, K], scaled, 0 at padding; [B, L, G, K]
    k: jax.Array  # [C, K]; [B, L, G, K]
    v: jax.Array  # [C, V]; [B, L, H, V]
    g: jax.Array  # the terms of `chunks._split` [terms, C]; [terms, B, L, H]
    beta: jax.Array  # [C]; [B, L, H]


class Factors(NamedTuple):
    """As `chunks._Chunks`, of one chunk and head."""

    q: jax.Array
    out: jax.Array
    decay: jax.Array  # a number
    correction: jax.Array
    added: jax.Array


_NUM_FACTORS = len(Factors._fields)


def _narrow(dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    """a b with float32 sums, of factors that are rounded to `dtype`."""
    if dtype == jnp.float32:
        return _exact(a, b)
    return lax.dot(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b as precise as with float32 factors: each is a sum of three of bfloat16."""
    (a0, a1, a2), (b0, b1, b2) = _parts(a), _parts(b)
    # By the parts of a, of which only one is in registers as a factor, and the smallest first.
    pairs = (a2, b0), (a1, b1), (a1, b0), (a0, b2), (a0, b1), (a0, b0)
    return sum(lax.dot(*pair, preferred_element_type=jnp.float32) for pair in pairs)


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three arrays of bfloat16, whose sum is x to the precision of float32."""
    x = x.astype(jnp.float32)
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    return parts


def _inverse(A: jax.Array) -> jax.Array:
    """`chunks.unit_lower_inverse` of [C, C], without slices: of the inverse D of the diagonal blocks
    of some size, and the blocks X of A below them in blocks of twice that size, D - D X D."""
    rows, columns = _indices(A.shape[0])
    D = jnp.where(rows == columns, 1.0, 0.0)
    size = 1
    while size < A.shape[0]:
        is_below = (rows // (2 * size) == columns // (2 * size)) & (rows // size > columns // size)
        X = jnp.where(is_below, A, 0.0)
        # the first D is the identity
        D -= X if size == 1 else _exact(D, _exact(X, D))
        size *= 2
    return D


def _indices(size: int) -> list[jax.Array]:
    return [lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in range(2)]


class _Gates(NamedTuple):
    """Masks and decays of one chunk."""

    visible: jax.Array  # [C, C]: token i reads token j
    in_last: jax.Array  # [C]: tokens of the segment of the last token
    decays: jax.Array  # [C, C]: exp(G_i - G_j) where visible
    since_start: jax.Array  # [C]: exp(G); 0 in segments that start in the chunk
    until_end: jax.Array  # [C]: exp(G_C - G); 0 before the last segment
    decay: jax.Array  # a number: exp(G_C), or 0


def _gates(g_ref, segments_ref, before_ref) -> _Gates:
    segments_C, before = segments_ref[...], before_ref[0]
    last = segments_ref[segments_ref.shape[0] - 1]
    rows, columns = _indices(segments_C.shape[0])
    visible = (rows >= columns) & (segments_C[:, None] == segments_C[None, :])
    in_last = segments_C == last
    between = until_end = since_start = total = 0.0
    for term in range(g_ref.shape[0]):
        g = g_ref[term]
        G = jnp.sum(jnp.where(visible, g[None, :], 0.0), axis=1)
        G_end = jnp.sum(jnp.where(in_last, g, 0.0))
        # Elsewhere the difference may be positive, and its exponential infinite.
        between += jnp.where(visible, G[:, None] - G[None, :], 0.0)
        until_end += jnp.where(in_last, G_end - G, 0.0)
        since_start += G
        total += G_end
    return _Gates(
        visible,
        in_last,
        jnp.where(visible, jnp.exp(between), 0.0),
        jnp.where(segments_C == before, jnp.exp(since_start), 0.0),
        jnp.where(in_last, jnp.exp(until_end), 0.0),
        jnp.where(last == before, jnp.exp(total), 0.0),
    )


def _corrected(kk: jax.Array, gates: _Gates, beta: jax.Array) -> jax.Array:
    """A, from the products of keys."""
    rows, columns = _indices(kk.shape[0])
    return jnp.where(rows > columns, kk * gates.decays * beta[:, None], 0.0)


def _over_columns(width: int, body: Callable, carry: tuple = ()) -> tuple:
    """carry = body(columns, *carry) over blocks of the columns of an array: one is in registers."""
    block = min(_COLUMNS, width)
    return lax.fori_loop(
        0, width // block, lambda i, carry: body(pl.ds(i * block, block), *carry), carry
    )


def _factors_kernel(x: Operands, segments_ref, before_ref, results: tuple):
    """See the top of chunks.py."""
    results, saved = Factors(*results[:_NUM_FACTORS]), results[_NUM_FACTORS:]
    narrow = functools.partial(_narrow, x.q.dtype)
    gates = _gates(x.g, segments_ref, before_ref)
    beta = x.beta[...]
    k = x.k[...]
    scores = (narrow(x.q[...], k.T) * gates.decays).astype(k.dtype)
    inverse = _inverse(_corrected(narrow(k, k.T), gates, beta))
    results.decay[...] = gates.decay
    for ref, value in zip(saved, (inverse, scores)):
        ref[...] = value
    # Read again after a store: the compiler would keep k in registers while it inverts.
    k = x.k[...]
    kept = (k * gates.until_end[:, None]).T.astype(k.dtype)

    def add(columns):
        u = _exact(inverse, x.v[:, columns] * beta[:, None])
        results.out[:, columns] = narrow(scores, u)
        results.added[:, columns] = narrow(kept, u)
        return ()

    def correct(columns):
        factor = beta * gates.since_start
        w = _exact(inverse, x.k[:, columns] * factor[:, None])
        results.correction[:, columns] = narrow(kept, w).astype(k.dtype)
        q = x.q[:, columns] * gates.since_start[:, None] - narrow(scores, w)
        results.q[:, columns] = q.astype(k.dtype)
        return ()

    _over_columns(x.v.shape[1], add)
    _over_columns(x.k.shape[1], correct)


def _gradients_kernel(
    x: Operands, segments_ref, before_ref, saved: tuple, gradients: Factors, results: tuple
):
    """The derivative of `_factors_kernel`, in reverse order, from its operands and what it saved.

    Arrays that several steps need are read in each of them: they would be in registers meanwhile.
    """
    dx = Operands(*results)
    inverse_ref, scores_ref = saved
    narrow = functools.partial(_narrow, x.q.dtype)
    gates = _gates(x.g, segments_ref, before_ref)
    since_start, until_end = gates.since_start, gates.until_end
    beta = x.beta[...]
    size = min(_COLUMNS, x.k.shape[1])
    blocks = [pl.ds(start, size) for start in range(0, x.k.shape[1], size)]

    def solved_gradient(dout, dkept_ref, columns):
        kept = (x.k[...] * until_end[:, None]).astype(x.k.dtype)
        return narrow(scores_ref[...].T, dout) + narrow(kept, dkept_ref[:, columns])

    def solve(columns, values, factor, dout, dkept_ref, dscores, dinverse, *dkept):
        """The gradients of the right side and of its factor, and the sums over columns."""
        right = values * factor[:, None]
        solved = _exact(inverse_ref[...], right)
        dscores += narrow(dout, solved.T)
        dkept = [
            total + narrow(solved, dkept_ref[rows, columns].T) for total, rows in zip(dkept, blocks)
        ]
        dsolved = solved_gradient(dout, dkept_ref, columns)
        dinverse += _exact(dsolved, right.T)
        dright = _exact(inverse_ref[...].T, dsolved)
        return dright, jnp.sum(dright * values, axis=1), (dscores, dinverse, *dkept)

    def add(columns, dbeta, *carry):
        values = x.v[:, columns].astype(jnp.float32)
        dout = gradients.out[:, columns]
        dright, dfactor, carry = solve(columns, values, beta, dout, gradients.added, *carry)
        dx.v[:, columns] = (dright * beta[:, None]).astype(x.v.dtype)
        return dbeta + dfactor, *carry

    def correct(columns, dsince, dbeta, *carry):
        values = x.k[:, columns].astype(jnp.float32)
        dq = gradients.q[:, columns].astype(jnp.float32)
        dsince += jnp.sum(dq * x.q[:, columns], axis=1)
        factor = beta * since_start
        _, dfactor, carry = solve(columns, values, factor, -dq, gradients.correction, *carry)
        dbeta += dfactor * since_start
        dx.beta[...] = dbeta  # Without a store, Triton would read shared arrays before the loop.
        return dsince + dfactor * beta, dbeta, *carry

    square = jnp.zeros(scores_ref.shape, jnp.float32)
    zero = jnp.zeros_like(beta)
    carry = square, square, *(jnp.zeros((beta.size, b.size), jnp.float32) for b in blocks)
    carry = _over_columns(x.v.shape[1], add, (zero, *carry))
    carry = _over_columns(x.k.shape[1], correct, (zero, *carry))
    dsince, dbeta, dscores, dinverse, *dkept = carry
    transposed = inverse_ref[...].T
    dA = -_exact(_exact(transposed, dinverse), transposed)
    gates = _gates(x.g, segments_ref, before_ref)
    dproducts, dkk, dbetween, dbeta_A = _product_gradients(x, gates, beta, dscores, dA)
    dx.beta[...] = dbeta + dbeta_A
    duntil = zero
    for columns, dkept_columns in zip(blocks, dkept):
        k = x.k[:, columns]
        dq = gradients.q[:, columns].astype(jnp.float32)
        dx.q[:, columns] = dq * since_start[:, None] + narrow(dproducts, k)
        duntil += jnp.sum(dkept_columns * k, axis=1)
        dright = _exact(inverse_ref[...].T, solved_gradient(-dq, gradients.correction, columns))
        dk = dkept_columns * until_end[:, None] + dright * (beta * since_start)[:, None]
        dk += narrow(dproducts.T, x.q[:, columns]) + narrow(dkk, k)
        dx.k[:, columns] = dk
    dg = _gradient_of_gates(gates, dbetween, dsince, duntil, gradients.decay[...])
    for term in range(dx.g.shape[0]):
        dx.g[term] = dg


def _product_gradients(x: Operands, gates: _Gates, beta, dscores, dA) -> tuple[jax.Array, ...]:
    """The gradients of q k^T, of k k^T and its transpose, of G_i - G_j, and of beta; see
    `_corrected`."""
    narrow = functools.partial(_narrow, x.q.dtype)
    k = x.k[...]
    dproducts = dscores * gates.decays
    dbetween = dproducts * narrow(x.q[...], k.T)
    by_beta = _corrected(dA, gates, jnp.ones_like(beta))
    by_kk = by_beta * narrow(k, k.T)
    dkk = by_beta * beta[:, None]
    return dproducts, dkk + dkk.T, dbetween + by_kk * beta[:, None], jnp.sum(by_kk, axis=1)


def _gradient_of_gates(gates: _Gates, dbetween, dsince, duntil, ddecay) -> jax.Array:
    """From the gradients of G_i - G_j, and of the fields of `gates`."""
    until = duntil * gates.until_end
    dG = jnp.sum(dbetween, axis=1) - jnp.sum(dbetween, axis=0)
    dG += dsince * gates.since_start - until
    dG_end = jnp.sum(until) + ddecay * gates.decay
    dg = jnp.sum(jnp.where(gates.visible, dG[:, None], 0.0), axis=0)
    return dg + jnp.where(gates.in_last, dG_end, 0.0)


def _specs(x: Operands) -> tuple[Operands, list, tuple]:
    """Block specs for a grid (chunk, head, sequence): of operands, segments, results of
    `_call_factors`."""
    C = KERNEL_TOKENS
    heads_per_key = x.v.shape[2] // x.q.shape[2]
    K, V = x.q.shape[-1], x.v.shape[-1]
    keys = pl.BlockSpec((None, C, None, K), lambda n, h, b: (b, n, h // heads_per_key, 0))
    operands = Operands(
        keys,
        keys,
        pl.BlockSpec((None, C, None, V), lambda n, h, b: (b, n, h, 0)),
        pl.BlockSpec((x.g.shape[0], None, None, C), lambda n, h, b: (0, b, h, n)),
        pl.BlockSpec((None, None, C), lambda n, h, b: (b, h, n)),
    )
    segments = [
        pl.BlockSpec((None, C), lambda n, h, b: (b, n)),
        pl.BlockSpec((None, None, 1), lambda n, h, b: (n, b, 0)),
    ]

    def factor(*shape):
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, None, None, *shape), lambda n, h, b: (n, b, h, *zeros))

    shapes = (C, K), (C, V), (), (K, K), (K, V), (C, C), (C, C)
    return operands, segments, tuple(factor(*shape) for shape in shapes)


@jax.custom_vjp
def factors(x: Operands, segments_BL: jax.Array, before_NB1: jax.Array) -> Factors:
    """The factors of all chunks, arrays [N, B, H, ...].

    Args:
      x: of all tokens; g [terms, B, H, L], beta [B, H, L].
      before_NB1: the segment of the token before each chunk.
    """
    return Factors(*_call_factors(x, segments_BL, before_NB1, _NUM_FACTORS))


def _call_factors(x, segments_BL, before_NB1, num_results):
    """The first `num_results` of the fields of `Factors`, the inverse of I + A, and the scores."""
    shape = (*before_NB1.shape[:2], x.v.shape[2])
    operands, segments, specs = _specs(x)
    dtype, wide = x.q.dtype, jnp.float32
    dtypes = dtype, wide, wide, dtype, wide, wide, dtype
    shapes = tuple(
        jax.ShapeDtypeStruct((*shape, *spec.block_shape[3:]), dtype)
        for spec, dtype in zip(specs, dtypes)
    )
    return _call(
        _factors_kernel,
        (x, segments_BL, before_NB1),
        grid=(shape[0], shape[2], shape[1]),
        in_specs=[operands, *segments],
        out_specs=specs[:num_results],
        out_shape=shapes[:num_results],
        params=_FACTOR_PARAMS,
        name="delta_factors",
    )


def _factors_forward(*operands):
    results = _call_factors(*operands, None)
    return Factors(*results[:_NUM_FACTORS]), (*operands, results[_NUM_FACTORS:])


def _factors_backward(residuals, gradients: Factors):
    x, _, before_NB1, _ = residuals
    num_chunks, num_sequences, _ = before_NB1.shape
    num_heads = x.v.shape[2]
    operands, segments, specs = _specs(x)
    per_head = jax.ShapeDtypeStruct((*x.v.shape[:3], x.q.shape[-1]), jnp.float32)
    own_keys = pl.BlockSpec(operands.q.block_shape, operands.v.index_map)
    dx = _call(
        _gradients_kernel,
        (*residuals, gradients),
        grid=(num_chunks, num_heads, num_sequences),
        in_specs=[operands, *segments, specs[_NUM_FACTORS:], Factors(*specs[:_NUM_FACTORS])],
        out_specs=operands._replace(q=own_keys, k=own_keys),
        out_shape=jax.eval_shape(lambda: x)._replace(q=per_head, k=per_head),
        params=_FACTOR_PARAMS,
        name="delta_factors_gradient",
    )
    # The gradients of key heads are sums over their value heads.
    q, k = (
        dy.reshape(*y.shape[:3], -1, y.shape[3]).sum(3).astype(y.dtype)
        for dy, y in ((dx.q, x.q), (dx.k, x.k))
    )
    return dx._replace(q=q, k=k), None, None


factors.defvjp(_factors_forward, _factors_backward)


def scan(
    first: jax.Array,
    decay: jax.Array,
    correction: jax.Array,
    added: jax.Array,
    dtype,
    backwards: bool,
) -> tuple[jax.Array, jax.Array]:
    """As `chunks._scan_chunks`, with one state and one gate a head: decay [N, B, H]."""
    num_chunks, num_sequences, num_heads, K, V = added.shape
    num_columns = first.shape[-1]
    block = min(_SCAN_COLUMNS, K, V)

    def chunk_spec(*shape, column=False):
        def index(c, h, b):
            return (0, b, h, *(0,) * (len(shape) - 1), *((c if column else 0,) if shape else ()))

        return pl.BlockSpec((num_chunks, None, None, *shape), index)

    state = pl.BlockSpec((None, None, K, block), lambda c, h, b: (b, h, 0, c))
    shape = (num_chunks, *first.shape)
    return _call(
        functools.partial(_scan_kernel, backwards=backwards, without=num_columns - V),
        (first, decay, correction, added),
        grid=(num_columns // block, num_heads, num_sequences),
        in_specs=[
            state,
            chunk_spec(),
            chunk_spec(K, K),
            chunk_spec(K, V),
        ],
        out_specs=(state, chunk_spec(K, block, column=True)),
        out_shape=(
            jax.ShapeDtypeStruct(first.shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, dtype),
        ),
        params=_SCAN_PARAMS,
        name="delta_scan",
    )


def _scan_kernel(
    first_ref,
    decay_ref,
    correction_ref,
    added_ref,
    results,
    *,
    backwards: bool,
    without: int,
):
    """Args: without: the first columns, to which nothing is added."""
    last_ref, entering_ref = results
    num_chunks, _, block = entering_ref.shape
    column = pl.program_id(0) * block - without
    columns = pl.ds(jnp.maximum(column, 0), block)

    def step(i, S):
        n = num_chunks - 1 - i if backwards else i
        narrow = S.astype(entering_ref.dtype)
        entering_ref[n] = narrow
        S = decay_ref[n] * S
        correction = correction_ref[n].T if backwards else correction_ref[n]
        S -= _narrow(narrow.dtype, correction, narrow)
        added = added_ref[n, :, columns].astype(jnp.float32)
        return S + (added if without == 0 else jnp.where(column >= 0, added, 0.0))

    last_ref[...] = lax.fori_loop(0, num_chunks, step, first_ref[...])


def _call(kernel: Callable, operands: tuple, *, params: dict, **options: Any) -> Any:
    """Runs `kernel` compiled, or interpreted on a CPU. It gets references to the operands, and
    a tuple of references to the results."""
    from jax.experimental.pallas import triton  # see kernels/pallas.py

    def run(interpret: bool):
        def body(*refs):
            kernel(*refs[: len(operands)], refs[len(operands) :])

        compiler_params = triton.CompilerParams(**params)
        return pl.pallas_call(body, compiler_params=compiler_params, interpret=interpret, **options)

    return lax.platform_dependent(*operands, cpu=run(interpret=True), default=run(interpret=False))
