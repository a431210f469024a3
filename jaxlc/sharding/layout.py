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
    chunks = np.arange(num_tokens).reshape(2 * context, num_tokens // (2 * context))
    ranks = np.arange(context)
    return np.stack([chunks[ranks], chunks[2 * context - 1 - ranks]], axis=1).reshape(-1)


def natural_order(layout_order: np.ndarray) -> np.ndarray:
    """The inverse: token t of the natural sequence lies at position `natural_order(order)[t]` of the layout."""
    inverse = np.empty_like(layout_order)
    inverse[layout_order] = np.arange(len(layout_order))
    return inverse
