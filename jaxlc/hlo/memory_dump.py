"""Reads the reports that XLA writes with the compile option `xla_dump_to`: memory, and how instructions run.

Five of the files are read, whose format is the same in JAX 0.10.1 and 0.12: `*memory-usage-report.txt` has the bytes
of each memory space, `*live-range.txt` the arrays that are alive at peak memory, `*_after_optimizations.txt` the
program with all instruction names (in newer versions, `compiled.as_text()` omits the computations that asynchronous
instructions wrap), and two files the commands of the executable. Writing the files takes less time than compile times
vary.

Thunks
------
A thunk is a command of the executable: a kernel, a copy by a copy engine, a collective, a loop. The HLO text does not
say which of them an instruction becomes. A slice of an array in host memory, for example, is a copy if XLA knows its
offset, and otherwise a kernel whose threads read host memory. `*thunk_sequence_after_thunk_passes.txt` lists the
commands, and below each of them, indented, those that it runs:

    000: kCommandBuffer [...]
        029: kCustomKernel [...] loop_gather_fusion_17 grid: [512, 1, 1] threads: [128, 1, 1]
    042: kWhile        [...]
    condition:
        043: kCustomKernel [...]
      body:
        070: kAsyncStart   [...] stream=computation_stream[2], async_id=1
            069: kCopy [...]

A command buffer is a CUDA graph, which the host launches as one. `*thunk_metadata.txt` has the instruction of each
number:

    thunk_metadata {
      thunk_info { profile_annotation: "dynamic-slice-start.55" thunk_id: 70 }
      thunk_kind: "kAsyncStart"
    }

JAX 0.10.1, 0.11.2 and 0.12.0.1 write both files in this form.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxlc.hlo.parser import (
    HOST_MEMORY,
    Computation,
    Instruction,
    Program,
    is_host_controlled,
    parse,
    trip_count,
)

_LINE = re.compile(r"^( *)(?:(\d+): (k\w+)|(condition|body|\w*branch\w*):)", re.MULTILINE)
_INSTRUCTION = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
_LABEL_INDENT = 2  # of "body:" below its loop; XLA writes "condition:" without an indent
# wrappers of the command below them
_WRAPPERS = ("kAsyncStart", "kDynamicSliceFusion", "kSequential")
_WITHOUT_OPERATION = (*_WRAPPERS, "kAsyncDone", "kPartitionId", "kReplicaId", "")
_KERNELS = ("kKernel", "kCustomKernel")

# name of an instruction -> kind of its thunk, as XLA names it: "kCopy", "kCustomKernel"
Thunks = Mapping[str, str]


class Launches(NamedTuple):
    """How a program runs on a GPU and its host. Counts of one run."""

    # kernels, copies, library calls and collectives, those in CUDA graphs included
    gpu_operations: int = 0
    host_launches: int = 0  # operations outside of CUDA graphs, and CUDA graphs
    cuda_graphs: int = 0  # launches of a CUDA graph
    # the host waits for the GPU, which then waits for the next launch
    host_synchronizations: int = 0

    def plus(self, other: "Launches", times: int = 1) -> "Launches":
        return Launches(*(own + times * count for own, count in zip(self, other, strict=True)))


@dataclass
class Command:
    """A thunk, or a part of one: the condition and the body of a loop, the branches of a
    conditional.
    """

    kind: str = ""  # as XLA names it; "" for a part
    instruction: str = ""  # "" if the metadata has none
    commands: "list[Command]" = field(default_factory=list)


def parse_commands(sequence: str, metadata: str) -> Command:
    """The commands of a program, below one without a kind.

    Args:
      sequence: contents of `*thunk_sequence_after_thunk_passes.txt`.
      metadata: contents of `*thunk_metadata.txt`.
    """
    instruction_of = {number: name for name, number in _INSTRUCTION.findall(metadata)}
    root = Command()
    above = [(-1, root)]  # depth and command, outermost first
    for indent, number, kind, part in _LINE.findall(sequence):
        depth = above[-1][0] + _LABEL_INDENT if part == "condition" else len(indent)
        while above[-1][0] >= depth:
            above.pop()
        command = Command(kind, instruction_of.get(str(int(number)), "") if number else "")
        above[-1][1].commands.append(command)
        above.append((depth, command))
    return root


def kinds(command: Command) -> Thunks:
    """The kind of the thunk of each instruction below `command`; of one that wraps another thunk,
    the kind of that.
    """
    return {below.instruction: _kind(below) for below in _walk(command) if below.instruction}


def is_kernel(kind: str) -> bool:
    """Whether a thunk of this kind runs on the GPU's multiprocessors."""
    return kind in _KERNELS


def count_launches(program: Program, command: Command) -> Launches:
    """The launches of one run of `command` and of the commands below it; of a conditional, of its
    longest branch.

    XLA runs a loop whose trip count it knows without the condition. For every other loop the host
    copies the result of the condition from the GPU before each round, and for a conditional its
    predicate: openxla/xla, `while_thunk.cc` and `conditional_thunk.cc`.

    Raises:
      ValueError: the trip count of a loop is unknown.
    """
    loops = {x.name: x for computation in program for x in computation if x.opcode == "while"}

    def count(command: Command) -> Launches:
        if command.kind == "kWhile":
            loop = loops[command.instruction]
            condition, body = map(count, command.commands)
            rounds = trip_count(program, loop)
            total = Launches().plus(body, rounds)
            evaluated = condition._replace(
                host_synchronizations=condition.host_synchronizations + 1
            )
            return total.plus(evaluated, rounds + 1) if is_host_controlled(loop) else total
        if command.kind == "kConditional":
            return max(map(count, command.commands)).plus(Launches(host_synchronizations=1))
        total = Launches()
        for below in command.commands:
            total = total.plus(count(below))
        if command.kind == "kCommandBuffer":
            return Launches(total.gpu_operations, host_launches=1, cuda_graphs=1)
        if command.kind in _WITHOUT_OPERATION:
            return total
        return Launches(gpu_operations=1, host_launches=1)

    return count(command)


def _kind(command: Command) -> str:
    if command.kind in _WRAPPERS and command.commands:
        return _kind(command.commands[0])
    return command.kind


def _walk(command: Command) -> Iterator[Command]:
    for below in command.commands:
        yield below
        yield from _walk(below)


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
    # instruction, index into its result, bytes
    alive_at_peak: tuple[tuple[str, tuple[int, ...], int], ...]
    commands: Command  # of the executable, below one that has no kind

    @property
    def thunks(self) -> Thunks:
        return kinds(self.commands)

    @property
    def symmetric_bytes(self) -> int:
        """Bytes in memory that other GPUs write to: space 1 is NVSHMEM's; newer versions use 7 for
        NCCL's.
        """
        return sum(
            size
            for space, size in self.bytes_by_space.items()
            if space not in (_DEVICE_MEMORY, HOST_MEMORY)
        )

    def largest(self, number: int) -> tuple[LiveTensor, ...]:
        """The `number` largest arrays in device memory at the peak."""
        by_name = {
            instruction.name: (computation, instruction)
            for computation in self.program
            for instruction in computation
        }
        tensors: list[LiveTensor] = []
        for name, index, size in sorted(self.alive_at_peak, key=lambda alive: -alive[2]):
            if len(tensors) == number:
                break
            computation, instruction = by_name[name]
            array = next((array for array in instruction.arrays if array.bytes == size), None)
            if array is not None and array.memory_space != HOST_MEMORY:
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                tensors.append(
                    LiveTensor(size, shape, maker(self.program, computation, instruction, index))
                )
        return tuple(tensors)


def read(directory: Path) -> Dump:
    """Reads the files that compiling one program wrote into `directory`."""

    def text(end: str) -> str:
        (path,) = directory.glob(f"*{end}.txt")
        return path.read_text("utf-8", "replace")

    _, _, peak = text("live-range").partition("(peak):\n")
    return Dump(
        parse(text("_after_optimizations")),
        {int(space): int(size) for space, size in _SPACE.findall(text("memory-usage-report"))},
        tuple(
            (name, tuple(map(int, re.findall(r"\d+", index))), int(size))
            for name, index, size in _ALIVE.findall(peak)
        ),
        parse_commands(text(".thunk_sequence_after_thunk_passes"), text(".thunk_metadata")),
    )


def maker(
    program: Program, computation: Computation, instruction: Instruction, index: tuple[int, ...]
) -> str:
    """`op_name` of the instruction that made an array, followed through tuples, copies and the
    carries of loops.

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
            instruction = computation.operands(instruction)[index[0]]
            index = index[1:]
        elif instruction.opcode == "get-tuple-element":
            index = (int(instruction.attributes["index"]), *index)
            (instruction,) = computation.operands(instruction)
        elif instruction.opcode in ("bitcast", "copy"):
            (instruction,) = computation.operands(instruction)
        else:
            break
    return instruction.op_name or instruction.name
