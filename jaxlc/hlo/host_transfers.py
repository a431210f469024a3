"""Copies between the GPU's memory and its host's, in one computation of a compiled program."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.hlo.async_ops import COLLECTIVES, transfers
from jaxlc.hlo.parser import Computation, Instruction, Program
from jaxlc.hlo.shapes import HOST_MEMORY, Array

_COPIES = ("copy", "dynamic-slice", "dynamic-update-slice", "fusion")
_FUSIONS = ("fusion", "fusion-start")


class HostCopy(NamedTuple):
    start: Instruction
    done: Instruction  # the same where nothing runs beside it
    bytes: int
    is_to_host: bool


def host_copies(program: Program, computation: Computation) -> Iterator[HostCopy]:
    """Asynchronous ones by their end, then those that are not.

    The compiler writes an asynchronous slice or update as a fusion, whose first operand is the array that is sliced or
    updated in place; an update's second is what is put in.
    """
    ends = [(each.start, each.done) for each in transfers(program, computation) if each.kind not in COLLECTIVES]
    ends += [(each, each) for each in computation if each.opcode in _COPIES]
    for start, done in ends:
        operands, result = [each.arrays[0] for each in computation.operands(start)], done.arrays[0]
        if operands and _is_on_host(operands[0]) and _is_on_host(result):
            if len(operands) > 1:
                yield HostCopy(start, done, operands[1].bytes, is_to_host=True)
        elif operands and _is_on_host(operands[0]) != _is_on_host(result):
            yield HostCopy(start, done, result.bytes, is_to_host=_is_on_host(result))


def device_arrays(program: Program) -> Iterator[Array]:
    """Arrays that the program has in the GPU's memory at some time, as often as it names them."""
    names = (each.called for computation in program for each in computation if each.opcode in _FUSIONS)
    fused = {name for called in names for name in called}  # what is made inside of a kernel is in its registers
    for computation in program:
        if computation.name not in fused:
            yield from (array for each in computation for array in each.arrays if not _is_on_host(array))


def host_arguments(program: Program) -> Iterator[Array]:
    """Arguments of the program that lie in host memory."""
    arguments = (each for each in program.entry if each.opcode == "parameter")
    yield from (array for each in arguments for array in each.arrays if _is_on_host(array))


def _is_on_host(array: Array) -> bool:
    return array.memory_space == HOST_MEMORY
