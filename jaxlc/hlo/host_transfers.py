"""Copies between device memory and host memory."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

from jaxlc.hlo.async_ops import COLLECTIVES, transfers
from jaxlc.hlo.parser import HOST_MEMORY, Array, Computation, Instruction, Program
from jaxlc.hlo.thunks import Thunks, is_kernel

_COPIES = ("copy", "dynamic-slice", "dynamic-update-slice", "fusion")
_FUSIONS = ("fusion", "fusion-start")


class HostCopy(NamedTuple):
    start: Instruction
    done: Instruction  # the start itself, if the copy is synchronous
    bytes: int
    is_to_host: bool
    is_kernel: bool = False  # a kernel that accesses host memory, instead of a copy by a copy engine


def find_host_copies(
    program: Program, computation: Computation, thunks: Thunks = MappingProxyType({})
) -> Iterator[HostCopy]:
    """Host copies of a computation: asynchronous ones in the order of their done, then synchronous ones.

    The compiler writes an asynchronous slice or update as a fusion. Its first operand is the array that is sliced or
    updated in place; the second operand of an update is the new content.

    Args:
      thunks: the thunks of the program's instructions; without them, every `is_kernel` is False.
    """
    pairs = [(copy.start, copy.done) for copy in transfers(program, computation) if copy.kind not in COLLECTIVES]
    pairs += [(copy, copy) for copy in computation if copy.opcode in _COPIES]
    for start, done in pairs:
        operands, result = [operand.arrays[0] for operand in computation.operands(start)], done.arrays[0]
        by_kernel = is_kernel(thunks.get(start.name, ""))
        if operands and _is_on_host(operands[0]) and _is_on_host(result):
            if len(operands) > 1:
                yield HostCopy(start, done, operands[1].bytes, is_to_host=True, is_kernel=by_kernel)
        elif operands and _is_on_host(operands[0]) != _is_on_host(result):
            yield HostCopy(start, done, result.bytes, is_to_host=_is_on_host(result), is_kernel=by_kernel)


def has_constant_offset(computation: Computation, copy: HostCopy) -> bool:
    """Whether `copy` is a whole array, or the same part of an array in all rounds of a loop."""
    offsets = [x for x in computation.operands(copy.start) if x.arrays[0].dtype == "s32" and not x.arrays[0].dims]
    return all(_is_constant(computation, offset) for offset in offsets)


def _is_constant(computation: Computation, instruction: Instruction) -> bool:
    while instruction.opcode in ("copy", "bitcast"):
        (instruction,) = computation.operands(instruction)
    return instruction.opcode == "constant"


def device_arrays(program: Program) -> Iterator[Array]:
    """Arrays that the program holds in device memory, once for each instruction that makes or renames them."""
    fusions = (instruction for computation in program for instruction in computation if instruction.opcode in _FUSIONS)
    fused = {name for fusion in fusions for name in fusion.called}  # intermediate values of a kernel are in registers
    for computation in program:
        if computation.name not in fused:
            arrays = (array for instruction in computation for array in instruction.arrays)
            yield from (array for array in arrays if not _is_on_host(array))


def host_arguments(program: Program) -> Iterator[Array]:
    """Arguments of the program that are in host memory."""
    arguments = (instruction for instruction in program.entry if instruction.opcode == "parameter")
    yield from (array for argument in arguments for array in argument.arrays if _is_on_host(array))


def _is_on_host(array: Array) -> bool:
    return array.memory_space == HOST_MEMORY
