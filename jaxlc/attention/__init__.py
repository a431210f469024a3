"""Attention over a sequence that is split across devices.

The public API: `attend`, `dot_product_attention` and, of linear attention, `gated_delta_rule` and
`short_convolution`.
"""

from jaxlc.attention.api import attend, dot_product_attention
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.attention.query_tiles import make_tiled
from jaxlc.attention.recurrence.sharded_rule import gated_delta_rule, short_convolution
from jaxlc.attention.strategies.sharded_attention import choose, make
from jaxlc.sharding.document_layout import natural_order, zigzag_order

__all__ = [
    "KernelSelection",
    "attend",
    "choose",
    "dot_product_attention",
    "gated_delta_rule",
    "make",
    "make_tiled",
    "natural_order",
    "short_convolution",
    "zigzag_order",
]


def __dir__() -> list[str]:
    return list(__all__)
