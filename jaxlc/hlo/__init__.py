"""Analysis of compiled programs: kernels, loops, the schedule, collectives and host copies, read
from the HLO text; each part is computed once.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from jaxlc.hlo.collectives import Collective, HostCopy, find_collectives, find_host_copies
from jaxlc.hlo.kernel_costs import (
    AttentionCollective,
    AttentionKernelCall,
    CountedCall,
    find_attention_calls,
    find_attention_collectives,
)
from jaxlc.hlo.memory_dump import Thunks
from jaxlc.hlo.parser import Instruction, Program, count_executions, parse

__all__ = ["AnalyzedProgram", "Program", "analyze", "parse"]


@dataclass(frozen=True, eq=False)
class AnalyzedProgram(Program):
    """A `Program` whose derived properties are cached. Counts are of one run of the program.

    All properties raise ValueError where the text does not say how often a loop runs.
    """

    thunks: Thunks  # empty if they are unknown
    skips_ring_steps: bool = False  # in runs that skip ring steps, if the program can

    @cached_property
    def skipping_ring_steps(self) -> "AnalyzedProgram":
        """The same program, for runs that skip ring steps."""
        return dataclasses.replace(self, skips_ring_steps=True)

    @cached_property
    def execution_counts(self) -> Counter[str]:
        """How often each computation runs, by name; see `parser.count_executions`."""
        return count_executions(self, skips_ring_steps=self.skips_ring_steps)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives that run at least once. Raises ValueError if the program is not
        scheduled.
        """
        return tuple(find_collectives(self, self.execution_counts))

    @cached_property
    def attention_calls(self) -> tuple[CountedCall, ...]:
        """Calls of attention kernels that run at least once."""
        return tuple(find_attention_calls(self, self.execution_counts))

    @cached_property
    def attention_call_of(self) -> dict[Instruction, AttentionKernelCall]:
        """`attention_calls` by instruction."""
        return {counted.call.instruction: counted.call for counted in self.attention_calls}

    @cached_property
    def attention_collectives(self) -> tuple[AttentionCollective, ...]:
        """The collectives of attention: of a ring, the collective permutes of KV blocks and of
        their gradients.
        """
        return tuple(find_attention_collectives(self, self.collectives))

    @cached_property
    def host_copies(self) -> dict[str, tuple[HostCopy, ...]]:
        """Copies between device and host memory, by the name of the computation that contains them."""
        return {
            computation.name: tuple(find_host_copies(self, computation, self.thunks))
            for computation in self
        }


def analyze(text: str, thunks: Thunks = MappingProxyType({})) -> AnalyzedProgram:
    """Parses the text of a compiled program (`compiled.as_text()`); see `parser.parse` for what it
    raises.

    Args:
      thunks: the result of `memory_dump.kinds`, which the text lacks.
    """
    return AnalyzedProgram(**vars(parse(text)), thunks=thunks)
