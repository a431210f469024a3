"""Collectives of a program: kind, replica groups, bytes sent, number of executions, transport; and
copies between device memory and host memory.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxlc.hlo.memory_dump import Thunks, is_kernel
from jaxlc.hlo.parser import (
    COLLECTIVES,
    HOST_MEMORY,
    Array,
    Computation,
    Instruction,
    Program,
    Transfer,
    required,
    transfers,
)

_COPIES = ("copy", "dynamic-slice", "dynamic-update-slice", "fusion")
_FUSIONS = ("fusion", "fusion-start")


class HostCopy(NamedTuple):
    start: Instruction
    done: Instruction  # the start itself, if the copy is synchronous
    bytes: int
    is_to_host: bool
    # a kernel that accesses host memory, instead of a copy by a copy engine
    is_kernel: bool = False


def find_host_copies(
    program: Program, computation: Computation, thunks: Thunks = MappingProxyType({})
) -> Iterator[HostCopy]:
    """Host copies of a computation: asynchronous ones in the order of their done, then synchronous
    ones.

    The compiler writes an asynchronous slice or update as a fusion. Its first operand is the array
    that is sliced or updated in place; the second operand of an update is the new content.

    Args:
      thunks: the thunks of the program's instructions; without them, every `is_kernel` is False.
    """
    pairs = [
        (copy.start, copy.done)
        for copy in transfers(program, computation)
        if copy.kind not in COLLECTIVES
    ]
    pairs += [(copy, copy) for copy in computation if copy.opcode in _COPIES]
    for start, done in pairs:
        operands = [operand.arrays[0] for operand in computation.operands(start)]
        result = done.arrays[0]
        is_from_host = bool(operands) and _is_on_host(operands[0])
        is_to_host = bool(operands) and _is_on_host(result)
        if is_to_host or is_from_host:
            by_kernel = is_kernel(thunks.get(start.name, ""))
            copied = [result] if is_from_host != is_to_host else operands[1:2]
            for array in copied:
                yield HostCopy(start, done, array.bytes, is_to_host, by_kernel)


def has_constant_offset(computation: Computation, copy: HostCopy) -> bool:
    """Whether `copy` is a whole array, or the same part of an array in all rounds of a loop."""
    offsets = [
        x
        for x in computation.operands(copy.start)
        if x.arrays[0].dtype == "s32" and not x.arrays[0].dims
    ]
    return all(_is_constant(computation, offset) for offset in offsets)


def _is_constant(computation: Computation, instruction: Instruction) -> bool:
    while instruction.opcode in ("copy", "bitcast"):
        (instruction,) = computation.operands(instruction)
    return instruction.opcode == "constant"


def device_arrays(program: Program) -> Iterator[Array]:
    """Arrays that the program holds in device memory, once for each instruction that makes or
    renames them.
    """
    fusions = (
        instruction
        for computation in program
        for instruction in computation
        if instruction.opcode in _FUSIONS
    )
    # intermediate values of a kernel are in registers
    fused = {name for fusion in fusions for name in fusion.called}
    for computation in program:
        if computation.name not in fused:
            arrays = (array for instruction in computation for array in instruction.arrays)
            for array in arrays:
                if not _is_on_host(array):
                    yield array


def host_arguments(program: Program) -> Iterator[Array]:
    """Arguments of the program that are in host memory."""
    arguments = (instruction for instruction in program.entry if instruction.opcode == "parameter")
    yield from (array for argument in arguments for array in argument.arrays if _is_on_host(array))


def _is_on_host(array: Array) -> bool:
    return array.memory_space == HOST_MEMORY


Groups = tuple[tuple[int, ...], ...]

# by mode
_TRANSPORTS = {"COLLECTIVES_SYMMETRIC_MEMORY": "symmetric", "COLLECTIVES_PEER_MEMORY": "peer"}


class Collective(NamedTuple):
    transfer: Transfer
    kind: str
    groups: Groups  # replica groups; of a permute, its (source, target) pairs
    sent_bytes: int  # sent by each device in one execution
    backend: str  # "NVSHMEM", or "DEFAULT", which is NCCL
    mode: str  # e.g. "COLLECTIVES_SYMMETRIC_MEMORY"; "" if the compiler noted none
    times: int  # executions in one run of the program

    @property
    def transport(self) -> str:
        """As in config.runtime.transport: "nvshmem", "symmetric", "peer" or "nccl"."""
        return "nvshmem" if self.backend == "NVSHMEM" else _TRANSPORTS.get(self.mode, "nccl")


def find_collectives(program: Program, execution_counts: Counter[str]) -> Iterator[Collective]:
    """All collectives that run at least once, computation by computation.

    Bandwidth-optimal algorithms determine the bytes that a device sends (nccl-tests,
    doc/PERFORMANCE.md). With n devices, an all-gather sends the operand to n - 1 others; a
    reduce-scatter or an all-to-all keeps 1 / n of it; an all-reduce is a reduce-scatter and an
    all-gather.

    Raises:
      ValueError: the program is not scheduled, or replica groups are in an unknown notation.
    """
    for computation in program:
        times = execution_counts[computation.name]
        for transfer in transfers(program, computation) if times else ():
            if transfer.kind not in COLLECTIVES:
                continue
            instruction = transfer.start
            if instruction.opcode == "async-start":
                instruction = tuple(program.computations[instruction.called[0]])[-1]
            groups = _groups(instruction)
            backend_config = transfer.start.backend_config.get("collective_backend_config", {})
            mode = backend_config.get("collectives_mode", "")
            operands = computation.operands(transfer.start)
            operand_bytes = sum(array.bytes for operand in operands for array in operand.arrays)
            size = len(groups[0])
            factor = {
                "all-gather": size - 1,
                "all-reduce": 2 * (size - 1) / size,
                "collective-permute": 1,
                "collective-broadcast": 1,
            }
            yield Collective(
                transfer,
                transfer.kind,
                groups,
                math.ceil(operand_bytes * factor.get(transfer.kind, (size - 1) / size)),
                backend_config.get("backend", "DEFAULT"),
                mode.replace("COLLECTIVES_MODE_INVALID", ""),
                times,
            )


def mesh_axes(groups: Groups, shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ; partitions are numbered in row-major
    order.

    Args:
      groups: partition numbers, as in `Collective.groups`.
      shape: mesh axes and their sizes, slowest first.
    """
    sizes = tuple(shape.values())
    # each (axes, members)
    coordinates = [np.array(np.unravel_index(group, sizes)) for group in groups]
    differs = np.any([(group != group[:, :1]).any(axis=1) for group in coordinates], axis=0)
    return tuple(axis for axis, is_crossed in zip(shape, differs) if is_crossed)


def _groups(instruction: Instruction) -> Groups:
    """Replica groups in any of XLA's notations: lists, `[8,4]<=[32]`, or axes of a mesh."""
    written = instruction.attributes.get("source_target_pairs") or instruction.attributes.get(
        "replica_groups", ""
    )
    if written.startswith("{"):
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", written)
        )
    if written.startswith("["):
        match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written)
        shape, dims, order = required(match, written).groups()
        return tuple(map(tuple, _iota(dims, order).reshape(_integers(shape)).tolist()))
    if written.startswith("mesh["):
        return _mesh_groups(written, instruction.attributes.get("device_ids", ""))
    raise ValueError(f"unknown notation of replica groups: {written!r} of {instruction}")


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Consecutive numbers as an array of `dims`, transposed."""
    numbers = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return numbers.transpose(_integers(order) if order else None)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _mesh_groups(written: str, listed_ids: str) -> Groups:
    """`mesh['a'=8,'b'=2] {'a'}`: groups of the partitions that differ only in the axes in braces.

    Args:
      listed_ids: the attribute after the mesh if the partitions are in another order, `(0,2,1,3) {'a'}` or
        `([2,2]T(1,0)) {'a'}`; else empty.
    """
    text = f"{written}, device_ids={listed_ids}" if listed_ids else written
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    names = re.findall(r"'([^']+)'", text[text.rindex("{") :])
    numbers = np.arange(math.prod(sizes.values()))
    if order := re.search(r"device_ids=\(([\d,]+)\)", text):
        numbers = np.array(_integers(order[1]))
    elif order := re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text):
        numbers = _iota(*order.groups())
    grid = numbers.reshape(list(sizes.values()))
    last = [list(sizes).index(name) for name in names]
    first = [dim for dim in range(grid.ndim) if dim not in last]
    size = math.prod(sizes[name] for name in names)
    return tuple(map(tuple, grid.transpose(first + last).reshape(-1, size).tolist()))
