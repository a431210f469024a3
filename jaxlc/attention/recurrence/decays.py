"""Which earlier tokens and states each token of a chunk reads, and the decays between them.

See the top of chunks.py. Arrays have dimensions [N, B, H, C, ...]: chunks, sequences, heads, and
tokens of a chunk.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.state_passing import product

# tokens of blocks that are computed without products, if the channels have gates of their own
_DIRECT_TOKENS = 16


class Paths(NamedTuple):
    """Which tokens of a chunk, and which states that enter it, a token reads. First comes the state
    after the last token, then the state of each level of prefixes, the deepest level first.
    """

    segments: jax.Array  # int32 [N, B, 1, C]
    prefixes: Sequence[jax.Array]  # of `levels`
    visible: jax.Array  # bool [N, B, 1, C, C]: token i reads token j
    enters: list[jax.Array]  # of each state, bool [N, B, 1, C]: the token reads it
    # Of each state, bool [N, B, 1, C]: the token after which it leaves the chunk; if no token is, it passes the chunk.
    # None: the last token.
    last: list[jax.Array | None]

    @classmethod
    def of(cls, segments: jax.Array, before: jax.Array, prefixes: Sequence[jax.Array]) -> "Paths":
        """Arguments are [N, B, 1, C], and [N, B, 1, 1]: the segment of the token before the chunk.

        Args:
          prefixes: of `levels`.
        """
        lower = jnp.tri(segments.shape[-1], dtype=bool)
        visible = lower & (segments[..., :, None] == segments[..., None, :])
        has_entered = segments == before
        enters = [has_entered]
        last = [None]
        for prefix in prefixes:
            in_branch = prefix != 0
            in_prefix = (
                lower & (prefix[..., :, None] == segments[..., None, :]) & in_branch[..., None]
            )
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
        return cls(segments, prefixes, visible, enters, last)


class Gates(NamedTuple):
    """The decays of the states and tokens of chunks, wide; of each state, the lists as in `Paths`."""

    paths: Paths
    G: jax.Array  # [terms, N, B, H, C, 1 or K]: sums of the terms of `split_gates` along the path
    # [..., C, 1 or K] until the token; 0 if that does not read the state
    since_start: list[jax.Array]
    # [..., C, 1 or K] until the last token that changes the state; 0 if that does not read the token
    until_end: list[jax.Array]
    decay: jax.Array  # [N, B, H, states, states, 1 or K], of states over the chunk

    @classmethod
    def of(
        cls, g: jax.Array, segments: jax.Array, before: jax.Array, prefixes: Sequence[jax.Array]
    ) -> "Gates":
        """g is from `split_gates`; the others are the arguments of `Paths.of`."""
        paths = Paths.of(segments, before, prefixes)
        if prefixes or g.shape[-1] == 1:
            # Along the path from the first token of the chunk that a token reads: a sum over other
            # documents, too, would round differences of G.
            G = product("...ij,...jk->...ik", paths.visible.astype(g.dtype), g)
        else:
            G = jnp.cumsum(g, axis=-2)
        total = jnp.exp(G.sum(0))
        since_start = [jnp.where(enters[..., None], total, 0) for enters in paths.enters]
        factors = [[_at(since, last) for since in since_start] for last in paths.last]
        for state, last in enumerate(paths.last):
            if last is not None:
                passes = 1 - last.sum(-1, keepdims=True).astype(g.dtype)
                factors[state][state] = jnp.broadcast_to(passes, factors[state][state].shape)
        decay = jnp.stack([jnp.stack(row, -2) for row in factors], -3)
        return cls(paths, G, since_start, _until_end(G, paths), decay)


def levels(prefixes: jax.Array) -> list[jax.Array]:
    """[..., D] -> D arrays, the deepest level first."""
    return [prefixes[..., level] for level in reversed(range(prefixes.shape[-1]))]


def _at(x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """The sum of x [..., C, n] over the tokens that are true; the last one if `tokens` is None."""
    return x[..., -1, :] if tokens is None else jnp.where(tokens[..., None], x, 0).sum(-2)


def split_gates(g: jax.Array, dtype) -> jax.Array:
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


def decays_between(first: jax.Array, last: jax.Array, reads: jax.Array) -> jax.Array:
    """exp(last - first) of the cumulative gates of two tokens, sums of the terms of `split_gates`, where
    `reads` is true, and 0 elsewhere.
    """
    # Elsewhere the difference may be positive, and its exponential infinite.
    difference = jnp.where(reads, (last - first).sum(0), 0)
    return jnp.where(reads, jnp.exp(difference), 0)


def _until_end(G: jax.Array, paths: Paths) -> list[jax.Array]:
    """exp(G_end - G_j) of each state [..., C, 1 or K], where the last token that changes it reads
    token j.
    """
    factors = []
    for last in paths.last:
        reads = _at(paths.visible, last).astype(bool)[..., None]
        factors.append(decays_between(G, _at(G, last)[..., None, :], reads))
    return factors


def decayed_products(xs: list[jax.Array], k: jax.Array, gates: Gates) -> list[jax.Array]:
    """x_i . k_j exp(G_i - G_j) [N, B, H, C, C] of each x, where token i reads token j."""
    G = gates.G
    num_heads = G.shape[3]
    dtype = k.dtype

    def repeated(x):  # [N, B, G, ...] -> [N, B, H, ...]
        return jnp.repeat(x, num_heads // x.shape[2], axis=2)

    if G.shape[-1] > 1:
        x = jnp.stack([repeated(x) for x in xs])
        return [*_products_by_channel(x, repeated(k), gates, dtype)]
    # Products of a token with itself do not depend on G. In its gradient, their two terms would cancel.
    decay = decays_between(G.mT, G, jnp.tril(gates.paths.visible, -1)) + jnp.eye(G.shape[-2])
    return [repeated(product("...ik,...jk->...ij", x, k, dtype)) * decay for x in xs]


def _products_by_channel(x: jax.Array, k: jax.Array, gates: Gates, dtype) -> jax.Array:
    """The sums over channels c of x_ic k_jc exp(G_ic - G_jc), [x, N, B, H, C, C], where token i
    reads token j. No exponent is positive.

    By blocks that double, as in `chunks.unit_lower_inverse`: tokens of the second one of two blocks read
    the states of the first one, as chunks do.
    """
    size = _DIRECT_TOKENS
    G = gates.G
    segments, prefixes = gates.paths[:2]
    none = jnp.zeros((), segments.dtype)

    def blocks(x, axis):  # [..., C, ...] -> [..., C / size, size, ...]
        return x.reshape(*x.shape[:axis], -1, size, *(x.shape[axis + 1 :] if axis < -1 else ()))

    def pairs(x, axis):  # the first and the second ones of two blocks, [..., C / 2 size, size, ...]
        x = blocks(x, axis)
        return (lax.slice_in_dim(x, start, None, 2, axis=axis + x.ndim - 1) for start in range(2))

    inside = Paths.of(blocks(segments, -1), none, [blocks(prefix, -1) for prefix in prefixes])
    total = _direct_products(*(blocks(array, -2) for array in (x, k, G)), inside.visible)
    while size < x.shape[-2]:
        (_, x2), (k1, _), (G1, G2) = (pairs(array, -2) for array in (x, k, G))
        (segments1, *prefixes1), (segments2, *prefixes2) = zip(
            *(pairs(array, -1) for array in (segments, *prefixes))
        )
        first = Paths.of(segments1, none, prefixes1)
        second = Paths.of(segments2, segments1[..., -1:], prefixes2)
        below = 0
        for until_end, last, enters in zip(_until_end(G1, first), first.last, second.enters):
            since = decays_between(_at(G1, last)[..., None, :], G2, enters[..., None])
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
    a scan hoists: so not `decays_between`.
    """
    for _ in range(times):
        G = lax.optimization_barrier(G)
        difference = (G[..., :, None, :] - G[..., None, :, :]).sum(0)
        yield visible[..., None] * jnp.exp(jnp.minimum(difference, 0))


def _direct_backward(operands, gradient):
    """Products of a token with itself, which do not depend on G, are added after its gradient."""
    x, k, G, visible = operands
    *decays, last = _exponentials(G, jnp.tril(visible, -1), len(x) + 1)
    dx = jnp.stack([
        (one[..., None] * k[..., None, :, :] * decay).sum(-2) for one, decay in zip(gradient, decays)
    ])  # fmt: skip
    by_pair = sum(one[..., None] * own[..., :, None, :] for one, own in zip(gradient, x))
    dk = (by_pair * last).sum(-3)
    dG = (x * dx).sum(0) - k * dk
    with_itself = (gradient * jnp.eye(k.shape[-2])).sum(-1, keepdims=True)
    dx += with_itself * k
    dk += (with_itself * x).sum(0)
    return dx.astype(x.dtype), dk.astype(k.dtype), jnp.broadcast_to(dG, G.shape), None


_direct_products.defvjp(lambda *operands: (_direct_products(*operands), operands), _direct_backward)
