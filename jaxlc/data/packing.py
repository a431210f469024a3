"""Rows of equal length from documents of any length.

A document longer than a row is cut into full rows and a remainder. Everything that is shorter than a row is
packed by best-fit decreasing: the longest piece first, each into the row where it leaves the least free space.
So a document is cut only where it must be, and next to nothing is padding (Ding et al. 2024, "Fewer Truncations
Improve Language Modeling", https://arxiv.org/abs/2404.10830).
"""

import functools
from bisect import bisect_left, insort

import numpy as np

from jaxlc.data.store import TokenStore


class PackedRows:
    """An endless sequence of rows: `rows[i]` for any i >= 0 is a pure function of (documents, row length, seed, i).

    Row i belongs to epoch i // num_rows. Each epoch holds every row once, in an order of its own that depends on
    the seed; `seed=None` is one fixed order for all epochs (mixed too, so that the first few rows are a fair sample).
    """

    def __init__(self, store: TokenStore, document_ids: np.ndarray, seq_len: int, seed: int | None):
        """`document_ids` int64: the documents of `store` to pack, at least one."""
        assert len(document_ids) and seq_len > 0, (len(document_ids), seq_len)
        self.store, self.document_ids, self.seq_len, self.seed = store, document_ids, seq_len, seed
        begins, ends = _cut(store.offsets[document_ids], store.offsets[document_ids + 1], seq_len)
        row_of_piece = best_fit(ends - begins, seq_len)
        by_row = np.argsort(row_of_piece, kind="stable")
        self.num_rows = int(row_of_piece[by_row[-1]]) + 1  # per epoch
        self._piece_begins, self._piece_ends = begins[by_row], ends[by_row]  # int64 [pieces], offsets into the store
        self._first_pieces = np.searchsorted(row_of_piece[by_row], np.arange(self.num_rows + 1))  # int64 [rows + 1]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Row i in natural order, arrays [S]:

        tokens        int32    0 on padding
        targets       int32    the next token of the same document, also where the document goes on in another row
        loss_weights  float32  1, but 0 at each document's last token (it has no next) and on padding
        positions     int32    number of earlier tokens of the same document in this row; 0 on padding
        segment_ids   int32    1, 2, 3... by document; 0 on padding
        """
        assert i >= 0, i
        epoch, index = divmod(i, self.num_rows)
        row = _row_order(self.num_rows, self.seed, epoch)[index]
        pieces = slice(self._first_pieces[row], self._first_pieces[row + 1])
        begins, ends = self._piece_begins[pieces], self._piece_ends[pieces]
        lengths = ends - begins
        row_ends = np.cumsum(lengths)
        num_tokens = row_ends[-1]

        def padded(values: np.ndarray, dtype) -> np.ndarray:
            out = np.zeros(self.seq_len, dtype)
            out[:num_tokens] = values
            return out

        stored = self.store.tokens
        tokens = padded(np.concatenate([stored[begin:end] for begin, end in zip(begins, ends, strict=True)]), np.int32)
        targets = np.append(tokens[1:], np.int32(0))
        offsets = self.store.offsets
        is_document_end = offsets[np.searchsorted(offsets, ends)] == ends
        next_tokens = stored[np.minimum(ends, len(stored) - 1)]
        targets[row_ends - 1] = np.where(is_document_end, 0, next_tokens)
        loss_weights = padded(np.float32(1), np.float32)
        loss_weights[row_ends[is_document_end] - 1] = 0
        return {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": loss_weights,
            "positions": padded(np.arange(num_tokens) - np.repeat(row_ends - lengths, lengths), np.int32),
            "segment_ids": padded(np.repeat(np.arange(1, len(lengths) + 1), lengths), np.int32),
        }


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing bin packing. Lengths int64 [pieces] in 1..capacity; returns row int64 [pieces], from 0.

    O(pieces x log rows): open rows are kept by their free space. The list of distinct free spaces is never longer
    than the row or the number of rows, so at most the square root of the corpus: inserting into it is cheap.
    """
    row_of_piece = np.empty(len(lengths), np.int64)
    open_rows: dict[int, list[int]] = {}  # free space -> rows that have it
    free_spaces: list[int] = []  # the keys of open_rows, sorted
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(free_spaces, length)
        if at == len(free_spaces):
            row, free = num_rows, capacity
            num_rows += 1
        else:
            free = free_spaces[at]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], free_spaces[at]
        row_of_piece[piece] = row
        left = free - length
        if left in open_rows:
            open_rows[left].append(row)
        elif left:
            open_rows[left] = [row]
            insort(free_spaces, left)
    return row_of_piece


def _cut(begins: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts spans [documents] every `seq_len` from their begin; returns begins and ends int64 [pieces]."""
    num_pieces = -(-(ends - begins) // seq_len)
    piece_in_document = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    piece_begins = np.repeat(begins, num_pieces) + piece_in_document * seq_len
    return piece_begins, np.minimum(piece_begins + seq_len, np.repeat(ends, num_pieces))


@functools.lru_cache(maxsize=4)  # an epoch's rows are asked for one by one, around its end those of two epochs
def _row_order(num_rows: int, seed: int | None, epoch: int) -> np.ndarray:
    # RandomState, not default_rng: its stream is frozen, a newer numpy gives the same rows (NumPy's NEP 19).
    generator = np.random.RandomState([0] if seed is None else [seed % 2**32, epoch])
    return generator.permutation(num_rows)
