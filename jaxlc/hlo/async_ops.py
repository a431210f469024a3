"""Asynchronous operations: pairs of a start and a done, and the instructions that the schedule puts between them."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.hlo.parser import Computation, Instruction, Program

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-broadcast", "collective-permute",
    "reduce-scatter",
)  # fmt: skip


class Transfer(NamedTuple):
    """A collective or a copy. A synchronous one has the same instruction as start and done."""

    kind: str  # the opcode without "-start": "collective-permute", "copy", "dynamic-update-slice"
    start: Instruction
    done: Instruction
    computation: Computation
    start_index: int  # positions of start and done in the schedule of the computation
    done_index: int
    overlapped_ops: tuple[Instruction, ...]  # instructions between start and done

    def overlaps(self, other: "Transfer") -> bool:
        """Whether both are in flight at the same time."""
        return (
            self.computation is other.computation
            and self.start_index < other.done_index
            and other.start_index < self.done_index
        )


def transfers(program: Program, computation: Computation) -> Iterator[Transfer]:
    """Transfers of a computation, ordered by their done; without those of the computations it calls.

    Raises:
      ValueError: the program is not scheduled, so the order of its instructions has no meaning.
    """
    if not program.is_scheduled:
        raise ValueError("the program is not scheduled: its instructions are not in execution order")
    start_indices = {}  # by name of the start, and of each -update, which continues one
    for index, instruction in enumerate(computation):
        if instruction.opcode in COLLECTIVES:
            yield Transfer(instruction.opcode, instruction, instruction, computation, index, index, ())
        elif instruction.opcode.endswith("-start"):
            start_indices[instruction.name] = index
        elif instruction.opcode.endswith("-update") and instruction.operands[0] in start_indices:
            start_indices[instruction.name] = start_indices[instruction.operands[0]]
        elif instruction.opcode.endswith("-done"):
            yield _transfer(program, computation, start_indices[instruction.operands[0]], index)


def _transfer(program: Program, computation: Computation, start_index: int, done_index: int) -> Transfer:
    instructions = tuple(computation)
    start = instructions[start_index]
    overlapped = () if is_synchronous(start) else instructions[start_index + 1 : done_index]
    return Transfer(
        _kind(program, start), start, instructions[done_index], computation, start_index, done_index, overlapped
    )


def is_synchronous(start: Instruction) -> bool:
    """Whether the compiler marked a start/done pair as synchronous: nothing runs between them."""
    return bool(start.backend_config.get("collective_backend_config", {}).get("is_sync"))


def _kind(program: Program, start: Instruction) -> str:
    """The operation of an `async-start` is the root, the last instruction, of the computation that it calls."""
    if start.opcode != "async-start":
        return start.opcode.removesuffix("-start")
    return tuple(program.computations[start.called[0]])[-1].opcode
