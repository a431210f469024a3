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
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK_TOKENS = 64


class Tokens(NamedTuple):
    """Consecutive tokens of sequences. Key heads G divide the value heads H."""

    q_BLGK: jax.Array
    k_BLGK: jax.Array
    v_BLHV: jax.Array
    g_BLH: jax.Array  # the logarithm of the decay, at most 0
    beta_BLH: jax.Array
    segments_BL: jax.Array  # int32; outputs of segment 0, padding, are 0
    segment_before_B: jax.Array  # of the token before these; 0: none


class Affine(NamedTuple):
    """The map of a state that enters tokens to the state that leaves them: S -> M S + U."""

    M: jax.Array  # [..., K, K]
    U: jax.Array  # [..., K, V]

    def __call__(self, S: jax.Array) -> jax.Array:
        return product("...ij,...jv->...iv", self.M, S) + self.U

    def after(self, first: "Affine") -> "Affine":
        """The map of `first`, and then of this one."""
        return Affine(product("...ij,...jk->...ik", self.M, first.M), self(first.U))


class _Chunks(NamedTuple):
    """What the recurrence over chunks needs: arrays [N, B, H, ...] of N chunks, whose masks and gates are applied.

    Factors of products have the dtype of the tokens: a step reads them, and converts nothing.
    """

    q: jax.Array | None  # [..., C, K], decayed since the start of the chunk; 0 in documents that start in it
    k: jax.Array  # [..., C, K], decayed until the end of the chunk; 0 in documents that end before
    u: jax.Array  # [..., C, V], float32 or wider, as decay
    w: jax.Array  # [..., C, K]
    scores: jax.Array | None  # [..., C, C]
    decay: jax.Array  # [...], of the state over the chunk; 0 if a document starts in it


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


def affine_map(tokens: Tokens, scale: float, chunk_tokens: int = CHUNK_TOKENS) -> Affine:
    """The map of the states over all tokens, M [B, H, K, K] and U [B, H, K, V], float32 or wider."""
    chunks, dtype = _chunks(tokens, scale, chunk_tokens), tokens.q_BLGK.dtype
    chunks, key_dim = chunks._replace(q=None, scores=None), chunks.k.shape[-1]

    def step(columns, chunk: _Chunks):  # (M | U) is the recurrence of the state, started from (I | 0)
        new = jnp.pad(chunk.u, [(0, 0)] * 3 + [(key_dim, 0)]) - product("bhck,bhkm->bhcm", chunk.w, columns, dtype)
        added = product("bhck,bhcm->bhkm", chunk.k, new, dtype)
        return columns * chunk.decay[..., None, None] + added, None

    _, num_sequences, num_heads, _, value_dim = chunks.u.shape
    start = identity(num_sequences, num_heads, key_dim, value_dim, chunks.u.dtype)
    columns, _ = lax.scan(step, jnp.concatenate(start, axis=-1), chunks)
    return Affine(columns[..., :key_dim], columns[..., key_dim:])


def outputs(
    tokens: Tokens, S_BHKV: jax.Array, scale: float, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[jax.Array, jax.Array]:
    """The outputs of all tokens, [B, L, H, V] in the dtype of q, from the state that enters the first one; and the
    state that leaves the last one."""
    chunks, dtype = _chunks(tokens, scale, chunk_tokens), tokens.q_BLGK.dtype

    def step(S, chunk: _Chunks):
        new = chunk.u - product("bhck,bhkv->bhcv", chunk.w, S, dtype)
        out = product("bhck,bhkv->bhcv", chunk.q, S, dtype) + product("bhij,bhjv->bhiv", chunk.scores, new, dtype)
        S = S * chunk.decay[..., None, None] + product("bhck,bhcv->bhkv", chunk.k, new, dtype)
        return S, out.astype(dtype)

    S_BHKV, out_NBHCV = lax.scan(step, S_BHKV, chunks)
    num_chunks, num_sequences, num_heads, _, value_dim = out_NBHCV.shape
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


def _chunks(tokens: Tokens, scale: float, chunk_tokens: int) -> _Chunks:
    num_sequences, num_tokens, num_heads, _ = tokens.v_BLHV.shape
    dtype = tokens.q_BLGK.dtype
    wide = jnp.promote_types(jnp.float32, dtype)

    def cut(x):  # [B, L, ...] -> [N, B, C, ...]
        return x.reshape(num_sequences, num_tokens // chunk_tokens, chunk_tokens, *x.shape[2:]).swapaxes(0, 1)

    def heads(x):  # [B, L, heads, ...] -> [N, B, H, C, ...]
        return jnp.moveaxis(jnp.repeat(cut(x), num_heads // x.shape[2], axis=3), 3, 2)

    q, k, v = heads(tokens.q_BLGK), heads(tokens.k_BLGK), heads(tokens.v_BLHV)
    beta, G = heads(tokens.beta_BLH.astype(wide)), jnp.cumsum(heads(tokens.g_BLH.astype(wide)), axis=-1)
    segments = cut(tokens.segments_BL)[:, :, None]  # [N, B, 1, C]
    before = jnp.concatenate([tokens.segment_before_B[None], segments[:-1, :, 0, -1]])[:, :, None, None]
    q = jnp.where(segments[..., None] == 0, 0, q * scale)

    lower = jnp.tri(chunk_tokens, dtype=bool)
    decay = jnp.exp(jnp.where(lower, G[..., :, None] - G[..., None, :], 0))
    decay = jnp.where(lower & (segments[..., :, None] == segments[..., None, :]), decay, 0)
    A = jnp.tril(product("...ik,...jk->...ij", k, k, dtype) * decay * beta[..., None], -1)
    inverse = unit_lower_inverse(A)
    since_start = jnp.where(segments == before, jnp.exp(G), 0)
    until_end = jnp.where(segments == segments[..., -1:], jnp.exp(G[..., -1:] - G), 0)
    return _Chunks(
        q=(q * since_start[..., None]).astype(dtype),
        k=(k * until_end[..., None]).astype(dtype),
        u=product("...ij,...jv->...iv", inverse, v * beta[..., None]),
        w=product("...ij,...jk->...ik", inverse, k * (beta * since_start)[..., None]).astype(dtype),
        scores=(product("...ik,...jk->...ij", q, k, dtype) * decay).astype(dtype),
        decay=since_start[..., -1],
    )


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
