"""What travels while something else runs: pairs of a start and a done in the order of the schedule."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.hlo.parser import Computation, Instruction, Program

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-broadcast", "collective-permute",
    "reduce-scatter",
)  # fmt: skip


class Transfer(NamedTuple):
    """A collective or a copy. One that is not asynchronous starts and ends with the same instruction."""

    kind: str  # the opcode without its -start: "collective-permute", "copy", "dynamic-update-slice"
    start: Instruction
    done: Instruction
    computation: Computation
    first: int  # places of start and done in the computation's order
    last: int
    meanwhile: tuple[Instruction, ...]  # what runs between them

    def overlaps(self, other: "Transfer") -> bool:
        return self.computation is other.computation and self.first < other.last and other.first < self.last


def transfers(program: Program, computation: Computation) -> Iterator[Transfer]:
    """Transfers of a computation, by their end. Not those of the computations it calls.

    Raises:
      ValueError: the program is not scheduled, so that its order says nothing.
    """
    if not program.is_scheduled:
        raise ValueError("the program is not scheduled: the order of its text is not the order in which it runs")
    started = {}  # the place of each start; of an -update too, which carries a start on
    for place, instruction in enumerate(computation):
        if instruction.opcode in COLLECTIVES:
            yield Transfer(instruction.opcode, instruction, instruction, computation, place, place, ())
        elif instruction.opcode.endswith("-start"):
            started[instruction.name] = place
        elif instruction.opcode.endswith("-update") and instruction.operands[0] in started:
            started[instruction.name] = started[instruction.operands[0]]
        elif instruction.opcode.endswith("-done"):
            yield _transfer(program, computation, started[instruction.operands[0]], place)


def _transfer(program: Program, computation: Computation, first: int, last: int) -> Transfer:
    lines = tuple(computation)
    start = lines[first]
    meanwhile = () if is_synchronous(start) else lines[first + 1 : last]
    return Transfer(_kind(program, start), start, lines[last], computation, first, last, meanwhile)


def is_synchronous(start: Instruction) -> bool:
    """Whether the compiler, though it wrote a pair, lets nothing run beside it."""
    return bool(start.backend_config.get("collective_backend_config", {}).get("is_sync"))


def _kind(program: Program, start: Instruction) -> str:
    """`async-start` says in the computation it calls what it starts: its root, which is the last line."""
    if start.opcode != "async-start":
        return start.opcode.removesuffix("-start")
    return tuple(program.computations[start.called[0]])[-1].opcode
