"""The order in which a sequence lies on its ranks. Pure numpy.

Under a causal mask a rank that holds late tokens has more keys to look at than one that holds early tokens.
Zigzag order cuts the sequence into 2 x context chunks and gives rank r the chunks r and 2 x context - 1 - r, so
every rank has the same work (Llama 3, section 3.3.2; zhuzilin/ring-flash-attention).
"""

import numpy as np

from jaxlc.core.errors import UserError


def zigzag_order(num_tokens: int, context: int) -> np.ndarray:
    """Returns order_T int64: position i of the layout holds token `order_T[i]` of the natural sequence.

    The layout splits evenly over `context` ranks; each rank's piece is (lo, hi), two chunks of equal length.

    Raises:
      UserError: num_tokens is not divisible by 2 x context.
    """
    if num_tokens % (2 * context):
        raise UserError(
            f"a sequence of {num_tokens} tokens does not split into 2 x {context} equal chunks;"
            f" use a multiple of {2 * context}"
        )
    return token_at(np.arange(num_tokens), num_tokens, context)


def token_at(place, num_tokens: int, context: int):
    """`zigzag_order(num_tokens, context)[place]` by arithmetic, for integers of numpy or of a traced program."""
    chunk_tokens = num_tokens // (2 * context)
    rank, offset = place // (2 * chunk_tokens), place % (2 * chunk_tokens)
    is_hi = offset // chunk_tokens
    chunk = rank + is_hi * (2 * context - 1 - 2 * rank)
    return chunk * chunk_tokens + offset % chunk_tokens


def natural_order(layout_order: np.ndarray) -> np.ndarray:
    """The inverse: token t of the natural sequence lies at position `natural_order(order)[t]` of the layout."""
    inverse = np.empty_like(layout_order)
    inverse[layout_order] = np.arange(len(layout_order))
    return inverse
