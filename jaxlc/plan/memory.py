"""What one GPU and one node must hold while a compiled step runs, and whether they can.

The host holds what the step keeps in pinned memory, and once more the whole training state while a checkpoint is
written: Orbax copies what is on the device, and `train/checkpoint.py` counts on no less for what is on the host.

A GPU's memory has three parts. The pool is what JAX's allocator takes: arguments, temporaries, kernel workspaces.
Beside it lie the transports' buffers, which come from libraries of their own. The rest is kept free (`USABLE_SHARE`).
Arguments, temporaries and symmetric buffers are the compiler's own figures; workspaces and NCCL's buffers are upper
bounds, since the compiler cannot know them without a GPU.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxlc.attention import cudnn
from jaxlc.config import RuntimeConfig
from jaxlc.core.hardware import is_coherent_with_host
from jaxlc.hlo import Program
from jaxlc.hlo.attention_kernels import attention_kernels
from jaxlc.hlo.collectives import Collective
from jaxlc.hlo.memory_dump import Dump, LiveTensor
from jaxlc.hlo.trip_counts import executions
from jaxlc.runtime import unified_memory
from jaxlc.runtime.xla_flags import users_options
from jaxlc.simulate.topology import Topology
from jaxlc.train.state import DEVICE, HOST, bytes_per_device
from jaxlc.train.step import TrainStep

# Of the capacity, what a run may fill. On an H100 the rest is 4 GiB: a CUDA context with its kernels takes about half
# a GiB, and the allocator loses some to gaps between arrays that come and go. Assumed; not measured on a GPU.
USABLE_SHARE = 0.95
USABLE_HOST_SHARE = unified_memory.HOST_SHARE  # the system, Python and the corpus's pages need some too
# JAX's pool, as a share of the capacity, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (JAX's documentation,
# "GPU memory allocation"). A run that needs more has to set it; the plan says to what.
DEFAULT_POOL_SHARE = 0.75

DEFAULT_NVSHMEM_HEAP_BYTES = 2**30  # NVSHMEM's documentation, NVSHMEM_SYMMETRIC_SIZE

# XLA's scheduler keeps temporaries within 95% of what 80% of the device's memory leaves beside arguments, though more
# would fit: near that limit it gives up overlap (xla/service/gpu/gpu_hlo_schedule.cc, GetSchedulerMemoryLimit; the 95
# is xla_gpu_memory_limit_slop_factor, which the presets of runtime/xla_flags.py raise). Seen in the 8B step on 8 H100s:
# 864 of 896 hops hidden at 655,360 tokens and 480 at 786,432, and 864 again with a factor of 130, for 0.7 GiB more.
_SCHEDULED_SHARE, _SLOP_OPTION, _SLOP_PERCENT = 0.80, "xla_gpu_memory_limit_slop_factor", 95

# NCCL on 8 H100s: a buffer of 10 MiB and one of 2 MiB for each of 32 channels to each peer that it sends to or
# receives from, 3.3 GB in all for an all-to-all (github.com/NVIDIA/nccl/issues/1685). A ring has one such peer, and so
# has a permute; each communicator has its own (issues/986). More peers than on a node were not measured.
_NCCL_BYTES_PER_PEER = 32 * (10 + 2) * 2**20
_NCCL_MOST_PEERS = 7
_POINT_TO_POINT = ("collective-permute", "all-to-all", "ragged-all-to-all")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU, and on the host of it. The parts of the arguments are as `TrainStep` shards them."""

    device_capacity_bytes: int
    device_arguments_bytes: int
    parameters_bytes: int  # on the GPU, and so below
    optimizer_bytes: int
    batch_bytes: int
    device_temp_bytes: int  # symmetric buffers not counted
    workspace_bytes: int  # at most
    symmetric_used_bytes: int  # by the program, in NVSHMEM's heap or in NCCL's registered buffers
    nvshmem_heap_bytes: int  # as configured; 0 where NVSHMEM carries nothing
    nccl_bytes: int  # at most
    scheduler_limit_bytes: int  # in which XLA's scheduler keeps temporaries and symmetric arrays
    host_parameters_bytes: int  # in pinned host memory, for each GPU
    host_optimizer_bytes: int
    host_bytes_per_device: int  # of the step: with what it keeps there for a while
    host_bytes_per_node: int
    staging_bytes_per_node: int  # of a checkpoint that is being written
    host_capacity_per_node_bytes: int
    unified_host_bytes: int  # of the host's memory, that the pool may take too: with runtime.unified_memory
    is_unified_over_pcie: bool  # asked for, and not counted
    largest: tuple[LiveTensor, ...]  # on the GPU, when the program holds most

    @property
    def symmetric_bytes(self) -> int:
        """The heap is taken as a whole."""
        return max(self.symmetric_used_bytes, self.nvshmem_heap_bytes)

    @property
    def pool_bytes(self) -> int:
        return self.device_arguments_bytes + self.device_temp_bytes + self.workspace_bytes

    @property
    def device_peak_bytes(self) -> int:
        return self.pool_bytes + self.symmetric_bytes + self.nccl_bytes

    @property
    def usable_bytes(self) -> float:
        return USABLE_SHARE * self.device_capacity_bytes + self.unified_host_bytes

    @property
    def spilled_bytes(self) -> float:
        """What lies in the host's memory since the GPU has no room for it; with unified memory."""
        spilled = self.device_peak_bytes - USABLE_SHARE * self.device_capacity_bytes
        return min(max(0, spilled), self.unified_host_bytes)

    @property
    def pool_share(self) -> float:
        """The share of the capacity that the allocator can be given: XLA_PYTHON_CLIENT_MEM_FRACTION."""
        free_bytes = self.usable_bytes - self.symmetric_bytes - self.nccl_bytes
        percent = 100 * free_bytes / self.device_capacity_bytes
        return max(0, math.floor(percent + 1e-9)) / 100  # 95% of the capacity are 94.99999999999999 percent of it

    @property
    def is_at_schedulers_limit(self) -> bool:
        """Whether XLA may have given up overlap for memory: within a twentieth of its limit, or above."""
        return self.device_temp_bytes + self.symmetric_used_bytes > 0.95 * self.scheduler_limit_bytes

    @property
    def device_fits(self) -> bool:
        return self.pool_bytes <= self.pool_share * self.device_capacity_bytes

    @property
    def host_fits(self) -> bool:
        needed_bytes = self.host_bytes_per_node + self.staging_bytes_per_node
        return needed_bytes <= USABLE_HOST_SHARE * self.host_capacity_per_node_bytes

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host_fits


def measure(
    step: TrainStep,
    gpus: Topology,
    compiled: jax.stages.Compiled,
    program: Program,
    sent: Sequence[Collective],
    dump: Dump,
) -> Memory:
    """Puts together what is known of a compiled step's memory.

    Args:
      program, sent: what `compiled` is, and its collectives.
      dump: what the compiler wrote down about its memory.
    """
    stats = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    host_results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    host_bytes = stats.host_argument_size_in_bytes + host_results + stats.host_temp_size_in_bytes
    heap = step.config.runtime.nvshmem_heap_bytes or DEFAULT_NVSHMEM_HEAP_BYTES
    gpus_per_node = min(gpus.gpus_per_node, gpus.num_gpus)
    host_bytes_per_node = host_bytes * gpus_per_node
    state, spaces = step.abstract_state, step.memory_spaces
    staging_bytes_per_node = bytes_per_device(state) * gpus_per_node
    unified_bytes = unified_host_bytes(step.config.runtime, gpus, host_bytes_per_node + staging_bytes_per_node)
    uses_nvshmem = any(each.backend == "NVSHMEM" for each in sent)
    return Memory(
        device_capacity_bytes=gpus.device.memory_bytes,
        device_arguments_bytes=stats.argument_size_in_bytes,
        parameters_bytes=bytes_per_device(state.params, spaces.params, DEVICE),
        optimizer_bytes=bytes_per_device(state.opt_state, spaces.opt_state, DEVICE),
        batch_bytes=bytes_per_device(step.abstract_batch),
        device_temp_bytes=stats.temp_size_in_bytes - dump.symmetric_bytes + results,
        workspace_bytes=workspace_bytes(program),
        symmetric_used_bytes=dump.symmetric_bytes,
        nvshmem_heap_bytes=heap if uses_nvshmem else 0,
        nccl_bytes=nccl_bytes(sent),
        scheduler_limit_bytes=_scheduler_limit_bytes(step, gpus.device.memory_bytes, stats.argument_size_in_bytes),
        host_parameters_bytes=bytes_per_device(state.params, spaces.params, HOST),
        host_optimizer_bytes=bytes_per_device(state.opt_state, spaces.opt_state, HOST),
        host_bytes_per_device=host_bytes,
        host_bytes_per_node=host_bytes_per_node,
        staging_bytes_per_node=staging_bytes_per_node,
        host_capacity_per_node_bytes=gpus.host_memory_bytes_per_node,
        unified_host_bytes=unified_bytes or 0,
        is_unified_over_pcie=step.config.runtime.unified_memory and unified_bytes is None,
        largest=dump.largest(5),
    )


def unified_host_bytes(config: RuntimeConfig, gpus: Topology, needed_bytes_per_node: int) -> int | None:
    """Of the host's memory, what each GPU's pool may take; None where unified memory is off, or goes over PCIe."""
    if not config.unified_memory or not is_coherent_with_host(gpus.device.device_kind):
        return None
    free_bytes = max(0, USABLE_HOST_SHARE * gpus.host_memory_bytes_per_node - needed_bytes_per_node)
    beside = int(free_bytes / gpus.gpus_per_node)
    if config.unified_memory_fraction:
        beside = min(beside, int((config.unified_memory_fraction - 1) * gpus.device.memory_bytes))
    return beside


def _scheduler_limit_bytes(step: TrainStep, capacity_bytes: int, arguments_bytes: int) -> int:
    percent = int((step.compiler_options | users_options(os.environ)).get(_SLOP_OPTION, _SLOP_PERCENT))
    return int(_SCHEDULED_SHARE * capacity_bytes - arguments_bytes) * percent // 100


def workspace_bytes(program: Program) -> int:
    """Scratch memory of cuDNN's calls, which is 0 in a program compiled without a GPU.

    A call's scratch is one of its results, and nobody reads it: it is free again when the call is over. Calls run one
    after the other, so they share it, and the largest counts. At most that much: it may lie where other temporaries
    lie at other times.
    """
    times = executions(program)
    sizes = [0]
    for computation in program:
        if not times[computation.name]:
            continue
        for call in attention_kernels(program, computation):
            if call.kernel == "cudnn":
                q, k = (each.arrays[0].dims for each in computation.operands(call.instruction)[:2])
                sizes.append(cudnn.workspace_bytes(q, k, call.is_backward))
    return max(sizes)


class _Communicator(NamedTuple):
    """XLA makes one for each set of devices, and for sends and receives among them another."""

    members: frozenset[int]
    is_point_to_point: bool


def nccl_bytes(sent: Sequence[Collective]) -> int:
    """NCCL's own buffers on a device, at most: for each communicator as many peers as it speaks with."""
    peers: dict[_Communicator, set[int]] = {}
    for each in sent:
        if each.backend == "NVSHMEM":
            continue
        if each.kind == "collective-permute":
            members = frozenset(member for pair in each.groups for member in pair)
            receivers = {target for source, target in each.groups if source == min(members)}
        else:
            members = frozenset(each.groups[0])
            others = sorted(members - {min(members)})
            receivers = set(others) if each.kind in _POINT_TO_POINT else set(others[:1])
        peers.setdefault(_Communicator(members, each.kind in _POINT_TO_POINT), set()).update(receivers)
    return sum(min(len(each), _NCCL_MOST_PEERS) for each in peers.values()) * _NCCL_BYTES_PER_PEER
