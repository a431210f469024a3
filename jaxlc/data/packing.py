"""Packs documents of any length into sequences of equal length.

A document longer than a sequence is cut into full sequences and a remainder. All chunks shorter than a sequence are
packed by best-fit decreasing: the longest chunk first, each into the sequence where it leaves the least free space.
A document is therefore cut only where it must be, and there is little padding (Ding et al. 2024, "Fewer Truncations
Improve Language Modeling", https://arxiv.org/abs/2404.10830).
"""

import functools
from bisect import bisect_left, insort

import numpy as np

from jaxlc.data.store import TokenStore


class PackedSequences:
    """An endless dataset: `sequences[i]` for any i >= 0 is a pure function of (documents, seq_len, seed, i).

    Sequence i belongs to epoch i // num_sequences. An epoch contains every sequence once, in an order that depends on
    the seed and the epoch. With `seed=None` all epochs have the same order, which is shuffled too, so that the first
    few sequences are a fair sample.
    """

    def __init__(self, store: TokenStore, document_ids: np.ndarray, seq_len: int, seed: int | None):
        """`document_ids` int64: the documents of `store` to pack, at least one."""
        assert len(document_ids) and seq_len > 0, (len(document_ids), seq_len)
        self.store, self.document_ids, self.seq_len, self.seed = store, document_ids, seq_len, seed
        begins, ends = _chunks(store.offsets[document_ids], store.offsets[document_ids + 1], seq_len)
        sequence_of_chunk = best_fit(ends - begins, seq_len)
        order = np.argsort(sequence_of_chunk, kind="stable")
        self.num_documents = len(document_ids)
        self.num_tokens = int((ends - begins).sum())  # per epoch, without padding
        self.num_sequences = int(sequence_of_chunk[order[-1]]) + 1  # per epoch
        self._chunk_begins, self._chunk_ends = begins[order], ends[order]  # int64 [chunks], offsets into the store
        # int64 [sequences + 1]
        self._first_chunks = np.searchsorted(sequence_of_chunk[order], np.arange(self.num_sequences + 1))

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i in natural order, arrays [S]:

        tokens        int32    0 on padding
        targets       int32    the next token of the same document, also if the document continues in another sequence
        loss_weights  float32  1, but 0 at each document's last token (which has no next token) and on padding
        positions     int32    number of earlier tokens of the same document in this sequence; 0 on padding
        segment_ids   int32    1, 2, 3... by document; 0 on padding
        """
        assert i >= 0, i
        epoch, index = divmod(i, self.num_sequences)
        sequence = _sequence_order(self.num_sequences, self.seed, epoch)[index]
        chunks = slice(self._first_chunks[sequence], self._first_chunks[sequence + 1])
        begins, ends = self._chunk_begins[chunks], self._chunk_ends[chunks]
        lengths = ends - begins
        packed_ends = np.cumsum(lengths)
        num_tokens = packed_ends[-1]

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
        targets[packed_ends - 1] = np.where(is_document_end, 0, next_tokens)
        loss_weights = padded(np.float32(1), np.float32)
        loss_weights[packed_ends[is_document_end] - 1] = 0
        return {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": loss_weights,
            "positions": padded(np.arange(num_tokens) - np.repeat(packed_ends - lengths, lengths), np.int32),
            "segment_ids": padded(np.repeat(np.arange(1, len(lengths) + 1), lengths), np.int32),
        }


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing bin packing: lengths int64 [items] in 1..capacity -> bin of each item, int64 [items].

    Takes O(items x log bins) time: open bins are indexed by their free space. The sorted list of distinct free spaces
    is at most as long as the capacity and as the number of bins, hence at most the square root of the total length, so
    inserting into it is cheap.
    """
    bin_of_item = np.empty(len(lengths), np.int64)
    open_bins: dict[int, list[int]] = {}  # free space -> bins that have it
    free_spaces: list[int] = []  # the keys of open_bins, sorted
    num_bins = 0
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(free_spaces, length)
        if at == len(free_spaces):
            bin_index, free = num_bins, capacity
            num_bins += 1
        else:
            free = free_spaces[at]
            bin_index = open_bins[free].pop()
            if not open_bins[free]:
                del open_bins[free], free_spaces[at]
        bin_of_item[item] = bin_index
        free -= length
        if free in open_bins:
            open_bins[free].append(bin_index)
        elif free:
            open_bins[free] = [bin_index]
            insort(free_spaces, free)
    return bin_of_item


def _chunks(begins: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts spans int64 [documents] into chunks of at most `seq_len`; returns begins and ends int64 [chunks]."""
    num_chunks = -(-(ends - begins) // seq_len)
    chunk_in_document = np.arange(num_chunks.sum()) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    chunk_begins = np.repeat(begins, num_chunks) + chunk_in_document * seq_len
    return chunk_begins, np.minimum(chunk_begins + seq_len, np.repeat(ends, num_chunks))


@functools.lru_cache(maxsize=4)  # sequences are requested one by one; at an epoch's border two epochs are in use
def _sequence_order(num_sequences: int, seed: int | None, epoch: int) -> np.ndarray:
    # RandomState, not default_rng: its stream is frozen, so every NumPy version gives the same order (NEP 19).
    generator = np.random.RandomState([0] if seed is None else [seed % 2**32, epoch])
    return generator.permutation(num_sequences)
