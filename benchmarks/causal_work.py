"""Counts the (query, key) pairs that each rank computes under a causal or document mask. Runs on
the host.
"""

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from jaxlc.config import ModelConfig
from jaxlc.config.flops import num_layers_by_kind
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.parser import Pass
from jaxlc.sharding.document_layout import zigzag_order

# side of the tiles that kernels compute or skip, about equal in cuDNN and our Pallas kernel
TILE = 128


def computed_pairs(num_tokens: int, context: int, num_queries: int, num_keys: int) -> list[int]:
    """Pairs that one causal kernel call computes on each rank, in whole tiles. The sequence is one document.

    Args:
      num_tokens: sequence length over all ranks.
      context: number of ranks.
      num_queries: queries of the call: of one rank, or of a group of ranks after an all-to-all.
      num_keys: keys of the call: num_queries (the same tokens) or num_tokens (the whole sequence).
    """
    num_blocks = num_tokens // num_queries
    order_RT = zigzag_order(num_tokens, num_blocks).reshape(num_blocks, num_queries)
    keys_S = order_RT.reshape(-1) if num_keys == num_tokens else None
    pairs = [
        _tiles(queries_T, queries_T if keys_S is None else keys_S) * TILE**2
        for queries_T in order_RT
    ]
    return [pairs[rank * num_blocks // context] for rank in range(context)]


def causal_pairs(num_tokens: int) -> int:
    """The minimum: each query attends to itself and to all tokens before it."""
    return num_tokens * (num_tokens + 1) // 2


def document_pairs(document_tokens: list[int], context: int) -> list[int]:
    """Visible pairs of each rank's queries under the causal mask of packed documents."""
    # visible to each query
    num_keys_T = np.concatenate([np.arange(1, length + 1) for length in document_tokens])
    return (
        num_keys_T[zigzag_order(len(num_keys_T), context)].reshape(context, -1).sum(axis=1).tolist()
    )


def _tiles(queries_T: np.ndarray, keys_S: np.ndarray) -> int:
    """The number of tiles that are not fully masked."""
    last_query, first_key = (_by_tile(x).max(axis=1) for x in (queries_T, -keys_S))
    return int((last_query[:, None] >= -first_key[None, :]).sum())


def _by_tile(tokens: np.ndarray) -> np.ndarray:
    num_padding = -len(tokens) % TILE
    return np.pad(tokens, (0, num_padding), mode="edge").reshape(-1, TILE)


def full_pairs(model: ModelConfig, seq_len: int) -> float:
    """Pairs of one sequence without a causal mask, but with windows, summed over the layers."""
    layers = num_layers_by_kind(model).items()
    return seq_len * sum(
        number * min(model.window_of(kind) or seq_len, seq_len) for kind, number in layers
    )


# (number of queries, number of keys) of a masked call -> the pairs that it computes on each rank
ComputedPairs = Callable[[int, int], list[int]]


def flops_by_rank(
    program: AnalyzedProgram, computed_pairs: ComputedPairs, num_ranks: int
) -> dict[Pass, list[float]]:
    """Attention FLOPs of one run on each rank, by pass.

    Args:
      computed_pairs: pairs that a masked call computes; all other calls compute all pairs.
    Raises:
      ValueError: a blockwise kernel; its number of queries and keys cannot be read from the program text.
    """
    flops: dict[Pass, list[float]] = defaultdict(lambda: [0.0] * num_ranks)
    for call, times in program.attention_calls:
        if call.sizes is None:
            raise ValueError(f"{call.instruction.name} is a loop: what its mask skips is unknown")
        pairs = call.sizes.num_queries * call.sizes.num_keys
        computed = computed_pairs(*call.sizes[1:]) if call.is_masked else [pairs] * num_ranks
        flops[call.pass_name] = [
            rank_flops + times * call.full_flops * rank_pairs / pairs
            for rank_flops, rank_pairs in zip(flops[call.pass_name], computed, strict=True)
        ]
    return dict(flops)


def imbalance(work_by_rank: list[float]) -> float:
    """Work of the busiest rank over the mean; 1 means balanced."""
    return max(work_by_rank) * len(work_by_rank) / math.fsum(work_by_rank)
