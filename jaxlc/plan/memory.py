"""Peak memory of a compiled step on one GPU and on one node, and whether it fits.

A GPU's memory has three parts: the pool of JAX's allocator (arguments, temporaries, kernel
workspaces), the buffers of the communication libraries, and a part that must stay free
(`USABLE_SHARE`). Arguments, temporaries and symmetric buffers are the compiler's own figures.
Workspaces and NCCL's buffers are upper bounds, because the compiler does not know them without a
GPU.

Host memory holds the step's pinned arrays and, while a checkpoint is written, a copy of the
training state in it: Orbax copies arrays that are on the device, and `checkpoints/` needs as much
for arrays that are on the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlc.attention.kernels import cudnn
from jaxlc.config import RuntimeConfig
from jaxlc.core.hardware import is_coherent_with_host
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.attention_kernels import documents_per_row
from jaxlc.hlo.collectives import Collective
from jaxlc.hlo.memory_dump import LiveTensor
from jaxlc.runtime import memory as runtime_memory
from jaxlc.simulate.topology import Topology

# Fraction of the capacity that a run may use. On an H100 the rest is 4 GiB: a CUDA context with its kernels takes about
# half a GiB, and the allocator loses some to fragmentation. Assumed; not measured on a GPU.
USABLE_SHARE = 0.95
# the rest is for the system, Python and the pages of the corpus
USABLE_HOST_SHARE = runtime_memory.HOST_SHARE


# NCCL on 8 H100s allocates a buffer of 10 MiB and one of 2 MiB per channel (32) and peer, 3.3 GB in total for an
# all-to-all (github.com/NVIDIA/nccl/issues/1685). Ring algorithms and permutes have one peer. Each communicator has its
# own buffers (issues/986). More peers than on one node were not measured.
NCCL_BYTES_PER_PEER = 32 * (10 + 2) * 2**20
NCCL_MAX_PEERS = 7
_POINT_TO_POINT = ("collective-permute", "all-to-all", "ragged-all-to-all")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per GPU and per node. Parameters, optimizer state and batch are parts of the arguments."""

    device_capacity_bytes: int  # memory of a GPU; a step may use 95%
    device_arguments_bytes: int  # parameters, optimizer state and batch on the GPU
    parameters_bytes: int  # on the GPU
    optimizer_bytes: int  # on the GPU
    batch_bytes: int  # on the GPU
    device_temp_bytes: int  # without symmetric buffers
    workspace_bytes: int  # upper bound of cuDNN's scratch memory
    symmetric_used_bytes: int  # by the program, in NVSHMEM's heap or in NCCL's registered buffers
    nvshmem_heap_bytes: int  # as configured; 0 if no collective uses NVSHMEM
    nccl_bytes: int  # upper bound of NCCL's buffers
    scheduler_limit_bytes: int  # XLA's scheduler's limit for temporaries and symmetric arrays
    host_parameters_bytes: int  # pinned host memory per GPU
    host_optimizer_bytes: int  # pinned host memory per GPU
    # pinned host memory of the step, including its temporaries, and of the reference
    host_bytes_per_device: int
    host_bytes_per_node: int  # pinned host memory of the step, of all GPUs of a node
    staging_bytes_per_node: int  # while a checkpoint is written
    host_capacity_per_node_bytes: int  # typical for the GPUs, or --host_memory_gib
    unified_host_bytes: int  # host memory that the pool may use too, with runtime.unified_memory
    is_unified_over_pcie: bool  # requested but not counted, because it is too slow
    largest: tuple[LiveTensor, ...]  # largest arrays in device memory at the peak
    # Sizes of JAX's pools in a run:
    memory_fraction: float  # config.runtime.memory_fraction
    host_pool_bytes: int  # pinned host memory per GPU
    # allocated by a run for all GPUs and processes of a node; 0: none
    host_pools_per_node_bytes: int

    @property
    def symmetric_bytes(self) -> int:
        """The NVSHMEM heap counts in full."""
        return max(self.symmetric_used_bytes, self.nvshmem_heap_bytes)

    @property
    def pool_bytes(self) -> int:
        return self.device_arguments_bytes + self.device_temp_bytes + self.workspace_bytes

    @property
    def device_peak_bytes(self) -> int:
        """Arguments, temporaries, workspaces, symmetric and NCCL buffers."""
        return self.pool_bytes + self.symmetric_bytes + self.nccl_bytes

    @property
    def usable_bytes(self) -> float:
        return USABLE_SHARE * self.device_capacity_bytes + self.unified_host_bytes

    @property
    def usable_host_bytes(self) -> float:
        """Of a node."""
        return USABLE_HOST_SHARE * self.host_capacity_per_node_bytes

    @property
    def spilled_bytes(self) -> float:
        """Bytes of the pool in host memory, because they do not fit the GPU; only with unified
        memory.
        """
        spilled = self.device_peak_bytes - USABLE_SHARE * self.device_capacity_bytes
        return min(max(0, spilled), self.unified_host_bytes)

    @property
    def pool_share(self) -> float:
        """Largest possible runtime.memory_fraction: more leaves too little for the buffers outside
        of the pool.
        """
        free_bytes = self.usable_bytes - self.symmetric_bytes - self.nccl_bytes
        steps = 10_000 * free_bytes / self.device_capacity_bytes  # steps of less than 0.02 GiB
        return max(0, math.floor(steps + 1e-7)) / 10_000  # 0.95 x 10,000 is 9,499.999999999998

    @property
    def is_at_schedulers_limit(self) -> bool:
        """Whether XLA may have given up overlap for memory: above 95% of its limit."""
        return (
            self.device_temp_bytes + self.symmetric_used_bytes > 0.95 * self.scheduler_limit_bytes
        )

    @property
    def excess_bytes(self) -> float:
        """Bytes that the GPU lacks, in total or in JAX's pool; at most 0 if the step fits."""
        pool_excess_bytes = self.pool_bytes - self.pool_share * self.device_capacity_bytes
        return max(self.device_peak_bytes - self.usable_bytes, pool_excess_bytes)

    @property
    def host_excess_bytes(self) -> float:
        """Bytes that a node lacks while a checkpoint is written; at most 0 if the step fits."""
        return self.host_bytes_per_node + self.staging_bytes_per_node - self.usable_host_bytes

    @property
    def pools_excess_bytes(self) -> float:
        """Bytes that a node lacks for all pools of pinned host memory and a checkpoint. They do not
        count in `fits`: the growth of the pools and their staging buffers are upper bounds."""
        if not self.host_pools_per_node_bytes:
            return 0
        return self.host_pools_per_node_bytes + self.staging_bytes_per_node - self.usable_host_bytes

    @property
    def device_fits(self) -> bool:
        return self.excess_bytes <= 0

    @property
    def fits(self) -> bool:
        """Whether device memory, the memory of the node and the pool of pinned host memory suffice."""
        return (
            self.device_fits
            and self.host_excess_bytes <= 0
            and self.host_bytes_per_device <= self.host_pool_bytes
        )

    @property
    def pool_settings(self) -> dict[str, float]:
        """Sizes of memory pools that the step needs and the config does not have, as settings."""
        settings = {}
        is_too_small = self.pool_bytes > self.memory_fraction * self.device_capacity_bytes
        if not self.unified_host_bytes and (is_too_small or self.memory_fraction > self.pool_share):
            settings["runtime.memory_fraction"] = self.pool_share
        # an eighth is for fragmentation
        if 0 < self.nvshmem_heap_bytes < self.symmetric_used_bytes:
            settings["runtime.nvshmem_heap_bytes"] = (
                -(-self.symmetric_used_bytes * 9 // 8 // 2**30) * 2**30
            )
        return settings


def host_pools_per_node_bytes(pool_bytes: int, gpus: Topology) -> int:
    """What the pools of pinned host memory grow to on a node, with those for staging buffers; see
    generate_text.py.
    """
    gpus_per_node = min(gpus.gpus_per_node, gpus.num_gpus)
    num_processes = gpus_per_node // gpus.devices_per_process
    return runtime_memory.pools_per_node_bytes(pool_bytes, gpus_per_node, num_processes)


def unified_host_bytes(
    config: RuntimeConfig, gpus: Topology, needed_bytes_per_node: int
) -> int | None:
    """Host memory that each GPU's pool may use; None if unified memory is off or would go over
    PCIe.
    """
    if not config.unified_memory or not is_coherent_with_host(gpus.device.device_kind):
        return None
    free_bytes = max(0, USABLE_HOST_SHARE * gpus.host_memory_bytes_per_node - needed_bytes_per_node)
    host_bytes = int(free_bytes / gpus.gpus_per_node)
    if config.unified_memory_fraction:
        host_bytes = min(
            host_bytes, int((config.unified_memory_fraction - 1) * gpus.device.memory_bytes)
        )
    return host_bytes


def workspace_bytes(program: AnalyzedProgram) -> int:
    """Workspace of cuDNN's attention calls, whose size is 0 in a program compiled without a GPU.

    Where a GPU is attached, the compiler writes the size into the last result of a call, and the
    temporaries of the program contain it.

    A workspace is freed when its call ends, and calls run one after the other, so the largest
    counts. This is an upper bound: the workspace may reuse the memory of other temporaries.
    """
    sizes = [0]
    for computation in program:
        for instruction in computation:
            call = program.attention_call_of.get(instruction)
            if call is None or call.kernel not in ("cudnn", "cudnn_packed"):
                continue
            last = instruction.arrays[-1]
            if last.dtype == "u8" and last.bytes > 0:
                continue
            q, k = (operand.arrays[0].dims for operand in computation.operands(instruction)[:2])
            sizes.append(
                cudnn.workspace_bytes(q, k, call.is_backward, documents_per_row(instruction))
            )
    return max(sizes)


def nccl_bytes(collectives: Sequence[Collective]) -> int:
    """Upper bound of NCCL's own buffers on a device: for each communicator, the buffers of all its
    peers.

    XLA creates a communicator per set of devices, and another one for point-to-point communication
    among them.
    """
    peers: dict[tuple[frozenset[int], bool], set[int]] = {}
    for collective in collectives:
        if collective.backend == "NVSHMEM":
            continue
        is_point_to_point = collective.kind in _POINT_TO_POINT
        if collective.kind == "collective-permute":
            members = frozenset(member for pair in collective.groups for member in pair)
            receivers = {target for source, target in collective.groups if source == min(members)}
        else:
            members = frozenset(collective.groups[0])
            others = sorted(members - {min(members)})
            receivers = set(others) if is_point_to_point else set(others[:1])
        peers.setdefault((members, is_point_to_point), set()).update(receivers)
    return (
        sum(min(len(receivers), NCCL_MAX_PEERS) for receivers in peers.values())
        * NCCL_BYTES_PER_PEER
    )
