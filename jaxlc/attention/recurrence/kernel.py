"""Kernels of the gated delta rule (Pallas on Triton), with one launch for all chunks.

They compute what `chunks.py` describes. A program of `delta_factors` owns one chunk and value head:
it solves for u and w, and computes the scores. A program of `delta_scan` owns some columns of one
head's state, keeps them in registers, and computes the outputs of one chunk after another. Their
derivatives have the same programs: `delta_scan_gradient` computes the gradients of states from the
last chunk to the first one, and `delta_factors_gradient` all gradients of the tokens of a chunk.

Products of float32 factors are sums of six products of bfloat16 factors. Those are in shared memory;
of TF32 factors, each thread would have copies in its registers. Triton's sizes are powers of 2.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxlc.attention.kernels.pallas import run_kernel

# Less than `chunks.CHUNK_TOKENS`, which it divides: a program has several arrays [C, K] and [C, C] of
# float32 in its registers.
KERNEL_TOKENS = 64
# Stages are loads in flight, each with shared memory of its own.
_CHUNK_PARAMS = dict(num_warps=8, num_stages=1)
_SCAN_PARAMS = dict(num_warps=4, num_stages=2)
_SCAN_COLUMNS = 32
_COLUMNS = 64  # of one step of a loop over the columns of keys or values


class Operands(NamedTuple):
    """Of one chunk and head; or of all, arrays [B, L, heads, width] and [B, heads, L]."""

    q: jax.Array  # [C, K], scaled, 0 at padding; of key heads, as k
    k: jax.Array  # [C, K]
    v: jax.Array  # [C, V]
    g: tuple[jax.Array, ...]  # [C], the terms of `decays.split_gates`
    beta: jax.Array  # [C]
    segments: jax.Array  # [C], int32; with one head, as the next one
    segment_before: jax.Array  # [1]: of the token before the chunk; or of all chunks


class Factors(NamedTuple):
    """As `Operands`; None where no kernel reads them. See the top of chunks.py."""

    w: jax.Array  # [C, K], in the dtype of q, as the scores
    scores: jax.Array | None  # [C, C]
    inverse: jax.Array | None  # [C, C], of I + A, for derivatives; float32, as the others
    u: jax.Array | None  # [C, V]
    since_start: jax.Array  # [C], of `_Gates`, as the next two
    until_end: jax.Array  # [C]
    decay: jax.Array | None  # [1]; or of all chunks


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
    """`unit_lower_inverse` of [C, C], without slices: of the inverse D of the diagonal blocks
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


def _gates(x: Operands) -> _Gates:
    segments_C = x.segments[...]
    before = x.segment_before[0]
    last = x.segments[segments_C.size - 1]
    rows, columns = _indices(segments_C.shape[0])
    visible = (rows >= columns) & (segments_C[:, None] == segments_C[None, :])
    in_last = segments_C == last
    between = until_end = since_start = total = 0.0
    for g_ref in x.g:
        g = g_ref[...]
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
    block = math.gcd(_COLUMNS, width)
    return lax.fori_loop(
        0, width // block, lambda i, carry: body(pl.ds(i * block, block), *carry), carry
    )


def _narrow_sum(dtype, left_ref, right_ref, rows) -> jax.Array:
    """left right^T, of some rows of `right`."""

    def add(columns, total):
        return (total + _narrow(dtype, left_ref[:, columns], right_ref[rows, columns].T),)

    zero = jnp.zeros((left_ref.shape[0], rows.size), jnp.float32)
    return _over_columns(left_ref.shape[1], add, (zero,))[0]


def _factors_kernel(x: Operands, results: tuple):
    results = Factors(*results)
    narrow = functools.partial(_narrow, x.q.dtype)
    gates = _gates(x)
    beta = x.beta[...]
    k = x.k[...]
    scores = narrow(x.q[...], k.T) * gates.decays
    inverse = _inverse(_corrected(narrow(k, k.T), gates, beta))
    results.scores[...] = scores.astype(k.dtype)
    results.since_start[...] = gates.since_start
    results.until_end[...] = gates.until_end
    results.decay[0] = gates.decay
    if results.inverse is not None:
        results.inverse[...] = inverse

    def solve(columns, result_ref, right_ref, factor):
        solved = _exact(inverse, right_ref[:, columns] * factor[:, None])
        result_ref[:, columns] = solved.astype(result_ref.dtype)
        return ()

    _over_columns(x.v.shape[1], lambda columns: solve(columns, results.u, x.v, beta))
    factor = beta * gates.since_start
    _over_columns(x.k.shape[1], lambda columns: solve(columns, results.w, x.k, factor))


def _scan_kernel(factors: Factors, q_ref, k_ref, first_ref, results: tuple):
    """See `_scan`; the states that enter chunks, and u - w S, are results for derivatives."""
    last_ref, out_ref, *saved = results
    dtype = q_ref.dtype
    narrow = functools.partial(_narrow, dtype)
    K, block = first_ref.shape
    V = factors.u.shape[1]
    # Nothing is added to the first columns, of maps of states.
    column = V - (pl.num_programs(0) - pl.program_id(0)) * block
    columns = pl.ds(jnp.maximum(column, 0), block)

    def step(n, S):
        tokens = pl.ds(n * KERNEL_TOKENS, KERNEL_TOKENS)
        new = jnp.where(column >= 0, factors.u[tokens, columns], 0.0)
        new -= narrow(factors.w[tokens, :], S)
        for ref, rows, value in zip(saved, (pl.ds(n * K, K), tokens), (S, new)):
            ref[rows, :] = value.astype(dtype)
        out = narrow(q_ref[tokens, :], S) * factors.since_start[tokens][:, None]
        out_ref[tokens, :] = (out + narrow(factors.scores[tokens, :], new)).astype(dtype)
        kept = new * factors.until_end[tokens][:, None]
        return S * factors.decay[n] + narrow(k_ref[tokens, :].T, kept)

    last_ref[...] = lax.fori_loop(0, factors.decay.size, step, first_ref[...])


def _scan_gradient_kernel(factors: Factors, q_ref, k_ref, dlast_ref, dout_ref, results: tuple):
    dfirst_ref, dnew_ref, dleaving_ref = results
    narrow = functools.partial(_narrow, q_ref.dtype)
    K, _ = dlast_ref.shape
    num_chunks = factors.decay.size

    def step(i, dS):
        n = num_chunks - 1 - i
        tokens = pl.ds(n * KERNEL_TOKENS, KERNEL_TOKENS)
        dleaving_ref[pl.ds(n * K, K), :] = dS.astype(dleaving_ref.dtype)
        dout = dout_ref[tokens, :]
        dnew = narrow(k_ref[tokens, :], dS) * factors.until_end[tokens][:, None]
        dnew += narrow(factors.scores[tokens, :].T, dout)
        dnew_ref[tokens, :] = dnew
        dS = dS * factors.decay[n] - narrow(factors.w[tokens, :].T, dnew)
        return dS + narrow(q_ref[tokens, :].T, dout * factors.since_start[tokens][:, None])

    dfirst_ref[...] = lax.fori_loop(0, num_chunks, step, dlast_ref[...])


def _gradients_kernel(
    factors: Factors,
    x: Operands,
    entering_ref,
    dleaving_ref,
    new_ref,
    dnew_ref,
    dout_ref,
    results: tuple,
):
    """The gradients of all operands, from what the other kernels saved.

    Arrays that several steps need are read in each of them: they would be in registers meanwhile.
    """
    dx = Operands(*results)
    narrow = functools.partial(_narrow, x.q.dtype)
    narrow_sum = functools.partial(_narrow_sum, x.q.dtype)
    beta = x.beta[...]
    since_start = factors.since_start[...]
    (C, K), (_, V) = x.k.shape, x.v.shape
    num_columns = dout_ref.shape[1]
    square = jnp.zeros((C, C), jnp.float32)
    zero = jnp.zeros_like(beta)

    def solve_values(columns, dA, dbeta):
        new_columns = pl.ds(columns.start + num_columns - V, columns.size)
        dright = _exact(factors.inverse[...].T, dnew_ref[:, new_columns])
        dx.v[:, columns] = (dright * beta[:, None]).astype(x.v.dtype)
        dbeta += jnp.sum(dright * x.v[:, columns], axis=1)
        return dA - _exact(dright, factors.u[:, columns].T), dbeta

    def solve_keys(rows):
        return -_exact(factors.inverse[...].T, narrow_sum(dnew_ref, entering_ref, rows))

    def correct(rows, dA, dbeta, dsince):
        dright = solve_keys(rows)
        dfactor = jnp.sum(dright * x.k[:, rows], axis=1)
        dA -= _exact(dright, factors.w[:, rows].T)
        return dA, dbeta + dfactor * since_start, dsince + dfactor * beta

    def read(rows, dsince, duntil):
        q, k = x.q[:, rows], x.k[:, rows]
        dq = narrow_sum(dout_ref, entering_ref, rows)
        dsince += jnp.sum(dq * q, axis=1)
        dx.q[:, rows] = dq * since_start[:, None] + narrow(dproducts, k)
        dkept = narrow_sum(new_ref, dleaving_ref, rows)
        duntil += jnp.sum(dkept * k, axis=1)
        dk = dkept * factors.until_end[...][:, None] + narrow(dproducts.T, q) + narrow(dkk, k)
        dx.k[:, rows] = dk + solve_keys(rows) * (beta * since_start)[:, None]
        return dsince, duntil

    def decayed(columns, total):
        product = entering_ref[:, columns].astype(jnp.float32) * dleaving_ref[:, columns]
        return (total + jnp.sum(product),)

    (ddecay,) = _over_columns(num_columns, decayed, (0.0,))
    carry = _over_columns(V, solve_values, (square, zero))
    dA, dbeta, dsince = _over_columns(K, correct, (*carry, zero))
    dscores = narrow_sum(dout_ref, new_ref, pl.ds(0, C))
    gates = _gates(x)
    dproducts, dkk, dbetween, dbeta_A = _product_gradients(x, gates, beta, dscores, dA)
    dx.beta[...] = dbeta + dbeta_A
    dsince, duntil = _over_columns(K, read, (dsince, zero))
    dg = _gradient_of_gates(gates, dbetween, dsince, duntil, ddecay)
    for dg_ref in dx.g:
        dg_ref[...] = dg


def _product_gradients(x: Operands, gates: _Gates, beta, dscores, dA) -> tuple[jax.Array, ...]:
    """The gradients of q k^T, of k k^T and its transpose, of G_i - G_j, and of beta; see
    `_corrected`."""
    narrow = functools.partial(_narrow, x.q.dtype)
    k = x.k[...]
    dproducts = dscores * gates.decays
    rows, columns = _indices(dproducts.shape[0])
    # Products of a token with itself do not depend on G: their two terms would cancel.
    dbetween = jnp.where(rows > columns, dproducts * narrow(x.q[...], k.T), 0.0)
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


def _specs(arrays: Any, num_heads: int, num_chunks: int = 1, columns: int | None = None) -> Any:
    """Block specs of arrays [B, rows, heads, width] or [B, heads, rows], for a grid (i, head,
    sequence): i counts chunks, or blocks of columns."""

    def spec(x):
        heads = x.shape[-2]

        def index(i, h, b):
            chunk = i if num_chunks > 1 else 0
            head = h * heads // num_heads
            return (b, head, chunk) if x.ndim == 3 else (b, chunk, head, i if columns else 0)

        if x.ndim == 3:
            return pl.BlockSpec((None, None, x.shape[2] // num_chunks), index)
        shape = None, x.shape[1] // num_chunks, None, columns or x.shape[3]
        return pl.BlockSpec(shape, index)

    return jax.tree.map(spec, arrays)


def _over_chunks(body: Callable, x: Operands, operands: tuple, results: Any, name: str) -> Any:
    """Calls a kernel with a program for each chunk, head and sequence."""
    num_sequences, _, num_heads, _ = x.v.shape
    num_chunks = x.segment_before.shape[2]
    return _call(
        body,
        operands,
        grid=(num_chunks, num_heads, num_sequences),
        in_specs=_specs(operands, num_heads, num_chunks),
        out_specs=_specs(results, num_heads, num_chunks),
        out_shape=results,
        params=_CHUNK_PARAMS,
        name=name,
    )


def _factors(x: Operands, *, has_inverse: bool) -> Factors:
    def array(width, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((*x.v.shape[:3], width), dtype)

    results = Factors(
        w=array(x.q.shape[3], x.q.dtype),
        scores=array(KERNEL_TOKENS, x.q.dtype),
        inverse=array(KERNEL_TOKENS) if has_inverse else None,
        u=array(x.v.shape[3]),
        since_start=jax.eval_shape(lambda: x.beta),
        until_end=jax.eval_shape(lambda: x.beta),
        decay=jax.ShapeDtypeStruct((*x.beta.shape[:2], x.segment_before.shape[2]), jnp.float32),
    )
    return _over_chunks(_factors_kernel, x, (x,), results, "delta_factors")


def _scan(body: Callable, x: Operands, factors: Factors, others: tuple, dtypes: tuple, name: str):
    """Calls a kernel whose programs scan over the chunks with some columns of a state.

    Args:
      others: the first state [B, K, H, M], and an array [B, L, H, M].
      dtypes: of as many results: the last state, an array [B, L, H, M], the states that enter the
        steps [B, N K, H, M], and an array [B, L, H, M].
    """
    num_sequences, K, num_heads, num_columns = others[0].shape
    num_chunks = factors.decay.shape[2]
    block = math.gcd(_SCAN_COLUMNS, K, num_columns)
    num_rows = K, x.v.shape[1], num_chunks * K, x.v.shape[1]
    results = tuple(
        jax.ShapeDtypeStruct((num_sequences, rows, num_heads, num_columns), dtype)
        for rows, dtype in zip(num_rows, dtypes)
    )
    others_specs, results_specs = _specs((others, results), num_heads, columns=block)
    return _call(
        body,
        (factors, x.q, x.k, *others),
        grid=(num_columns // block, num_heads, num_sequences),
        in_specs=(*_specs((factors, x.q, x.k), num_heads), *others_specs),
        out_specs=results_specs,
        out_shape=results,
        params=_SCAN_PARAMS,
        name=name,
    )


@jax.custom_vjp
def outputs(first: jax.Array, x: Operands) -> tuple[jax.Array, jax.Array]:
    """The state after all chunks, float32, and the outputs [B, L, H, M] in the dtype of q.

    Args:
      first: the state before them [B, K, H, M], float32. Values are added to its last V columns.
    """
    factors = _factors(x, has_inverse=False)
    dtypes = jnp.float32, x.q.dtype
    return tuple(_scan(_scan_kernel, x, factors, (first,), dtypes, "delta_scan"))


def _outputs_forward(first, x):
    factors = _factors(x, has_inverse=True)
    dtypes = jnp.float32, *[x.q.dtype] * 3
    read = factors._replace(inverse=None)
    last, out, *states = _scan(_scan_kernel, x, read, (first,), dtypes, "delta_scan")
    return (last, out), (x, factors, *states)


def _outputs_backward(residuals, gradients):
    x, factors, entering, new = residuals
    dfirst, dnew, dleaving = _scan(
        _scan_gradient_kernel,
        x,
        factors._replace(u=None, inverse=None),
        gradients,
        (jnp.float32, jnp.float32, x.q.dtype),
        "delta_scan_gradient",
    )
    factors = factors._replace(scores=None, decay=None)
    per_head = jax.ShapeDtypeStruct((*x.v.shape[:3], x.q.shape[3]), jnp.float32)
    dx = _over_chunks(
        _gradients_kernel,
        x,
        (factors, x, entering, dleaving, new, dnew, gradients[1]),
        jax.eval_shape(lambda: x)._replace(
            q=per_head, k=per_head, segments=None, segment_before=None
        ),
        "delta_factors_gradient",
    )
    # The gradients of key heads are sums over their value heads.
    q, k = (
        dy.reshape(*y.shape[:3], -1, y.shape[3]).sum(3).astype(y.dtype)
        for dy, y in ((dx.q, x.q), (dx.k, x.k))
    )
    return dfirst, dx._replace(q=q, k=k)


outputs.defvjp(_outputs_forward, _outputs_backward, optimize_remat=True)


def _call(kernel: Callable, operands: tuple, *, params: dict, **options: Any) -> Any:
    """Runs `kernel` with references to the operands, and a tuple of references to the results."""

    def body(*refs):
        kernel(*refs[: len(operands)], refs[len(operands) :])

    return run_kernel(body, operands, **params, **options)
