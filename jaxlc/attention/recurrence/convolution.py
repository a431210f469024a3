"""A causal convolution of few taps along a sequence that is split over ranks; for code inside
`shard_map`.

What convolutions read of prefixes: before the first tokens of a segment are the last tokens of its
prefix, and before those, if they are few, the last ones of the prefix's own prefix, and so on.

A prefix of level e is followed by all segments that continue it, so for their tokens it ends at the
last token before them of level e or less. Each fragment is cut into chunks. Of the tokens before a
chunk, it needs for each level the last ones that end in this way, its tail: a scan over the chunks
of a fragment finds them, and ranks exchange the tails of their fragments. Within a chunk, matrices
of 0 and 1 select tokens, so that no gradient is a scatter.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import append_tokens
from jaxlc.attention.state_passing import is_first, like, predecessors, where
from jaxlc.core import CONTEXT, scopes
from jaxlc.sharding.mesh import Ranks

_CHUNK_TOKENS = 64
_ONE_RANK = Ranks(CONTEXT, 1)


class Tail(NamedTuple):
    """The P - 1 tokens that end with the last token of a level or less before a place in the
    sequence.
    """

    x: jax.Array  # [..., P - 1, W]
    segments: jax.Array | None  # int32 [..., P - 1]; None: not asked for
    exists: jax.Array  # bool [...]

    def or_else(self, earlier: "Tail") -> "Tail":
        return where(self.exists, self, earlier)


class _Chunks(NamedTuple):
    """The chunks of a fragment, arrays [B, chunks, ...]."""

    x: jax.Array  # [..., P - 1 + C, W], with the tokens before the chunk
    segments: jax.Array  # int32 [..., P - 1 + C]
    prefixes: jax.Array  # int32 [..., C, D]
    # int32 [..., C, D]: the last token up to each one of level e or less, an index; -1: none
    ends: jax.Array


def taps_of_prefixes(
    x: list[jax.Array],
    segments: list[jax.Array],
    prefixes: list[jax.Array],
    weights_PW: jax.Array,
    ranks: Ranks,
) -> list[jax.Array]:
    """The sums over the tokens of prefixes that the taps reach, [B, L, W] of each fragment, in
    float32 or wider.

    Args:
      x, segments: of the fragments, with the P - 1 tokens before each, [B, P - 1 + L, W] and [B, P - 1 + L].
      prefixes: [B, L, D], of the fragments.
    """
    num_before = len(weights_PW) - 1
    sums = []
    chunks = [_chunks(*parts, num_before) for parts in zip(x, segments, prefixes)]

    @functools.partial(jax.vmap, in_axes=-1, out_axes=2)
    def tails_of_level(ends: list[jax.Array]) -> list[Tail]:
        last = [_last_tails(part, end, num_before) for part, end in zip(chunks, ends)]
        return tails_before(last, ranks)

    tails = tails_of_level([part.ends[:, :, -1] for part in chunks])
    for part, tail, own in zip(chunks, tails, prefixes):
        out_BNCW = _sums(part, tail, weights_PW)
        sums.append(out_BNCW.reshape(len(own), -1, out_BNCW.shape[-1])[:, : own.shape[1]])
    return sums


def tails_before(last: list[Tail], ranks: Ranks) -> list[Tail]:
    """The tail before each of N consecutive parts of each fragment, arrays [B, N, ...].

    Args:
      last: the tail that ends in each part, if there is one.
    """
    # After the scan: the last tail up to the end of each part, which a later part may not have.
    until = [lax.associative_scan(lambda a, b: b.or_else(a), parts, axis=1) for parts in last]
    before = _fragment_tails([jax.tree.map(lambda t: t[:, -1], x) for x in until], ranks)
    tails = []
    for parts, first in zip(until, before):
        first = jax.tree.map(lambda t: t[:, None], first)
        rest = jax.tree.map(lambda t: t[:, :-1], parts).or_else(first)
        tails.append(jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), first, rest))
    return tails


def _chunks(
    x_BLW: jax.Array, segments_BL: jax.Array, prefixes_BLD: jax.Array, num_before: int
) -> _Chunks:
    num_tokens = prefixes_BLD.shape[1]
    size = max(_CHUNK_TOKENS, num_before)
    missing = -num_tokens % size

    def cut(x):  # with the tokens before each chunk
        x = append_tokens(x, missing)
        own = x[:, num_before:].reshape(len(x), -1, size, *x.shape[2:])
        before = jnp.concatenate(
            [x[:, None, :num_before], own[:, :-1, size - num_before :]], axis=1
        )
        return jnp.concatenate([before, own], axis=2)

    padded = jnp.pad(prefixes_BLD, [(0, 0), (0, missing), (0, 0)], constant_values=-1)
    prefixes = padded.reshape(len(padded), -1, size, padded.shape[2])
    ends = lax.cummax(jnp.where(prefixes == 0, jnp.arange(size)[:, None], -1), axis=2)
    return _Chunks(cut(x_BLW), cut(segments_BL), prefixes, ends)


def _last_tails(chunks: _Chunks, end_BN: jax.Array, num_before: int) -> Tail:
    """The tail that ends in each chunk, [B, chunks, ...]; `end_BN`: where, -1: nowhere."""
    columns = end_BN[..., None] + 1 + jnp.arange(num_before)
    selected = columns[..., None] == jnp.arange(chunks.x.shape[2])
    x = _selected(selected, chunks.x)
    return Tail(x, jnp.where(selected, chunks.segments[:, :, None], 0).sum(-1), end_BN >= 0)


def _fragment_tails(own: list[Tail], ranks: Ranks) -> list[Tail]:
    """The tail before each fragment, from the last tail in each fragment. Its size does not depend
    on the length.
    """
    num_fragments = len(own) * ranks.size
    index = lax.axis_index(ranks.axis) if ranks.size > 1 else 0
    # of this rank's fragments in the sequence
    places = [index, num_fragments - 1 - index][: len(own)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *own)
    gathered = functools.partial(lax.all_gather, axis_name=ranks.axis)
    stacked = jax.tree.map(gathered if ranks.size > 1 else lambda t: t[None], stacked)
    parts = [jax.tree.map(lambda t, i=i: t[:, i][:: 1 - 2 * i], stacked) for i in range(len(own))]
    # in the order of the sequence
    all_tails = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)

    def before(place) -> Tail:
        order = jnp.arange(num_fragments)[:, None]
        last_B = jnp.where(all_tails.exists & (order < place), order, -1).max(0)
        is_last_FB = order == last_B
        return jax.tree.map(
            lambda t: jnp.where(like(is_last_FB, t), t, jnp.zeros_like(t)).sum(0).astype(t.dtype),
            all_tails,
        )

    return list(map(before, places))


def _sums(chunks: _Chunks, tails: Tail, weights_PW: jax.Array) -> jax.Array:
    """As `taps_of_prefixes`, [B, chunks, C, W], from the tails of all levels, [B, chunks, D, ...]."""
    num_before = len(weights_PW) - 1
    size, num_levels = chunks.prefixes.shape[2:]
    wide = jnp.promote_types(jnp.float32, chunks.x.dtype)

    def with_tails(tails, tokens):  # [B, chunks, rows, ...]
        return jnp.concatenate([tails.reshape(*tails.shape[:2], -1, *tails.shape[4:]), tokens], 2)

    rows = with_tails(tails.x, chunks.x)
    row_segments = with_tails(tails.segments, chunks.segments)
    own = chunks.segments[..., num_before:]
    # The tokens that each token reads of its own segment, besides itself, and of deeper levels.
    number = sum(
        (chunks.segments[..., i : i + size] == own).astype(jnp.int32) for i in range(num_before)
    )
    distance = 0  # of rows that are tokens of prefixes, along the path; 0: other rows
    for level in reversed(range(num_levels)):
        prefix = chunks.prefixes[..., level]
        end = chunks.ends[..., level]
        tail_end = num_before * (level + 1) - 1
        chunk_start = num_before * (num_levels + 1)
        end = jnp.where(end < 0, tail_end, chunk_start + end)
        from_end = end[..., None] - jnp.arange(rows.shape[2])
        is_row = (row_segments[:, :, None] == prefix[..., None]) & (prefix > 0)[..., None]
        is_row &= (from_end >= 0) & (from_end < num_before)
        distance += jnp.where(is_row, number[..., None] + 1 + from_end, 0)
        number += is_row.sum(-1, dtype=jnp.int32)
    return sum(
        _selected(distance == num_before - tap, rows).astype(wide) * weights_PW[tap].astype(wide)
        for tap in range(num_before)
    )


def _selected(is_selected: jax.Array, x: jax.Array) -> jax.Array:
    """Rows of x [..., J, W], where each row of bool [..., I, J] has at most one that is true;
    exact.
    """
    return jnp.einsum(
        "...ij,...jw->...iw", is_selected.astype(x.dtype), x, precision=lax.Precision.HIGHEST
    )


@jax.named_scope(scopes.CONVOLUTION)
def convolution(
    x_btW: jax.Array,
    weights_PW: jax.Array,
    segments_bt: jax.Array | None,
    prefixes_btD: jax.Array | None = None,
    *,
    ranks: Ranks = _ONE_RANK,
    num_fragments: int = 1,
    past_bPW: jax.Array | None = None,
) -> jax.Array:
    """The convolution of each channel, [b, t, W] in the dtype of x. See `jaxlc.attention.short_convolution`.

    Each fragment receives the last P - 1 tokens before it, and their segments.

    Args:
      prefixes_btD: of `chunks.Tokens`: the first tokens of a segment also read the last ones of its prefixes.
      past_bPW: the P - 1 tokens before the sequence, without segments. None: there are none.
    """
    if segments_bt is None:
        segments_bt = jnp.ones(x_btW.shape[:2], jnp.int32)
    x, segments = (jnp.split(array, num_fragments, axis=1) for array in (x_btW, segments_bt))
    num_before = len(weights_PW) - 1
    if num_before == 0:
        return x_btW * weights_PW[0].astype(x_btW.dtype)
    before, segments_before = (
        predecessors([part[:, -num_before:] for part in parts], ranks) for parts in (x, segments)
    )
    if past_bPW is not None:
        before[0] = jnp.where(is_first(ranks), past_bPW.astype(x_btW.dtype), before[0])
        segments_before = [jnp.ones_like(part) for part in segments_before]
    x, segments = (
        [jnp.concatenate(pair, axis=1) for pair in zip(*pairs)]
        for pairs in ((before, x), (segments_before, segments))
    )
    prefix_sums = [None] * num_fragments
    if prefixes_btD is not None:
        prefix_sums = taps_of_prefixes(
            x, segments, jnp.split(prefixes_btD, num_fragments, axis=1), weights_PW, ranks
        )
    return jnp.concatenate(
        [_convolved(*parts[:2], weights_PW, parts[2]) for parts in zip(x, segments, prefix_sums)], 1
    )


def _convolved(
    x_BLW: jax.Array,
    segments_BL: jax.Array,
    weights_PW: jax.Array,
    added_BLW: jax.Array | None = None,
) -> jax.Array:
    """Of tokens after the first P - 1, the sum of `added_BLW` and the tokens of their segment that
    the taps reach.
    """
    out_BLW = _taps(x_BLW, segments_BL, weights_PW)
    return (out_BLW if added_BLW is None else out_BLW + added_BLW).astype(x_BLW.dtype)


@jax.custom_vjp
def _taps(x_BLW: jax.Array, segments_BL: jax.Array, weights_PW: jax.Array) -> jax.Array:
    """Of tokens after the first P - 1, the sum of the tokens of their segment that the taps reach, in
    float32 or wider.
    """
    own = segments_BL[:, len(weights_PW) - 1 :]
    return _sum(_reached(x_BLW, segments_BL, own), weights_PW)


def _taps_backward(operands, dout_BLW: jax.Array):
    """The gradient of x is a convolution of dout in the other direction: one kernel, which rounds once.
    JAX's derivative writes an array for each tap.
    """
    x_BLW, segments_BL, weights_PW = operands
    num_before = len(weights_PW) - 1
    dout = jnp.pad(dout_BLW, [(0, 0), (num_before, num_before), (0, 0)])
    segments = jnp.pad(segments_BL, [(0, 0), (0, num_before)])
    dx = _sum(_reached(dout, segments, segments_BL), weights_PW[::-1])
    taps = _reached(x_BLW, segments_BL, segments_BL[:, num_before:])
    dweights_PW = jnp.stack([(dout_BLW * x).sum((0, 1)) for x in taps])
    return dx.astype(x_BLW.dtype), None, dweights_PW.astype(weights_PW.dtype)


_taps.defvjp(lambda *operands: (_taps(*operands), operands), _taps_backward)


def _reached(x_BLW: jax.Array, segments_BL: jax.Array, own_BT: jax.Array) -> list[jax.Array]:
    """For each offset, what T tokens of x from this offset on are, in float32 or wider; 0 if their segment
    is another one than in `own_BT`.
    """
    num_tokens = own_BT.shape[1]
    wide = jnp.promote_types(jnp.float32, x_BLW.dtype)
    parts = [slice(i, i + num_tokens) for i in range(x_BLW.shape[1] - num_tokens + 1)]
    return [
        jnp.where((segments_BL[:, part] == own_BT)[..., None], x_BLW[:, part], 0).astype(wide)
        for part in parts
    ]


def _sum(taps: list[jax.Array], weights_PW: jax.Array) -> jax.Array:
    return sum(x * weight_W.astype(x.dtype) for x, weight_W in zip(taps, weights_PW))
