"""The places of a step's sequences in its microbatches and replicas, by the work of attention.

Replicas wait for each other in every layer, where FSDP gathers weights and reduces gradients. So a microbatch takes as
long as the replica with the most pairs of a query and a key. The replica cost of a step is the sum over microbatches of
the slowest replica's pairs, relative to the mean of the replicas; 1 is ideal. It is low if the sequences of a
microbatch have similar numbers of pairs. All other work of a sequence is proportional to its tokens, padding included,
and therefore equal.

A step has the same sequences in any order, and its loss and gradients are means over the global batch.
"""

import functools
import threading
from collections.abc import Sequence

import numpy as np

from jaxlc.config import Config
from jaxlc.core.flops import document_pairs
from jaxlc.data.sequences.mixed import PackedText


def balanced_order(config: Config, pairs: Sequence[int]) -> np.ndarray:
    """The sequence at each place of a global batch, int64 [sequences]: microbatch by microbatch, in each one replica by
    replica. A pure function, since every process calls it.

    The natural order remains if it has no higher replica cost, as with one replica or with sequences of equal work.

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
    """The replica cost of a step with `pairs` int64 [sequences], by place; see the docstring of the module."""
    replicas = config.mesh.data * config.mesh.fsdp
    by_replica = np.reshape(pairs, (config.train.gradient_accumulation_steps, replicas, -1)).sum(axis=2)
    return float(by_replica.max(axis=1).sum() * replicas / max(by_replica.sum(), 1))


def _spread(microbatch: np.ndarray, pairs: np.ndarray, num_replicas: int) -> list[int]:
    """The sequences of a microbatch, given by descending work, replica by replica: each goes to the replica with the
    least work that has space for it (LPT, Graham 1969)."""
    replicas: list[list[int]] = [[] for _ in range(num_replicas)]
    for sequence in microbatch.tolist():
        with_space = [replica for replica in replicas if len(replica) * num_replicas < len(microbatch)]
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
