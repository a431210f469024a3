"""Recurrent layers over consecutive tokens, in chunks: matrix products instead of a loop over tokens.

For each token, a head decays its state S [K, V] by exp(g), changes it, and reads it:

    S = exp(g) S;  S = S + k (beta error)^T;  out = S^T q + skip v

The error is v - S^T k by the delta rule: Yang et al., "Gated Delta Networks: Improving Mamba2 with
Delta Rule" (2024), sections 3.2 and 3.3; with a g for each channel of K, Kimi Delta Attention (Kimi
Linear, arXiv:2510.26692). Without correction it is v: Mamba-2 (Dao and Gu, "Transformers are SSMs",
2024), whose B, C, x, step size and D are k, q, v, beta and skip.

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

Without correction, u = beta v, and there is no w. The decays then multiply v and the outputs instead of
keys and queries, and heads that share a key are columns of one state. Consecutive tokens map the state that enters them
affinely: S' = M S + U. Documents are masks: a token reads only tokens and states of its own
segment. Gates may be of any size, such as 0 and -1000 in a chunk. So G is two sums whose
differences are accurate, one of integers (`_split`).

With a gate for each channel, exp(G_i - G_j) is inside the product of q_i and k_j. exp(-G_j) may be
infinite. So two neighboring blocks of tokens are multiplied with factors exp(G_i - R) and exp(R -
G_j), where R is G at the end of the first one, and blocks of a few tokens without products.

Segments may continue another one, their prefix, which may continue another one: the nodes of trees
of at most D + 1 levels, level 0 being those without a prefix. A node is followed by the nodes that
continue it, each with all that continue that one. So D more states are passed on, those after the
last token of level e or less, for each e < D: where a node of level e + 1 starts, this is the state
after its prefix. The path of a token is its own node and all prefixes of it. A token reads the
tokens of its path that are in its chunk, and one of the states that enter the chunk. Gates add up
along the path. All states are one state [(D + 1) K, V]: q, k and w have (D + 1) K columns, and the
decay is a matrix [D + 1, D + 1] of scalars, or of vectors of K channels.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.recurrence import kernel
from jaxlc.attention.recurrence.kernel import unit_lower_inverse
from jaxlc.attention.state_passing import Affine, product

CHUNK_TOKENS = 128


# tokens of blocks that are computed without products, if the channels have gates of their own
_DIRECT_TOKENS = 16


@dataclass(frozen=True)
class Rule:
    """How tokens change the state and read it; see the top of the file."""

    scale: float  # multiplies queries
    corrects: bool = True  # the delta rule; layers have queries and keys of length 1
    uses_kernel: bool = False  # kernel.py computes what it supports, see `has_kernel`


class Tokens(NamedTuple):
    """Consecutive tokens of sequences. Key heads G divide the value heads H."""

    q_BLGK: jax.Array
    k_BLGK: jax.Array
    v_BLHV: jax.Array
    g_BLH: jax.Array  # the logarithm of the decay, at most 0; or [B, L, H, K], of each channel
    beta_BLH: jax.Array
    skip_BLH: jax.Array | None  # None: 0
    segments_BL: jax.Array  # int32; outputs of segment 0, padding, are 0
    segment_before_B: jax.Array | None  # of the token before these; 0: none
    # The prefix of each level that a token's segment continues; 0 from the segment's own level on.
    # None: no segment continues another one.
    prefixes_BLD: jax.Array | None = None


class _Chunks(NamedTuple):
    """The recurrence over chunks: arrays [N, B, H, ...] of N chunks, whose masks and gates are
    applied.

    With prefixes, K counts the rows of all states. Factors of products have the dtype of the
    tokens.
    """

    # [..., C, K]; outputs are q S + out. Without correction [N, B, G, C, K], and q S is multiplied by
    # `since`
    q: jax.Array
    out: jax.Array  # [..., C, V], float32 or wider, as decay and added
    # [..., states, states, 1 or channels], 0 if a document starts in the chunk; S' = decay S -
    # correction S + added
    decay: jax.Array
    correction: jax.Array | None  # [..., K, K]
    added: jax.Array  # [..., K, V]; without correction [N, B, G, K, H / G x V], see `_by_group`
    # without correction, of each state: the decays since the start of the chunk [..., C, 1]
    since: list[jax.Array] | None = None


def map_and_reads(tokens: Tokens, rule: Rule) -> tuple[Affine, jax.Array]:
    """The map of the states over all tokens, float32 or wider, and the outputs as functions of the
    state that enters the first token, for `read`: [B, N, H, C, K + V] of N chunks in the dtype of q.

    For rules with correction, see `sum_map`.
    """
    dtype = tokens.q_BLGK.dtype
    if has_kernel(tokens, rule):
        num_sequences, _, num_heads, value_dim = tokens.v_BLHV.shape
        shape = num_sequences, num_heads, tokens.q_BLGK.shape[-1], value_dim
        own, out = _kernel_outputs(tokens, _identity(jnp.zeros(shape, jnp.float32)), rule)
        out = out.reshape(num_sequences, -1, CHUNK_TOKENS, *out.shape[2:]).swapaxes(2, 3)
        return _map_of(own), out
    chunks = _chunks(tokens, rule)
    no_state = jnp.zeros_like(chunks.added[0])
    columns, entering = _states(_identity(no_state), chunks, dtype)
    return _map_of(columns), _outputs(chunks, entering, dtype)


def sum_map(tokens: Tokens, rule: Rule) -> Affine:
    """The map of the states over all tokens by a rule without correction: M has a row for each state."""
    if tokens.prefixes_BLD is None:
        return _sum_map(tokens)
    chunks = _chunks(tokens, rule)
    decay = chunks.decay[..., 0]
    M = jnp.broadcast_to(jnp.eye(decay.shape[-1], dtype=decay.dtype), decay.shape[1:])
    M, _ = lax.scan(lambda M, decay: (product("...ij,...jk->...ik", decay, M), None), M, decay)
    U, _ = _states(jnp.zeros_like(chunks.added[0]), chunks, tokens.q_BLGK.dtype)
    return Affine(M, _by_head(U, M.shape[1]))


def _sum_map(tokens: Tokens) -> Affine:
    """As `sum_map`, without prefixes: one product. Sums of gates from a token to the last one are accurate
    where their exponential is not small.
    """
    segments_BL, g_BLH, v_BLHV = tokens.segments_BL, tokens.g_BLH, tokens.v_BLHV
    last_B1 = segments_BL[:, -1:]
    later_BLH = jnp.pad(lax.cumsum(g_BLH, 1, reverse=True)[:, 1:], [(0, 0), (0, 1), (0, 0)])
    is_read_BL1 = (segments_BL == last_B1)[..., None]
    factor_BLH = jnp.where(is_read_BL1, jnp.exp(later_BLH) * tokens.beta_BLH, 0)
    added_BLGM = (factor_BLH[..., None] * v_BLHV).reshape(*tokens.k_BLGK.shape[:3], -1)
    U = product("blgk,blgm->bgkm", tokens.k_BLGK, added_BLGM, tokens.k_BLGK.dtype)
    passes_B1 = tokens.segment_before_B[:, None] == last_B1
    M_BH = jnp.where(passes_B1, jnp.exp(later_BLH[:, 0] + g_BLH[:, 0]), 0)
    return Affine(M_BH[..., None, None], _by_head(U, v_BLHV.shape[2]))


def _identity(no_state: jax.Array) -> jax.Array:
    """The map of states that changes nothing, [..., K, K + V], of a state of zeros."""
    eye = jnp.eye(no_state.shape[-2], dtype=no_state.dtype)
    eye = jnp.broadcast_to(eye, (*no_state.shape[:-2], *eye.shape))
    return jnp.concatenate([eye, no_state], axis=-1)


def _map_of(columns: jax.Array) -> Affine:
    key_dim = columns.shape[-2]
    return Affine(columns[..., :key_dim], columns[..., key_dim:])


def _outputs(chunks: _Chunks, entering: jax.Array, dtype) -> jax.Array:
    """[B, N, H, C, V] in `dtype`, of the states that enter the chunks; or K + V columns, of maps of
    states.
    """
    if chunks.since is None:
        out = product("nbhck,nbhkm->nbhcm", chunks.q, entering, dtype)
        return _add_last(out, chunks.out).astype(dtype).swapaxes(0, 1)
    out = chunks.out
    for since, state in zip(chunks.since, jnp.split(entering, len(chunks.since), axis=-2)):
        out += since * _by_head(product("nbgck,nbgkm->nbgcm", chunks.q, state, dtype), out.shape[2])
    return out.astype(dtype).swapaxes(0, 1)


def _by_group(x: jax.Array, num_groups: int) -> jax.Array:
    """[..., H, n, V] -> [..., G, n, H / G x V]: the heads that share a key as columns of one head."""
    *dims, num_heads, rows, width = x.shape
    x = x.reshape(*dims, num_groups, num_heads // num_groups, rows, width)
    return x.swapaxes(-3, -2).reshape(*dims, num_groups, rows, -1)


def _by_head(x: jax.Array, num_heads: int) -> jax.Array:
    """The inverse of `_by_group`."""
    *dims, num_groups, rows, _ = x.shape
    x = x.reshape(*dims, num_groups, rows, num_heads // num_groups, -1)
    return x.swapaxes(-3, -2).reshape(*dims, num_heads, rows, -1)


def _add_last(x: jax.Array, added: jax.Array) -> jax.Array:
    """x, with `added` added to the last columns."""
    missing = x.shape[-1] - added.shape[-1]
    return x + jnp.pad(added, [(0, 0)] * (added.ndim - 1) + [(missing, 0)])


def _states(first: jax.Array, chunks: _Chunks, dtype) -> tuple[jax.Array, jax.Array]:
    """The state after all chunks; and those that enter the chunks, [N, *first.shape] in `dtype`,
    for products.

    Args:
      first: [B, H, K, V]; or of maps of states, [B, H, K, K + V]; without correction, see `_by_group`.
    """
    decay = chunks.decay[..., None]
    if chunks.since is not None:
        flat = decay.reshape(*decay.shape[:3], -1, 1)
        flat = jnp.broadcast_to(flat, (*flat.shape[:-1], chunks.out.shape[-1]))
        num_groups = chunks.added.shape[2]
        shape = *decay.shape[:2], num_groups, *decay.shape[3:6], -1
        decay = _by_group(flat, num_groups).reshape(shape)
    return _recurrence(first, decay, chunks.correction, chunks.added, dtype)


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
    transposed = decay.swapaxes(-3, -4)
    dfirst, dleaving = _scan_chunks(dlast, transposed, correction, dentering, dtype, backwards=True)
    by_state = [
        x.reshape(*x.shape[:3], decay.shape[3], -1, x.shape[-1]) for x in (dleaving, entering)
    ]
    kept = "".join(name for name, size in zip("km", decay.shape[-2:]) if size > 1)
    ddecay = product(f"nbhikm,nbhjkm->nbhij{kept}", *by_state).reshape(decay.shape)
    dcorrection = None
    if correction is not None:
        dcorrection = -product("nbhim,nbhjm->nbhij", dleaving, entering, dtype)
        dcorrection = dcorrection.astype(correction.dtype)
    dadded = dleaving[..., -added.shape[-1] :]
    return dfirst, ddecay, dcorrection, dadded.astype(added.dtype)


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def _scan_chunks(first, decay, correction, added, dtype, backwards=False):
    """See `_states`; from the last chunk to the first one, with corrections transposed, if
    `backwards`.
    """
    subscripts = "bhji,bhjm->bhim" if backwards else "bhij,bhjm->bhim"

    def step(carry, chunk):
        (S, narrow), (decay, correction, added) = carry, chunk
        S = _decayed(S, decay)
        if correction is not None:
            S = S - product(subscripts, correction, narrow, dtype)
        S = _add_last(S, added)
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


def outputs(tokens: Tokens, S_BHKV: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """The outputs of all tokens, [B, L, H, V] in the dtype of q, from the state that enters the
    first one; and the state that leaves the last one."""
    if has_kernel(tokens, rule):
        S_BHKV, out = _kernel_outputs(tokens, S_BHKV, rule)
        return out, S_BHKV
    chunks = _chunks(tokens, rule)
    dtype = tokens.q_BLGK.dtype
    S = S_BHKV if rule.corrects else _by_group(S_BHKV, chunks.added.shape[2])
    S, entering = _states(S, chunks, dtype)
    out = _in_order(_outputs(chunks, entering, dtype))
    return out, S if rule.corrects else _by_head(S, S_BHKV.shape[1])


def has_kernel(tokens: Tokens, rule: Rule) -> bool:
    """Whether the kernels compute the chunks: with corrections, one gate a head, no prefixes."""
    is_supported = rule.corrects and tokens.g_BLH.ndim == tokens.beta_BLH.ndim
    is_supported &= tokens.prefixes_BLD is None
    return rule.uses_kernel and is_supported and jnp.finfo(tokens.q_BLGK.dtype).bits <= 32


def _kernel_outputs(tokens: Tokens, first: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """The state after all tokens, and the outputs [B, L, H, V], by the kernels, whose chunks are
    shorter. See `_states`."""
    dtype = tokens.q_BLGK.dtype
    segments = tokens.segments_BL
    ends = segments[:, kernel.KERNEL_TOKENS - 1 : -1 : kernel.KERNEL_TOKENS]
    before = jnp.concatenate([tokens.segment_before_B[:, None], ends], axis=1)
    is_padding = (segments == 0)[..., None, None]
    g, beta = (x.astype(jnp.float32).swapaxes(1, 2) for x in (tokens.g_BLH, tokens.beta_BLH))
    operands = kernel.Operands(
        jnp.where(is_padding, 0, tokens.q_BLGK * rule.scale),
        tokens.k_BLGK,
        tokens.v_BLHV,
        tuple(_split(g, dtype)),
        beta,
        segments[:, None],
        before[:, None],
    )
    last, out = kernel.outputs(first.swapaxes(1, 2), operands)
    return last.swapaxes(1, 2), out


def _chunks(tokens: Tokens, rule: Rule) -> _Chunks:
    num_sequences, num_tokens, num_heads, _ = tokens.v_BLHV.shape
    dtype = tokens.q_BLGK.dtype
    wide = jnp.promote_types(jnp.float32, dtype)

    def cut(x):  # [B, L, ...] -> [N, B, C, ...]
        return x.reshape(
            num_sequences, num_tokens // CHUNK_TOKENS, CHUNK_TOKENS, *x.shape[2:]
        ).swapaxes(0, 1)

    def heads(x):  # [B, L, heads, ...] -> [N, B, heads, C, ...]
        return jnp.moveaxis(cut(x), 3, 2)

    def of_each_token(x):  # [B, L, H] or [B, L, H, K] -> [N, B, H, C, 1 or K]
        return heads(x.astype(wide).reshape(*x.shape[:3], -1))

    q, k, v = heads(tokens.q_BLGK), heads(tokens.k_BLGK), heads(tokens.v_BLHV)
    beta, g = of_each_token(tokens.beta_BLH), _split(of_each_token(tokens.g_BLH), dtype)
    segments = cut(tokens.segments_BL)[:, :, None]  # [N, B, 1, C]
    before = jnp.concatenate([tokens.segment_before_B[None], segments[:-1, :, 0, -1]])[
        :, :, None, None
    ]
    is_padding = segments[..., None] == 0
    q = jnp.where(is_padding, 0, q * rule.scale)
    skip = 0
    if tokens.skip_BLH is not None:
        skip = jnp.where(is_padding, 0, of_each_token(tokens.skip_BLH) * v)
    prefixes = () if tokens.prefixes_BLD is None else _levels(cut(tokens.prefixes_BLD)[:, :, None])
    paths = _paths(segments, before, prefixes)
    if prefixes or g.shape[-1] == 1:
        # Along the path from the first token of the chunk that a token reads: a sum over other
        # documents, too, would round differences of G.
        G = product("...ij,...jk->...ik", paths.visible.astype(wide), g)
    else:
        G = jnp.cumsum(g, axis=-2)

    total = jnp.exp(G.sum(0))
    since_start = [jnp.where(enters[..., None], total, 0) for enters in paths.enters]
    factors = [[_at(since, last) for since in since_start] for last in paths.last]
    for state, last in enumerate(paths.last):
        if last is not None:
            passes = 1 - last.sum(-1, keepdims=True).astype(wide)
            factors[state][state] = jnp.broadcast_to(passes, factors[state][state].shape)
    until_end = _until_end(G, paths)
    decay = jnp.stack([jnp.stack(row, -2) for row in factors], -3)
    if not rule.corrects:
        u = v * beta
        out = _decayed_sums(q, k, G, u, paths.visible)
        kept = [_by_group(factor * u, k.shape[2]) for factor in until_end]
        added = [product("nbgck,nbgcm->nbgkm", k, x, dtype) for x in kept]
        return _Chunks(q, out + skip, decay, None, jnp.concatenate(added, axis=-2), since_start)

    scores, kk = _decayed_products([q, k], k, G, paths, segments, prefixes)
    q, k = (jnp.repeat(x, num_heads // x.shape[2], axis=2) for x in (q, k))

    def columns(x, factors):  # of all states
        return jnp.concatenate([x * factor for factor in factors], axis=-1)

    kept = columns(k, until_end)
    inverse = unit_lower_inverse(jnp.tril(kk * beta, -1))
    u = product("...ij,...jv->...iv", inverse, v * beta)
    w = product("...ij,...jk->...ik", inverse, columns(k, [beta * since for since in since_start]))
    q_since = columns(q, since_start) - product("...ij,...jk->...ik", scores, w, dtype)
    return _Chunks(
        q=q_since.astype(dtype),
        out=product("...ij,...jv->...iv", scores, u, dtype) + skip,
        decay=decay,
        correction=product("...ck,...cm->...km", kept, w, dtype).astype(dtype),
        added=product("...ck,...cv->...kv", kept, u, dtype),
    )


@jax.custom_vjp
def _decayed_sums(q, k, G, u, visible):
    """The sums of (q_i . k_j) exp(G_i - G_j) u_j over the tokens j that token i reads, float32 or wider,
    for a gate per head.
    """
    return _sums_forward(q, k, G, u, visible)[0]


def _decayed_scores(q, k, G, visible):
    """The factors of u [N, B, H, C, C], and exp(G_i - G_j)."""
    decay = _decays_between(G.mT, G, visible)
    scores = product("...ik,...jk->...ij", q, k, k.dtype)
    return jnp.repeat(scores, decay.shape[2] // k.shape[2], axis=2) * decay, decay


def _sums_forward(q, k, G, u, visible):
    scores, _ = _decayed_scores(q, k, G, visible)
    out = product("...ij,...jv->...iv", scores, u, k.dtype)
    return out, (q, k, G, u, visible)


def _sums_backward(residuals, dout):
    """Each kernel that reads dscores [N, B, H, C, C] computes decays from G: no array of that size is stored
    for them.
    """
    q, k, G, u, visible = residuals
    dtype = k.dtype
    scores, decay = _decayed_scores(q, k, G, visible)
    du = product("...ij,...iv->...jv", scores, dout, dtype)
    dscores = product("...iv,...jv->...ij", dout, u, dtype)
    dG = jnp.tril(dscores * scores, -1)  # the diagonal, which does not depend on G, would cancel
    dG = (dG.sum(-1) - dG.sum(-2))[..., None]
    dscores = (dscores * decay).reshape(*k.shape[:3], -1, *dscores.shape[-2:]).sum(3)
    dq = product("...ij,...jk->...ik", dscores, k, dtype)
    dk = product("...ij,...ik->...jk", dscores, q, dtype)
    return dq.astype(dtype), dk.astype(dtype), jnp.broadcast_to(dG, G.shape), du, None


_decayed_sums.defvjp(_sums_forward, _sums_backward)


def _split(g: jax.Array, dtype) -> jax.Array:
    """g [...] as two terms [2, ...]: integers, whose sums over a chunk are exact, and numbers of at
    most 1/2. So the difference of two large sums is accurate.

    Args:
      dtype: of the tokens. With half precision, one term [1, ...]: the rounding errors of its sums are smaller than
        rounding to half precision.
    """
    # exponentials of smaller gates are 0 as well
    g = jnp.maximum(g, 1.1 * math.log(jnp.finfo(g.dtype).smallest_subnormal))
    if jnp.finfo(dtype).bits < 32:
        return g[None]
    whole = jnp.round(g)
    return jnp.stack([whole, g - whole])


def _decays_between(first: jax.Array, last: jax.Array, reads: jax.Array) -> jax.Array:
    """exp(last - first) of the cumulative gates of two tokens, sums of the terms of `_split`, where
    `reads` is true, and 0 elsewhere.
    """
    # Elsewhere the difference may be positive, and its exponential infinite.
    difference = jnp.where(reads, (last - first).sum(0), 0)
    return jnp.where(reads, jnp.exp(difference), 0)


def _until_end(G: jax.Array, paths: "_Paths") -> list[jax.Array]:
    """exp(G_end - G_j) of each state [..., C, 1 or K], where the last token that changes it reads
    token j.
    """
    factors = []
    for last in paths.last:
        reads = _at(paths.visible, last).astype(bool)[..., None]
        factors.append(_decays_between(G, _at(G, last)[..., None, :], reads))
    return factors


def _decayed_products(
    xs: list[jax.Array],
    k: jax.Array,
    G: jax.Array,
    paths: "_Paths",
    segments: jax.Array,
    prefixes: Sequence[jax.Array],
) -> list[jax.Array]:
    """x_i . k_j exp(G_i - G_j) [N, B, H, C, C] of each x, where token i reads token j."""
    num_heads = G.shape[3]
    dtype = k.dtype

    def repeated(x):  # [N, B, G, ...] -> [N, B, H, ...]
        return jnp.repeat(x, num_heads // x.shape[2], axis=2)

    if G.shape[-1] > 1:
        x = jnp.stack([repeated(x) for x in xs])
        return [*_products_by_channel(x, repeated(k), G, segments, prefixes, dtype)]
    decay = _decays_between(G.mT, G, paths.visible)
    return [repeated(product("...ik,...jk->...ij", x, k, dtype)) * decay for x in xs]


def _products_by_channel(
    x: jax.Array,
    k: jax.Array,
    G: jax.Array,
    segments: jax.Array,
    prefixes: Sequence[jax.Array],
    dtype,
) -> jax.Array:
    """The sums over channels c of x_ic k_jc exp(G_ic - G_jc), [x, N, B, H, C, C], where token i
    reads token j. No exponent is positive.

    By blocks that double, as in `unit_lower_inverse`: tokens of the second one of two blocks read
    the states of the first one, as chunks do.
    """
    size = _DIRECT_TOKENS
    none = jnp.zeros((), segments.dtype)

    def blocks(x, axis):  # [..., C, ...] -> [..., C / size, size, ...]
        return x.reshape(*x.shape[:axis], -1, size, *(x.shape[axis + 1 :] if axis < -1 else ()))

    def pairs(x, axis):  # the first and the second ones of two blocks, [..., C / 2 size, size, ...]
        x = blocks(x, axis)
        return (lax.slice_in_dim(x, start, None, 2, axis=axis + x.ndim - 1) for start in range(2))

    inside = _paths(blocks(segments, -1), none, [blocks(prefix, -1) for prefix in prefixes])
    total = _direct_products(*(blocks(array, -2) for array in (x, k, G)), inside.visible)
    while size < x.shape[-2]:
        (_, x2), (k1, _), (G1, G2) = (pairs(array, -2) for array in (x, k, G))
        (segments1, *prefixes1), (segments2, *prefixes2) = zip(
            *(pairs(array, -1) for array in (segments, *prefixes))
        )
        first = _paths(segments1, none, prefixes1)
        second = _paths(segments2, segments1[..., -1:], prefixes2)
        below = 0
        for until_end, last, enters in zip(_until_end(G1, first), first.last, second.enters):
            since = _decays_between(_at(G1, last)[..., None, :], G2, enters[..., None])
            below += product("...ik,...jk->...ij", x2 * since, k1 * until_end, dtype)
        upper = jnp.concatenate([total[..., 0::2, :, :], jnp.zeros_like(below)], axis=-1)
        lower = jnp.concatenate([below, total[..., 1::2, :, :]], axis=-1)
        total = jnp.concatenate([upper, lower], axis=-2)
        size *= 2
    return total[..., 0, :, :]


@jax.custom_vjp
def _direct_products(x, k, G, visible):
    """As `_products_by_channel`, of blocks [..., c, K], with all exponentials at once."""
    decays = _exponentials(G, visible, len(x))
    return jnp.stack([
        (one[..., :, None, :] * k[..., None, :, :] * decay).sum(-1) for one, decay in zip(x, decays)
    ])  # fmt: skip


def _exponentials(G, visible, times):
    """The exponentials for each of several sums. They are equal, but behind barriers: XLA would store
    what several sums share, which is much larger than their operands. It would store zeros, too, which
    a scan hoists: so not `_decays_between`.
    """
    for _ in range(times):
        G = lax.optimization_barrier(G)
        difference = (G[..., :, None, :] - G[..., None, :, :]).sum(0)
        yield visible[..., None] * jnp.exp(jnp.minimum(difference, 0))


def _direct_forward(x, k, G, visible):
    return _direct_products(x, k, G, visible), (x, k, G, visible)


def _direct_backward(residuals, gradient):
    x, k, G, visible = residuals
    *decays, last = _exponentials(G, visible, len(x) + 1)
    dx = jnp.stack([
        (one[..., None] * k[..., None, :, :] * decay).sum(-2) for one, decay in zip(gradient, decays)
    ])  # fmt: skip
    of_pairs = sum(one[..., None] * own[..., :, None, :] for one, own in zip(gradient, x))
    dk = (of_pairs * last).sum(-3)
    dG = (x * dx).sum(0) - k * dk
    return dx.astype(x.dtype), dk.astype(k.dtype), jnp.broadcast_to(dG, G.shape), None


_direct_products.defvjp(_direct_forward, _direct_backward)


class _Paths(NamedTuple):
    """Which tokens of a chunk, and which states that enter it, a token reads. First comes the state
    after the last token, then the state of each level of prefixes, the deepest level first.
    """

    visible: jax.Array  # bool [N, B, 1, C, C]: token i reads token j
    enters: list[jax.Array]  # of each state, bool [N, B, 1, C]: the token reads it
    # Of each state, bool [N, B, 1, C]: the token after which it leaves the chunk; if no token is, it passes the chunk.
    # None: the last token.
    last: list[jax.Array | None]


def _levels(prefixes: jax.Array) -> list[jax.Array]:
    """[..., D] -> D arrays, the deepest level first."""
    return [prefixes[..., level] for level in reversed(range(prefixes.shape[-1]))]


def _paths(segments: jax.Array, before: jax.Array, prefixes: Sequence[jax.Array]) -> _Paths:
    """Arguments are [N, B, 1, C], and [N, B, 1, 1]: the segment of the token before the chunk.

    Args:
      prefixes: of `_levels`.
    """
    lower = jnp.tri(segments.shape[-1], dtype=bool)
    visible = lower & (segments[..., :, None] == segments[..., None, :])
    has_entered = segments == before
    enters = [has_entered]
    last = [None]
    for prefix in prefixes:
        in_branch = prefix != 0
        in_prefix = lower & (prefix[..., :, None] == segments[..., None, :]) & in_branch[..., None]
        visible |= in_prefix
        # A prefix that starts in the chunk is visible; of the deepest one that ended or continues
        # from before, the state is read, too.
        started = in_prefix.any(-1) & (prefix != before)
        reads_prefix = in_branch & ~has_entered & ~started
        enters.append(reads_prefix)
        has_entered |= reads_prefix
        # tokens of this level or less from here on
        is_after = jnp.flip(jnp.cumsum(jnp.flip(~in_branch, -1), -1), -1)
        last.append(~in_branch & (is_after == 1))
    return _Paths(visible, enters, last)


def _at(x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """The sum of x [..., C, n] over the tokens that are true; the last one if `tokens` is None."""
    return x[..., -1, :] if tokens is None else jnp.where(tokens[..., None], x, 0).sum(-2)


def _decayed(S: jax.Array, decay: jax.Array) -> jax.Array:
    """The states S [B, H, states x K, V], each as a sum of all states with factors decay [B, H,
    states, states, 1 or K, 1 or V].
    """
    states = S.reshape(*S.shape[:2], 1, decay.shape[3], -1, S.shape[-1])
    return (decay * states).sum(3).reshape(S.shape)
