"""The gated delta rule over consecutive tokens, in chunks: matrix products instead of a loop over tokens.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), sections 3.2 and 3.3. For each token, a
head decays its state S [K, V] by exp(g), corrects it by the delta rule, and reads it:

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  out = S^T q

Over a chunk of C tokens with the cumulative gates G_i = g_1 + ... + g_i, let A be the strictly lower triangular matrix
beta_i (k_i . k_j) exp(G_i - G_j), and u = (I + A)^-1 (beta v), w = (I + A)^-1 (beta exp(G) k). Then

    new = u - w S
    out = (exp(G) q) S + (q k^T * exp(G_i - G_j) for j <= i) new
    S' = exp(G_C) S + (exp(G_C - G) k)^T new

So consecutive tokens map the state that enters them affinely: S' = M S + U. Documents are masks: a token reads only
tokens and states of its own segment. Gates of -inf instead would make differences of G undefined.

Segments (branches) may continue another one, their prefix. Then a second state is passed on, that after the last token
that is in no branch: a prefix is followed by its branches, so where a branch starts this is the state after its prefix.
Both are one state [2 K, V]: q, k and w have 2 K columns, and the decay is a matrix [2, 2] of scalars.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK_TOKENS = 128


class Tokens(NamedTuple):
    """Consecutive tokens of sequences. Key heads G divide the value heads H."""

    q_BLGK: jax.Array
    k_BLGK: jax.Array
    v_BLHV: jax.Array
    g_BLH: jax.Array  # the logarithm of the decay, at most 0
    beta_BLH: jax.Array
    segments_BL: jax.Array  # int32; outputs of segment 0, padding, are 0
    segment_before_B: jax.Array  # of the token before these; 0: none
    prefixes_BL: jax.Array | None = None  # the segment that a token's segment continues; 0, or None: it continues none


class Affine(NamedTuple):
    """The map of a state that enters tokens to the state that leaves them: S -> M S + U. With prefixes, K counts the
    rows of both states."""

    M: jax.Array  # [..., K, K]
    U: jax.Array  # [..., K, V]

    def __call__(self, S: jax.Array) -> jax.Array:
        return product("...ij,...jv->...iv", self.M, S) + self.U

    def after(self, first: "Affine") -> "Affine":
        """The map of `first`, and then of this one."""
        return Affine(product("...ij,...jk->...ik", self.M, first.M), self(first.U))


class _Chunks(NamedTuple):
    """What the recurrence over chunks needs: arrays [N, B, H, ...] of N chunks, whose masks and gates are applied.

    With prefixes, K counts the columns of both states. Factors of products have the dtype of the tokens: a step reads
    them, and converts nothing.
    """

    q: jax.Array | None  # [..., C, K], decayed since the start of the chunk; 0 in documents that start in it
    k: jax.Array  # [..., C, K], decayed until the end of the chunk; 0 in documents that end before
    u: jax.Array  # [..., C, V], float32 or wider, as decay
    w: jax.Array  # [..., C, K]
    scores: jax.Array | None  # [..., C, C]
    # [..., states, states], of the states over the chunk; 0 if a document starts in it
    decay: jax.Array


def product(subscripts: str, a: jax.Array, b: jax.Array, dtype=None) -> jax.Array:
    """An einsum that accumulates in float32 or wider, and returns that.

    Args:
      dtype: of the factors. None, float32, float64: exact products; bfloat16: those of tensor cores.
    """
    result = jnp.promote_types(jnp.float32, jnp.promote_types(a.dtype, b.dtype))
    if dtype is not None and jnp.finfo(dtype).bits < 32:
        return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=result)
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=result)


def identity(num_sequences: int, num_heads: int, key_dim: int, value_dim: int, dtype) -> Affine:
    """The map of no tokens."""
    shape = num_sequences, num_heads, key_dim
    return Affine(
        jnp.broadcast_to(jnp.eye(key_dim, dtype=dtype), (*shape, key_dim)), jnp.zeros((*shape, value_dim), dtype)
    )


def affine_map(tokens: Tokens, scale: float) -> Affine:
    """The map of the states over all tokens, M [B, H, K, K] and U [B, H, K, V], float32 or wider."""
    chunks, dtype = _chunks(tokens, scale), tokens.q_BLGK.dtype
    chunks = chunks._replace(q=None, scores=None)

    def step(columns, chunk: _Chunks):
        return _next_columns(columns, chunk, dtype)[0], None

    columns, _ = lax.scan(step, _first_columns(chunks), chunks)
    return _affine(columns)


def map_and_reads(tokens: Tokens, scale: float) -> tuple[Affine, jax.Array]:
    """The map of the states over all tokens, as `affine_map`, and the outputs as functions of the state that enters the
    first token, for `read`: [B, N, H, C, K + V] of N chunks in the dtype of q."""
    chunks, dtype = _chunks(tokens, scale), tokens.q_BLGK.dtype

    def step(columns, chunk: _Chunks):  # outputs are linear in the columns
        next_columns, new = _next_columns(columns, chunk, dtype)
        out = product("bhck,bhkm->bhcm", chunk.q, columns, dtype) + product("bhij,bhjm->bhim", chunk.scores, new, dtype)
        return next_columns, out.astype(dtype)

    columns, reads = lax.scan(step, _first_columns(chunks), chunks)
    return _affine(columns), reads.swapaxes(0, 1)


def _first_columns(chunks: _Chunks) -> jax.Array:
    """(M | U) of no tokens, [B, H, K, K + V]: (I | 0)."""
    _, num_sequences, num_heads, _, value_dim = chunks.u.shape
    return jnp.concatenate(identity(num_sequences, num_heads, chunks.k.shape[-1], value_dim, chunks.u.dtype), axis=-1)


def _next_columns(columns: jax.Array, chunk: _Chunks, dtype) -> tuple[jax.Array, jax.Array]:
    """(M | U) after a chunk, by the recurrence of the state, and its values `new` [B, H, C, K + V]."""
    key_dim = columns.shape[-2]
    new = jnp.pad(chunk.u, [(0, 0)] * 3 + [(key_dim, 0)]) - product("bhck,bhkm->bhcm", chunk.w, columns, dtype)
    return _decayed(columns, chunk.decay) + product("bhck,bhcm->bhkm", chunk.k, new, dtype), new


def _affine(columns: jax.Array) -> Affine:
    key_dim = columns.shape[-2]
    return Affine(columns[..., :key_dim], columns[..., key_dim:])


def read(reads: jax.Array, S_BHKV: jax.Array) -> jax.Array:
    """The outputs [B, L, H, V] of tokens, from `map_and_reads`, with the state that enters the first one."""
    key_dim = S_BHKV.shape[-2]
    out = product("bnhck,bhkv->bnhcv", reads[..., :key_dim], S_BHKV, reads.dtype) + reads[..., key_dim:]
    num_sequences, num_chunks, num_heads, chunk_tokens, value_dim = out.shape
    shape = num_sequences, num_chunks * chunk_tokens, num_heads, value_dim
    return out.astype(reads.dtype).swapaxes(2, 3).reshape(shape)


def outputs(tokens: Tokens, S_BHKV: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """The outputs of all tokens, [B, L, H, V] in the dtype of q, from the state that enters the first one; and the
    state that leaves the last one."""
    chunks, dtype = _chunks(tokens, scale), tokens.q_BLGK.dtype

    def step(S, chunk: _Chunks):
        new = chunk.u - product("bhck,bhkv->bhcv", chunk.w, S, dtype)
        out = product("bhck,bhkv->bhcv", chunk.q, S, dtype) + product("bhij,bhjv->bhiv", chunk.scores, new, dtype)
        S = _decayed(S, chunk.decay) + product("bhck,bhcv->bhkv", chunk.k, new, dtype)
        return S, out.astype(dtype)

    S_BHKV, out_NBHCV = lax.scan(step, S_BHKV, chunks)
    num_chunks, num_sequences, num_heads, chunk_tokens, value_dim = out_NBHCV.shape
    shape = num_sequences, num_chunks * chunk_tokens, num_heads, value_dim
    return out_NBHCV.transpose(1, 0, 3, 2, 4).reshape(shape), S_BHKV


def one_output(tokens: Tokens, S_BHKV: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """As `outputs`, of one token that is not padding, L = 1."""
    q_BHK, k_BHK = (
        jnp.repeat(x[:, 0], tokens.v_BLHV.shape[2] // x.shape[2], axis=1).astype(S_BHKV.dtype)
        for x in (tokens.q_BLGK, tokens.k_BLGK)
    )
    S_BHKV = jnp.exp(tokens.g_BLH[:, 0, :, None, None]) * S_BHKV
    error_BHV = tokens.v_BLHV[:, 0] - product("bhk,bhkv->bhv", k_BHK, S_BHKV)
    S_BHKV += k_BHK[..., None] * (tokens.beta_BLH[:, 0, :, None] * error_BHV)[..., None, :]
    out_BHV = scale * product("bhk,bhkv->bhv", q_BHK, S_BHKV)
    return out_BHV[:, None].astype(tokens.q_BLGK.dtype), S_BHKV


def _chunks(tokens: Tokens, scale: float) -> _Chunks:
    num_sequences, num_tokens, num_heads, _ = tokens.v_BLHV.shape
    dtype = tokens.q_BLGK.dtype
    wide = jnp.promote_types(jnp.float32, dtype)

    def cut(x):  # [B, L, ...] -> [N, B, C, ...]
        return x.reshape(num_sequences, num_tokens // CHUNK_TOKENS, CHUNK_TOKENS, *x.shape[2:]).swapaxes(0, 1)

    def heads(x):  # [B, L, heads, ...] -> [N, B, H, C, ...]
        return jnp.moveaxis(jnp.repeat(cut(x), num_heads // x.shape[2], axis=3), 3, 2)

    q, k, v = heads(tokens.q_BLGK), heads(tokens.k_BLGK), heads(tokens.v_BLHV)
    beta, G = heads(tokens.beta_BLH.astype(wide)), jnp.cumsum(heads(tokens.g_BLH.astype(wide)), axis=-1)
    segments = cut(tokens.segments_BL)[:, :, None]  # [N, B, 1, C]
    before = jnp.concatenate([tokens.segment_before_B[None], segments[:-1, :, 0, -1]])[:, :, None, None]
    q = jnp.where(segments[..., None] == 0, 0, q * scale)
    prefixes = None if tokens.prefixes_BL is None else cut(tokens.prefixes_BL)[:, :, None]
    paths = _paths(segments, before, prefixes)
    if prefixes is not None:  # along the path from the first token of the chunk that a token reads
        G = _at(heads(tokens.g_BLH.astype(wide))[..., None, :], paths.visible)

    # Elsewhere the difference may be positive, and its exponential infinite.
    decay = jnp.exp(jnp.where(paths.visible, G[..., :, None] - G[..., None, :], 0))
    decay = jnp.where(paths.visible, decay, 0)
    A = jnp.tril(product("...ik,...jk->...ij", k, k, dtype) * decay * beta[..., None], -1)
    inverse = unit_lower_inverse(A)
    since_start = [jnp.where(enters, jnp.exp(G), 0) for enters in paths.enters]
    kept = [[_at(since, last) for since in since_start] for last in paths.last]
    if prefixes is not None:
        kept[1][1] = jnp.broadcast_to(1 - paths.last[1].sum(-1).astype(wide), kept[1][1].shape)
    until_end = [_at(decay.mT, None if last is None else last[..., None, :]) for last in paths.last]

    def columns(x, factors):  # of all states
        return jnp.concatenate([x * factor[..., None] for factor in factors], axis=-1)

    return _Chunks(
        q=columns(q, since_start).astype(dtype),
        k=columns(k, until_end).astype(dtype),
        u=product("...ij,...jv->...iv", inverse, v * beta[..., None]),
        w=product("...ij,...jk->...ik", inverse, columns(k, [beta * since for since in since_start])).astype(dtype),
        scores=(product("...ik,...jk->...ij", q, k, dtype) * decay).astype(dtype),
        decay=jnp.stack([jnp.stack(row, -1) for row in kept], -2),
    )


class _Paths(NamedTuple):
    """Which tokens of a chunk, and which states that enter it, a token reads."""

    visible: jax.Array  # bool [N, B, 1, C, C]: token i reads token j
    enters: list[jax.Array]  # of each state, bool [N, B, 1, C]: the token reads it
    # Of each state, bool [N, B, 1, C]: the token after which it leaves the chunk; if no token is, it passes the chunk.
    # None: the last token.
    last: list[jax.Array | None]


def _paths(segments: jax.Array, before: jax.Array, prefixes: jax.Array | None) -> _Paths:
    """Arguments are [N, B, 1, C], and [N, B, 1, 1]: the segment of the token before the chunk."""
    lower = jnp.tri(segments.shape[-1], dtype=bool)
    visible = lower & (segments[..., :, None] == segments[..., None, :])
    continues = segments == before
    if prefixes is None:
        return _Paths(visible, [continues], [None])
    of_prefix = lower & (prefixes[..., :, None] == segments[..., None, :]) & (prefixes != 0)[..., None]
    # A prefix that starts in the chunk is visible; of one that ended or continues from before, the state is read, too.
    started = of_prefix.any(-1) & (prefixes != before)
    reads_prefix = (prefixes != 0) & ~continues & ~started
    in_no_branch = prefixes == 0
    is_after = jnp.flip(jnp.cumsum(jnp.flip(in_no_branch, -1), -1), -1)  # tokens in no branch from here on
    return _Paths(visible | of_prefix, [continues, reads_prefix], [None, in_no_branch & (is_after == 1)])


def _at(x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """The sum of x [..., C] over the tokens that are true; the last entry if `tokens` is None."""
    return x[..., -1] if tokens is None else jnp.where(tokens, x, 0).sum(-1)


def _decayed(S: jax.Array, decay: jax.Array) -> jax.Array:
    """The states S [B, H, states x K, V], each as a sum of all states with factors decay [B, H, states, states]."""
    num_states = decay.shape[-1]
    if num_states == 1:
        return S * decay
    of_states = S.reshape(*S.shape[:2], num_states, -1, S.shape[-1])
    return sum(decay[..., i, None, None] * of_states[:, :, i][:, :, None] for i in range(num_states)).reshape(S.shape)


@jax.custom_vjp
def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower triangular matrices A [..., C, C]; C is a power of 2.

    By substitution between blocks that double: of blocks [[P, 0], [X, Q]] the inverse is [[P', 0], [-Q' X P', Q']] with
    the inverses P' and Q'. The product (I - A)(I + A^2)(I + A^4) ... is equal in exact arithmetic, but its factors
    cancel: with 64 equal keys its error is 2e9 in float32.
    """
    inverse, size = jnp.ones((*A.shape[:-1], 1, 1), A.dtype), 1
    while size < A.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(A, 2 * size)[..., size:, :size]
        corner = -product("...ij,...jk->...ik", second, product("...ij,...jk->...ik", below, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _inverse_forward(A):
    inverse = unit_lower_inverse(A)
    return inverse, inverse


def _inverse_backward(inverse, gradient):
    """-inverse^T gradient inverse^T: two products instead of the derivative of the substitution."""
    gradient = product("...ji,...jk->...ik", inverse, gradient)
    return (-jnp.tril(product("...ij,...kj->...ik", gradient, inverse), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _diagonal_blocks(A: jax.Array, size: int) -> jax.Array:
    """[..., C, C] -> [..., C / size, size, size]"""
    num_blocks = A.shape[-1] // size
    blocks = A.reshape(*A.shape[:-2], num_blocks, size, num_blocks, size)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
