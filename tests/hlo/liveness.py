"""How many arrays of one kind are alive at one time, in the order of a program's schedule."""

import itertools
from collections.abc import Callable, Iterator

from jaxlc.hlo.parser import Array, Computation, Instruction, Program

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
            for array in arrays.get(name, ()):
                yield (index, array)
    for array in arrays[instruction.name]:
        yield (index + 1, array)


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
