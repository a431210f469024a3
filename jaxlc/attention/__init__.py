"""Attention over a sequence that is split across devices. `attend` and `dot_product_attention` are the public API."""

from jaxlc.attention.api import attend
from jaxlc.attention.dot_product import dot_product_attention
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.attention.strategies.sharded_attention import choose, make
from jaxlc.attention.tiles.query_tiles import make_tiled
from jaxlc.sharding.layout import natural_order, zigzag_order

__all__ = [
    "KernelSelection",
    "attend",
    "choose",
    "dot_product_attention",
    "make",
    "make_tiled",
    "natural_order",
    "zigzag_order",
]


def __dir__() -> list[str]:
    return list(__all__)
