"""The gated delta rule over consecutive tokens, in chunks: matrix products instead of a loop over
tokens.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), sections 3.2 and 3.3.
For each token, a head decays its state S [K, V] by exp(g), corrects it by the delta rule, and reads
it:

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  out = S^T q

Over a chunk of C tokens with the cumulative gates G_i = g_1 + ... + g_i, let A be the strictly
lower triangular matrix beta_i (k_i . k_j) exp(G_i - G_j), and u = (I + A)^-1 (beta v), w = (I +
A)^-1 (beta exp(G) k). Then

    new = u - w S
    out = (exp(G) q) S + scores new, with the scores (q k^T * exp(G_i - G_j) for j <= i)
    S' = exp(G_C) S + kept^T new, with kept = exp(G_C - G) k

Both are linear in S. So all products of tokens are computed for many chunks at once, and the
recurrence over chunks has one product:

    out = (exp(G) q - scores w) S + scores u
    S' = exp(G_C) S - (kept^T w) S + kept^T u

Consecutive tokens map the state that enters them affinely: S' = M S + U. Documents are masks: a
token reads only tokens and states of its own segment. Gates of -inf instead would make differences
of G undefined.

Segments (branches) may continue another one, their prefix. Then a second state is passed on, the
state after the last token that is in no branch: a prefix is followed by its branches, so where a
branch starts this is the state after its prefix. Both are one state [2 K, V]: q, k and w have 2 K
columns, and the decay is a matrix [2, 2] of scalars.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.state_passing import Affine, identity, product


@jax.custom_vjp
def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower triangular matrices A [..., C, C]; C is a power of 2.

    By substitution between blocks that double: of blocks [[P, 0], [X, Q]] the inverse is [[P', 0],
    [-Q' X P', Q']] with the inverses P' and Q'. The product (I - A)(I + A^2)(I + A^4) ... is equal
    in exact arithmetic, but its factors cancel: with 64 equal keys its error is 2e9 in float32.
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
    # the segment that a token's segment continues; 0, or None: it continues none
    prefixes_BL: jax.Array | None = None


class _Chunks(NamedTuple):
    """The recurrence over chunks: arrays [N, B, H, ...] of N chunks, whose masks and gates are
    applied.

    With prefixes, K counts the rows of both states. Factors of products have the dtype of the
    tokens.
    """

    q: jax.Array  # [..., C, K]; outputs are q S + out
    out: jax.Array  # [..., C, V], float32 or wider, as decay and added
    # [..., states, states], 0 if a document starts in the chunk; S' = decay S - correction S +
    # added
    decay: jax.Array
    correction: jax.Array  # [..., K, K]
    added: jax.Array  # [..., K, V]


def affine_map(tokens: Tokens, scale: float) -> Affine:
    """The map of the states over all tokens, M [B, H, K, K] and U [B, H, K, V], float32 or wider."""
    chunks, dtype = _chunks(tokens, scale), tokens.q_BLGK.dtype
    return _affine(_states(_first_columns(chunks), chunks, dtype)[0])


def map_and_reads(tokens: Tokens, scale: float) -> tuple[Affine, jax.Array]:
    """The map of the states over all tokens, as `affine_map`, and the outputs as functions of the
    state that enters the first token, for `read`: [B, N, H, C, K + V] of N chunks in the dtype of
    q."""
    chunks, dtype = _chunks(tokens, scale), tokens.q_BLGK.dtype
    columns, entering = _states(_first_columns(chunks), chunks, dtype)
    return _affine(columns), _outputs(chunks, entering, dtype)


def _first_columns(chunks: _Chunks) -> jax.Array:
    """(M | U) of no tokens, [B, H, K, K + V]: (I | 0)."""
    _, num_sequences, num_heads, key_dim, value_dim = chunks.added.shape
    return jnp.concatenate(
        identity(num_sequences, num_heads, key_dim, value_dim, chunks.added.dtype), axis=-1
    )


def _affine(columns: jax.Array) -> Affine:
    key_dim = columns.shape[-2]
    return Affine(columns[..., :key_dim], columns[..., key_dim:])


def _outputs(chunks: _Chunks, entering: jax.Array, dtype) -> jax.Array:
    """[B, N, H, C, V] in `dtype`, of the states that enter the chunks; or K + V columns, of maps of
    states.
    """
    out = product("nbhck,nbhkm->nbhcm", chunks.q, entering, dtype)
    return _add_last(out, chunks.out).astype(dtype).swapaxes(0, 1)


def _add_last(x: jax.Array, added: jax.Array) -> jax.Array:
    """x, with `added` added to the last columns."""
    missing = x.shape[-1] - added.shape[-1]
    return x + jnp.pad(added, [(0, 0)] * (added.ndim - 1) + [(missing, 0)])


def _states(first: jax.Array, chunks: _Chunks, dtype) -> tuple[jax.Array, jax.Array]:
    """The state after all chunks; and those that enter the chunks, [N, *first.shape] in `dtype`,
    for products.

    Args:
      first: [B, H, K, V]; or of maps of states, [B, H, K, K + V].
    """
    return _recurrence(first, chunks.decay, chunks.correction, chunks.added, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _recurrence(first, decay, correction, added, dtype):
    return _scan_chunks(first, decay, correction, added, dtype)


def _recurrence_forward(first, decay, correction, added, dtype):
    last, entering = _scan_chunks(first, decay, correction, added, dtype)
    return (last, entering), (decay, correction, added, entering)


def _recurrence_backward(dtype, residuals, gradients):
    """The gradients of states by a recurrence of the same form, and of its factors for all chunks
    at once.
    """
    decay, correction, added, entering = residuals
    dlast, dentering = gradients
    dfirst, dleaving = _scan_chunks(dlast, decay.mT, correction, dentering, dtype, backwards=True)
    by_state = [
        x.reshape(*x.shape[:3], decay.shape[-1], -1, x.shape[-1]) for x in (dleaving, entering)
    ]
    ddecay = product("nbhikm,nbhjkm->nbhij", *by_state)
    dcorrection = -product("nbhim,nbhjm->nbhij", dleaving, entering, dtype)
    dadded = dleaving[..., -added.shape[-1] :]
    return dfirst, ddecay, dcorrection.astype(correction.dtype), dadded.astype(added.dtype)


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def _scan_chunks(first, decay, correction, added, dtype, backwards=False):
    """See `_states`; from the last chunk to the first one, with corrections transposed, if
    `backwards`.
    """
    subscripts = "bhji,bhjm->bhim" if backwards else "bhij,bhjm->bhim"

    def step(carry, chunk):
        (S, narrow), (decay, correction, added) = carry, chunk
        S = _add_last(_decayed(S, decay) - product(subscripts, correction, narrow, dtype), added)
        return (S, S.astype(dtype)), narrow

    carry = first, first.astype(dtype)  # the kernel that computes a state converts it
    (last, _), entering = lax.scan(step, carry, (decay, correction, added), reverse=backwards)
    return last, entering


def read(reads: jax.Array, S_BHKV: jax.Array) -> jax.Array:
    """The outputs [B, L, H, V] of tokens, from `map_and_reads`, with the state that enters the
    first one.
    """
    key_dim = S_BHKV.shape[-2]
    out = (
        product("bnhck,bhkv->bnhcv", reads[..., :key_dim], S_BHKV, reads.dtype)
        + reads[..., key_dim:]
    )
    return _in_order(out.astype(reads.dtype))


def _in_order(out_BNHCV: jax.Array) -> jax.Array:
    """[B, N, H, C, V] -> [B, L, H, V]"""
    num_sequences, _, num_heads, _, value_dim = out_BNHCV.shape
    return out_BNHCV.swapaxes(2, 3).reshape(num_sequences, -1, num_heads, value_dim)


def outputs(tokens: Tokens, S_BHKV: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """The outputs of all tokens, [B, L, H, V] in the dtype of q, from the state that enters the
    first one; and the state that leaves the last one."""
    chunks, dtype = _chunks(tokens, scale), tokens.q_BLGK.dtype
    S_BHKV, entering = _states(S_BHKV, chunks, dtype)
    return _in_order(_outputs(chunks, entering, dtype)), S_BHKV


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
        return x.reshape(
            num_sequences, num_tokens // CHUNK_TOKENS, CHUNK_TOKENS, *x.shape[2:]
        ).swapaxes(0, 1)

    def heads(x):  # [B, L, heads, ...] -> [N, B, heads, C, ...]
        return jnp.moveaxis(cut(x), 3, 2)

    def repeated(x):  # [N, B, G, ...] -> [N, B, H, ...]
        return jnp.repeat(x, num_heads // x.shape[2], axis=2)

    q, k, v = heads(tokens.q_BLGK), heads(tokens.k_BLGK), heads(tokens.v_BLHV)
    beta, G = (
        heads(tokens.beta_BLH.astype(wide)),
        jnp.cumsum(heads(tokens.g_BLH.astype(wide)), axis=-1),
    )
    segments = cut(tokens.segments_BL)[:, :, None]  # [N, B, 1, C]
    before = jnp.concatenate([tokens.segment_before_B[None], segments[:-1, :, 0, -1]])[
        :, :, None, None
    ]
    q = jnp.where(segments[..., None] == 0, 0, q * scale)
    prefixes = None if tokens.prefixes_BL is None else cut(tokens.prefixes_BL)[:, :, None]
    paths = _paths(segments, before, prefixes)
    if prefixes is not None:  # along the path from the first token of the chunk that a token reads
        G = _at(heads(tokens.g_BLH.astype(wide))[..., None, :], paths.visible)

    # Elsewhere the difference may be positive, and its exponential infinite.
    decay = jnp.exp(jnp.where(paths.visible, G[..., :, None] - G[..., None, :], 0))
    decay = jnp.where(paths.visible, decay, 0)
    qk, kk = (repeated(product("...ik,...jk->...ij", x, k, dtype)) for x in (q, k))
    A = jnp.tril(kk * decay * beta[..., None], -1)
    inverse = unit_lower_inverse(A)
    since_start = [jnp.where(enters, jnp.exp(G), 0) for enters in paths.enters]
    factors = [[_at(since, last) for since in since_start] for last in paths.last]
    if prefixes is not None:
        factors[1][1] = jnp.broadcast_to(
            1 - paths.last[1].sum(-1).astype(wide), factors[1][1].shape
        )
    until_end = [_at(decay.mT, None if last is None else last[..., None, :]) for last in paths.last]

    def columns(x, factors):  # of all states
        return jnp.concatenate([x * factor[..., None] for factor in factors], axis=-1)

    q, k = repeated(q), repeated(k)
    u = product("...ij,...jv->...iv", inverse, v * beta[..., None])
    w = product("...ij,...jk->...ik", inverse, columns(k, [beta * since for since in since_start]))
    scores = qk * decay
    kept = columns(k, until_end)
    return _Chunks(
        q=(columns(q, since_start) - product("...ij,...jk->...ik", scores, w, dtype)).astype(dtype),
        out=product("...ij,...jv->...iv", scores, u, dtype),
        decay=jnp.stack([jnp.stack(row, -1) for row in factors], -2),
        correction=product("...ck,...cm->...km", kept, w, dtype).astype(dtype),
        added=product("...ck,...cv->...kv", kept, u, dtype),
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
    in_prefix = (
        lower & (prefixes[..., :, None] == segments[..., None, :]) & (prefixes != 0)[..., None]
    )
    # A prefix that starts in the chunk is visible; of one that ended or continues from before, the
    # state is read, too.
    started = in_prefix.any(-1) & (prefixes != before)
    reads_prefix = (prefixes != 0) & ~continues & ~started
    in_no_branch = prefixes == 0
    # tokens in no branch from here on
    is_after = jnp.flip(jnp.cumsum(jnp.flip(in_no_branch, -1), -1), -1)
    return _Paths(
        visible | in_prefix, [continues, reads_prefix], [None, in_no_branch & (is_after == 1)]
    )


def _at(x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """The sum of x [..., C] over the tokens that are true; the last entry if `tokens` is None."""
    return x[..., -1] if tokens is None else jnp.where(tokens, x, 0).sum(-1)


def _decayed(S: jax.Array, decay: jax.Array) -> jax.Array:
    """The states S [B, H, states x K, V], each as a sum of all states with factors decay [B, H,
    states, states].
    """
    num_states = decay.shape[-1]
    if num_states == 1:
        return S * decay
    states = S.reshape(*S.shape[:2], num_states, -1, S.shape[-1])
    return sum(
        decay[..., i, None, None] * states[:, :, i][:, :, None] for i in range(num_states)
    ).reshape(S.shape)
