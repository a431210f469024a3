"""The order of sequences: mixtures of several sources, and the places of a step's sequences in microbatches and
replicas.

Mixtures
--------
Sequence i of the mixture is a sequence of one source. A fixed schedule selects the source: over any first n sequences,
each source has less than one sequence more or less than its share. It solves the chairman assignment problem (Tijdeman
1980, "The chairman assignment problem", Discrete Mathematics 32): at each place, of the sources that may be next, the
one with the earliest deadline is next.

Balance
-------
The places of a step's sequences follow from the work of attention. Replicas wait for each other in every layer, where
FSDP gathers weights and reduces gradients. So a microbatch takes as long as the replica with the most pairs of a query
and a key. The replica cost of a step is the sum over microbatches of the slowest replica's pairs, relative to the mean
of the replicas; 1 is ideal. It is low if the sequences of a microbatch have similar numbers of pairs. All other work of
a sequence is proportional to its tokens, padding included, and therefore equal.

A step has the same sequences in any order, and its loss and gradients are means over the global batch.
"""

import functools
import threading
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxlc.config import Config
from jaxlc.config.flops import document_pairs
from jaxlc.data.sequences.packing import PackedSequences

# sequences after which the schedule repeats; shares are rounded to multiples of 1 / PERIOD
PERIOD = 10_000


class MixedSequences:
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

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i; see `PackedSequences`."""
        source, index = self._at(i)
        return source[index]

    def document_lengths(self, i: int) -> np.ndarray:
        """See `PackedSequences.document_lengths`."""
        source, index = self._at(i)
        return source.document_lengths(index)

    def _at(self, i: int) -> tuple[PackedSequences, int]:
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
    unit, slack = PERIOD * scale, PERIOD
    placed, order = [0] * num_sources, []
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
    num_replicas = config.mesh.data * config.mesh.fsdp
    balanced = np.array([_spread(microbatch, pairs, num_replicas) for microbatch in by_work])
    natural_cost, cost = (replica_cost(config, pairs[order]) for order in (natural, balanced))
    return (balanced if cost < natural_cost else natural).reshape(-1)


def replica_cost(config: Config, pairs: np.ndarray) -> float:
    """The replica cost of a step with `pairs` int64 [sequences], by place; see the docstring of the
    module.
    """
    replicas = config.mesh.data * config.mesh.fsdp
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
        self._sequences, self._first = sequences, first_sequence
        self._batch_size = config.train.global_batch_size
        self._order = functools.lru_cache(maxsize=16)(
            lambda begin: balanced_order(config, step_pairs(sequences, config, begin))
        )
        self._lock = threading.Lock()  # threads that build sequences of one step share its order

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns the sequence at place i - first_sequence of the run; see `PackedSequences`."""
        place = (i - self._first) % self._batch_size
        with self._lock:
            order = self._order(i - place)
        return self._sequences[i - place + int(order[place])]
