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
from numpy.typing import ArrayLike

from jaxlc.attention.kernels.cudnn_packed import calls_for
from jaxlc.config import Config
from jaxlc.config.flops import causal_pairs, document_pairs
from jaxlc.config.kinds.attention import num_head_ranks
from jaxlc.data.sequences.loader import OrderOf
from jaxlc.data.sequences.mixture import balanced_order
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
        """Those of branches and prefixes, or those of other pairs."""
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
    num_tokens, steps = config.data.seq_len, num_ring_steps(config)
    local_tokens = num_tokens / num_shards(config)
    half = share * local_tokens * num_tokens / (2 * steps)
    window_pairs = share * causal_pairs(num_tokens, config.model.window) * local_tokens / num_tokens
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
    segment_ids_T = np.zeros(num_tokens, np.int32)
    segment_ids_T[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    order_T = order_of({"segment_ids": segment_ids_T})
    shards, tile_T = num_shards(config), _tile_of_tokens(config)
    pieces = _pieces(segment_ids_T, order_T, shards, tile_T)
    prefixes = prefixes or [0] * len(lengths)
    pairs = _pairs_by_rank(pieces, shards, tile_T.max() + 1)
    prefix_pairs = _prefix_pairs_by_rank(pieces, prefixes, shards, tile_T.max() + 1)
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
        by_ring_step(_further_calls(pieces, shards, num_tokens // shards, few_documents))
        .max(axis=1)
        .astype(float)
    )
    if skips_ring_steps and not (slowest + slowest_prefix)[NUM_FIRST_RING_STEPS:].any():
        slowest, slowest_prefix, calls = (
            x[:NUM_FIRST_RING_STEPS] for x in (slowest, slowest_prefix, calls)
        )
    window_pairs = _window_pairs(pieces, shards, config.model.window or num_tokens)
    return SequenceWork(
        lengths=tuple(int(length) for length in lengths),
        pairs=document_pairs(config.model, lengths, tokens_before(lengths, prefixes)),
        ring_cost=ring_cost((work + prefix_work).reshape(-1, shards)),
        work=AttentionWork(
            slowest[0],
            slowest[1:].mean() if len(slowest) > 1 else 0.0,
            float(window_pairs.max()),
            calls[0],
            calls[1:].mean() if len(calls) > 1 else 0.0,
            slowest_prefix[0],
            slowest_prefix[1:].mean() if len(slowest_prefix) > 1 else 0.0,
            len(slowest) - 1.0,
        ),
    )


def mean_of_microbatches(
    config: Config, sequences: Sequence[SequenceWork]
) -> list[tuple[float, AttentionWork]]:
    """The mean work per sequence if each microbatch takes as long as its slowest replica.

    Replicas wait for each other where they gather weights and sum gradients, in every layer. Consecutive sequences form
    global batches, whose sequences have the places of a run (`balanced_order`).

    Returns:
      (share of the microbatches, work) of those that run all ring steps, and of those that skip some, if there are any.
    """
    num_sequences, batch_size = len(sequences), config.train.global_batch_size
    batches = np.resize(np.arange(num_sequences), (-(-num_sequences // batch_size), batch_size))
    pairs = np.array([sequence.pairs for sequence in sequences])
    placed = np.concatenate([batch[balanced_order(config, pairs[batch])] for batch in batches])
    num_replicas = config.mesh.data * config.mesh.fsdp
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


class _Pieces(NamedTuple):
    """Consecutive tokens of a document that are neighbors on one rank; int64 [pieces], in the order
    of the sequence.
    """

    document: np.ndarray
    offset: np.ndarray  # tokens of the document before the piece
    num_tokens: np.ndarray
    rank: np.ndarray
    tile: np.ndarray


def _tile_of_tokens(config: Config) -> np.ndarray:
    """int64 [tokens]: the tile that has each token of the layout; 0 without memory.tile_tokens."""
    num_tokens, tile_tokens = config.data.seq_len, config.memory.tile_tokens
    if not tile_tokens:
        return np.zeros(num_tokens, np.int64)
    subchunks = 2 * num_tokens // (config.mesh.context * tile_tokens)  # of a rank
    index_T = np.arange(num_tokens) // (tile_tokens // 2) % subchunks
    return np.minimum(index_T, subchunks - 1 - index_T)


def _pieces(
    segment_ids_T: np.ndarray, order_T: np.ndarray, num_ranks: int, tile_T: np.ndarray
) -> _Pieces:
    rank_T = np.arange(len(order_T)) // (len(order_T) // num_ranks)
    document_T = segment_ids_T[order_T]
    is_first = np.ones(len(order_T), bool)
    is_first[1:] = (np.diff(order_T) != 1) | (np.diff(document_T) != 0) | (np.diff(rank_T) != 0)
    is_first[1:] |= np.diff(tile_T) != 0
    begins = np.flatnonzero(is_first)
    num_tokens = np.diff(begins, append=len(order_T))
    order = np.argsort(order_T[begins])
    begins, num_tokens = begins[order], num_tokens[order]
    is_text = document_T[begins] > 0
    begins, num_tokens = begins[is_text], num_tokens[is_text]
    document, first_token = document_T[begins], order_T[begins]
    is_new = np.diff(document, prepend=0) != 0
    offset = first_token - np.maximum.accumulate(np.where(is_new, first_token, 0))
    return _Pieces(document, offset, num_tokens, rank_T[begins], tile_T[begins])


def _pairs_by_rank(pieces: _Pieces, num_ranks: int, num_tiles: int) -> np.ndarray:
    """int64 [tiles, query ranks, key ranks]: pairs of a query in a tile and a key that it attends
    to.
    """
    num_tokens, rank = pieces.num_tokens, pieces.rank
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


def tokens_before(lengths: ArrayLike, prefixes: Sequence[int]) -> np.ndarray:
    """int64, the shape of `lengths`: tokens of all prefixes that each document continues.

    Args:
      lengths: int [documents, ...].
      prefixes: of `sequence_work`.
    """
    lengths = np.asarray(lengths, np.int64)
    before = np.zeros_like(lengths)
    for document, prefix in enumerate(prefixes):
        if prefix:
            before[document] = before[prefix - 1] + lengths[prefix - 1]
    return before


def _prefix_pairs_by_rank(
    pieces: _Pieces, prefixes: Sequence[int], num_ranks: int, num_tiles: int
) -> np.ndarray:
    """int64 [tiles, query ranks, key ranks]: pairs of a query in a branch in a tile and a key in
    its prefixes.
    """
    queries = np.zeros((num_tiles, num_ranks, len(prefixes)), np.int64)
    np.add.at(queries, (pieces.tile, pieces.rank, pieces.document - 1), pieces.num_tokens)
    return queries @ tokens_before(queries.sum(axis=0).T, prefixes)


def _further_calls(
    pieces: _Pieces, num_ranks: int, local_tokens: int, few_documents: bool
) -> np.ndarray:
    """int64 [query ranks, key ranks]: calls in a loop for the documents that both ranks have.

    The longest documents are first, and a call takes consecutive ones from the size of its first
    document on.
    """
    tokens = np.zeros((num_ranks, pieces.document.max(initial=0) + 1), np.int64)
    np.add.at(tokens, (pieces.rank, pieces.document), pieces.num_tokens)
    num_calls = np.zeros((num_ranks, num_ranks), np.int64)
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


def _window_pairs(pieces: _Pieces, num_ranks: int, window: int) -> np.ndarray:
    """int64 [ranks]: pairs of each rank's queries with a sliding window in tokens."""

    def pairs_before(offset):  # pairs of the first queries of a document
        reach = np.minimum(offset, window)
        return offset * reach - reach * (reach - 1) // 2

    pairs = pairs_before(pieces.offset + pieces.num_tokens) - pairs_before(pieces.offset)
    return np.bincount(pieces.rank, pairs, num_ranks).astype(np.int64)
