"""Reads the reports that XLA writes with the compile option `xla_dump_to`.

Five of the files are read, whose format is the same in JAX 0.10.1 and 0.12: `*memory-usage-report.txt` has the bytes
of each memory space, `*live-range.txt` the arrays that are alive at peak memory, `*_after_optimizations.txt` the
program with all instruction names (in newer versions, `compiled.as_text()` omits the computations that asynchronous
instructions wrap), and two files the commands of the executable (`jaxlc.hlo.thunks`). Writing the files takes less time
than compile times vary.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxlc.hlo.parser import HOST_MEMORY, Computation, Instruction, Program, parse
from jaxlc.hlo.thunks import Command, Thunks, kinds, parse_commands

_SPACE = re.compile(r"^Memory Space: .*\(color=(\d+)\)\nTotal bytes: (\d+)", re.MULTILINE)
_ALIVE = re.compile(r"^ +(\S+)\{([\d,]*)\}: (\d+) bytes \(cumulative", re.MULTILINE)
_DEVICE_MEMORY = 0
_MAX_STEPS = 16  # through instructions that only pass an array on


class LiveTensor(NamedTuple):
    """An array in device memory at the peak."""

    bytes: int  # per GPU
    shape: str  # as XLA writes it: "bf16[32,1,4096,4096]"
    made_by: str  # op_name of the instruction that made it, or the name of an argument


class Dump(NamedTuple):
    """Contents of the files."""

    program: Program
    bytes_by_space: dict[int, int]  # by XLA's memory space
    alive_at_peak: tuple[tuple[str, tuple[int, ...], int], ...]  # instruction, index into its result, bytes
    commands: Command  # of the executable, below one that has no kind

    @property
    def thunks(self) -> Thunks:
        return kinds(self.commands)

    @property
    def symmetric_bytes(self) -> int:
        """Bytes in memory that other GPUs write to: space 1 is NVSHMEM's; newer versions use 7 for NCCL's."""
        return sum(size for space, size in self.bytes_by_space.items() if space not in (_DEVICE_MEMORY, HOST_MEMORY))

    def largest(self, number: int) -> tuple[LiveTensor, ...]:
        """The `number` largest arrays in device memory at the peak."""
        by_name = {
            instruction.name: (computation, instruction) for computation in self.program for instruction in computation
        }
        tensors: list[LiveTensor] = []
        for name, index, size in sorted(self.alive_at_peak, key=lambda alive: -alive[2]):
            if len(tensors) == number:
                break
            computation, instruction = by_name[name]
            array = next((array for array in instruction.arrays if array.bytes == size), None)
            if array is not None and array.memory_space != HOST_MEMORY:
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                tensors.append(LiveTensor(size, shape, maker(self.program, computation, instruction, index)))
        return tuple(tensors)


def read(directory: Path) -> Dump:
    """Reads the files that compiling one program wrote into `directory`."""
    (usage,) = directory.glob("*memory-usage-report.txt")
    (live_range,) = directory.glob("*live-range.txt")
    (program,) = directory.glob("*_after_optimizations.txt")
    (sequence,) = directory.glob("*.thunk_sequence_after_thunk_passes.txt")
    (metadata,) = directory.glob("*.thunk_metadata.txt")
    _, _, peak = live_range.read_text().partition("(peak):\n")
    return Dump(
        parse(program.read_text()),
        {int(space): int(size) for space, size in _SPACE.findall(usage.read_text())},
        tuple((name, tuple(_numbers(index)), int(size)) for name, index, size in _ALIVE.findall(peak)),
        parse_commands(sequence.read_text(), metadata.read_text()),
    )


def _numbers(text: str) -> Iterator[int]:
    return (int(number) for number in text.split(",") if number)


def maker(program: Program, computation: Computation, instruction: Instruction, index: tuple[int, ...]) -> str:
    """`op_name` of the instruction that made an array, followed through tuples, copies and the carries of loops.

    Args:
      index: path into the instruction's result, if that is a tuple.
    """
    for _ in range(_MAX_STEPS):
        if instruction.opcode == "while" and index:
            computation = program.computations[instruction.attributes["body"].lstrip("%")]
            instruction = tuple(computation)[-1]
        elif instruction.opcode == "parameter" and index and computation is not program.entry:
            instruction = tuple(computation)[-1]  # result of the previous round
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
