"""Reads a compiled program's text: what runs, how often, in which order, and what travels meanwhile."""

from jaxlc.hlo.parser import Program, parse

__all__ = ["Program", "parse"]
