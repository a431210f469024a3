"""Selects documents by length, splits a corpus into training and held-out documents, packs them into
sequences, and orders the sequences: mixtures of several sources, and the places of a step's
sequences in microbatches and replicas.

Packing
-------
A document longer than a sequence is cut into full sequences and a remainder. All chunks shorter
than a sequence are packed by best-fit decreasing: the longest chunk first, each into the sequence
where it leaves the least free space. A document is therefore cut only where it must be, and there
is little padding (Ding et al. 2024, "Fewer Truncations Improve Language Modeling",
https://arxiv.org/abs/2404.10830).

Mixtures
--------
Sequence i of the mixture is a sequence of one source. A fixed schedule selects the source: over any
first n sequences, each source has less than one sequence more or less than its share. It solves the
chairman assignment problem (Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics
32): at each place, of the sources that may be next, the one with the earliest deadline is next.

Balance
-------
The places of a step's sequences follow from the work of attention. Replicas wait for each other in
every layer, where FSDP gathers weights and reduces gradients. So a microbatch takes as long as the
replica with the most pairs of a query and a key. The replica cost of a step is the sum over
microbatches of the slowest replica's pairs, relative to the mean of the replicas; 1 is ideal. It is
low if the sequences of a microbatch have similar numbers of pairs. All other work of a sequence is
proportional to its tokens, padding included, and therefore equal.

A step has the same sequences in any order, and its loss and gradients are means over the global
batch.
"""

import functools
import hashlib
import math
import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxlc.config import Config
from jaxlc.config.flops import document_pairs
from jaxlc.config.schema import SourceConfig
from jaxlc.core import UserError
from jaxlc.core.files import Arrays
from jaxlc.data.tokens.store import TokenStore


class Split(NamedTuple):
    # that the ids refer to: with one more document if a document's tail is held out
    store: TokenStore
    train_ids: np.ndarray  # int64 [training documents]
    heldout_ids: np.ndarray  # int64 [held-out documents]
    tail_tokens: int  # length of the held-out tail; 0 if entire documents are held out


def split_documents(
    store: TokenStore, eval_fraction: float, setting: str = "data.sources"
) -> Split:
    """Holds out the documents whose split hash is below `eval_fraction`, 0 to 1; with 0, none.

    The hash depends only on a document's name, so adding documents does not move others across the
    split. If it puts all documents on one side, as with a single large document, the last
    `eval_fraction` of the longest document is held out instead. It becomes a document of its own,
    so training never predicts its tokens.

    Args:
      setting: that names the corpus; in errors.
    Raises:
      UserError: the longest document is too short to hold out its tail.
    """
    is_heldout = store.split_hashes < eval_fraction
    if not eval_fraction or (is_heldout.any() and not is_heldout.all()):
        return Split(store, np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout), 0)
    lengths = np.diff(store.offsets)
    longest = int(lengths.argmax())
    tail_tokens = math.ceil(lengths[longest] * eval_fraction)
    # one token to predict, and one to predict it from
    if min(tail_tokens, lengths[longest] - tail_tokens) < 2:
        raise UserError(
            f"{setting}: too little text to hold out data.eval_fraction={eval_fraction}: {len(lengths)}"
            f" documents, the longest of {lengths[longest]} tokens; add documents or change data.eval_fraction"
        )
    store = replace(
        store,
        offsets=np.insert(store.offsets, longest + 1, store.offsets[longest + 1] - tail_tokens),
        split_hashes=np.insert(store.split_hashes, longest, store.split_hashes[longest]),
    )
    train_ids = np.delete(np.arange(store.num_documents), longest + 1)
    return Split(store, train_ids, np.array([longest + 1]), tail_tokens)


_ALL_DOCUMENTS = SourceConfig(name="")  # packed as they are


class PackedSequences:
    """An endless dataset: `sequences[i]` for any i >= 0 is a pure function of (documents, seq_len,
    seed, i).

    Sequence i belongs to epoch i // num_sequences. An epoch contains every sequence once, in an
    order that depends on the seed and the epoch. With `seed=None` all epochs have the same order,
    which is shuffled too, so that the first few sequences are a fair sample.
    """

    def __init__(
        self,
        store: TokenStore,
        document_ids: np.ndarray,
        seq_len: int,
        seed: int | None,
        source: SourceConfig = _ALL_DOCUMENTS,
    ):
        """
        Args:
          document_ids: int64, the documents of `store` to pack, at least one; a document may occur several times.
          source: how documents are cut, and which chunks are used. With answer_weights=answer, the loss weights of each
            answer of a chat have the same sum, instead of being 1; they are 1 on average over the answers of the store.
        """
        assert len(document_ids) and source.chunk_tokens <= seq_len, (source, seq_len)
        self.store = store
        self.document_ids = document_ids
        self.seq_len = seq_len
        self.seed = seed
        if seed is not None and source.name:
            # One of its own, so that sources of equal size have different orders.
            hashed = hashlib.sha256(f"{seed}\0{source.name}".encode()).digest()
            self.seed = int.from_bytes(hashed[:4])
        self.num_documents = len(document_ids)
        begins = store.offsets[document_ids]
        document_ends = store.offsets[document_ids + 1]
        used_ends = document_ends
        if overlong_rule(source) == "truncate":
            used_ends = np.minimum(document_ends, begins + seq_len)
        begins, ends, chunk_documents = _chunks(begins, used_ends, source.chunk_tokens or seq_len)
        is_document_end = ends == document_ends[chunk_documents]
        if source.pool == "full_length":
            is_used = ends - begins == seq_len
            begins = begins[is_used]
            ends = ends[is_used]
            is_document_end = is_document_end[is_used]
        assert len(begins), "no document is as long as a sequence"
        sequence_of_chunk = best_fit(ends - begins, seq_len)
        order = np.argsort(sequence_of_chunk, kind="stable")
        self.num_tokens = self.epoch_tokens = int((ends - begins).sum())  # without padding
        self.num_sequences = int(sequence_of_chunk[order[-1]]) + 1  # per epoch
        # int64 [chunks], offsets into the store
        self._chunk_begins = begins[order]
        self._chunk_ends = ends[order]
        self._is_document_end = is_document_end[order]  # bool [chunks]
        # int64 [sequences + 1]
        self._first_chunks = np.searchsorted(
            sequence_of_chunk[order], np.arange(self.num_sequences + 1)
        )
        self._counting = np.arange(seq_len, dtype=np.int32)
        if (answers := store.answers) is not None:
            # int64 [chunks]: the answers that contain targets of each chunk
            self._first_answers = np.searchsorted(
                answers[:, 1], self._chunk_begins + 1, side="right"
            )
            target_ends = self._chunk_ends + ~self._is_document_end
            self._end_answers = np.searchsorted(answers[:, 0], target_ends, side="left")
            lengths = answers[:, 1] - answers[:, 0]
            # of the tokens of each answer
            self._answer_weights = np.ones(len(lengths))
            if source.answer_weights == "answer":
                self._answer_weights = lengths.mean() / lengths

    def __getitem__(self, i: int) -> Arrays:
        """Returns sequence i in natural order, arrays [S]:

        tokens        int32    0 on padding
        targets       int32    the next token of the same document, also if the document continues in another sequence
        loss_weights  float32  1, but 0 at each document's last token, which has no next token, and on padding; in chats
                               the weight of the answer that contains the target, or 0
        positions     int32    number of earlier tokens of the same document in this sequence; 0 on padding
        segment_ids   int32    1, 2, 3... by document; 0 on padding
        """
        chunks = self._chunks_of(i)
        begins = self._chunk_begins[chunks].tolist()
        ends = self._chunk_ends[chunks].tolist()
        tokens, targets, positions, segment_ids = np.empty((4, self.seq_len), np.int32)
        loss_weights = np.ones(self.seq_len, np.float32)
        at = 0
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), start=1):
            first = at
            at += end - begin
            chunk = chunks.start + number - 1
            is_document_end = bool(self._is_document_end[chunk])
            stored = self.store.read(begin, end if is_document_end else end + 1)
            tokens[first:at] = stored[: end - begin]
            targets[first : first + len(stored) - 1] = stored[1:]
            positions[first:at] = self._counting[: end - begin]
            segment_ids[first:at] = number
            if is_document_end:
                targets[at - 1] = loss_weights[at - 1] = 0
            if self.store.answers is not None:
                self._weigh_answers(loss_weights[first:at], chunk)
        arrays = dict(
            tokens=tokens,
            targets=targets,
            loss_weights=loss_weights,
            positions=positions,
            segment_ids=segment_ids,
        )
        for array in arrays.values():
            array[at:] = 0
        return arrays

    def _weigh_answers(self, weights: np.ndarray, chunk: int) -> None:
        """Sets the loss weights [tokens] of one chunk of chat tokens."""
        weights[:] = 0
        for number in range(self._first_answers[chunk], self._end_answers[chunk]):
            # in the targets of the chunk
            begin, end = self.store.answers[number] - self._chunk_begins[chunk] - 1
            weights[max(begin, 0) : end] = self._answer_weights[number]

    def num_without_loss(self) -> tuple[int, int]:
        """The number of chunks, and of those of chats without a token that has a loss."""
        num_chunks = len(self._chunk_begins)
        if self.store.answers is None:
            return num_chunks, 0
        return num_chunks, int((self._first_answers >= self._end_answers).sum())

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

    def num_tokens_of_first(self, num_sequences: int) -> list[int]:
        """Tokens of the first sequences, without padding; a list of one number, as for the sources
        of a mixture.
        """
        num_epochs, num_more = divmod(num_sequences, self.num_sequences)
        lengths = np.add.reduceat(self._chunk_ends - self._chunk_begins, self._first_chunks[:-1])
        order = epoch_order(self.num_sequences, self.seed, num_epochs)
        return [num_epochs * self.num_tokens + int(lengths[order[:num_more]].sum())]


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing bin packing: lengths int64 [items] in 1..capacity -> bin of each item,
    int64 [items].

    Takes O(items x log bins) time: open bins are indexed by their free space. The sorted list of
    distinct free spaces is at most as long as the capacity and as the number of bins, hence at most
    the square root of the total length, so inserting into it is cheap.
    """
    bin_of_item = np.empty(len(lengths), np.int64)
    open_bins: dict[int, list[int]] = {}  # free space -> bins that have it
    free_spaces: list[int] = []  # the keys of open_bins, sorted
    num_bins = 0
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(free_spaces, length)
        if at == len(free_spaces):
            bin_index = num_bins
            free = capacity
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


def _chunks(
    begins: np.ndarray, ends: np.ndarray, chunk_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts spans int64 [documents] into chunks of at most `chunk_tokens`.

    Returns:
      Begin, end and index of the document of each chunk, int64 [chunks].
    """
    num_chunks = -(-(ends - begins) // chunk_tokens)
    documents = np.repeat(np.arange(len(begins)), num_chunks)
    chunk_in_document = np.arange(len(documents)) - np.repeat(
        np.cumsum(num_chunks) - num_chunks, num_chunks
    )
    chunk_begins = begins[documents] + chunk_in_document * chunk_tokens
    return chunk_begins, np.minimum(chunk_begins + chunk_tokens, ends[documents]), documents


@functools.lru_cache(maxsize=64)  # one per source of a mixture, and two at an epoch's boundary
def epoch_order(num_sequences: int, seed: int | None, epoch: int) -> np.ndarray:
    # RandomState, not default_rng: its stream is frozen, so every NumPy version gives the same
    # order (NEP 19).
    generator = np.random.RandomState([0] if seed is None else [seed % 2**32, epoch])
    return generator.permutation(num_sequences)


def packed_source(
    store: TokenStore,
    document_ids: np.ndarray,
    source: SourceConfig,
    seq_len: int,
    seed: int | None,
) -> PackedSequences | None:
    """Packs the documents that `source` selects; None if it selects none.

    Args:
      document_ids: int64, documents of `store`.
      seed: data.seed; None: the same order in every epoch.
    """
    selected = np.repeat(document_ids, num_copies(store, document_ids, source, seq_len))
    return PackedSequences(store, selected, seq_len, seed, source) if len(selected) else None


def num_copies(
    store: TokenStore, document_ids: np.ndarray, source: SourceConfig, seq_len: int
) -> np.ndarray:
    """How often each document occurs in an epoch, int64 [documents]: 0 if it is not used.

    A weight of 2.5 gives each document 2 copies, and one more to the half of the documents with the
    smallest hashes of their names among those of their length class.
    """
    lengths = store.offsets[document_ids + 1] - store.offsets[document_ids]
    min_tokens = max(source.min_tokens, seq_len if source.pool == "full_length" else 0)
    is_used = lengths >= min_tokens
    if source.max_tokens:
        is_used &= lengths <= source.max_tokens
    if overlong_rule(source) == "drop":
        is_used &= lengths <= seq_len
    copies = is_used.astype(np.int64)
    classes = np.searchsorted(np.array(source.length_limits, np.int64), lengths, side="right")
    for index, weight in enumerate(source.length_weights):
        members = np.flatnonzero(is_used & (classes == index))
        copies[members] = int(weight)
        num_more = round((weight - int(weight)) * len(members))
        by_hash = np.argsort(store.split_hashes[document_ids[members]], kind="stable")
        copies[members[by_hash[:num_more]]] += 1
    return copies


def overlong_rule(source: SourceConfig) -> str:
    """What happens to documents longer than a sequence: cut, truncate or drop."""
    if source.overlong == "auto":
        return "drop" if source.has_chats else "cut"
    return source.overlong


# sequences after which the schedule repeats; shares are rounded to multiples of 1 / PERIOD
PERIOD = 10_000


class JoinedSequences:
    """An endless dataset whose sequences are of several `PackedSequences`."""

    def at(self, i: int) -> tuple[PackedSequences, int]:
        """The dataset that has sequence i, and its index there."""
        raise NotImplementedError

    def __getitem__(self, i: int) -> Arrays:
        """Returns sequence i; see `PackedSequences`."""
        sequences, index = self.at(i)
        return sequences[index]

    def document_lengths(self, i: int) -> np.ndarray:
        """See `PackedSequences.document_lengths`."""
        sequences, index = self.at(i)
        return sequences.document_lengths(index)


class MixedSequences(JoinedSequences):
    """An endless dataset: `sequences[i]` for any i >= 0 is a pure function of (sources, shares, i).

    An epoch of the mixture ends before the first of its sources starts its second epoch.
    """

    def __init__(self, sources: Sequence[PackedSequences], shares: Sequence[float]):
        """`shares` > 0 of the tokens, without padding; they are divided by their sum."""
        self.sources = tuple(sources)
        self.num_documents = sum(source.num_documents for source in sources)
        # in one epoch of each source, without padding
        self.num_tokens = sum(source.num_tokens for source in sources)
        # A source whose sequences have more padding needs more sequences for the same share of the
        # tokens.
        weights = [
            share * source.num_sequences / source.num_tokens
            for share, source in zip(shares, sources)
        ]
        counts = _rounded(weights)
        self._source_of = schedule(tuple(counts))
        is_source = self._source_of == np.arange(len(sources))[:, None]
        self._counts = np.array(counts)
        # int64 [sources, PERIOD + 1]: sequences of each source before a place of the schedule
        self._before = np.pad(np.cumsum(is_source, axis=1), ((0, 0), (1, 0)))
        self.num_sequences = self._sequences_before_repetition()  # per epoch
        # in these sequences, without padding
        self.epoch_tokens = sum(self.num_tokens_of_first(self.num_sequences))

    def at(self, i: int) -> tuple[PackedSequences, int]:
        """The source of sequence i, and its index there."""
        source = self._source_of[i % PERIOD]
        return self.sources[source], int(self.num_sequences_of_first(i)[source])

    def num_sequences_of_first(self, num_sequences: int) -> np.ndarray:
        """Sequences of each source among the first ones, int64 [sources]."""
        periods, place = divmod(num_sequences, PERIOD)
        return periods * self._counts + self._before[:, place]

    def num_tokens_of_first(self, num_sequences: int) -> list[int]:
        """Tokens of each source in the first sequences, without padding."""
        counts = self.num_sequences_of_first(num_sequences).tolist()
        tokens = [source.num_tokens_of_first(n) for source, n in zip(self.sources, counts)]
        return sum(tokens, [])

    def _sequences_before_repetition(self) -> int:
        """The largest n >= 1 for which no source has more than one epoch in the first n sequences."""
        limits = []
        for source, count, before in zip(self.sources, self._counts.tolist(), self._before):
            periods, remainder = divmod(source.num_sequences, count)
            limits.append(
                periods * PERIOD + int(np.searchsorted(before, remainder, side="right")) - 1
            )
        return max(1, min(limits))


PackedText = PackedSequences | MixedSequences


def _rounded(weights: Sequence[float]) -> list[int]:
    """Integers in proportion to `weights` > 0, at least 1 each, with the sum PERIOD."""
    exact = np.array(weights) * (PERIOD / sum(weights))
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while counts.sum() != PERIOD:  # the source that is farthest below or above its weight
        if counts.sum() < PERIOD:
            counts[np.argmax(exact - counts)] += 1
        else:
            counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts.tolist()


@functools.lru_cache(maxsize=16)
def schedule(counts: tuple[int, ...]) -> np.ndarray:
    """A periodic order in which source s occurs counts[s] times per PERIOD, evenly: the source at
    each place, int64 [PERIOD].
    """
    assert sum(counts) == PERIOD and min(counts) > 0, counts
    num_sources = len(counts)
    # All numbers are multiplied by PERIOD and by 2 (num_sources - 1), so that they are integers.
    scale = max(1, 2 * (num_sources - 1))
    unit = PERIOD * scale
    slack = PERIOD
    placed = [0] * num_sources
    order = []
    for place in range(1, PERIOD + 1):
        deadlines = [
            (Fraction((placed[source] + 1) * unit - slack, count), source)
            for source, count in enumerate(counts)
            # May be next: its share up to here is more than it has by at least 1 / (2 num_sources -
            # 2).
            if place * count * scale - placed[source] * unit >= slack
        ]
        _, best = min(deadlines)
        placed[best] += 1
        order.append(best)
    return np.array(order)


def balanced_order(config: Config, pairs: Sequence[int]) -> np.ndarray:
    """The sequence at each place of a global batch, int64 [sequences]: microbatch by microbatch, in
    each one replica by replica. A pure function, since every process calls it.

    The natural order remains if it has no higher replica cost, as with one replica or with
    sequences of equal work.

    Args:
      pairs: of each sequence of the batch, in the order of their indices (`document_pairs`).
    """
    pairs = np.array(pairs, np.int64)
    natural = np.arange(len(pairs)).reshape(config.train.gradient_accumulation_steps, -1)
    by_work = np.argsort(-pairs, kind="stable").reshape(natural.shape)
    num_replicas = config.mesh.num_replicas
    balanced = np.array([_spread(microbatch, pairs, num_replicas) for microbatch in by_work])
    natural_cost, cost = (replica_cost(config, pairs[order]) for order in (natural, balanced))
    return (balanced if cost < natural_cost else natural).reshape(-1)


def replica_cost(config: Config, pairs: np.ndarray) -> float:
    """The replica cost of a step with `pairs` int64 [sequences], by place; see the docstring of the
    module.
    """
    replicas = config.mesh.num_replicas
    by_replica = np.reshape(pairs, (config.train.gradient_accumulation_steps, replicas, -1)).sum(
        axis=2
    )
    return float(by_replica.max(axis=1).sum() * replicas / max(by_replica.sum(), 1))


def _spread(microbatch: np.ndarray, pairs: np.ndarray, num_replicas: int) -> list[int]:
    """The sequences of a microbatch, given by descending work, replica by replica: each goes to the
    replica with the least work that has space for it (LPT, Graham 1969)."""
    replicas: list[list[int]] = [[] for _ in range(num_replicas)]
    for sequence in microbatch.tolist():
        with_space = [
            replica for replica in replicas if len(replica) * num_replicas < len(microbatch)
        ]
        min(with_space, key=lambda replica: pairs[replica].sum()).append(sequence)
    return sum(replicas, [])


def step_pairs(sequences: PackedText, config: Config, begin: int) -> list[int]:
    """Pairs of each sequence of a step, the first of which has the index `begin`."""
    indices = range(begin, begin + config.train.global_batch_size)
    return [document_pairs(config.model, sequences.document_lengths(i)) for i in indices]


class BalancedSequences:
    """The sequences of a corpus by place: those of each step in `balanced_order`.

    It reads the lengths of the documents of a whole step, without their tokens.
    """

    def __init__(self, sequences: PackedText, config: Config, first_sequence: int):
        """`first_sequence`: the index of the first sequence of a step."""
        self._sequences = sequences
        self._first = first_sequence
        self._batch_size = config.train.global_batch_size
        self._order = functools.lru_cache(maxsize=16)(
            lambda begin: balanced_order(config, step_pairs(sequences, config, begin))
        )
        self._lock = threading.Lock()  # threads that build sequences of one step share its order

    def __getitem__(self, i: int) -> Arrays:
        """Returns the sequence at place i - first_sequence of the run; see `PackedSequences`."""
        place = (i - self._first) % self._batch_size
        with self._lock:
            order = self._order(i - place)
        return self._sequences[i - place + int(order[place])]
