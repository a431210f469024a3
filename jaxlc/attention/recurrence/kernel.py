"""Kernels of recurrences over chunks (Pallas on Triton): one for the factors of a chunk, one for
the scan over chunks.

Both compute what `chunks.py` describes, with nothing of size [C, C] in device memory and one launch
for all chunks. A program of the first kernel owns one chunk and value head. Its backward computes
the chunk again. A program of the second one owns some columns of one head's state, and keeps them
in registers.

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
_FACTOR_WARPS = 8
_SCAN_WARPS = 4
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


class _Matmul(NamedTuple):
    """Matrix products with float32 sums."""

    dtype: Any  # of the tokens
    interpret: bool

    def narrow(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a b, of factors that are rounded to `dtype`."""
        if self.dtype == jnp.float32:
            return self.exact(a, b)
        return lax.dot(
            a.astype(self.dtype), b.astype(self.dtype), preferred_element_type=jnp.float32
        )

    def exact(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a b as precise as with float32 factors: each is a sum of three of bfloat16."""
        if self.interpret:
            return lax.dot(a, b, precision=lax.Precision.HIGHEST)
        (a0, a1, a2), (b0, b1, b2) = _parts(a), _parts(b)
        pairs = (a2, b0), (a1, b1), (a0, b2), (a1, b0), (a0, b1), (a0, b0)  # the smallest first
        return sum(lax.dot(*pair, preferred_element_type=jnp.float32) for pair in pairs)


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three arrays of bfloat16, whose sum is x to the precision of float32."""
    x = x.astype(jnp.float32)
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    return parts


def _inverse(A: jax.Array, matmul: _Matmul) -> jax.Array:
    """`chunks.unit_lower_inverse` of [C, C], without slices: of the inverse D of the diagonal blocks
    of some size, and the blocks X of A below them in blocks of twice that size, D - D X D."""
    rows, columns = _indices(A.shape[0])
    D = jnp.where(rows == columns, 1.0, 0.0)
    size = 1
    while size < A.shape[0]:
        is_below = (rows // (2 * size) == columns // (2 * size)) & (rows // size > columns // size)
        X = jnp.where(is_below, A, 0.0)
        # the first D is the identity
        D -= X if size == 1 else matmul.exact(D, matmul.exact(X, D))
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


def _shared(x: Operands, segments_ref, before_ref, matmul: _Matmul) -> tuple:
    """What both kernels compute: (gates, beta, k, scores, inverse of I + A)."""
    gates = _gates(x.g, segments_ref, before_ref)
    beta = x.beta[...]
    k = x.k[...]
    scores = matmul.narrow(x.q[...], k.T) * gates.decays
    return gates, beta, k, scores, _inverse(_corrected(matmul.narrow(k, k.T), gates, beta), matmul)


def _over_columns(width: int, body: Callable, carry: tuple = ()) -> tuple:
    """carry = body(columns, *carry) over blocks of the columns of an array: one is in registers."""
    block = min(_COLUMNS, width)
    return lax.fori_loop(
        0, width // block, lambda i, carry: body(pl.ds(i * block, block), *carry), carry
    )


def _factors_kernel(x: Operands, segments_ref, before_ref, results: tuple, *, interpret: bool):
    """See the top of chunks.py."""
    results = Factors(*results)
    matmul = _Matmul(x.q.dtype, interpret)
    gates, beta, k, scores, inverse = _shared(x, segments_ref, before_ref, matmul)
    kept = (k * gates.until_end[:, None]).T.astype(k.dtype)
    results.decay[...] = gates.decay

    def add(columns):
        u = matmul.exact(inverse, x.v[:, columns] * beta[:, None])
        results.out[:, columns] = matmul.narrow(scores, u)
        results.added[:, columns] = matmul.narrow(kept, u)
        return ()

    def correct(columns):
        factor = beta * gates.since_start
        w = matmul.exact(inverse, x.k[:, columns] * factor[:, None])
        results.correction[:, columns] = matmul.narrow(kept, w).astype(k.dtype)
        q = x.q[:, columns] * gates.since_start[:, None] - matmul.narrow(scores, w)
        results.q[:, columns] = q.astype(k.dtype)
        return ()

    _over_columns(x.v.shape[1], add)
    _over_columns(x.k.shape[1], correct)


def _gradients_kernel(
    x: Operands, segments_ref, before_ref, gradients: Factors, results: tuple, *, interpret: bool
):
    """The derivative of `_factors_kernel`, in reverse order, from its operands."""
    dx = Operands(*results)
    matmul = _Matmul(x.q.dtype, interpret)
    gates, beta, k, scores, inverse = _shared(x, segments_ref, before_ref, matmul)
    since_start = gates.since_start
    kept = (k * gates.until_end[:, None]).astype(k.dtype)

    def solve_gradients(dsolved, right, dinverse):
        """The gradients of the right side and of the inverse."""
        dinverse += matmul.exact(dsolved, right.T)
        return matmul.exact(inverse.T, dsolved), dinverse

    def add(columns, dscores, dinverse, dkept, dbeta):
        v = x.v[:, columns].astype(jnp.float32)
        right = v * beta[:, None]
        u = matmul.exact(inverse, right)
        dout = gradients.out[:, columns]
        dadded = gradients.added[:, columns]
        dscores += matmul.narrow(dout, u.T)
        dkept += matmul.narrow(u, dadded.T)
        du = matmul.narrow(scores.T, dout) + matmul.narrow(kept, dadded)
        dright, dinverse = solve_gradients(du, right, dinverse)
        dx.v[:, columns] = (dright * beta[:, None]).astype(k.dtype)
        return dscores, dinverse, dkept, dbeta + jnp.sum(dright * v, axis=1)

    def correct(columns, dscores, dinverse, dkept, dbeta, dsince):
        factor = beta * since_start
        k_columns = x.k[:, columns].astype(jnp.float32)
        dq = gradients.q[:, columns].astype(jnp.float32)
        dsince += jnp.sum(dq * x.q[:, columns], axis=1)
        right = k_columns * factor[:, None]
        w = matmul.exact(inverse, right)
        dcorrection = gradients.correction[:, columns]
        dscores -= matmul.narrow(dq, w.T)
        dkept += matmul.narrow(w, dcorrection.T)
        dright, dinverse = solve_gradients(w_gradient(dq, dcorrection), right, dinverse)
        dfactor = jnp.sum(dright * k_columns, axis=1)
        return dscores, dinverse, dkept, dbeta + dfactor * since_start, dsince + dfactor * beta

    def w_gradient(dq, dcorrection):
        return matmul.narrow(kept, dcorrection) - matmul.narrow(scores.T, dq)

    square = jnp.zeros_like(scores)
    zero = jnp.zeros_like(beta)
    carry = square, square, jnp.zeros(k.shape, jnp.float32), zero
    *carry, dbeta = _over_columns(x.v.shape[1], add, carry)
    carry = _over_columns(k.shape[1], correct, (*carry, dbeta, zero))
    dscores, dinverse, dkept, dbeta, dsince = carry
    # Results are written once, with all columns: Triton orders no loads after stores.
    dq = gradients.q[...].astype(jnp.float32)
    dproducts = dscores * gates.decays
    dbetween = dproducts * matmul.narrow(x.q[...], k.T)
    dx.q[...] = dq * since_start[:, None] + matmul.narrow(dproducts, k)
    duntil = jnp.sum(dkept * k, axis=1)
    dk = dkept * gates.until_end[:, None] + matmul.narrow(dproducts.T, x.q[...])
    dA = -matmul.exact(matmul.exact(inverse.T, dinverse), inverse.T)
    dkk, dbetween_A, dbeta_A = _gradient_of_corrected(dA, matmul.narrow(k, k.T), gates, beta)
    dbetween += dbetween_A
    dbeta += dbeta_A
    dk += matmul.narrow(dkk + dkk.T, k)
    dright = matmul.exact(inverse.T, w_gradient(dq, gradients.correction[...]))
    dk += dright * (beta * since_start)[:, None]
    dx.k[...] = dk
    dx.beta[...] = dbeta

    dg = _gradient_of_gates(gates, dbetween, dsince, duntil, gradients.decay[...])
    for term in range(dx.g.shape[0]):
        dx.g[term] = dg


def _gradient_of_corrected(dA, kk, gates: _Gates, beta) -> tuple[jax.Array, ...]:
    """The gradients of kk, of G_i - G_j and of beta, from the gradient of A; see `_corrected`."""
    by_beta = _corrected(dA, gates, jnp.ones_like(beta))
    by_kk = by_beta * kk
    return by_beta * beta[:, None], by_kk * beta[:, None], jnp.sum(by_kk, axis=1)


def _gradient_of_gates(gates: _Gates, dbetween, dsince, duntil, ddecay) -> jax.Array:
    """From the gradients of G_i - G_j, and of the fields of `gates`."""
    until = duntil * gates.until_end
    dG = jnp.sum(dbetween, axis=1) - jnp.sum(dbetween, axis=0)
    dG += dsince * gates.since_start - until
    dG_end = jnp.sum(until) + ddecay * gates.decay
    dg = jnp.sum(jnp.where(gates.visible, dG[:, None], 0.0), axis=0)
    return dg + jnp.where(gates.in_last, dG_end, 0.0)


def _specs(x: Operands) -> tuple[Operands, list, Factors]:
    """Block specs for a grid (chunk, head, sequence): of operands, segments, factors."""
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

    return operands, segments, Factors(*(factor(*s) for s in ((C, K), (C, V), (), (K, K), (K, V))))


@jax.custom_vjp
def factors(x: Operands, segments_BL: jax.Array, before_NB1: jax.Array) -> Factors:
    """The factors of all chunks, arrays [N, B, H, ...].

    Args:
      x: of all tokens; g [terms, B, H, L], beta [B, H, L].
      before_NB1: the segment of the token before each chunk.
    """
    return _call_factors(x, segments_BL, before_NB1)


def _call_factors(x, segments_BL, before_NB1):
    shape = (*before_NB1.shape[:2], x.v.shape[2])
    K, V = x.q.shape[-1], x.v.shape[-1]
    operands, segments, specs = _specs(x)
    shapes = Factors(
        jax.ShapeDtypeStruct((*shape, KERNEL_TOKENS, K), x.q.dtype),
        jax.ShapeDtypeStruct((*shape, KERNEL_TOKENS, V), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((*shape, K, K), x.q.dtype),
        jax.ShapeDtypeStruct((*shape, K, V), jnp.float32),
    )
    return _call(
        _factors_kernel,
        (x, segments_BL, before_NB1),
        grid=(shape[0], shape[2], shape[1]),
        in_specs=[operands, *segments],
        out_specs=specs,
        out_shape=shapes,
        num_warps=_FACTOR_WARPS,
        name="delta_factors",
    )


def _factors_forward(x, segments_BL, before_NB1):
    return factors(x, segments_BL, before_NB1), (x, segments_BL, before_NB1)


def _factors_backward(residuals, gradients: Factors):
    x, segments_BL, before_NB1 = residuals
    num_chunks, num_sequences, _ = before_NB1.shape
    num_heads = x.v.shape[2]
    operands, segments, specs = _specs(x)
    per_head = jax.ShapeDtypeStruct((*x.v.shape[:3], x.q.shape[-1]), jnp.float32)
    own_keys = pl.BlockSpec(operands.q.block_shape, operands.v.index_map)
    dx = _call(
        _gradients_kernel,
        (x, segments_BL, before_NB1, gradients),
        grid=(num_chunks, num_heads, num_sequences),
        in_specs=[operands, *segments, specs],
        out_specs=operands._replace(q=own_keys, k=own_keys),
        out_shape=Operands(per_head, per_head, *map(_shape, (x.v, x.g, x.beta))),
        num_warps=_FACTOR_WARPS,
        name="delta_factors_gradient",
    )
    q, k = (_sum_of_heads(dy, y) for dy, y in ((dx.q, x.q), (dx.k, x.k)))
    return dx._replace(q=q, k=k), None, None


factors.defvjp(_factors_forward, _factors_backward)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _sum_of_heads(dx_BLHK: jax.Array, x_BLGK: jax.Array) -> jax.Array:
    """The gradient of each key head: a sum over its value heads."""
    by_key_head = dx_BLHK.reshape(*x_BLGK.shape[:3], -1, x_BLGK.shape[3])
    return by_key_head.sum(3).astype(x_BLGK.dtype)


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
        num_warps=_SCAN_WARPS,
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
    interpret: bool,
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
        S -= _Matmul(narrow.dtype, interpret).narrow(correction, narrow)
        added = added_ref[n, :, columns].astype(jnp.float32)
        return S + (added if without == 0 else jnp.where(column >= 0, added, 0.0))

    last_ref[...] = lax.fori_loop(0, num_chunks, step, first_ref[...])


def _call(kernel: Callable, operands: tuple, *, num_warps: int, **options: Any) -> Any:
    """Runs `kernel` compiled, or interpreted on a CPU. It gets references to the operands, and
    a tuple of references to the results."""
    from jax.experimental.pallas import triton  # see kernels/pallas.py

    def run(interpret: bool):
        def body(*refs):
            kernel(*refs[: len(operands)], refs[len(operands) :], interpret=interpret)

        params = triton.CompilerParams(num_warps=num_warps, num_stages=2)
        return pl.pallas_call(body, compiler_params=params, interpret=interpret, **options)

    return lax.platform_dependent(*operands, cpu=run(interpret=True), default=run(interpret=False))
