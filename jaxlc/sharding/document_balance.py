"""Candidates of per-document sharding: which rank gets which tokens. `document_layout` chooses one.
Pure NumPy.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(kw_only=True)
class Assignment:
    """A candidate: documents with their ranks. Documents are numbered by descending length here."""

    lengths: np.ndarray  # int64 [documents], descending
    begins: np.ndarray  # int64 [documents]: offsets in the sequence
    rank_tokens: int
    unit: int
    sizes: np.ndarray  # int64 [sharded documents, 2 x context]: tokens of each piece
    whole: list[list[int]]  # by rank
    # document, rank, offset, tokens
    cuts: list[tuple[int, int, int, int]] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        lengths,
        rank_tokens: int,
        context: int,
        num_sharded: int,
        unit: int,
        in_sequence: bool = False,
    ) -> "Assignment | None":
        """None: the tokens cannot be equal on all ranks with these sharded documents.

        Args:
          in_sequence: the other documents are placed one after the other, and cut where the space of a rank ends.
        """
        order = np.argsort(-lengths, kind="stable")
        begins = (np.cumsum(lengths) - lengths)[order]
        lengths = lengths[order]
        sizes, tokens = _cut_into_pieces(lengths[:num_sharded], context, unit)
        cuts = []
        if in_sequence:
            whole = [[] for _ in range(context)]
            cuts = _place_in_sequence(lengths, num_sharded, rank_tokens - tokens)
        else:
            whole, tokens = _place_whole(lengths, num_sharded, tokens, rank_tokens)
        assignment = cls(
            lengths=lengths,
            begins=begins,
            rank_tokens=rank_tokens,
            unit=unit,
            sizes=sizes,
            whole=whole,
            cuts=cuts,
        )
        if in_sequence:
            return assignment if (tokens <= rank_tokens).all() else None
        return assignment if assignment._equalize(tokens - rank_tokens) else None

    def _equalize(self, excess: np.ndarray) -> bool:
        """Moves tokens between neighboring ranks, so that every rank has as many; returns whether
        it is possible.

        `excess` int64 [context]: tokens of each rank above its share. What is missing in total is
        padding.
        """
        padding = -int(excess.sum())
        flow = 0
        for rank in range(len(excess) - 1):
            flow += int(excess[rank])  # tokens from this rank to the next, if positive
            num_padding = min(max(-flow, 0), padding)
            flow += num_padding
            padding -= num_padding
            if flow and not self._move(rank, flow):
                return False
        return True

    def _move(self, rank: int, flow: int) -> bool:
        """Moves `flow` tokens from `rank` to the next rank, or -flow tokens from there to `rank`."""
        source, target = (rank, rank + 1) if flow > 0 else (rank + 1, rank)
        num_tokens = abs(flow)
        while num_tokens:
            documents = self.whole[source]
            longer = [document for document in documents if self.lengths[document] > num_tokens]
            exact = [document for document in documents if self.lengths[document] == num_tokens]
            if exact:
                self._move_whole(exact[0], source, target)
                return True
            if longer:  # the shortest of them, which has the least work
                document = longer[-1]
                self.whole[source].remove(document)
                length = int(self.lengths[document])
                head = length - num_tokens if flow > 0 else num_tokens
                self.cuts += [(document, rank, 0, head), (document, rank + 1, head, length - head)]
                return True
            if not documents:
                return self._shift_pieces(rank, num_tokens if flow > 0 else -num_tokens)
            document = documents[0]
            self._move_whole(document, source, target)
            num_tokens -= int(self.lengths[document])
        return True

    def _move_whole(self, document: int, source: int, target: int):
        self.whole[source].remove(document)
        self.whole[target] = sorted([*self.whole[target], document])

    def _shift_pieces(self, rank: int, flow: int) -> bool:
        """As `_move`, by moving the boundaries between the pieces of the longest sharded document."""
        if not len(self.sizes):
            return False
        last = self.sizes.shape[1] - 1
        for num_moved, pieces in (
            (flow // 2, (rank, rank + 1)),
            (flow - flow // 2, (last - rank, last - rank - 1)),
        ):
            self.sizes[0, pieces[0]] -= num_moved
            self.sizes[0, pieces[1]] += num_moved
        return bool((self.sizes[0] > 0).all())

    @functools.cached_property
    def in_sequence(self) -> "Pieces":
        """The pieces of all ranks in the order of the sequence, in one tile."""
        pieces = self.pieces()
        document, offset, tokens, rank = pieces[np.lexsort(pieces[:, [1, 0]].T)].T
        return Pieces(document, offset, tokens, rank, np.zeros_like(rank))

    def work_by_rank(self) -> np.ndarray:
        """int64 [query ranks, key ranks]: pairs of a query and a key that it attends to."""
        return pairs_by_rank(self.in_sequence, len(self.whole), 1)[0]

    def num_shared(self) -> tuple[int, int]:
        """`num_shared` of the documents of all ranks."""
        tokens = tokens_by_rank(self.in_sequence, len(self.lengths) - 1, len(self.whole), 1)
        return num_shared(tokens[0].T, self.rank_tokens)

    def pieces(self) -> np.ndarray:
        """The pieces of all ranks. The tokens of a rank that other ranks need come first.

        Returns:
          int64 [pieces, 4]: document, offset in the document, tokens, rank; by rank, in the order of the rank's tokens.
          Documents are numbered as in this class.
        """
        chunks = np.arange(2 * len(self.whole))
        is_ragged = self.sizes % self.unit > 0
        columns = np.broadcast_arrays(
            np.arange(len(self.sizes))[:, None],
            np.cumsum(self.sizes, axis=1) - self.sizes,
            self.sizes,
            np.minimum(chunks, chunks[::-1]),
            # after the others, which stay aligned
            is_ragged | is_ragged[:, ::-1],
        )
        rows = np.stack(columns, axis=-1).reshape(-1, 5).tolist()
        rows += [
            (document, offset, tokens, rank, 2) for document, rank, offset, tokens in self.cuts
        ]
        for rank, documents in enumerate(self.whole):
            rows += [(document, 0, self.lengths[document], rank, 3) for document in documents]
        *_, sizes, ranks, kinds = columns = np.array(rows, np.int64).reshape(-1, 5).T
        by_rank = np.lexsort((kinds, ranks))
        return columns[:4, by_rank[sizes[by_rank] > 0]].T

    def mirrored_pieces(self) -> np.ndarray | None:
        """As `pieces`, for layers in tiles: sharded documents have their two pieces in different halves of a rank.

        The second half has them in the opposite order. So a tile, which mirrors them (attention/query_tiles.py),
        has both pieces of a document. The tokens that the next rank needs of cut documents are in the first half, too.

        Returns:
          int64 [pieces, 4], with the half of a rank, 2 x rank or 2 x rank + 1, in place of the rank. None: the pieces
          do not fit into the halves.
        """
        half_tokens = self.rank_tokens // 2
        context = len(self.whole)
        num_tokens_lo = self.sizes[:, :context].sum(axis=1)
        own = self.pieces()
        cut = {document for document, *_ in self.cuts}
        pieces = []
        for rank in range(context):
            first = []
            middle = []
            last = []
            for document, offset, tokens, _ in own[own[:, 3] == rank].tolist():
                is_sharded = document < len(self.sizes)
                is_first = not offset and document in cut
                if is_sharded:
                    is_first = offset < num_tokens_lo[document]
                (first if is_first else last if is_sharded else middle).append(
                    (document, offset, tokens)
                )
            if max(sum(tokens for _, _, tokens in part) for part in (first, last)) > half_tokens:
                return None
            begin, second = _split_at(first + middle, half_tokens)
            pieces += [(*piece, 2 * rank) for piece in begin]
            pieces += [(*piece, 2 * rank + 1) for piece in second + last[::-1]]
        return np.array(pieces, np.int64).reshape(-1, 4)

    def fragments(self, pieces: np.ndarray, num_chains: int) -> np.ndarray:
        """int32 [tokens]: the fragment of its rank that each token of the layout belongs to.

        A chain is a part of the sequence whose tokens are on the ranks in zigzag order: first on
        ranks 0, 1, ..., then on ..., 1, 0. Fragment 2 i is what a rank has first of chain i,
        fragment 2 i + 1 the second. Each sharded document is a chain. The last chain begins with
        the cut documents, which continue on the next rank; its second fragments have the whole
        documents and padding.

        Args:
          pieces: of `pieces()`.
          num_chains: more than the number of sharded documents.
        """
        num_sharded = len(self.sizes)
        context = len(self.whole)
        assert num_sharded < num_chains, (num_sharded, num_chains)
        num_tokens_lo = self.sizes[:, :context].sum(axis=1)
        cut = {document for document, *_ in self.cuts}
        rest = 2 * num_chains - 1
        fragments_RT = np.full((context, self.rank_tokens), rest, np.int32)
        ends = [0] * context
        for document, offset, tokens, rank in pieces.tolist():
            fragment = rest - (document in cut)
            if document < num_sharded:
                fragment = 2 * document + int(offset >= num_tokens_lo[document])
            fragments_RT[rank, ends[rank] : ends[rank] + tokens] = fragment
            ends[rank] += tokens
        return fragments_RT.reshape(-1)

    def has_chains(self, num_chains: int, min_tokens: int) -> bool:
        """Whether there are fewer sharded documents than chains, and all pieces between two others
        of their document have at least `min_tokens` tokens."""
        between = [
            tokens
            for document, _, offset, tokens in self.cuts
            if offset and offset + tokens < self.lengths[document]
        ]
        sizes = [*self.sizes.reshape(-1).tolist(), *between]
        return len(self.sizes) < num_chains and all(tokens >= min_tokens for tokens in sizes)

    def order(self, pieces: np.ndarray, per_rank: int = 1) -> np.ndarray:
        """int64 [tokens]: index i of the layout holds token `order[i]` of the sequence.

        `pieces` as of `pieces()`; as of `mirrored_pieces()` with two halves `per_rank`.
        """
        next_padding = int(self.lengths.sum())
        parts = []
        for place in range(per_rank * len(self.whole)):
            place_pieces = pieces[pieces[:, 3] == place]
            first = self.begins[place_pieces[:, 0]] + place_pieces[:, 1]
            parts += [
                np.arange(begin, begin + tokens)
                for begin, tokens in zip(first, place_pieces[:, 2], strict=True)
            ]
            num_padding = self.rank_tokens // per_rank - int(place_pieces[:, 2].sum())
            parts.append(np.arange(next_padding, next_padding + num_padding))
            next_padding += num_padding
        return np.concatenate(parts)


def num_shared(tokens: np.ndarray, rank_tokens: int) -> tuple[int, int]:
    """The largest numbers of documents that two ranks share, and of those with over a quarter of a
    rank's tokens. Either rank may have that many of them.

    Args:
      tokens: int64 [documents, ranks].
    """
    has_tokens = (tokens > 0).astype(int)
    is_long = (4 * tokens > rank_tokens).astype(int)
    shared = has_tokens.T @ has_tokens
    long = is_long.T @ has_tokens + has_tokens.T @ is_long - is_long.T @ is_long
    others = 1 - np.eye(tokens.shape[1], dtype=int)
    return int((others * shared).max()), int((others * long).max())


def _split_at(pieces: list[tuple[int, int, int]], num_tokens: int) -> tuple[list, list]:
    """The first `num_tokens` tokens of pieces (document, offset, tokens), and the others; a piece
    may be cut in two.
    """
    first = []
    rest = []
    free = num_tokens
    for document, offset, tokens in pieces:
        size = min(tokens, free)
        free -= size
        if size > 0:
            first.append((document, offset, size))
        if tokens > size:
            rest.append((document, offset + size, tokens - size))
    return first, rest


def _cut_into_pieces(lengths: np.ndarray, context: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Piece lengths int64 [documents, 2 x context], and their sum by rank, int64 [context].

    All pieces of a document have the same number of units. Remaining units and the last tokens go
    to the ranks that have the fewest tokens so far.
    """
    tokens = np.zeros(context, np.int64)
    tokens_lo, tokens_hi = np.zeros((2, context), np.int64)
    units, rest = np.divmod(lengths, unit)
    base, extra = np.divmod(units, 2 * context)
    sizes = np.repeat(base[:, None] * unit, 2 * context, axis=1)
    for document in range(len(lengths)):
        # Also evens out the two pieces of a rank: extra units alternate between them.
        for half in range(2):
            num_extra = min(int(extra[document]) - half * context, context)
            if num_extra <= 0:
                break
            ranks = np.argsort(tokens, kind="stable")[:num_extra]
            is_hi = tokens_hi[ranks] <= tokens_lo[ranks]
            sizes[document, np.where(is_hi, 2 * context - 1 - ranks, ranks)] += unit
            tokens[ranks] += unit
            tokens_hi[ranks[is_hi]] += unit
            tokens_lo[ranks[~is_hi]] += unit
        rank = int(np.argmin(tokens))
        is_hi = tokens_hi[rank] <= tokens_lo[rank]
        sizes[document, 2 * context - 1 - rank if is_hi else rank] += rest[document]
        tokens[rank] += rest[document]
        (tokens_hi if is_hi else tokens_lo)[rank] += rest[document]
    return sizes, (sizes[:, :context] + sizes[:, : context - 1 : -1]).sum(axis=0)


def _place_whole(
    lengths, num_sharded: int, tokens: np.ndarray, rank_tokens: int
) -> tuple[list[list[int]], np.ndarray]:
    """The other documents by rank, longest first, and all tokens by rank."""
    ranks = range(len(tokens))
    work = [0] * len(tokens)
    free = (rank_tokens - tokens).tolist()
    whole = [[] for _ in ranks]
    for document, length in enumerate(lengths[num_sharded:].tolist(), num_sharded):
        with_space = [rank for rank in ranks if free[rank] >= length]
        rank = (
            min(with_space, key=lambda r: (work[r], -free[r]))
            if with_space
            else max(ranks, key=free.__getitem__)
        )
        whole[rank].append(document)
        work[rank] += length * length
        free[rank] -= length
    return whole, rank_tokens - np.array(free, np.int64)


def _place_in_sequence(
    lengths, num_sharded: int, free: np.ndarray
) -> list[tuple[int, int, int, int]]:
    """The other documents one after the other as (document, rank, offset, tokens); `free` int64
    [context]: tokens.
    """
    ends = np.cumsum(np.maximum(free, 0))
    places = []
    begin = 0
    for document, length in enumerate(lengths[num_sharded:].tolist(), num_sharded):
        offset = 0
        while offset < length:
            rank = int(np.searchsorted(ends, begin, side="right"))
            if rank == len(ends):
                return places
            tokens = min(length - offset, int(ends[rank]) - begin)
            places.append((document, rank, offset, tokens))
            offset += tokens
            begin += tokens
    return places


class Pieces(NamedTuple):
    """Consecutive tokens of a document that are neighbors on one rank; int64 [pieces], in the order
    of the sequence.
    """

    document: np.ndarray
    offset: np.ndarray  # tokens of the document before the piece
    num_tokens: np.ndarray
    rank: np.ndarray
    tile: np.ndarray


def sequence_pieces(
    segment_ids_T: np.ndarray, order_T: np.ndarray, num_ranks: int, tile_T: np.ndarray
) -> Pieces:
    """The pieces of a sequence whose token `order_T[i]` is at place i of the layout, in tile
    `tile_T[i]`.
    """
    rank_T = np.arange(len(order_T)) // (len(order_T) // num_ranks)
    document_T = segment_ids_T[order_T]
    is_first = np.ones(len(order_T), bool)
    is_first[1:] = (np.diff(order_T) != 1) | (np.diff(document_T) != 0) | (np.diff(rank_T) != 0)
    is_first[1:] |= np.diff(tile_T) != 0
    begins = np.flatnonzero(is_first)
    num_tokens = np.diff(begins, append=len(order_T))
    order = np.argsort(order_T[begins])
    begins = begins[order]
    num_tokens = num_tokens[order]
    is_text = document_T[begins] > 0
    begins = begins[is_text]
    num_tokens = num_tokens[is_text]
    document = document_T[begins]
    first_token = order_T[begins]
    is_new = np.diff(document, prepend=0) != 0
    offset = first_token - np.maximum.accumulate(np.where(is_new, first_token, 0))
    return Pieces(document, offset, num_tokens, rank_T[begins], tile_T[begins])


def pairs_by_rank(pieces: Pieces, num_ranks: int, num_tiles: int) -> np.ndarray:
    """int64 [tiles, query ranks, key ranks]: pairs of a query in a tile and a key that it attends
    to.
    """
    num_tokens = pieces.num_tokens
    rank = pieces.rank
    # tokens of all earlier pieces, by rank
    by_rank = np.zeros((len(rank) + 1, num_ranks), np.int64)
    by_rank[np.arange(1, len(rank) + 1), rank] = num_tokens
    by_rank = by_rank.cumsum(axis=0)[:-1]
    is_new = np.diff(pieces.document, prepend=0) != 0
    # the first piece of each document
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(rank)), 0))
    pairs = np.zeros((num_tiles, num_ranks, num_ranks), np.int64)
    np.add.at(pairs, (pieces.tile, rank), num_tokens[:, None] * (by_rank - by_rank[first]))
    np.add.at(pairs, (pieces.tile, rank, rank), num_tokens * (num_tokens + 1) // 2)
    return pairs


def tokens_by_rank(
    pieces: Pieces, num_documents: int, num_ranks: int, num_tiles: int
) -> np.ndarray:
    """int64 [tiles, ranks, documents + 1]: tokens of each document, by its segment id."""
    tokens = np.zeros((num_tiles, num_ranks, num_documents + 1), np.int64)
    np.add.at(tokens, (pieces.tile, pieces.rank, pieces.document), pieces.num_tokens)
    return tokens


def prefix_pairs_by_rank(tokens: np.ndarray, ancestors: np.ndarray) -> np.ndarray:
    """int64 [tiles, query ranks, key ranks]: pairs of a query in a tile and a key in a prefix of its
    document.

    Args:
      tokens: of `tokens_by_rank`.
      ancestors: int [documents + 1, levels]: the prefixes of each document; 0: none.
    """
    return tokens @ tokens.sum(0)[:, ancestors].sum(-1).T
