"""What masks leave to compute on each rank, counted on the host."""

import numpy as np

from jaxlc.sharding.layout import zigzag_order

TILE = 128  # kernels compute whole tiles, of about this side in cuDNN and in jaxlc.kernels


def visited_pairs(num_tokens: int, context: int, num_queries: int, num_keys: int) -> list[int]:
    """Pairs of a query and a key that a causal kernel call computes on each rank, in whole tiles.

    Args:
      num_tokens: of the row, over all ranks; one document.
      num_queries: of the call: a rank's piece, or that of ranks which exchanged heads for tokens.
      num_keys: of the call: those tokens themselves, or the whole row.
    """
    num_pieces = num_tokens // num_queries
    order_RT = zigzag_order(num_tokens, num_pieces).reshape(num_pieces, num_queries)
    keys_S = order_RT.reshape(-1) if num_keys == num_tokens else None
    pairs = [_tiles(queries_T, queries_T if keys_S is None else keys_S) * TILE**2 for queries_T in order_RT]
    return [pairs[rank * num_pieces // context] for rank in range(context)]


def causal_pairs(num_tokens: int) -> int:
    """The least that can be computed: each query sees itself and all tokens before it."""
    return num_tokens * (num_tokens + 1) // 2


def document_pairs(document_tokens: list[int], context: int) -> list[int]:
    """Pairs that the causal mask of a row of packed documents leaves to each rank's queries."""
    keys_T = np.concatenate([np.arange(1, length + 1) for length in document_tokens])  # that each token sees
    return keys_T[zigzag_order(len(keys_T), context)].reshape(context, -1).sum(axis=1).tolist()


def _tiles(queries_T: np.ndarray, keys_S: np.ndarray) -> int:
    """Tiles in which some query sees some key."""
    last_query, first_key = (_by_tile(x).max(axis=1) for x in (queries_T, -keys_S))
    return int((last_query[:, None] >= -first_key[None, :]).sum())


def _by_tile(tokens: np.ndarray) -> np.ndarray:
    missing = -len(tokens) % TILE
    return np.pad(tokens, (0, missing), mode="edge").reshape(-1, TILE)
