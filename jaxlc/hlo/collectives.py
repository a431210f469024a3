"""The collectives of a program: what, between whom, how many bytes, how often, and over which transport."""

import math
import re
from typing import NamedTuple

import numpy as np

from jaxlc.hlo.async_ops import COLLECTIVES, Transfer, transfers
from jaxlc.hlo.parser import Instruction, Program
from jaxlc.hlo.trip_counts import executions

Groups = tuple[tuple[int, ...], ...]

_TRANSPORTS = {"COLLECTIVES_SYMMETRIC_MEMORY": "symmetric", "COLLECTIVES_PEER_MEMORY": "peer"}  # by mode


class Collective(NamedTuple):
    transfer: Transfer
    kind: str
    groups: Groups  # partitions that speak with each other; of a permute, its (source, target) pairs
    sent_bytes: int  # that each device puts on the link in one go
    backend: str  # "NVSHMEM", or "DEFAULT", which is NCCL
    mode: str  # "COLLECTIVES_SYMMETRIC_MEMORY" and the like; "" where none is noted
    times: int  # in one run of the program

    @property
    def transport(self) -> str:
        """By the name that the config has for it: "nvshmem", "symmetric", "peer" or "nccl"."""
        return "nvshmem" if self.backend == "NVSHMEM" else _TRANSPORTS.get(self.mode, "nccl")


def collectives(program: Program) -> list[Collective]:
    """All collectives that run at least once, computation by computation."""
    times = executions(program)
    return [
        _collective(program, transfer, times[computation.name])
        for computation in program
        if times[computation.name]
        for transfer in transfers(program, computation)
        if transfer.kind in COLLECTIVES
    ]


def mesh_axes(groups: Groups, shape: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the members of a group differ, for a mesh whose partitions are numbered in row-major order.

    Args:
      groups: of partition numbers, as `Collective.groups`.
      shape: the mesh's axes and their sizes, slowest first.
    """
    sizes = tuple(shape.values())
    places = [np.array(np.unravel_index(group, sizes)) for group in groups]  # (axes, members)
    differs = np.any([(place != place[:, :1]).any(axis=1) for place in places], axis=0)
    return tuple(axis for axis, is_crossed in zip(shape, differs) if is_crossed)


def _collective(program: Program, transfer: Transfer, times: int) -> Collective:
    what = transfer.start
    if what.opcode == "async-start":
        what = tuple(program.computations[what.called[0]])[-1]
    groups = _groups(what)
    notes = transfer.start.backend_config.get("collective_backend_config", {})
    mode = notes.get("collectives_mode", "").replace("COLLECTIVES_MODE_INVALID", "")
    sent_bytes = _sent_bytes(transfer, len(groups[0]))
    return Collective(transfer, transfer.kind, groups, sent_bytes, notes.get("backend", "DEFAULT"), mode, times)


def _sent_bytes(transfer: Transfer, group_size: int) -> int:
    """What one device sends with the algorithms that move least (nccl-tests, doc/PERFORMANCE.md), from operand bytes.

    With n devices an all-gather passes the operand to n - 1 others; of a reduce-scatter or an all-to-all 1 / n stays;
    an all-reduce is both, one after the other.
    """
    own = sum(array.bytes for each in transfer.computation.operands(transfer.start) for array in each.arrays)
    n = group_size
    share = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1, "collective-broadcast": 1}
    return math.ceil(own * share.get(transfer.kind, (n - 1) / n))


def _groups(instruction: Instruction) -> Groups:
    """From any of the ways to write them: lists, `[8,4]<=[32]`, or axes of a mesh."""
    written = instruction.attributes.get("source_target_pairs") or instruction.attributes.get("replica_groups", "")
    if written.startswith("{"):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", written))
    if written.startswith("["):
        return _iota_groups(written)
    if written.startswith("mesh["):
        return _mesh_groups(written)
    raise ValueError(f"groups written in an unknown way: {written!r} of {instruction}")


def _iota_groups(written: str) -> Groups:
    """`[groups,size]<=[dims]T(order)`: partition numbers in a grid of `dims`, transposed, then cut into groups."""
    shape, dims, order = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written).groups()
    dims = [int(size) for size in dims.split(",")]
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if order:
        numbers = numbers.transpose([int(dim) for dim in order.split(",")])
    return tuple(map(tuple, numbers.reshape([int(size) for size in shape.split(",")]).tolist()))


def _mesh_groups(written: str) -> Groups:
    """`mesh['a'=8,'b'=2] {'a'}`: groups of the partitions that differ in the axes in braces only."""
    mesh, _, chosen = written.partition("] ")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    names = re.findall(r"'([^']+)'", chosen)
    order = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh)
    numbers = np.arange(math.prod(sizes.values()))
    if order:
        dims = [int(size) for size in order[1].split(",")]
        numbers = numbers.reshape(dims)
        numbers = numbers.transpose([int(dim) for dim in order[2].split(",")]) if order[2] else numbers
    grid = numbers.reshape(list(sizes.values()))
    last = [list(sizes).index(name) for name in names]
    first = [dim for dim in range(grid.ndim) if dim not in last]
    size = math.prod(sizes[name] for name in names)
    return tuple(map(tuple, grid.transpose(first + last).reshape(-1, size).tolist()))
