"""Per-document sharding: the assignment of a packed sequence's documents to context ranks. Pure NumPy.

Zigzag order over the whole sequence balances one document. In a sequence of many documents, a rank that holds the end
of a long document has several times the work of a rank that holds short documents. Here, each long document is cut into
2 x context pieces of its own, and rank r holds its pieces r and 2 x context - 1 - r, so that every rank has the same
work in every ring step (per-document sharding: WLB-LLM, arXiv:2503.17924, section 5). Short documents are placed whole,
by work. Every rank holds exactly the same number of tokens:

    sharded documents   pieces of multiples of `block_tokens`, as far as the balance permits
    whole documents     longest first, to the rank with the least work that has space for it (LPT, Graham 1969)
    cut documents       where the whole documents of a rank do not fit exactly, one of them is cut in two: the first
                        part is on rank r, the rest on rank r + 1. Only ring step 1 has work for it
    padding             at the end of each rank

On a rank, sharded documents come first, each with its two pieces next to each other, then cut documents. So the tokens
of a document are contiguous on every rank, and the tokens that other ranks need are a prefix of the rank's tokens. Of
the sharded documents, those come first whose pieces on this rank have whole blocks. With the documents in the same
order on all ranks, a kernel computes 5% more blocks of 128 x 128 (Python's standard library, context 8).

Ring cost: ring steps are synchronized by the transfers, so the time of a sequence is the sum over ring steps of the
maximum over ranks of the work, relative to the mean work of a rank. 1 is ideal. The number of sharded documents is the
smallest whose ring cost is below a limit: each sharded document makes the pieces shorter that kernels work on.
"""

from dataclasses import dataclass, field

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import zigzag_order

MAX_RING_COST = 1.03  # accepted without trying to cut more documents, or into finer pieces


@dataclass(frozen=True, kw_only=True)
class DocumentLayout:
    """The assignment of one sequence's tokens to ranks."""

    # int64 [pieces, 4]: document, offset in the document, tokens, rank; by rank, in the order of the rank's tokens.
    pieces: np.ndarray
    order: np.ndarray  # int64 [tokens]: index i of the layout holds token `order[i]` of the natural order
    ring_work: np.ndarray  # int64 [ring steps, ranks]: pairs of a query and a key that it attends to
    num_shared_tokens: int  # the longest prefix of a rank's tokens that other ranks need: keys, or queries of such keys
    num_sharded_documents: int
    block_tokens: int  # pieces of sharded documents are multiples of it, except for at most a few per document

    @property
    def ring_cost(self) -> float:
        """See the docstring of the module."""
        return ring_cost(self.ring_work)

    @property
    def active_ring_steps(self) -> tuple[int, ...]:
        """The ring steps that have work on any rank; the others can be skipped on all ranks."""
        return tuple(np.flatnonzero(self.ring_work.any(axis=1)).tolist())


def document_layout(
    lengths: np.ndarray, num_tokens: int, context: int, *, block_tokens: int = 128, max_cost: float = MAX_RING_COST
) -> DocumentLayout:
    """The layout of a sequence; a pure function of its arguments.

    Args:
      lengths: int [documents]: tokens of each document, in the order of the sequence. The rest of the sequence is
        padding.
      num_tokens: tokens of the sequence.
      context: number of ranks.
      block_tokens: a power of 2; preferred multiple of the lengths of pieces.
      max_cost: the ring cost that is accepted; if no candidate reaches it, the one with the lowest cost is returned.
    Raises:
      UserError: the tokens do not split over the ranks.
    """
    lengths = np.asarray(lengths, np.int64)
    assert (lengths > 0).all() and lengths.sum() <= num_tokens, (lengths, num_tokens)
    if num_tokens % context:
        raise UserError(
            f"a sequence of {num_tokens} tokens does not split over {context} ranks; use a multiple of {context}"
        )
    best, best_cost = None, np.inf
    for unit, num_sharded in _candidates(lengths, num_tokens // context, context, block_tokens):
        assignment = _Assignment.create(lengths, num_tokens // context, context, num_sharded, unit)
        cost = np.inf if assignment is None else ring_cost(assignment.ring_work())
        if cost < best_cost:
            best, best_cost = assignment, cost
        if best_cost <= max_cost:
            break
    return best.layout()


def document_order(segment_ids_T: np.ndarray, context: int, inner: int = 1) -> np.ndarray:
    """The order of a packed sequence's tokens: index i of the layout holds token `order_T[i]` of the natural order.

    A pure function, so processes that share a sequence compute the same order.

    Args:
      segment_ids_T: int [tokens]: the document of each token, the same number for neighboring tokens; 0 is padding.
      context: number of ranks, or of groups of ranks.
      inner: number of ranks of a group. Its tokens are split over them in zigzag order, as Ulysses expects
        (attention/ulysses.py).
    Returns:
      int64 [tokens]
    Raises:
      UserError: the tokens do not split over the ranks.
    """
    documents_first = np.argsort(segment_ids_T == 0, kind="stable")  # padding may be anywhere
    ids = segment_ids_T[documents_first][: np.count_nonzero(segment_ids_T)]
    lengths = np.diff(np.flatnonzero(np.diff(ids, prepend=0)), append=len(ids))
    order_T = documents_first[document_layout(lengths, len(segment_ids_T), context).order]
    if inner > 1:
        order_T = order_T.reshape(context, -1)[:, zigzag_order(len(order_T) // context, inner)].reshape(-1)
    return order_T


def ring_cost(ring_work: np.ndarray) -> float:
    """The sum over ring steps of the maximum over ranks, relative to the mean work of a rank; work [steps, ranks]."""
    total = ring_work.sum()
    return float(ring_work.max(axis=1).sum() * ring_work.shape[1] / total) if total else 1.0


def by_ring_step(work: np.ndarray) -> np.ndarray:
    """[query rank, key rank] -> [ring step, query rank]; in step i, rank r has the keys of rank r - i."""
    ranks = np.arange(len(work))
    return work[ranks, (ranks - ranks[:, None]) % len(work)]


def _candidates(lengths: np.ndarray, rank_tokens: int, context: int, block_tokens: int):
    """(unit of piece lengths, number of sharded documents), in the order of preference."""
    if context == 1 or not len(lengths):
        yield 1, 0
        return
    first = int((lengths > rank_tokens).sum())  # longer than a rank's tokens: never whole
    units = [block_tokens]
    while units[-1] > 1:
        units.append(max(1, units[-1] // 4))
    for unit in units:
        num_sharded = first
        while num_sharded < len(lengths):
            yield unit, num_sharded
            num_sharded += 1 + (num_sharded - first) // 8
        yield unit, len(lengths)


@dataclass(kw_only=True)
class _Assignment:
    """A candidate: documents with their ranks. Documents are numbered by descending length here."""

    documents: np.ndarray  # int64 [documents]: their indices in the sequence, by descending length
    lengths: np.ndarray  # int64 [documents]
    begins: np.ndarray  # int64 [documents]: offsets in the sequence
    rank_tokens: int
    unit: int
    sizes: np.ndarray  # int64 [sharded documents, 2 x context]: tokens of each piece
    whole: list[list[int]]  # by rank
    cuts: list[tuple[int, int, int]] = field(default_factory=list)  # document, rank of its head, tokens of its head

    @classmethod
    def create(cls, lengths, rank_tokens: int, context: int, num_sharded: int, unit: int) -> "_Assignment | None":
        """None: the tokens cannot be equal on all ranks with these sharded documents."""
        documents = np.argsort(-lengths, kind="stable")
        begins = (np.cumsum(lengths) - lengths)[documents]
        lengths = lengths[documents]
        sizes, tokens = _cut_into_pieces(lengths[:num_sharded], context, unit)
        whole, tokens = _place_whole(lengths, num_sharded, tokens, rank_tokens)
        assignment = cls(
            documents=documents,
            lengths=lengths,
            begins=begins,
            rank_tokens=rank_tokens,
            unit=unit,
            sizes=sizes,
            whole=whole,
        )
        return assignment if assignment._equalize(tokens - rank_tokens) else None

    def _equalize(self, excess: np.ndarray) -> bool:
        """Moves tokens between neighboring ranks, so that every rank has as many; returns whether it is possible.

        `excess` int64 [context]: tokens of each rank above its share. What is missing in total is padding.
        """
        padding, flow = -int(excess.sum()), 0
        for rank in range(len(excess) - 1):
            flow += int(excess[rank])  # tokens from this rank to the next, if positive
            num_padding = min(max(-flow, 0), padding)
            flow, padding = flow + num_padding, padding - num_padding
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
                head = int(self.lengths[document]) - num_tokens if flow > 0 else num_tokens
                self.cuts.append((document, rank, head))
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
        """As `_move`, by moving the borders between the pieces of the longest sharded document."""
        if not len(self.sizes):
            return False
        last = self.sizes.shape[1] - 1
        for num_moved, pieces in ((flow // 2, (rank, rank + 1)), (flow - flow // 2, (last - rank, last - rank - 1))):
            self.sizes[0, pieces[0]] -= num_moved
            self.sizes[0, pieces[1]] += num_moved
        return bool((self.sizes[0] > 0).all())

    def ring_work(self) -> np.ndarray:
        """int64 [ring steps, ranks]"""
        context = len(self.whole)
        lo, hi = self.sizes[:, :context], self.sizes[:, : context - 1 : -1]  # [sharded documents, ranks]
        both = lo + hi
        work = np.where(np.tri(context, k=-1, dtype=bool), both.T @ lo, hi.T @ both)  # keys of earlier, later ranks
        diagonal = (both * (both + 1) // 2).sum(axis=0)
        for rank, documents in enumerate(self.whole):
            diagonal[rank] += (self.lengths[documents] * (self.lengths[documents] + 1) // 2).sum()
        for document, rank, head in self.cuts:
            rest = int(self.lengths[document]) - head
            diagonal[rank] += head * (head + 1) // 2
            diagonal[rank + 1] += rest * (rest + 1) // 2
            work[rank + 1, rank] += rest * head
        np.fill_diagonal(work, diagonal)
        return by_ring_step(work)

    def layout(self) -> DocumentLayout:
        pieces, num_shared = [], 0
        for rank in range(len(self.whole)):
            shared = self._shared_pieces(rank)
            num_shared = max(num_shared, sum(tokens for _, _, tokens in shared))
            whole = [(document, 0, int(self.lengths[document])) for document in self.whole[rank]]
            pieces += [(*piece, rank) for piece in shared + whole]
        pieces = np.array(pieces, np.int64).reshape(-1, 4)
        order = self._order(pieces)
        pieces[:, 0] = self.documents[pieces[:, 0]]
        return DocumentLayout(
            pieces=pieces,
            order=order,
            ring_work=self.ring_work(),
            num_shared_tokens=num_shared,
            num_sharded_documents=len(self.sizes),
            block_tokens=self.unit,
        )

    def _shared_pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """(document, offset, tokens) of the sharded and the cut documents of a rank, in the order of its tokens."""
        offsets = np.cumsum(self.sizes, axis=1) - self.sizes
        chunks = rank, self.sizes.shape[1] - 1 - rank
        is_ragged = (self.sizes[:, chunks] % self.unit).any(axis=1)  # these come last: the others stay aligned
        pieces = [
            (int(document), int(offsets[document, chunk]), int(self.sizes[document, chunk]))
            for document in np.argsort(is_ragged, kind="stable")
            for chunk in chunks
        ]
        pieces = [piece for piece in pieces if piece[2]]
        for document, head_rank, head in self.cuts:
            if head_rank == rank:
                pieces.append((document, 0, head))
            elif head_rank == rank - 1:
                pieces.append((document, head, int(self.lengths[document]) - head))
        return pieces

    def _order(self, pieces: np.ndarray) -> np.ndarray:
        context = len(self.whole)
        next_padding = int(self.lengths.sum())
        parts = []
        for rank in range(context):
            of_rank = pieces[pieces[:, 3] == rank]
            first = self.begins[of_rank[:, 0]] + of_rank[:, 1]
            parts += [np.arange(begin, begin + tokens) for begin, tokens in zip(first, of_rank[:, 2], strict=True)]
            num_padding = self.rank_tokens - int(of_rank[:, 2].sum())
            parts.append(np.arange(next_padding, next_padding + num_padding))
            next_padding += num_padding
        return np.concatenate(parts)


def _cut_into_pieces(lengths: np.ndarray, context: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Piece lengths int64 [documents, 2 x context], and their sum by rank, int64 [context].

    All pieces of a document have the same number of units. Remaining units and the last tokens go to the ranks that
    have the fewest tokens so far.
    """
    tokens = np.zeros(context, np.int64)
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
            is_hi = (ranks + document + half) % 2 == 1
            sizes[document, np.where(is_hi, 2 * context - 1 - ranks, ranks)] += unit
            tokens[ranks] += unit
        rank = int(np.argmin(tokens))
        sizes[document, 2 * context - 1 - rank] += rest[document]
        tokens[rank] += rest[document]
    return sizes, (sizes[:, :context] + sizes[:, : context - 1 : -1]).sum(axis=0)


def _place_whole(lengths, num_sharded: int, tokens: np.ndarray, rank_tokens: int) -> tuple[list[list[int]], np.ndarray]:
    """The other documents by rank, longest first, and all tokens by rank."""
    ranks, work, free = range(len(tokens)), [0] * len(tokens), (rank_tokens - tokens).tolist()
    whole = [[] for _ in ranks]
    for document, length in enumerate(lengths[num_sharded:].tolist(), num_sharded):
        with_space = [rank for rank in ranks if free[rank] >= length]
        rank = min(with_space, key=lambda r: (work[r], -free[r])) if with_space else max(ranks, key=free.__getitem__)
        whole[rank].append(document)
        work[rank] += length * length
        free[rank] -= length
    return whole, rank_tokens - np.array(free, np.int64)
