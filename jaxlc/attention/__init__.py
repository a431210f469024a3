"""Attention over a sequence that is split across devices. `attend` is the public door."""

from jaxlc.attention.api import attend, choose_kernel, make

__all__ = ["attend", "choose_kernel", "make"]
