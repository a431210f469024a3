"""Copies between the GPU's memory and its host's, in one computation of a compiled program."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.program.schedule import COLLECTIVES, transfers
from jaxlc.program.shapes import HOST_MEMORY, Array
from jaxlc.program.text import Computation, Instruction, Program

_COPIES = ("copy", "dynamic-slice", "dynamic-update-slice")


class HostCopy(NamedTuple):
    start: Instruction
    done: Instruction  # the same where nothing runs beside it
    bytes: int
    is_to_host: bool


def host_copies(program: Program, computation: Computation) -> Iterator[HostCopy]:
    """Asynchronous ones by their end, then those that are not."""
    pairs = [each for each in transfers(program, computation) if each.kind not in COLLECTIVES]
    ends = [(each.kind, each.start, each.done) for each in pairs]
    ends += [(each.opcode, each, each) for each in computation if each.opcode in _COPIES]
    for kind, start, done in ends:
        operands, (result, *_) = [each.arrays[0] for each in computation.operands(start)], done.arrays
        source = operands[1] if kind == "dynamic-update-slice" else operands[0]
        if _is_on_host(source) != _is_on_host(result):
            moved = source if kind == "dynamic-update-slice" else result
            yield HostCopy(start, done, moved.bytes, is_to_host=_is_on_host(result))


def _is_on_host(array: Array) -> bool:
    return array.memory_space == HOST_MEMORY
