"""Attention over a sequence that is split across devices. `attend` is the public API."""

from jaxlc.attention.api import KernelSelection, attend, choose, make
from jaxlc.attention.query_tiles import make_tiled

__all__ = ["KernelSelection", "attend", "choose", "make", "make_tiled"]
