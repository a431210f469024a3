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
differences are accurate, one of integers (`decays.split_gates`).

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
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.recurrence import kernel
from jaxlc.attention.recurrence.decays import (
    Gates,
    decayed_products,
    decays_between,
    levels,
    split_gates,
)
from jaxlc.attention.state_passing import Affine, product

CHUNK_TOKENS = 128


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
    """The recurrence over chunks by the delta rule: arrays [N, B, H, ...] of N chunks, whose masks
    and gates are applied.

    With prefixes, K counts the rows of all states. Factors of products have the dtype of the
    tokens.
    """

    q: jax.Array  # [..., C, K]; outputs are q S + out
    out: jax.Array  # [..., C, V], float32 or wider, as decay and added
    # [..., states, states, 1 or channels, 1], 0 if a document starts in the chunk; S' = decay S -
    # correction S + added
    decay: jax.Array
    correction: jax.Array  # [..., K, K]
    added: jax.Array  # [..., K, V]


class _SumChunks(NamedTuple):
    """The same without correction. The H / G heads that share a key are columns of one head, M in
    all: see `_by_group`.
    """

    q: jax.Array  # [N, B, G, C, K]; outputs are the sums over the states of since (q S), plus out
    since: list[jax.Array]  # [N, B, H, C, 1]
    out: jax.Array  # [N, B, H, C, V]
    decay: jax.Array  # [N, B, H, states, states, 1]
    added: jax.Array  # [N, B, G, K, M]


def map_and_reads(tokens: Tokens, rule: Rule) -> tuple[Affine, jax.Array]:
    """The map of the states over all tokens, float32 or wider, and the outputs as functions of the
    state that enters the first token, for `read`: [B, N, H, C, K + V] of N chunks in the dtype of q.

    Rules without correction have `sum_map`.
    """
    dtype = tokens.q_BLGK.dtype
    if has_kernel(tokens, rule):
        num_sequences, _, num_heads, value_dim = tokens.v_BLHV.shape
        shape = num_sequences, num_heads, tokens.q_BLGK.shape[-1], value_dim
        own, out = _kernel_outputs(tokens, _identity(jnp.zeros(shape, jnp.float32)), rule)
        out = out.reshape(num_sequences, -1, CHUNK_TOKENS, *out.shape[2:]).swapaxes(2, 3)
        return _map_of(own), out
    chunks = _chunks(tokens, rule)
    identity = _identity(jnp.zeros_like(chunks.added[0]))
    columns, entering = _recurrence(identity, *chunks[2:], dtype)
    return _map_of(columns), _outputs(chunks, entering, dtype)


def sum_map(tokens: Tokens, rule: Rule) -> Affine:
    """The map of the states over all tokens by a rule without correction: M has a row for each state."""
    if tokens.prefixes_BLD is None:
        return _sum_map(tokens)
    chunks = _sum_chunks(tokens, rule)
    decay = chunks.decay[..., 0]
    M = jnp.broadcast_to(jnp.eye(decay.shape[-1], dtype=decay.dtype), decay.shape[1:])
    M, _ = lax.scan(lambda M, decay: (product("...ij,...jk->...ik", decay, M), None), M, decay)
    U, _ = _sum_states(jnp.zeros_like(chunks.added[0]), chunks)
    return Affine(M, _by_head(U, M.shape[1]))


def _sum_map(tokens: Tokens) -> Affine:
    """As `sum_map`, without prefixes: one product. Sums of gates from a token to the last one are accurate
    where their exponential is not small.
    """
    segments_BL = tokens.segments_BL
    g_BLH = tokens.g_BLH
    v_BLHV = tokens.v_BLHV
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
    out = product("nbhck,nbhkm->nbhcm", chunks.q, entering, dtype)
    return _add_last(out, chunks.out).astype(dtype).swapaxes(0, 1)


def _sum_outputs(tokens: Tokens, S_BHKV: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """As `outputs`, without correction."""
    chunks = _sum_chunks(tokens, rule)
    num_heads, dtype = S_BHKV.shape[1], chunks.q.dtype
    S, entering = _sum_states(_by_group(S_BHKV, chunks.q.shape[2]), chunks)
    out = chunks.out
    for since, state in zip(chunks.since, jnp.split(entering, len(chunks.since), axis=-2)):
        read = product("nbgck,nbgkm->nbgcm", chunks.q, state, dtype)
        out += since * _by_head(read, num_heads)
    return _in_order(out.astype(dtype).swapaxes(0, 1)), _by_head(S, num_heads)


def _sum_states(first: jax.Array, chunks: _SumChunks) -> tuple[jax.Array, jax.Array]:
    """As `_recurrence`, of states [B, G, K, M]."""
    by_head = chunks.decay.reshape(*chunks.decay.shape[:3], -1, 1)
    by_head = jnp.broadcast_to(by_head, (*by_head.shape[:-1], chunks.out.shape[-1]))
    decay = _by_group(by_head, first.shape[1])
    decay = decay.reshape(*decay.shape[:3], *chunks.decay.shape[3:], -1)
    return _recurrence(first, decay, None, chunks.added, chunks.q.dtype)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _recurrence(first, decay, correction, added, dtype):
    """The state after all chunks; and those that enter the chunks, [N, *first.shape] in `dtype`,
    for products.

    Args:
      first: [B, H, K, V]; or of maps of states, [B, H, K, K + V].
      decay, correction, added: of `_Chunks`. correction may be None: 0; decay has a factor for each
        column, or one.
    """
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
    """See `_recurrence`; from the last chunk to the first one, with corrections transposed, if
    `backwards`.
    """
    subscripts = "bhji,bhjm->bhim" if backwards else "bhij,bhjm->bhim"

    def step(carry, chunk):
        S, narrow = carry
        decay, correction, added = chunk
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
    if not rule.corrects:
        return _sum_outputs(tokens, S_BHKV, rule)
    chunks = _chunks(tokens, rule)
    dtype = tokens.q_BLGK.dtype
    S, entering = _recurrence(S_BHKV, *chunks[2:], dtype)
    return _in_order(_outputs(chunks, entering, dtype)), S


def one_output(tokens: Tokens, S_BHKV: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """As `outputs`, of one token that is not padding, L = 1."""
    num_heads = tokens.v_BLHV.shape[2]
    q_BHK, k_BHK = (
        jnp.repeat(x[:, 0], num_heads // x.shape[2], axis=1).astype(S_BHKV.dtype)
        for x in (tokens.q_BLGK, tokens.k_BLGK)
    )
    v_BHV = tokens.v_BLHV[:, 0].astype(S_BHKV.dtype)
    decay_BH = jnp.exp(tokens.g_BLH[:, 0])
    S_BHKV = decay_BH.reshape(*decay_BH.shape[:2], -1, 1) * S_BHKV
    new_BHV = v_BHV - product("bhk,bhkv->bhv", k_BHK, S_BHKV) if rule.corrects else v_BHV
    S_BHKV += k_BHK[..., None] * (tokens.beta_BLH[:, 0, :, None] * new_BHV)[..., None, :]
    out_BHV = rule.scale * product("bhk,bhkv->bhv", q_BHK, S_BHKV)
    if tokens.skip_BLH is not None:
        out_BHV += tokens.skip_BLH[:, 0, :, None] * v_BHV
    return out_BHV[:, None].astype(tokens.q_BLGK.dtype), S_BHKV


def has_kernel(tokens: Tokens, rule: Rule) -> bool:
    """Whether the kernels compute the chunks: with corrections, one gate a head, no prefixes."""
    is_supported = rule.corrects and tokens.g_BLH.ndim == tokens.beta_BLH.ndim
    is_supported &= tokens.prefixes_BLD is None
    return rule.uses_kernel and is_supported and jnp.finfo(tokens.q_BLGK.dtype).bits <= 32


def _kernel_outputs(tokens: Tokens, first: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """The state after all tokens, and the outputs [B, L, H, V], by the kernels, whose chunks are
    shorter. See `_recurrence`."""
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
        tuple(split_gates(g, dtype)),
        beta,
        segments[:, None],
        before[:, None],
    )
    last, out = kernel.outputs(first.swapaxes(1, 2), operands)
    return last.swapaxes(1, 2), out


class _Cut(NamedTuple):
    """The tokens of chunks, [N, B, heads, C, ...]; queries are scaled, and 0 in padding."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array  # [N, B, H, C, 1]
    skipped: jax.Array | float  # skip v
    gates: Gates

    @classmethod
    def of(cls, tokens: Tokens, rule: Rule) -> "_Cut":
        num_sequences, num_tokens = tokens.segments_BL.shape
        dtype = tokens.q_BLGK.dtype
        wide = jnp.promote_types(jnp.float32, dtype)

        def cut(x):  # [B, L, ...] -> [N, B, C, ...]
            shape = num_sequences, num_tokens // CHUNK_TOKENS, CHUNK_TOKENS
            return x.reshape(*shape, *x.shape[2:]).swapaxes(0, 1)

        def heads(x):  # [B, L, heads, ...] -> [N, B, heads, C, ...]
            return jnp.moveaxis(cut(x), 3, 2)

        def numbers(x):  # [B, L, H] or [B, L, H, K] -> [N, B, H, C, 1 or K]
            return heads(x.astype(wide).reshape(*x.shape[:3], -1))

        segments = cut(tokens.segments_BL)[:, :, None]
        before = [tokens.segment_before_B[None], segments[:-1, :, 0, -1]]
        prefixes = ()
        if tokens.prefixes_BLD is not None:
            prefixes = levels(cut(tokens.prefixes_BLD)[:, :, None])
        gates = split_gates(numbers(tokens.g_BLH), dtype)
        gates = Gates.of(gates, segments, jnp.concatenate(before)[:, :, None, None], prefixes)
        is_padding = segments[..., None] == 0
        q = heads(tokens.q_BLGK)
        k = heads(tokens.k_BLGK)
        v = heads(tokens.v_BLHV)
        q = jnp.where(is_padding, 0, q * rule.scale)
        skipped = 0
        if tokens.skip_BLH is not None:
            skipped = jnp.where(is_padding, 0, numbers(tokens.skip_BLH) * v)
        return cls(q, k, v, numbers(tokens.beta_BLH), skipped, gates)


def _chunks(tokens: Tokens, rule: Rule) -> _Chunks:
    q, k, v, beta, skipped, gates = _Cut.of(tokens, rule)
    dtype = k.dtype
    scores, kk = decayed_products([q, k], k, gates)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))

    def columns(x, factors):  # of all states
        return jnp.concatenate([x * factor for factor in factors], axis=-1)

    kept = columns(k, gates.until_end)
    inverse = unit_lower_inverse(jnp.tril(kk * beta, -1))
    u = product("...ij,...jv->...iv", inverse, v * beta)
    steps = [beta * since for since in gates.since_start]
    w = product("...ij,...jk->...ik", inverse, columns(k, steps))
    q_since = columns(q, gates.since_start) - product("...ij,...jk->...ik", scores, w, dtype)
    return _Chunks(
        q=q_since.astype(dtype),
        out=product("...ij,...jv->...iv", scores, u, dtype) + skipped,
        decay=gates.decay[..., None],
        correction=product("...ck,...cm->...km", kept, w, dtype).astype(dtype),
        added=product("...ck,...cv->...kv", kept, u, dtype),
    )


@jax.custom_vjp
def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower triangular matrices A [..., C, C]; C is a power of 2.

    By substitution between blocks that double: of blocks [[P, 0], [X, Q]] the inverse is [[P', 0],
    [-Q' X P', Q']] with the inverses P' and Q'. The product (I - A)(I + A^2)(I + A^4) ... is equal
    in exact arithmetic, but its factors cancel: with 64 equal keys its error is 2e9 in float32.
    """
    inverse = jnp.ones((*A.shape[:-1], 1, 1), A.dtype)
    size = 1
    while size < A.shape[-1]:
        first = inverse[..., 0::2, :, :]
        second = inverse[..., 1::2, :, :]
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


def _sum_chunks(tokens: Tokens, rule: Rule) -> _SumChunks:
    q, k, v, beta, skipped, gates = _Cut.of(tokens, rule)
    u = v * beta
    out = _decayed_sums(q, k, gates.G, u, gates.paths.visible) + skipped
    kept = [_by_group(factor * u, k.shape[2]) for factor in gates.until_end]
    added = [product("nbgck,nbgcm->nbgkm", k, x, k.dtype) for x in kept]
    return _SumChunks(q, gates.since_start, out, gates.decay, jnp.concatenate(added, axis=-2))


@jax.custom_vjp
def _decayed_sums(q, k, G, u, visible):
    """The sums of (q_i . k_j) exp(G_i - G_j) u_j over the tokens j that token i reads, float32 or wider,
    for a gate per head.
    """
    return _sums_forward(q, k, G, u, visible)[0]


def _decayed_scores(q, k, G, visible):
    """The factors of u [N, B, H, C, C], and exp(G_i - G_j)."""
    decay = decays_between(G.mT, G, visible)
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


def _decayed(S: jax.Array, decay: jax.Array) -> jax.Array:
    """The states S [B, H, states x K, V], each as a sum of all states with factors decay [B, H,
    states, states, 1 or K, 1 or V].
    """
    states = S.reshape(*S.shape[:2], 1, decay.shape[3], -1, S.shape[-1])
    return (decay * states).sum(3).reshape(S.shape)
