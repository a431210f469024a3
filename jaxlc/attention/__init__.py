"""Attention over a sequence that is split across devices. `attend` is the public door."""

from jaxlc.attention.api import Choice, attend, choose, make
from jaxlc.attention.tiled import make_tiled

__all__ = ["Choice", "attend", "choose", "make", "make_tiled"]
