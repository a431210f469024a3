"""Room for the tokens that sliding windows need of other ranks. Pure NumPy.

The exchange of these tokens (attention/strategies/window_exchange.py) has static shapes: each rank sends a fixed number
of tokens to the rank at each distance. Zigzag order has one predecessor per chunk, so it always needs the same tokens.
Under per-document sharding each piece of a document has a predecessor, and pieces that are shorter than the window need
several. So the exchange has room for several windows, and a layout of documents that needs more is not used.
"""

import numpy as np

_WINDOWS_AT_DISTANCE = {1: 8, 2: 2}  # windows for which there is room, in each direction


def room_by_distance(rank_tokens: int, num_ranks: int, window: int, *, shared_prefixes: bool = False) -> dict[int, int]:
    """Tokens that a rank can send to the rank `distance` after it, modulo the ranks, for each distance that has any.

    Args:
      shared_prefixes: documents in zigzag order continue prefixes. Only of the first document of a chunk and of those
        that share its prefix, the prefix ends before the chunk, on any rank: a chunk needs one more window.
    """
    chunk_tokens, chunks = rank_tokens // 2, np.arange(2 * num_ranks)
    sizes = np.full(len(chunks), chunk_tokens)
    rank = np.minimum(chunks, chunks[::-1])
    zigzag = np.stack([np.zeros_like(chunks), chunks * chunk_tokens, sizes, rank], axis=1)
    room = _by_distance(_needed(zigzag, num_ranks, window))
    if has_room_for_documents(rank_tokens, window):
        for_documents = np.zeros(num_ranks, np.int64)
        for distance, num_windows in _WINDOWS_AT_DISTANCE.items():
            for signed in (distance, -distance):
                for_documents[signed % num_ranks] += num_windows * (window - 1)
        room = np.minimum(np.maximum(room, for_documents), rank_tokens)
    if shared_prefixes:
        room = np.minimum(room + 2 * (window - 1), rank_tokens)
    return {distance: int(room[distance]) for distance in range(1, num_ranks) if room[distance]}


def room_per_chunk(rank_tokens: int, num_ranks: int, window: int) -> int:
    """Tokens that a chunk, half of a rank's tokens, can have of all others."""
    room = sum(room_by_distance(rank_tokens, num_ranks, window).values())
    return max(room, min(window - 1, (2 * num_ranks - 1) * (rank_tokens // 2)))


def has_room_for_documents(rank_tokens: int, window: int) -> bool:
    """Whether the exchange has room for several windows: in one direction, they are at most the tokens of a rank."""
    return sum(_WINDOWS_AT_DISTANCE.values()) * (window - 1) <= rank_tokens


def has_room(pieces: np.ndarray, num_places: int, rank_tokens: int, num_ranks: int, window: int) -> bool:
    """Whether the windows of a layout need at most the tokens for which there is room.

    Args:
      pieces: int64 [pieces, 4]: document, offset in the document, tokens, place.
      num_places: of all ranks: ranks, or chunks, two for each rank in turn.
    """
    by_place = _needed(pieces, num_places, window)
    per_rank = num_places // num_ranks
    by_rank = by_place.reshape(num_ranks, per_rank, num_ranks, per_rank).sum(axis=(1, 3))
    room = room_by_distance(rank_tokens, num_ranks, window)
    needed = _by_distance(by_rank)
    if any(needed[distance] > room.get(distance, 0) for distance in range(1, num_ranks)):
        return False
    return per_rank == 1 or by_place.sum(axis=1).max() <= room_per_chunk(rank_tokens, num_ranks, window)


def _needed(pieces: np.ndarray, num_places: int, window: int) -> np.ndarray:
    """int64 [places, places]: tokens of the second place that windows of the first reach, at most; 0 on the diagonal.

    A token that several pieces of a place need counts for each of them.
    """
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    needed = np.zeros((num_places, num_places), np.int64)
    for lag in range(1, len(pieces)):
        (document, offset, size, place), (other, other_offset, _, other_place) = pieces[:-lag].T, pieces[lag:].T
        num_tokens = offset + size - np.maximum(offset, other_offset - (window - 1))
        num_tokens = np.where(document == other, np.maximum(num_tokens, 0), 0)
        if not num_tokens.any():
            break
        np.add.at(needed, (other_place, place), num_tokens)
    np.fill_diagonal(needed, 0)
    return needed


def _by_distance(needed: np.ndarray) -> np.ndarray:
    """int64 [distances]: the maximum over the ranks of what a rank needs of the one that is `distance` before it."""
    ranks = np.arange(len(needed))
    return needed[ranks[:, None], (ranks[:, None] - ranks) % len(needed)].max(axis=0)
