"""Analysis of compiled programs: kernels, loops, the schedule, collectives and host copies, read
from the HLO text.
"""

from jaxlc.hlo.analysis import AnalyzedProgram, analyze
from jaxlc.hlo.parser import Program, parse

__all__ = ["AnalyzedProgram", "Program", "analyze", "parse"]
