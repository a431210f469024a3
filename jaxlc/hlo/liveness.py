"""How many arrays of one kind exist at one time, in the order of the schedule."""

from collections.abc import Callable, Iterator

from jaxlc.hlo.parser import Computation, Instruction, Program
from jaxlc.hlo.shapes import Array

IsCounted = Callable[[Array], bool]
# Opcodes whose results are their operands' arrays under another name; a loop's carry stays where it is.
_SAME_ARRAYS = ("tuple", "bitcast", "while", "optimization-barrier")


def most_alive(program: Program, is_counted: IsCounted, computation: Computation | None = None) -> int:
    """The most counted arrays that are alive at one time in `computation` (None: the entry) and the loops in it.

    An array lives from the instruction that makes it, or from the start where it is a parameter, until its last use.
    Each array that an instruction makes is its own: what the compiler lets share memory although both live is counted
    twice, so this is no less than what there is.
    """
    computation = computation or program.entry
    arrays = _arrays_held(computation, is_counted)
    uses = {array: place for place, array in _uses(computation, arrays)}  # the last place of each
    alive, most = set(), 0
    for place, instruction in enumerate(computation):
        alive |= arrays[instruction.name]
        in_loop = 0
        if instruction.opcode == "while":
            body = program.computations[instruction.attributes["body"].lstrip("%")]
            in_loop = most_alive(program, is_counted, body) - len(arrays[instruction.name])
        most = max(most, len(alive) + max(0, in_loop))
        alive = {array for array in alive if uses[array] > place}
    return most


def _uses(computation: Computation, arrays: dict[str, set[int]]) -> Iterator[tuple[int, int]]:
    """Each place where an array is made or read; the result of the computation is read at its end."""
    for place, instruction in enumerate(computation):
        for name in (instruction.name, *instruction.operands):
            yield from ((place, array) for array in arrays.get(name, ()))
    yield from ((place + 1, array) for array in arrays[instruction.name])


def _arrays_held(computation: Computation, is_counted: IsCounted) -> dict[str, set[int]]:
    """By instruction, the counted arrays that its result consists of; an array is the number it was given."""
    held: dict[str, list[int | None]] = {}
    made = iter(range(10**9))
    for instruction in computation:
        held[instruction.name] = _held_by(instruction, held, is_counted, made)
    return {name: {array for array in arrays if array is not None} for name, arrays in held.items()}


def _held_by(instruction: Instruction, held, is_counted: IsCounted, made: Iterator[int]) -> list[int | None]:
    """An entry for each array of the result; None for one that is not counted."""
    operands = [array for name in instruction.operands for array in held[name]]
    if instruction.opcode == "get-tuple-element":
        return [operands[int(instruction.attributes["index"])]]
    if instruction.opcode in _SAME_ARRAYS:
        return operands
    if instruction.opcode == "collective-permute-done":
        return operands[1:2]
    new = [next(made) if is_counted(array) else None for array in instruction.arrays]
    return operands + new[1:2] if instruction.opcode == "collective-permute-start" else new
