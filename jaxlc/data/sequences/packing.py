"""Packs documents of any length into sequences of equal length.

A document longer than a sequence is cut into full sequences and a remainder. All chunks shorter than a sequence are
packed by best-fit decreasing: the longest chunk first, each into the sequence where it leaves the least free space.
A document is therefore cut only where it must be, and there is little padding (Ding et al. 2024, "Fewer Truncations
Improve Language Modeling", https://arxiv.org/abs/2404.10830).
"""

import functools
from bisect import bisect_left, insort

import numpy as np

from jaxlc.data.tokens.store import TokenStore


class PackedSequences:
    """An endless dataset: `sequences[i]` for any i >= 0 is a pure function of (documents, seq_len, seed, i).

    Sequence i belongs to epoch i // num_sequences. An epoch contains every sequence once, in an order that depends on
    the seed and the epoch. With `seed=None` all epochs have the same order, which is shuffled too, so that the first
    few sequences are a fair sample.
    """

    def __init__(
        self,
        store: TokenStore,
        document_ids: np.ndarray,
        seq_len: int,
        seed: int | None,
        *,
        chunk_tokens: int = 0,
        max_document_tokens: int = 0,
        is_full_length: bool = False,
        weighs_answers_equally: bool = False,
    ):
        """
        Args:
          document_ids: int64, the documents of `store` to pack, at least one; a document may occur several times.
          chunk_tokens: documents are cut into chunks of at most this length; 0: `seq_len`.
          max_document_tokens: only the first tokens of a longer document are used; 0: all.
          is_full_length: chunks shorter than `seq_len` are not used.
          weighs_answers_equally: the loss weights of each answer of a chat have the same sum, instead of being 1; they
            are 1 on average over the answers of the store.
        """
        assert len(document_ids) and 0 <= chunk_tokens <= seq_len, (len(document_ids), chunk_tokens, seq_len)
        self.store, self.document_ids, self.seq_len, self.seed = store, document_ids, seq_len, seed
        self.num_documents = len(document_ids)
        begins, document_ends = store.offsets[document_ids], store.offsets[document_ids + 1]
        used_ends = np.minimum(document_ends, begins + max_document_tokens) if max_document_tokens else document_ends
        begins, ends, chunk_documents = _chunks(begins, used_ends, chunk_tokens or seq_len)
        is_document_end = ends == document_ends[chunk_documents]
        if is_full_length:
            is_used = ends - begins == seq_len
            begins, ends, is_document_end = begins[is_used], ends[is_used], is_document_end[is_used]
        assert len(begins), "no document is as long as a sequence"
        sequence_of_chunk = best_fit(ends - begins, seq_len)
        order = np.argsort(sequence_of_chunk, kind="stable")
        self.num_tokens = self.epoch_tokens = int((ends - begins).sum())  # without padding
        self.num_sequences = int(sequence_of_chunk[order[-1]]) + 1  # per epoch
        self._chunk_begins, self._chunk_ends = begins[order], ends[order]  # int64 [chunks], offsets into the store
        self._is_document_end = is_document_end[order]  # bool [chunks]
        # int64 [sequences + 1]
        self._first_chunks = np.searchsorted(sequence_of_chunk[order], np.arange(self.num_sequences + 1))
        self._counting = np.arange(seq_len, dtype=np.int32)
        self._answer_weights = None if store.answers is None else _answer_weights(store.answers, weighs_answers_equally)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i in natural order, arrays [S]:

        tokens        int32    0 on padding
        targets       int32    the next token of the same document, also if the document continues in another sequence
        loss_weights  float32  1, but 0 at each document's last token, which has no next token, and on padding; in chats
                               the weight of the answer that contains the target, or 0
        positions     int32    number of earlier tokens of the same document in this sequence; 0 on padding
        segment_ids   int32    1, 2, 3... by document; 0 on padding
        """
        chunks = self._chunks_of(i)
        begins, ends = self._chunk_begins[chunks].tolist(), self._chunk_ends[chunks].tolist()
        tokens, targets, positions, segment_ids = np.empty((4, self.seq_len), np.int32)
        loss_weights = np.ones(self.seq_len, np.float32)
        at = 0
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), start=1):
            first, at = at, at + end - begin
            is_document_end = bool(self._is_document_end[chunks.start + number - 1])
            stored = self.store.read(begin, end if is_document_end else end + 1)
            tokens[first:at] = stored[: end - begin]
            targets[first : first + len(stored) - 1] = stored[1:]
            positions[first:at] = self._counting[: end - begin]
            segment_ids[first:at] = number
            if is_document_end:
                targets[at - 1] = loss_weights[at - 1] = 0
            if self.store.answers is not None:
                self._weigh_answers(loss_weights[first:at], begin, is_document_end)
        for array in (tokens, targets, loss_weights, positions, segment_ids):
            array[at:] = 0
        return {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": loss_weights,
            "positions": positions,
            "segment_ids": segment_ids,
        }

    def _weigh_answers(self, weights: np.ndarray, begin: int, is_document_end: bool) -> None:
        """Sets the loss weights [chunk] of one chunk of chat tokens that starts at `begin` of the store."""
        answers = self.store.answers
        end = begin + len(weights) + (not is_document_end)  # end of the targets
        first = int(np.searchsorted(answers[:, 1], begin + 1, side="right"))
        last = int(np.searchsorted(answers[:, 0], end, side="left"))
        weights[:] = 0
        for number in range(first, last):
            answer_begin, answer_end = answers[number].tolist()
            target = slice(max(answer_begin - begin - 1, 0), min(answer_end, end) - begin - 1)
            weights[target] = self._answer_weights[number]

    def num_without_loss(self) -> tuple[int, int]:
        """The number of chunks, and of those of chats without a token that has a loss."""
        answers, begins = self.store.answers, self._chunk_begins
        if answers is None:
            return len(begins), 0
        first = np.searchsorted(answers[:, 1], begins + 1, side="right")
        last = np.searchsorted(answers[:, 0], self._chunk_ends + ~self._is_document_end, side="left")
        return len(begins), int((first >= last).sum())

    def document_lengths(self, i: int) -> np.ndarray:
        """Tokens of the documents of sequence i, int64 [documents], in its order; reads no tokens."""
        chunks = self._chunks_of(i)
        return self._chunk_ends[chunks] - self._chunk_begins[chunks]

    def _chunks_of(self, i: int) -> slice:
        """The chunks of sequence i."""
        assert i >= 0, i
        epoch, index = divmod(i, self.num_sequences)
        sequence = epoch_order(self.num_sequences, self.seed, epoch)[index]
        return slice(self._first_chunks[sequence], self._first_chunks[sequence + 1])

    def num_tokens_of_first(self, num_sequences: int) -> int:
        """Tokens of the first sequences, without padding."""
        num_epochs, num_more = divmod(num_sequences, self.num_sequences)
        chunk_ends = np.concatenate([[0], np.cumsum(self._chunk_ends - self._chunk_begins)])
        lengths = np.diff(chunk_ends[self._first_chunks])
        order = epoch_order(self.num_sequences, self.seed, num_epochs)
        return num_epochs * self.num_tokens + int(lengths[order[:num_more]].sum())


def _answer_weights(answers: np.ndarray, weighs_answers_equally: bool) -> np.ndarray:
    """The loss weight of the tokens of each answer, float32 [answers]."""
    lengths = answers[:, 1] - answers[:, 0]
    return (lengths.mean() / lengths if weighs_answers_equally else np.ones(len(answers))).astype(np.float32)


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


def _chunks(begins: np.ndarray, ends: np.ndarray, chunk_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts spans int64 [documents] into chunks of at most `chunk_tokens`.

    Returns:
      Begin, end and index of the document of each chunk, int64 [chunks].
    """
    num_chunks = -(-(ends - begins) // chunk_tokens)
    documents = np.repeat(np.arange(len(begins)), num_chunks)
    chunk_in_document = np.arange(len(documents)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    chunk_begins = begins[documents] + chunk_in_document * chunk_tokens
    return chunk_begins, np.minimum(chunk_begins + chunk_tokens, ends[documents]), documents


@functools.lru_cache(maxsize=64)  # one per source of a mixture, and two at an epoch's boundary
def epoch_order(num_sequences: int, seed: int | None, epoch: int) -> np.ndarray:
    # RandomState, not default_rng: its stream is frozen, so every NumPy version gives the same order (NEP 19).
    generator = np.random.RandomState([0] if seed is None else [seed % 2**32, epoch])
    return generator.permutation(num_sequences)
