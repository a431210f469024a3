"""The order of a sequence's tokens on the context ranks: zigzag order and per-document sharding. Pure NumPy.

Per-document sharding
---------------------
Zigzag order over the whole sequence balances one document. In a sequence of many documents, a rank that holds the end
of a long document has several times the work of a rank that holds short documents. Here, each long document is cut into
2 x context pieces of its own, and rank r holds its pieces r and 2 x context - 1 - r, so that every rank has the same
work in every ring step (per-document sharding: WLB-LLM, arXiv:2503.17924, section 5). Short documents are placed whole,
by work. Every rank holds exactly the same number of tokens:

    sharded documents   pieces of multiples of 128 tokens, as far as the balance permits
    whole documents     longest first, to the rank with the least work that has space for it (LPT, Graham 1969)
    cut documents       where the whole documents of a rank do not fit exactly, one of them is cut in two: the first
                        part is on rank r, the rest on rank r + 1. Only ring step 1 has work for it
    padding             at the end of each rank

On a rank, sharded documents come first, each with its two pieces next to each other, then cut documents. So the tokens
of a document are contiguous on every rank, and the tokens that other ranks need are a prefix of the rank's tokens.
Sharded documents whose pieces on this rank have whole blocks come first. With the documents in the same order on all
ranks, a kernel computes 5% more blocks of 128 x 128 (Python's standard library, context 8).

Ring cost: ring steps are synchronized by the transfers, so the time of a sequence is the sum over ring steps of the
maximum over ranks of the work, relative to the mean work of a rank. 1 is ideal. The number of sharded documents is the
smallest whose ring cost is below a limit: each sharded document makes the pieces shorter that kernels work on.

Without sharded documents, no rank needs the keys of another one but of the rank before it. A ring that skips the steps
after step 1 in this case saves more than a better balance of short documents does.

Zigzag order
------------
Under a causal mask a query attends to all earlier keys, so a rank with late tokens would have more work than one with
early tokens. Zigzag order cuts the sequence into 2 x context chunks and assigns the chunks r and 2 x context - 1 - r to
rank r, so that every rank has the same work (Llama 3, arXiv:2407.21783, section 3.3.2; zhuzilin/ring-flash-attention).

Sliding windows
---------------
The exchange of the tokens that windows need of other ranks (attention/strategies/window_exchange.py) has static shapes:
each rank sends a fixed number of tokens to the rank at each distance. Zigzag order has one predecessor per chunk, so it
always needs the same tokens. Under per-document sharding each piece of a document has a predecessor, and pieces that
are shorter than the window need several. So the exchange has room for several windows, and a layout of documents that
needs more is not used.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxlc.core import UserError
from jaxlc.sharding.document_balance import (
    Assignment,
    num_shared,
    pairs_by_rank,
    prefix_pairs_by_rank,
    sequence_pieces,
    tokens_by_rank,
)


def zigzag_order(num_tokens: int, context: int) -> np.ndarray:
    """Returns order_T int64 [num_tokens]: index i of the layout holds token `order_T[i]` of the
    natural order.

    The layout is split evenly over `context` ranks; each rank's local shard is two chunks of equal
    length, (lo, hi).

    Raises:
      UserError: num_tokens is not divisible by 2 x context.
    """
    if num_tokens % (2 * context):
        raise UserError(
            f"zigzag order cannot split a sequence of {num_tokens} tokens into 2 x {context} equal chunks;"
            f" use a multiple of {2 * context}"
        )
    return token_at(np.arange(num_tokens), num_tokens, context)


def token_at(index, num_tokens: int, context: int):
    """Computes `zigzag_order(num_tokens, context)[index]` for integer arrays of NumPy or JAX."""
    chunk_tokens = num_tokens // (2 * context)
    rank = index // (2 * chunk_tokens)
    offset = index % (2 * chunk_tokens)
    is_hi = offset // chunk_tokens
    chunk = rank + is_hi * (2 * context - 1 - 2 * rank)
    return chunk * chunk_tokens + offset % chunk_tokens


def natural_order(layout_order: np.ndarray) -> np.ndarray:
    """The inverse permutation: token t of the natural order is at index `natural_order(order)[t]`
    of the layout.
    """
    inverse = np.empty_like(layout_order)
    inverse[layout_order] = np.arange(len(layout_order))
    return inverse


_WINDOWS_AT_DISTANCE = {1: 8, 2: 2}  # windows for which there is room, in each direction


def room_by_distance(
    rank_tokens: int, num_ranks: int, window: int, *, shared_prefixes: int = 0
) -> dict[int, int]:
    """Tokens that a rank can send to the rank `distance` after it, modulo the ranks, for each distance that has any.

    Args:
      shared_prefixes: levels of prefixes that documents in zigzag order continue. Only prefixes of the first document
        of a chunk end before the chunk, on any rank: a chunk needs one more window for each level.
    """
    chunk_tokens = rank_tokens // 2
    chunks = np.arange(2 * num_ranks)
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
        room = np.minimum(room + 2 * shared_prefixes * (window - 1), rank_tokens)
    return {distance: int(room[distance]) for distance in range(1, num_ranks) if room[distance]}


def room_per_chunk(rank_tokens: int, num_ranks: int, window: int) -> int:
    """Tokens that a chunk, half of a rank's tokens, can have of all others."""
    room = sum(room_by_distance(rank_tokens, num_ranks, window).values())
    return max(room, min(window - 1, (2 * num_ranks - 1) * (rank_tokens // 2)))


def has_room_for_documents(rank_tokens: int, window: int) -> bool:
    """Whether the exchange has room for several windows: in one direction, they are at most the
    tokens of a rank.
    """
    return sum(_WINDOWS_AT_DISTANCE.values()) * (window - 1) <= rank_tokens


def has_room(
    pieces: np.ndarray, num_places: int, rank_tokens: int, num_ranks: int, window: int
) -> bool:
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
    return per_rank == 1 or by_place.sum(axis=1).max() <= room_per_chunk(
        rank_tokens, num_ranks, window
    )


def _needed(pieces: np.ndarray, num_places: int, window: int) -> np.ndarray:
    """int64 [places, places]: tokens of the second place that windows of the first reach, at most;
    0 on the diagonal.

    A token that several pieces of a place need counts for each of them.
    """
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    needed = np.zeros((num_places, num_places), np.int64)
    for lag in range(1, len(pieces)):
        document, offset, size, place = pieces[:-lag].T
        other, other_offset, _, other_place = pieces[lag:].T
        num_tokens = offset + size - np.maximum(offset, other_offset - (window - 1))
        num_tokens = np.where(document == other, np.maximum(num_tokens, 0), 0)
        if not num_tokens.any():
            break
        np.add.at(needed, (other_place, place), num_tokens)
    np.fill_diagonal(needed, 0)
    return needed


def _by_distance(needed: np.ndarray) -> np.ndarray:
    """int64 [distances]: the maximum over the ranks of what a rank needs of the one that is
    `distance` before it.
    """
    ranks = np.arange(len(needed))
    return needed[ranks[:, None], (ranks[:, None] - ranks) % len(needed)].max(axis=0)


_BLOCK_TOKENS = 128  # preferred multiple of the lengths of pieces; a power of 2
MAX_RING_COST = 1.03  # accepted without trying to cut more documents, or into finer pieces
# Any two ranks have tokens of at most this many documents in common, and of those with more than a quarter of a rank's
# tokens. So two kernel calls take the documents of a ring step: attention/kernels/cudnn_packed.py, `calls_for`.
MAX_SHARED_DOCUMENTS, MAX_LONG_SHARED_DOCUMENTS = 11, 3
# that have work if no document is sharded: a cut document is on neighboring ranks
NUM_FIRST_RING_STEPS = 2
# What a ring step without pairs costs, in pairs per query: estimated 640 for Llama 3.1 8B on H100s with NVLink, 8,192
# tokens per rank. Over a network it costs more.
_RING_STEP_PAIRS = 512


def document_order(
    segment_ids_T: np.ndarray,
    context: int,
    inner: int = 1,
    *,
    mirrored: bool = False,
    window: int | None = None,
    skips_ring_steps: bool = False,
    max_sharded: int = MAX_SHARED_DOCUMENTS,
) -> np.ndarray | None:
    """The order of a packed sequence's tokens: index i of the layout holds token `order_T[i]` of the natural order.

    A pure function, so processes that share a sequence compute the same order.

    Args:
      segment_ids_T: int [tokens]: the document of each token, the same number for neighboring tokens; 0 is padding.
      context: number of ranks, or of groups of ranks.
      inner: number of ranks of a group. Its tokens are split over them in zigzag order, as Ulysses expects
        (attention/strategies/ulysses.py).
      mirrored: for layers in tiles, see `Assignment.mirrored_pieces`.
      window: tokens of a sliding window, whose exchange has limited room (document_layout.py).
      skips_ring_steps: ring steps after step 1 do not run if no document needs them.
      max_sharded: the largest number of documents that are split over all ranks.
    Returns:
      int64 [tokens]; None if no layout fits `mirrored` or `window`.
    Raises:
      UserError: the tokens do not split over the ranks.
    """
    documents_first, lengths = _documents(segment_ids_T, context)
    num_tokens = len(segment_ids_T)
    per_rank = 2 if mirrored else 1

    def pieces_of(assignment: Assignment) -> np.ndarray | None:
        pieces = assignment.mirrored_pieces() if mirrored else assignment.pieces()
        if pieces is None or window is None:
            return pieces
        if has_room(pieces, per_rank * context, num_tokens // context, context, window):
            return pieces
        return None

    fits = (
        None
        if window is None and not mirrored
        else lambda assignment: pieces_of(assignment) is not None
    )
    best = _best_assignment(
        lengths, num_tokens, context,
        max_sharded=max_sharded, fits=fits, skips_ring_steps=skips_ring_steps,
    )  # fmt: skip
    if best is None:
        return None
    return _in_groups(documents_first[best.order(pieces_of(best), per_rank)], context, inner)


def _in_groups(order_T: np.ndarray, context: int, inner: int) -> np.ndarray:
    """The order of groups of ranks, of which each has its tokens in zigzag order."""
    order_GT = order_T.reshape(context, -1)
    return order_GT[:, zigzag_order(order_GT.shape[1], inner)].reshape(-1)


def tree_order(
    segment_ids_T: np.ndarray, prefix_ids_TD: np.ndarray, context: int, inner: int = 1
) -> np.ndarray:
    """As `document_order`, of documents that continue prefixes: also by pairs of queries and keys of prefixes.

    If a long document is split over all ranks, so are the pairs of its keys and its branches. Small trees are better on
    one rank as a whole. So documents are taken each by itself, or trees as if they were documents, whichever costs
    less.

    The tokens of a rank are in natural order. So all tokens that continue a prefix are contiguous on each rank, as the
    packed call over the keys of prefixes requires.

    Args:
      prefix_ids_TD: int [tokens, levels]; see `attention.key_ranges.TokenInfo`.
    """
    ancestors = np.zeros((segment_ids_T.max() + 1, prefix_ids_TD.shape[1]), np.int64)
    ancestors[segment_ids_T] = prefix_ids_TD
    trees_T = np.where(prefix_ids_TD[:, 0] > 0, prefix_ids_TD[:, 0], segment_ids_T)

    def cost(order_T: np.ndarray) -> float:
        pieces = sequence_pieces(segment_ids_T, order_T, context, np.zeros_like(order_T))
        tokens = tokens_by_rank(pieces, len(ancestors) - 1, context, 1)
        shared, long = num_shared(tokens[0].T, len(order_T) // context)
        fits = shared <= MAX_SHARED_DOCUMENTS and long <= MAX_LONG_SHARED_DOCUMENTS
        pairs = pairs_by_rank(pieces, context, 1) + prefix_pairs_by_rank(tokens, ancestors)
        return ring_cost(by_ring_step(pairs[0])) if fits else np.inf

    orders = [
        document_order(segment_ids_T, context),
        # two ranks share up to two documents of a tree
        document_order(trees_T, context, max_sharded=MAX_SHARED_DOCUMENTS // 2),
    ]
    order_T = np.sort(min(orders, key=cost).reshape(context, -1), axis=1).reshape(-1)
    return _in_groups(order_T, context, inner)


class ChainedOrder(NamedTuple):
    """An order of tokens, and the fragments of each rank. See `Assignment.fragments`."""

    order_T: np.ndarray  # int64 [tokens]
    fragments_T: np.ndarray  # int32 [tokens], in the layout


def chained_order(
    segment_ids_T: np.ndarray,
    context: int,
    *,
    num_chains: int,
    min_tokens: int,
    window: int | None = None,
    skips_ring_steps: bool = False,
) -> ChainedOrder:
    """As `document_order`, with a limited number of documents that ranks share, for layers that exchange states.

    Args:
      num_chains: at least 2. At most num_chains - 1 documents are cut into pieces for all ranks.
      min_tokens: of a piece between two others of its document.
      skips_ring_steps: as for `document_order`.
    Returns:
      Zigzag order, which is one chain, if no layout has so few chains, so long pieces and room for the windows.
    Raises:
      UserError: the tokens do not split over the ranks.
    """
    documents_first, lengths = _documents(segment_ids_T, context)
    num_tokens = len(segment_ids_T)

    def fits(assignment: Assignment) -> bool:
        if not assignment.has_chains(num_chains, max(1, min_tokens)):
            return False
        return window is None or has_room(
            assignment.pieces(), context, num_tokens // context, context, window
        )

    best = _best_assignment(
        lengths, num_tokens, context,
        max_sharded=num_chains - 1, fits=fits, is_exhaustive=window is None, skips_ring_steps=skips_ring_steps,
    )  # fmt: skip
    if best is None:
        return zigzag_chain(num_tokens, context)
    pieces = best.pieces()
    return ChainedOrder(documents_first[best.order(pieces)], best.fragments(pieces, num_chains))


def zigzag_chain(num_tokens: int, context: int) -> ChainedOrder:
    """Zigzag order, as the first chain."""
    halves_T = np.repeat(np.arange(2, dtype=np.int32), num_tokens // (2 * context))
    return ChainedOrder(zigzag_order(num_tokens, context), np.tile(halves_T, context))


def _documents(segment_ids_T: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, first the tokens of documents, and the lengths of the documents. Padding may be
    anywhere. Raises UserError if the tokens do not split over the ranks.
    """
    num_tokens = len(segment_ids_T)
    if num_tokens % context:
        raise UserError(
            f"a sequence of {num_tokens} tokens does not split over {context} ranks; use a multiple of {context}"
        )
    documents_first = np.argsort(segment_ids_T == 0, kind="stable")
    ids = segment_ids_T[documents_first][: np.count_nonzero(segment_ids_T)]
    return documents_first, np.diff(np.flatnonzero(np.diff(ids, prepend=0)), append=len(ids))


def _best_assignment(
    lengths: np.ndarray,
    num_tokens: int,
    context: int,
    *,
    max_sharded: int = MAX_SHARED_DOCUMENTS,
    fits: Callable[[Assignment], bool] | None = None,
    is_exhaustive: bool | None = None,
    skips_ring_steps: bool = False,
) -> Assignment | None:
    """The first candidate that costs at most MAX_RING_COST, otherwise the one with the lowest cost; None: none fits.

    The cost is the ring cost, less what skipped ring steps save.

    Args:
      max_sharded: the largest number of sharded documents.
      fits: a further condition.
      is_exhaustive: documents are cut in sequence if no other candidate is possible. Otherwise, candidates with finer
        pieces are not even tried once one fits. None: True without `fits`.
    """
    if is_exhaustive is None:
        is_exhaustive = fits is None
    best = None
    best_cost = np.inf
    sizes = num_tokens // context, context, max_sharded
    for in_sequence in (False, True)[: 1 + is_exhaustive]:
        for assignment in _assignments(lengths, *sizes, in_sequence):
            if not is_exhaustive and best is not None and assignment.unit < best.unit:
                break
            work = by_ring_step(assignment.work_by_rank())
            cost = ring_cost(work)
            if skips_ring_steps and not work[NUM_FIRST_RING_STEPS:].any():
                cost -= (
                    _RING_STEP_PAIRS
                    * len(work[NUM_FIRST_RING_STEPS:])
                    * num_tokens
                    / max(work.sum(), 1)
                )
            if cost < best_cost and (fits is None or fits(assignment)):
                best = assignment
                best_cost = cost
            if best_cost <= MAX_RING_COST:
                break
        if best is not None:
            break
    return best


def ring_cost(ring_work: np.ndarray) -> float:
    """The sum over ring steps of the maximum over ranks, relative to the mean work of a rank; work
    [steps, ranks].
    """
    total = ring_work.sum()
    return float(ring_work.max(axis=1).sum() * ring_work.shape[1] / total) if total else 1.0


def by_ring_step(work: np.ndarray) -> np.ndarray:
    """[query rank, key rank] -> [ring step, query rank]; in step i, rank r has the keys of rank r -
    i.
    """
    ranks = np.arange(len(work))
    return work[ranks, (ranks - ranks[:, None]) % len(work)]


def _assignments(
    lengths: np.ndarray, rank_tokens: int, context: int, max_sharded: int, in_sequence: bool
) -> Iterator[Assignment]:
    """The candidates in the order of preference."""
    units = [1]
    numbers = [0]  # of sharded documents
    if context > 1 and len(lengths):
        units = [_BLOCK_TOKENS]
        while units[-1] > 1:
            units.append(max(1, units[-1] // 4))
        # Longer than a rank's tokens: never whole.
        first = 0 if in_sequence else int((lengths > rank_tokens).sum())
        numbers = [first]
        while numbers[-1] <= min(len(lengths), max_sharded):
            numbers.append(numbers[-1] + 1 + (numbers[-1] - first) // 8)
        numbers.pop()
    for unit, number in itertools.product(units, numbers):
        assignment = Assignment.create(lengths, rank_tokens, context, number, unit, in_sequence)
        if assignment is None:
            continue
        num_shared, num_long = assignment.num_shared()
        if num_shared <= MAX_SHARED_DOCUMENTS and num_long <= MAX_LONG_SHARED_DOCUMENTS:
            yield assignment
