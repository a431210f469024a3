"""The order of tokens in the arrays of a batch."""

from dataclasses import dataclass

import numpy as np

from jaxlc.data.loader import OrderOf
from jaxlc.sharding.layout import zigzag_order


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """The order of tokens in the arrays of a batch."""

    description: str  # for the start report
    # arrays [S] in natural order, "segment_ids" among them -> int64 [S]: index i of the batch holds token of(...)[i].
    of: OrderOf


def natural(num_tokens: int) -> SequenceOrder:
    """Tokens are not reordered."""
    order_T = np.arange(num_tokens)
    return SequenceOrder(description="tokens in natural order", of=lambda _: order_T)


def zigzag(num_tokens: int, context: int) -> SequenceOrder:
    """Zigzag order over the whole sequence, the same for all sequences."""
    order_T = zigzag_order(num_tokens, context)
    return SequenceOrder(description="tokens in zigzag order", of=lambda _: order_T)
