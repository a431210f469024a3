"""What XLA writes down about a program's memory under the compile option `xla_dump_to`.

Three of its files are read, whose form is the same in jax 0.10.1 and 0.12: `*memory-usage-report.txt` has the bytes
of each memory space, `*live-range.txt` the arrays that are alive when the program holds most, and
`*_after_optimizations.txt` the program with all its names: in newer versions `compiled.as_text()` leaves out what an
asynchronous instruction wraps. Writing all of them costs less than compile times vary.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxlc.hlo import Program, parse
from jaxlc.hlo.parser import Computation, Instruction
from jaxlc.hlo.shapes import HOST_MEMORY

_SPACE = re.compile(r"^Memory Space: .*\(color=(\d+)\)\nTotal bytes: (\d+)", re.MULTILINE)
_ALIVE = re.compile(r"^ +(\S+)\{([\d,]*)\}: (\d+) bytes \(cumulative", re.MULTILINE)
_DEVICE_MEMORY = 0
_LONGEST_TRAIL = 16  # of instructions that only pass an array on


class LiveTensor(NamedTuple):
    """An array on one device when the program holds most."""

    bytes: int
    shape: str  # as XLA writes it: "bf16[32,1,4096,4096]"
    made_by: str  # the path of its JAX operation, or the name of an argument


class Dump(NamedTuple):
    """What the files say."""

    program: Program
    bytes_by_space: dict[int, int]  # by XLA's number of the memory space
    alive_at_peak: tuple[tuple[str, tuple[int, ...], int], ...]  # instruction, place in its result, bytes

    @property
    def symmetric_bytes(self) -> int:
        """What lies in memory that other GPUs write to: space 1 is NVSHMEM's, newer versions use 7 for NCCL's."""
        return sum(size for space, size in self.bytes_by_space.items() if space not in (_DEVICE_MEMORY, HOST_MEMORY))

    def largest(self, number: int) -> tuple[LiveTensor, ...]:
        """The largest arrays on the device at the peak."""
        places = {each.name: (computation, each) for computation in self.program for each in computation}
        found = []
        for name, index, size in sorted(self.alive_at_peak, key=lambda alive: -alive[2]):
            if len(found) == number:
                break
            computation, instruction = places[name]
            array = next((array for array in instruction.arrays if array.bytes == size), None)
            if array is not None and array.memory_space != HOST_MEMORY:
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                found.append(LiveTensor(size, shape, maker(self.program, computation, instruction, index)))
        return tuple(found)


def read(directory: Path) -> Dump:
    """Reads what compiling one program wrote into `directory`."""
    (usage,) = directory.glob("*memory-usage-report.txt")
    (live_range,) = directory.glob("*live-range.txt")
    (program,) = directory.glob("*_after_optimizations.txt")
    _, _, peak = live_range.read_text().partition("(peak):\n")
    return Dump(
        parse(program.read_text()),
        {int(space): int(size) for space, size in _SPACE.findall(usage.read_text())},
        tuple((name, tuple(_numbers(index)), int(size)) for name, index, size in _ALIVE.findall(peak)),
    )


def _numbers(text: str) -> Iterator[int]:
    return (int(number) for number in text.split(",") if number)


def maker(program: Program, computation: Computation, instruction: Instruction, index: tuple[int, ...]) -> str:
    """The operation that made an array, found through loops, which carry what their bodies make.

    Args:
      index: which part of the instruction's result, where that is a tuple.
    """
    for _ in range(_LONGEST_TRAIL):
        if instruction.opcode == "while" and index:
            computation = program.computations[instruction.attributes["body"].lstrip("%")]
            instruction = tuple(computation)[-1]
        elif instruction.opcode == "parameter" and index and computation is not program.entry:
            instruction = tuple(computation)[-1]  # of the round before
        if instruction.opcode == "tuple" and index:
            instruction, index = computation.operands(instruction)[index[0]], index[1:]
        elif instruction.opcode == "get-tuple-element":
            index = (int(instruction.attributes["index"]), *index)
            (instruction,) = computation.operands(instruction)
        elif instruction.opcode in ("bitcast", "copy"):
            (instruction,) = computation.operands(instruction)
        else:
            break
    return instruction.op_name or instruction.name
