"""Which tiles of queries see which tiles of keys: what lets a kernel skip the others.

A program of a kernel owns one tile (of queries in the forward and for dQ, of keys for dK and dV) and loops over tiles
of the other side. A short list of runs of tiles, made by XLA before the kernel starts, tells it which:

    run = (start, full, end)    tiles [start, full) need the mask, tiles [full, end) are seen whole and need none

A causal row is two runs: the tiles wholly in the past, and those on the diagonal. Documents that lie in pieces, as in
zigzag order, make more; what is left after MAX_RUNS - 1 becomes one run with the mask, which costs time and is still
right. So the answer is O(T + S) numbers, and a kernel's loops are plain counted loops, which the compiler pipelines.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MAX_RUNS = 8


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is static about who may see whom, and how the two sides are cut into tiles."""

    causal: bool
    window: int | None  # a query sees itself and the window - 1 positions before it; only with causal
    num_queries: int
    num_keys: int
    tile_T: int
    tile_S: int

    @property
    def first_query(self) -> int:
        """The index of the first query among the keys: the last query stands at the last key."""
        return self.num_keys - self.num_queries

    def sees(self, q_positions, k_positions, q_segments, k_segments):
        """The mask of a tile, bool: operands broadcast against each other, segments may be None. None: all is seen."""
        seen = None
        if q_segments is not None:
            seen = (q_segments == k_segments) & (q_segments != 0)
        if self.causal:
            age = q_positions - k_positions
            is_past = age >= 0 if self.window is None else (age >= 0) & (age < self.window)
            seen = is_past if seen is None else seen & is_past
        return seen


class Tokens(NamedTuple):
    """Positions and segment ids of one side, int32. Of references, within a kernel, to one row's."""

    positions_BT: jax.Array | None  # None: the index in the row, the last query at the last key
    segments_BT: jax.Array | None  # None: one document. 0 is padding: it sees nothing, nobody sees it


class _Bounds(NamedTuple):
    """Of each tile, [B, number of tiles]."""

    first_position: jax.Array
    last_position: jax.Array
    first_segment: jax.Array | None  # padding left out
    last_segment: jax.Array | None
    has_padding: jax.Array | None


def runs_of_keys(queries: Tokens, keys: Tokens, rule: Rule) -> jax.Array:
    """The runs of key tiles that each query tile sees: int32 [B or 1, query tiles, runs, 3]."""
    if _goes_by_index(queries, rule):
        back, ahead = (rule.window, 1) if rule.causal else (None, None)
        return _runs_by_index(
            _Side(rule.first_query, rule.num_queries, rule.tile_T), _Side(0, rule.num_keys, rule.tile_S), back, ahead
        )
    q, k = _bounds_of_both(queries, keys, rule)
    q, k = _map(lambda x: x[:, :, None], q), _map(lambda x: x[:, None, :], k)
    return _runs(*_relation(q, k, rule), num_whole_tiles=rule.num_keys // rule.tile_S)


def runs_of_queries(queries: Tokens, keys: Tokens, rule: Rule) -> jax.Array:
    """The runs of query tiles that see each key tile: int32 [B or 1, key tiles, runs, 3]."""
    if _goes_by_index(queries, rule):
        back, ahead = (1, rule.window) if rule.causal else (None, None)
        return _runs_by_index(
            _Side(0, rule.num_keys, rule.tile_S), _Side(rule.first_query, rule.num_queries, rule.tile_T), back, ahead
        )
    q, k = _bounds_of_both(queries, keys, rule)
    q, k = _map(lambda x: x[:, None, :], q), _map(lambda x: x[:, :, None], k)
    return _runs(*_relation(q, k, rule), num_whole_tiles=rule.num_queries // rule.tile_T)


def _goes_by_index(queries: Tokens, rule: Rule) -> bool:
    return queries.segments_BT is None and (queries.positions_BT is None or not rule.causal)


class _Side(NamedTuple):
    """One side of masks by index."""

    offset: int  # position of its first token
    num_tokens: int
    tile: int


def _runs_by_index(own: _Side, other: _Side, back: int | None, ahead: int | None) -> jax.Array:
    """A token at position p is related to positions p - back < o < p + ahead; None is no limit. Two runs, exact."""
    everything = own.num_tokens + other.num_tokens + abs(own.offset) + abs(other.offset)
    back, ahead = (everything if x is None else min(x, everything) - 1 for x in (back, ahead))
    first = jnp.arange(0, own.num_tokens, own.tile, dtype=jnp.int32)
    last = jnp.minimum(first + own.tile, own.num_tokens) - 1
    first, last = (x + own.offset - other.offset for x in (first, last))

    def tiles_before(index, rounding):  # of the other side
        return (jnp.clip(index, 0, other.num_tokens) + rounding) // other.tile

    start, end = tiles_before(first - back, 0), tiles_before(last + ahead + 1, other.tile - 1)
    full = jnp.clip(tiles_before(last - back, other.tile - 1), start, end)
    full_end = jnp.clip(tiles_before(first + ahead + 1, 0), full, end)
    two_runs = ((start, full, full_end), (full_end, jnp.maximum(full_end, end), jnp.maximum(full_end, end)))
    return jnp.stack([jnp.stack(run, axis=-1) for run in two_runs], axis=-2)[None]


def _bounds_of_both(queries: Tokens, keys: Tokens, rule: Rule) -> tuple[_Bounds, _Bounds]:
    return (
        _bounds(queries, rule.first_query, rule.num_queries, rule.tile_T),
        _bounds(keys, 0, rule.num_keys, rule.tile_S),
    )


def _bounds(tokens: Tokens, offset: int, num_tokens: int, tile: int) -> _Bounds:
    def tiles(x_BT):  # the last one filled up with its last token
        padded = jnp.pad(x_BT, ((0, 0), (0, -num_tokens % tile)), mode="edge")
        return padded.reshape(x_BT.shape[0], -1, tile)

    positions_BT = tokens.positions_BT
    if positions_BT is None:
        positions_BT = jnp.arange(offset, offset + num_tokens, dtype=jnp.int32)[None]
    positions = tiles(positions_BT)
    if tokens.segments_BT is None:
        return _Bounds(positions.min(-1), positions.max(-1), None, None, None)
    segments = tiles(tokens.segments_BT)
    first_segment = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments).min(-1)
    return _Bounds(positions.min(-1), positions.max(-1), first_segment, segments.max(-1), (segments == 0).any(-1))


def _relation(q: _Bounds, k: _Bounds, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """(may any pair of the tiles' tokens see each other, do all), each [B, own tiles, other tiles]."""
    some, every = True, True
    if rule.causal:
        some, every = q.last_position >= k.first_position, q.first_position >= k.last_position
        if rule.window is not None:
            some &= q.first_position - k.last_position < rule.window
            every &= q.last_position - k.first_position < rule.window
    if q.last_segment is not None:
        some &= jnp.maximum(q.first_segment, k.first_segment) <= jnp.minimum(q.last_segment, k.last_segment)
        is_one_document = (q.first_segment == q.last_segment) & ~q.has_padding & ~k.has_padding
        every &= is_one_document & (k.first_segment == q.first_segment) & (k.last_segment == q.first_segment)
    return some, every


def _runs(some: jax.Array, every: jax.Array, num_whole_tiles: int) -> jax.Array:
    """Cuts each row of tiles into runs: [B, own tiles, other tiles] bool -> int32 [B, own tiles, runs, 3]."""
    num_tiles = some.shape[-1]
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    whole = some & every & (tile < num_whole_tiles)  # an incomplete tile needs its mask

    def first(condition, at):
        return jnp.where(condition & (tile >= at[..., None]), tile, num_tiles).min(axis=-1)

    def next_run(at, _):
        start = first(some, at)
        full = first(~some | whole, start)
        end = first(~whole, full)
        return end, jnp.stack([start, full, end], axis=-1)

    at = jnp.zeros(some.shape[:-1], jnp.int32)
    at, runs = lax.scan(next_run, at, length=min(MAX_RUNS, num_tiles) - 1)
    end = jnp.where(some, tile + 1, 0).max(axis=-1)
    rest = jnp.stack([jnp.minimum(first(some, at), end), end, end], axis=-1)
    return jnp.concatenate([jnp.moveaxis(runs, 0, -2), rest[..., None, :]], axis=-2)


def _map(f, bounds: _Bounds) -> _Bounds:
    return _Bounds(*(None if x is None else f(x) for x in bounds))
