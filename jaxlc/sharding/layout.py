"""Zigzag order: the assignment of a sequence's tokens to context ranks. Pure NumPy.

Under a causal mask a query attends to all earlier keys, so a rank with late tokens would have more work than one with
early tokens. Zigzag order cuts the sequence into 2 x context chunks and assigns the chunks r and 2 x context - 1 - r to
rank r, so that every rank has the same work (Llama 3, arXiv:2407.21783, section 3.3.2; zhuzilin/ring-flash-attention).
"""

import numpy as np

from jaxlc.core.errors import UserError


def zigzag_order(num_tokens: int, context: int) -> np.ndarray:
    """Returns order_T int64 [num_tokens]: index i of the layout holds token `order_T[i]` of the natural order.

    The layout is split evenly over `context` ranks; each rank's local shard is two chunks of equal length, (lo, hi).

    Raises:
      UserError: num_tokens is not divisible by 2 x context.
    """
    if num_tokens % (2 * context):
        raise UserError(
            f"zigzag order cannot split a sequence of {num_tokens} tokens into 2 x {context} equal chunks;"
            f" use a multiple of {2 * context}"
        )
    return token_at(np.arange(num_tokens), num_tokens, context)


def token_at(index, num_tokens: int, context: int):
    """Computes `zigzag_order(num_tokens, context)[index]` for integer arrays of NumPy or JAX."""
    chunk_tokens = num_tokens // (2 * context)
    rank, offset = index // (2 * chunk_tokens), index % (2 * chunk_tokens)
    is_hi = offset // chunk_tokens
    chunk = rank + is_hi * (2 * context - 1 - 2 * rank)
    return chunk * chunk_tokens + offset % chunk_tokens


def natural_order(layout_order: np.ndarray) -> np.ndarray:
    """The inverse permutation: token t of the natural order is at index `natural_order(order)[t]` of the layout."""
    inverse = np.empty_like(layout_order)
    inverse[layout_order] = np.arange(len(layout_order))
    return inverse
