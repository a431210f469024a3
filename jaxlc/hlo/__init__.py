"""Analysis of compiled programs: kernels, loops, the schedule, collectives and host copies, read
from the HLO text; each part is computed once.

Also: how many arrays of one kind are alive at one time, in the order of the schedule.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
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
from jaxlc.hlo.parser import Array, Computation, Instruction, Program, count_executions, parse

__all__ = ["AnalyzedProgram", "Program", "analyze", "parse"]

IsCounted = Callable[[Array], bool]
# Opcodes whose results are their operands' arrays under another name; a loop updates its carry in
# place.
_SAME_ARRAYS = ("tuple", "bitcast", "while", "optimization-barrier")


def max_alive(
    program: Program, is_counted: IsCounted, computation: Computation | None = None
) -> int:
    """Maximum number of counted arrays alive at one time in `computation` (None: the entry) and the
    loops in it.

    An array is alive from the instruction that makes it (a parameter: from the start) until its
    last use. Arrays that share a buffer while both are alive count twice, so this is an upper
    bound.
    """
    computation = computation or program.entry
    arrays = _arrays_held(computation, is_counted)
    last_use = {array: index for index, array in _uses(computation, arrays)}
    alive = set()
    maximum = 0
    for index, instruction in enumerate(computation):
        alive |= arrays[instruction.name]
        in_loop = 0
        if instruction.opcode == "while":
            body = program.computations[instruction.attributes["body"].lstrip("%")]
            in_loop = max_alive(program, is_counted, body) - len(arrays[instruction.name])
        maximum = max(maximum, len(alive) + max(0, in_loop))
        alive = {array for array in alive if last_use[array] > index}
    return maximum


def _uses(computation: Computation, arrays: dict[str, set[int]]) -> Iterator[tuple[int, int]]:
    """(index, array) wherever an array is made or read; the result of the computation is read at
    its end.
    """
    for index, instruction in enumerate(computation):
        # it reads one of them
        operands = () if instruction.opcode == "get-tuple-element" else instruction.operands
        for name in (instruction.name, *operands):
            yield from ((index, array) for array in arrays.get(name, ()))
    yield from ((index + 1, array) for array in arrays[instruction.name])


def _arrays_held(computation: Computation, is_counted: IsCounted) -> dict[str, set[int]]:
    """The counted arrays, as unique numbers, of each instruction's result, by the name of the
    instruction.
    """
    held: dict[str, list[int | None]] = {}
    numbers = itertools.count()
    for instruction in computation:
        held[instruction.name] = _held_by(instruction, held, is_counted, numbers)
    return {name: {array for array in arrays if array is not None} for name, arrays in held.items()}


def _held_by(
    instruction: Instruction,
    held: dict[str, list[int | None]],
    is_counted: IsCounted,
    numbers: Iterator[int],
) -> list[int | None]:
    """A number for each array of the result; None for an array that is not counted."""
    operands = [array for name in instruction.operands for array in held[name]]
    if instruction.opcode == "get-tuple-element":
        return [operands[int(instruction.attributes["index"])]]
    if instruction.opcode in _SAME_ARRAYS:
        return operands
    if instruction.opcode == "collective-permute-done":
        return operands[1:2]
    new = [next(numbers) if is_counted(array) else None for array in instruction.arrays]
    return operands + new[1:2] if instruction.opcode == "collective-permute-start" else new


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
    program = parse(text)
    return AnalyzedProgram(program.computations, program.entry, program.is_scheduled, thunks)
