"""Work of attention over packed sequences: pairs of a query and a key that a run computes in each
ring step.

A ring step ends on all ranks at the same time, because each rank waits for its next KV block. So
the time of a sequence follows from the rank with the most pairs in each step, and depends on the
lengths of the documents and on the order of tokens that distributes them over the ranks
(`jaxlc.step.batch`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxlc.attention.kernels.cudnn_packed import calls_for
from jaxlc.config import Config
from jaxlc.config.flops import causal_pairs, document_pairs
from jaxlc.config.kinds.attention import num_head_ranks
from jaxlc.data.sequences.loader import OrderOf
from jaxlc.data.sequences.packing import balanced_order
from jaxlc.sharding.document_balance import (
    Pieces,
    pairs_by_rank,
    prefix_pairs_by_rank,
    sequence_pieces,
    tokens_by_rank,
)
from jaxlc.sharding.document_layout import NUM_FIRST_RING_STEPS, by_ring_step, ring_cost


class AttentionWork(NamedTuple):
    """Pairs per head of one sequence on the slowest rank, of full layers and of those with a
    sliding window.
    """

    own_pairs: float  # in ring step 0, or in the only kernel call of a strategy without ring steps
    ring_step_pairs: float  # mean over the other ring steps that run, 0 without them
    window_pairs: float
    # Calls of a packed kernel in a loop, for more documents than those outside of it take.
    own_further_calls: float = 0.0
    ring_step_further_calls: float = 0.0  # mean over the other ring steps
    # Pairs of a query in a branch and a key in the prefixes that it continues, as the first two.
    prefix_own_pairs: float = 0.0
    prefix_ring_step_pairs: float = 0.0
    num_other_steps: float = 0.0  # ring steps that run after step 0

    @property
    def total(self) -> float:
        """Pairs of full layers in all ring steps."""
        return self.total_of(is_over_prefix=False) + self.total_of(is_over_prefix=True)

    def total_of(self, *, is_over_prefix: bool) -> float:
        """Pairs of branches and their prefixes; or all others."""
        if is_over_prefix:
            return self.prefix_own_pairs + self.num_other_steps * self.prefix_ring_step_pairs
        return self.own_pairs + self.num_other_steps * self.ring_step_pairs

    def in_steps(self, num_other_steps: float) -> "AttentionWork":
        """The same work if more ring steps run."""
        factor = self.num_other_steps / num_other_steps if num_other_steps else 1.0
        return self._replace(
            ring_step_pairs=factor * self.ring_step_pairs,
            ring_step_further_calls=factor * self.ring_step_further_calls,
            prefix_ring_step_pairs=factor * self.prefix_ring_step_pairs,
            num_other_steps=num_other_steps,
        )


@dataclass(frozen=True, kw_only=True)
class SequenceWork:
    """The documents of a packed sequence, and their work."""

    lengths: tuple[int, ...]  # tokens of each document
    pairs: int  # all ranks, summed over the layers
    # sum over ring steps, and tiles, of the slowest rank's pairs, relative to the mean of the ranks
    ring_cost: float
    work: AttentionWork


def num_shards(config: Config) -> int:
    """The number of parts of a sequence whose queries are in different kernel calls: ranks, or
    groups of ranks.
    """
    return config.mesh.context // num_head_ranks(config)


def num_ring_steps(config: Config) -> int:
    """Ring steps of an attention layer, the rank's own block included; 1 for strategies without a
    ring.
    """
    return 1 if config.attention.strategy == "all_gather" else num_shards(config)


def one_document(config: Config, share: float = 1.0) -> AttentionWork:
    """The work of a sequence that is one document, which is equal on all ranks: half of all pairs.

    Args:
      share: of these pairs; below 1 for sequences of several documents, with equal work on all ranks.
    """
    num_tokens = config.data.seq_len
    steps = num_ring_steps(config)
    local_tokens = num_tokens / num_shards(config)
    half = share * local_tokens * num_tokens / (2 * steps)
    window_pairs = (
        share * causal_pairs(num_tokens, config.model.attention.window) * local_tokens / num_tokens
    )
    return AttentionWork(
        half, half if steps > 1 else 0.0, window_pairs, num_other_steps=steps - 1.0
    )


def sequence_work(
    config: Config,
    order_of: OrderOf,
    lengths: Sequence[int],
    prefixes: Sequence[int] = (),
    *,
    few_documents: bool = False,
    skips_ring_steps: bool = False,
) -> SequenceWork:
    """The work of a packed sequence.

    Args:
      order_of: the order of its tokens in a run, such as `TrainStep.sequence_order.of`.
      lengths: int [documents], in the order of the sequence; the rest of config.data.seq_len is padding.
      prefixes: int [documents]: the number, from 1, of the earlier document that each continues; 0: none. Empty: all 0.
      few_documents, skips_ring_steps: of `TrainStep.sequence_order`.
    """
    num_tokens = config.data.seq_len
    num_levels = config.attention.shared_prefixes
    segment_ids_T = np.zeros(num_tokens, np.int32)
    segment_ids_T[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ancestors = ancestors_of(prefixes or [0] * len(lengths))
    sequence = {"segment_ids": segment_ids_T}
    if num_levels:
        missing = [(0, 0), (0, num_levels - ancestors.shape[1])]
        sequence["prefix_ids"] = np.pad(ancestors, missing)[segment_ids_T]
    order_T = order_of(sequence)
    shards = num_shards(config)
    tile_T = _tile_of_tokens(config)
    pieces = sequence_pieces(segment_ids_T, order_T, shards, tile_T)
    tokens = tokens_by_rank(pieces, len(lengths), shards, tile_T.max() + 1)
    pairs = pairs_by_rank(pieces, shards, tile_T.max() + 1)
    prefix_pairs = prefix_pairs_by_rank(tokens, ancestors)
    work, prefix_work = (
        np.stack([by_ring_step(tile) for tile in x]) for x in (pairs, prefix_pairs)
    )
    if config.attention.strategy == "all_gather":
        work, prefix_work = (x.sum(axis=1, keepdims=True) for x in (work, prefix_work))
    slowest_ranks = (work + prefix_work).argmax(axis=2)[..., None]
    slowest, slowest_prefix = (
        np.take_along_axis(x, slowest_ranks, axis=2).sum((0, 2)).astype(float)
        for x in (work, prefix_work)
    )
    calls = (
        by_ring_step(_further_calls(tokens.sum(0), num_tokens // shards, few_documents))
        .max(axis=1)
        .astype(float)
    )
    if skips_ring_steps and not (slowest + slowest_prefix)[NUM_FIRST_RING_STEPS:].any():
        slowest, slowest_prefix, calls = (
            x[:NUM_FIRST_RING_STEPS] for x in (slowest, slowest_prefix, calls)
        )
    window_pairs = _window_pairs(pieces, shards, config.model.attention.window or num_tokens)
    return SequenceWork(
        lengths=tuple(int(length) for length in lengths),
        pairs=document_pairs(config.model, lengths, np.append(0, lengths)[ancestors].sum(1)[1:]),
        ring_cost=ring_cost((work + prefix_work).reshape(-1, shards)),
        work=AttentionWork(
            slowest[0],
            _mean_of_others(slowest),
            float(window_pairs.max()),
            calls[0],
            _mean_of_others(calls),
            slowest_prefix[0],
            _mean_of_others(slowest_prefix),
            len(slowest) - 1.0,
        ),
    )


def _mean_of_others(by_ring_step: np.ndarray) -> float:
    """The mean over the ring steps after the first one; 0 without them."""
    return by_ring_step[1:].mean() if len(by_ring_step) > 1 else 0.0


def mean_of_microbatches(
    config: Config, sequences: Sequence[SequenceWork]
) -> list[tuple[float, AttentionWork]]:
    """The mean work per sequence if each microbatch takes as long as its slowest replica.

    Replicas wait for each other where they gather weights and sum gradients, in every layer. Consecutive sequences form
    global batches, whose sequences have the places of a run (`balanced_order`).

    Returns:
      (share of the microbatches, work) of those that run all ring steps, and of those that skip some, if there are any.
    """
    num_sequences = len(sequences)
    batch_size = config.train.global_batch_size
    batches = np.resize(np.arange(num_sequences), (-(-num_sequences // batch_size), batch_size))
    pairs = np.array([sequence.pairs for sequence in sequences])
    placed = np.concatenate([batch[balanced_order(config, pairs[batch])] for batch in batches])
    num_replicas = config.mesh.num_replicas
    per_microbatch = batch_size // config.train.gradient_accumulation_steps
    by_steps: dict[float, list[AttentionWork]] = {}
    for microbatch in placed.reshape(-1, per_microbatch):
        works = [sequences[i].work for i in microbatch]
        num_steps = max(work.num_other_steps for work in works)  # all replicas run the same ones
        works = np.array([work.in_steps(num_steps) for work in works])
        works = works.reshape(num_replicas, -1, works.shape[1]).mean(axis=1)
        slowest = max((AttentionWork(*row) for row in works), key=lambda work: work.total)
        by_steps.setdefault(num_steps, []).append(slowest)
    num_microbatches = len(placed) // per_microbatch
    return [
        (len(works) / num_microbatches, AttentionWork(*np.mean(works, axis=0).tolist()))
        for _, works in sorted(by_steps.items(), reverse=True)
    ]


def _tile_of_tokens(config: Config) -> np.ndarray:
    """int64 [tokens]: the tile that has each token of the layout; 0 without memory.tile_tokens."""
    num_tokens = config.data.seq_len
    tile_tokens = config.memory.tile_tokens
    if not tile_tokens:
        return np.zeros(num_tokens, np.int64)
    subchunks = 2 * num_tokens // (config.mesh.context * tile_tokens)  # of a rank
    index_T = np.arange(num_tokens) // (tile_tokens // 2) % subchunks
    return np.minimum(index_T, subchunks - 1 - index_T)


def ancestors_of(prefixes: Sequence[int]) -> np.ndarray:
    """int64 [documents + 1, levels]: the prefixes before each document, by its number, the root
    first; 0: none.

    Args:
      prefixes: of `sequence_work`.
    """
    paths: list[list[int]] = [[]]
    for prefix in prefixes:
        paths.append([*paths[prefix], prefix] if prefix else [])
    num_levels = max(map(len, paths))
    return np.array([path + [0] * (num_levels - len(path)) for path in paths], np.int64)


def _further_calls(tokens: np.ndarray, local_tokens: int, few_documents: bool) -> np.ndarray:
    """int64 [query ranks, key ranks]: calls in a loop for the documents that both ranks have.

    The longest documents are first, and a call takes consecutive ones from the size of its first
    document on.

    Args:
      tokens: of `tokens_by_rank`, [ranks, documents].
    """
    num_calls = np.zeros((len(tokens), len(tokens)), np.int64)
    for ranks in np.ndindex(num_calls.shape):
        calls = calls_for(
            1, local_tokens, local_tokens, causal=ranks[0] == ranks[1], few_documents=few_documents
        )
        limits = np.array([size.num_queries for size in calls.repeated[1:]])
        queries_and_keys = tokens[list(ranks)]
        longest = queries_and_keys.max(axis=0)[queries_and_keys.all(axis=0)]
        size_of = np.sort((longest[:, None] <= limits).sum(axis=1))
        first = calls.num_documents
        while calls.repeated and first < len(size_of):
            first += calls.repeated[size_of[first]].num_documents
            num_calls[ranks] += 1
    return num_calls


def _window_pairs(pieces: Pieces, num_ranks: int, window: int) -> np.ndarray:
    """int64 [ranks]: pairs of each rank's queries with a sliding window in tokens."""

    def pairs_before(offset):  # pairs of the first queries of a document
        reach = np.minimum(offset, window)
        return offset * reach - reach * (reach - 1) // 2

    pairs = pairs_before(pieces.offset + pieces.num_tokens) - pairs_before(pieces.offset)
    return np.bincount(pieces.rank, pairs, num_ranks).astype(np.int64)
