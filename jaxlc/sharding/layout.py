"""Zigzag order: how a sequence is distributed over the context ranks. Pure numpy.

Under a causal mask, later tokens attend to more keys. Zigzag order splits the sequence into 2 x context chunks and
assigns chunks r and 2 x context - 1 - r to rank r, so all ranks have equal work (Llama 3, arXiv:2407.21783, section
3.3.2; zhuzilin/ring-flash-attention).
"""

import numpy as np

from jaxlc.core.errors import UserError


def zigzag_order(num_tokens: int, context: int) -> np.ndarray:
    """Returns order_T int64: index i of the layout holds token `order_T[i]` of the natural order.

    Rank r of `context` holds the r-th of `context` equal parts of the layout: a low and a high chunk of equal length.

    Raises:
      UserError: num_tokens is not divisible by 2 x context.
    """
    if num_tokens % (2 * context):
        raise UserError(
            f"invalid sequence length {num_tokens} for zigzag order over context={context}:"
            f" expected a multiple of 2 x context = {2 * context}"
        )
    return token_at(np.arange(num_tokens), num_tokens, context)


def token_at(place, num_tokens: int, context: int):
    """`zigzag_order(num_tokens, context)[place]` by arithmetic; `place` is a numpy or traced integer array."""
    chunk_tokens = num_tokens // (2 * context)
    rank, offset = place // (2 * chunk_tokens), place % (2 * chunk_tokens)
    is_hi = offset // chunk_tokens
    chunk = rank + is_hi * (2 * context - 1 - 2 * rank)
    return chunk * chunk_tokens + offset % chunk_tokens


def natural_order(layout_order: np.ndarray) -> np.ndarray:
    """The inverse permutation: token t of the natural order is at index `natural_order(order)[t]` of the layout."""
    inverse = np.empty_like(layout_order)
    inverse[layout_order] = np.arange(len(layout_order))
    return inverse
