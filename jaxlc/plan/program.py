"""The training step as a program that is compiled ahead of time: its memory, collectives, ring and
kernels.

Peak memory is that of one GPU and of one node. A GPU's memory has three parts: the pool of JAX's allocator (arguments,
temporaries, kernel workspaces), the buffers of the communication libraries, and a part that must stay free
(`USABLE_SHARE`). Arguments, temporaries and symmetric buffers are the compiler's own figures. Workspaces and NCCL's
buffers are upper bounds, because the compiler does not know them without a GPU.

Host memory holds the step's pinned arrays and, while a checkpoint is written, a copy of the training state in it: Orbax
copies arrays that are on the device, and `checkpoints/` needs as much for arrays that are on the host.
"""

import math
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import jax
from jax.stages import Compiled, Lowered

from jaxlc.attention.kernels import cudnn, fa3
from jaxlc.checkpoints.pretrained import checkpoint_part
from jaxlc.config import RuntimeConfig
from jaxlc.core import UserError, scopes
from jaxlc.core.files import TEMPORARY_ADVICE, temporary_explained
from jaxlc.core.hardware import is_coherent_with_host
from jaxlc.hlo import AnalyzedProgram, analyze
from jaxlc.hlo.collectives import Collective, mesh_axes
from jaxlc.hlo.kernel_costs import (
    ALLOCATE_BUFFER,
    AttentionCollective,
    attention_kernel,
    delta_kernel,
    documents_per_row,
    expert_kernel,
)
from jaxlc.hlo.memory_dump import Dump, Launches, LiveTensor, count_launches, read
from jaxlc.hlo.parser import PASSES, Instruction, components, pass_of
from jaxlc.runtime import memory as runtime_memory
from jaxlc.runtime.xla_flags import SCHEDULED_SHARE, SLOP_OPTION, users_options
from jaxlc.simulate.packed_work import num_ring_steps
from jaxlc.simulate.time_model import TimeModel, num_sequences
from jaxlc.simulate.timeline import Prediction, predict
from jaxlc.simulate.topology import FAILS_WITH_TRITON, NO_TRITON, Topology, options_without_gpu
from jaxlc.step import verify_compiled
from jaxlc.step.memory import pinned_bytes
from jaxlc.step.state import DEVICE, HOST, bytes_per_device
from jaxlc.step.step import TrainStep
from jaxlc.step.verify_compiled import place_params, place_state

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
    workspace_bytes: int  # upper bound of the scratch memory of attention kernels
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
    num_processes = gpus.used_gpus_per_node // gpus.devices_per_process
    return runtime_memory.pools_per_node_bytes(pool_bytes, gpus.used_gpus_per_node, num_processes)


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
    """Workspace of cuDNN's attention calls, whose size is 0 in a program compiled without a GPU, and of fa3's, which
    no program has.

    Where a GPU is attached, the compiler writes the size into the last result of a call, and the
    temporaries of the program contain it.

    A workspace is freed when its call ends, and calls run one after the other, so the largest
    counts. This is an upper bound: the workspace may reuse the memory of other temporaries.
    """
    sizes = [0]
    for computation in program:
        for instruction in computation:
            if instruction.opcode != "custom-call":  # also of the call within a fusion
                continue
            call = attention_kernel(program, computation, instruction)
            if call is None or not call.kernel.startswith(("cudnn", "fa3")):
                continue
            last = instruction.arrays[-1]
            if call.kernel.startswith("fa3"):
                if call.is_backward:
                    dq, dk, *_ = (array.dims for array in instruction.arrays)
                    sizes.append(fa3.workspace_bytes(dq, dk, last.dims[0]))
                continue
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


_NVSHMEM_HEAP_BYTES = 2**30  # the default of NVSHMEM_SYMMETRIC_SIZE, NVSHMEM's documentation
# XLA's scheduler limits temporaries to 95% of (80% of the device's memory minus arguments), though more would fit. Near
# that limit it gives up overlap (xla/service/gpu/gpu_hlo_schedule.cc, GetSchedulerMemoryLimit; the 95 is
# xla_gpu_memory_limit_slop_factor, which the presets of runtime/xla_flags.py raise). In the 8B step compiled for 8
# H100s, 864 of 896 permutes were hidden at 655,360 tokens and 480 at 786,432; with a factor of 130, 864 again, for 0.7
# GiB more.
_SLOP_PERCENT = 95


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled program: of a training step, an evaluation or log-probabilities."""

    compiled: Compiled
    dump: Dump  # the compiler's reports of arrays in memory and of thunks
    program: AnalyzedProgram
    compile_seconds: float  # on this machine

    @property
    def launches(self) -> Launches:
        return count_launches(self.program, self.dump.commands)

    @property
    def temp_bytes(self) -> int:
        """Temporaries and results in device memory, without symmetric buffers and results in
        donated arguments.
        """
        stats = self.compiled.memory_analysis()
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return stats.temp_size_in_bytes - self.dump.symmetric_bytes + results


def compile_step(step: TrainStep) -> CompiledProgram:
    """The training step.

    Raises:
      UserError: arrays too large for the compiler, or not enough memory on this machine.
    """
    return _compiled(step, step.lower, place_state, step.compile)


def compile_evaluation(step: TrainStep) -> CompiledProgram:
    """The evaluation of one microbatch, `TrainStep.jitted_evaluation`. Raises UserError as
    `compile_step`.
    """
    return _compiled(step, step.lower_evaluation, place_params, step.compile_lowered)


def compile_log_probs(step: TrainStep) -> CompiledProgram:
    """The log-probabilities of a batch, `TrainStep.jitted_log_probs`. Raises UserError as
    `compile_step`.
    """
    return _compiled(step, step.lower_log_probs, place_params, step.compile_lowered)


def _compiled(
    step: TrainStep,
    lower: Callable[[], Lowered],
    place: Callable[[TrainStep, Lowered], None],
    compile_lowered: Callable[..., Compiled],
) -> CompiledProgram:
    def with_options(options: dict) -> Compiled:
        lowered = lower()
        place(step, lowered)
        return compile_lowered(extra_options=options, lowered=lowered)

    start_seconds = time.perf_counter()
    with temporary_explained(), tempfile.TemporaryDirectory() as directory:
        options = options_without_gpu(step.config.precision.compute) | {"xla_dump_to": directory}
        try:
            compiled = _compiled_without_gpu(with_options, options)
        except (jax.errors.JaxRuntimeError, OverflowError, MemoryError) as error:
            advice = "use a shorter sequence or a larger config.mesh.context"
            first_line = str(error).partition("\n")[0]
            if first_line.startswith("INTERNAL"):
                advice = f"this is a defect of the compiler of JAX {jax.__version__}: use another version"
            if "No PTX compilation provider" in first_line:
                advice = "install NVIDIA's assembler: pip install nvidia-cuda-nvcc-cu12"
            if "/tempfile-" in first_line:  # the input of the assembler
                advice = TEMPORARY_ADVICE
            seq_len = step.config.data.seq_len
            raise UserError(
                f"compilation failed with config.data.seq_len={seq_len}: {first_line}; {advice}"
            ) from error
        dump = read(Path(directory))
    seconds = time.perf_counter() - start_seconds
    program = analyze(compiled.as_text(), dump.thunks)
    return CompiledProgram(compiled=compiled, dump=dump, program=program, compile_seconds=seconds)


def _compiled_without_gpu(compile_with: Callable[[dict], Compiled], options: dict) -> Compiled:
    """As compiled with `options`; with cuBLAS for all products where Triton needs autotuning, that
    is, a GPU.
    """
    try:
        return compile_with(options)
    except jax.errors.JaxRuntimeError as error:
        if FAILS_WITH_TRITON not in str(error):
            raise
    return compile_with({**options, **NO_TRITON})


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram(CompiledProgram):
    """A training step that is compiled ahead of time and verified against its config
    (`compile_step`).
    """

    step: TrainStep
    model: TimeModel  # the target GPUs, and the rates of all estimates
    warnings: tuple[str, ...]  # a transport other than the requested one

    @classmethod
    def compile(cls, step: TrainStep, model: TimeModel) -> Self:
        """Compiles `step` for `model.gpus`, analyzes the program and verifies it.

        Raises:
          UserError: arrays too large for the compiler, a transport that the compiler did not use, or state that is not
            in the memory that the config names.
        """
        compiled = compile_step(step)
        warnings = verify_compiled.check(step, compiled.program.attention_collectives)
        verify_compiled.check_memory(step, compiled.program)
        verify_compiled.check_host_copies(compiled.program)
        return cls(**vars(compiled), step=step, model=model, warnings=tuple(warnings))

    @cached_property
    def memory(self) -> Memory:
        step = self.step
        gpus = self.model.gpus
        runtime = self.step.config.runtime
        stats = self.compiled.memory_analysis()
        collectives = self.program.collectives
        host_results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        host_bytes = (
            stats.host_argument_size_in_bytes + host_results + stats.host_temp_size_in_bytes
        )
        if step.reference is not None:
            host_bytes += bytes_per_device(step.reference.abstract_state.params)
        gpus_per_node = gpus.used_gpus_per_node
        host_bytes_per_node = host_bytes * gpus_per_node
        state = step.abstract_state
        spaces = step.memory_spaces
        staging_bytes_per_node = bytes_per_device(checkpoint_part(step, state)) * gpus_per_node
        unified_bytes = unified_host_bytes(
            runtime, gpus, host_bytes_per_node + staging_bytes_per_node
        )
        pool_bytes = runtime_memory.host_pool_bytes(runtime, pinned_bytes(step.config).pooled)
        heap_bytes = 0
        if any(collective.backend == "NVSHMEM" for collective in collectives):
            heap_bytes = runtime.nvshmem_heap_bytes or _NVSHMEM_HEAP_BYTES
        slop_percent = int(
            (step.compiler_options | users_options(os.environ)).get(SLOP_OPTION, _SLOP_PERCENT)
        )
        scheduled_bytes = int(
            SCHEDULED_SHARE * gpus.device.memory_bytes - stats.argument_size_in_bytes
        )
        return Memory(
            device_capacity_bytes=gpus.device.memory_bytes,
            device_arguments_bytes=stats.argument_size_in_bytes,
            parameters_bytes=bytes_per_device(state.params, spaces.params, DEVICE),
            optimizer_bytes=bytes_per_device(state.opt_state, spaces.opt_state, DEVICE),
            # Not of `step.abstract_batch`: JAX drops unused arrays, such as document ids without a
            # document mask.
            batch_bytes=stats.argument_size_in_bytes - bytes_per_device(state, spaces, DEVICE),
            device_temp_bytes=self.temp_bytes,
            workspace_bytes=workspace_bytes(self.program),
            symmetric_used_bytes=self.dump.symmetric_bytes,
            nvshmem_heap_bytes=heap_bytes,
            nccl_bytes=nccl_bytes(collectives),
            scheduler_limit_bytes=scheduled_bytes * slop_percent // 100,
            host_parameters_bytes=bytes_per_device(state.params, spaces.params, HOST),
            host_optimizer_bytes=bytes_per_device(state.opt_state, spaces.opt_state, HOST),
            host_bytes_per_device=host_bytes,
            host_bytes_per_node=host_bytes_per_node,
            staging_bytes_per_node=staging_bytes_per_node,
            host_capacity_per_node_bytes=gpus.host_memory_bytes_per_node,
            unified_host_bytes=unified_bytes or 0,
            is_unified_over_pcie=runtime.unified_memory and unified_bytes is None,
            largest=self.dump.largest(5),
            memory_fraction=runtime.memory_fraction,
            host_pool_bytes=pool_bytes or runtime_memory.DEFAULT_HOST_GIB * 2**30,
            host_pools_per_node_bytes=host_pools_per_node_bytes(pool_bytes, gpus),
        )

    @cached_property
    def ring(self) -> "Ring":
        return ring(self.program.attention_collectives, self.model)

    @cached_property
    def prediction(self) -> Prediction:
        """The estimated time of the step."""
        return predict(self.program, self.model)

    @cached_property
    def evaluation_peak_bytes(self) -> int:
        """Peak memory of an evaluation between two steps, which is compiled too. Raises UserError
        as `compile_step`.
        """
        evaluation = compile_evaluation(self.step)
        verify_compiled.check(self.step, evaluation.program.attention_collectives)
        return self.peak_bytes_with(evaluation)

    def peak_bytes_with(self, other: CompiledProgram) -> int:
        """Peak memory on one GPU of another program between two steps: with the state, and with the
        buffers of collectives. Raises UserError if it does not copy from host memory as it should.
        """
        verify_compiled.check_host_copies(other.program)
        memory = self.memory
        state_bytes = memory.parameters_bytes + memory.optimizer_bytes
        batch_bytes = bytes_per_device(self.step.abstract_evaluation_batch)
        program_bytes = other.temp_bytes + workspace_bytes(other.program)
        return (
            state_bytes + batch_bytes + program_bytes + memory.symmetric_bytes + memory.nccl_bytes
        )


class CollectiveStats(NamedTuple):
    """All collectives of one step that agree in kind, axes, transport and link."""

    kind: str  # HLO opcode, such as "all-gather"
    axes: tuple[str, ...]  # mesh axes along which the members of a replica group differ
    backend: str  # "NCCL" or "NVSHMEM"
    mode: str  # "symmetric" is NCCL's one-sided put, "peer" a copy; "" the default
    count: int  # number of collectives
    bytes: int  # sent by each device, in all of them together
    crosses_domains: bool  # some leave an NVLink domain and use the network


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Collective permutes of attention in one step. The JSON calls one of them, between two ranks,
    a hop.

    `hidden` and `exposed` are estimates: hidden permutes take no longer than the attention kernels
    that overlap with them (`TimeModel.is_hidden_by_attention`); all others are exposed. Other
    kernels may hide those as well, which the simulated step time takes into account.
    """

    hops: int  # all permutes, between two ranks each
    hidden: int  # estimated
    exposed: int  # hops - hidden
    exposed_forward: int  # exposed hops in the forward pass
    by_backend: dict[str, int]  # hops by backend and mode: "NCCL", "NVSHMEM", "NCCL symmetric"
    # By pass, bytes per token of a block for each array that a hop of strategy ring or hybrid
    # sends. Empty: no hop sends whole blocks.
    token_bytes: dict[str, tuple[float, ...]] = field(default_factory=dict)


def collective_stats(
    collectives: Sequence[Collective], mesh_shape: dict[str, int], gpus_per_domain: int
) -> tuple[CollectiveStats, ...]:
    """Groups the collectives of a program; most bytes first."""
    count = Counter()
    size = Counter()
    for collective in collectives:
        groups = collective.groups
        crosses = any(len({member // gpus_per_domain for member in group}) > 1 for group in groups)
        key = (collective.kind, mesh_axes(groups, mesh_shape), *_transport(collective), crosses)
        count[key] += collective.times
        size[key] += collective.times * collective.sent_bytes
    stats = [CollectiveStats(*key[:4], count[key], size[key], key[4]) for key in count]
    return tuple(sorted(stats, key=lambda group: -group.bytes))


def ring(exchanges: Sequence[AttentionCollective], model: TimeModel) -> Ring:
    """Counts the collective permutes among the collectives of attention."""
    permutes = [
        exchange for exchange in exchanges if exchange.collective.kind == "collective-permute"
    ]
    exposed = [permute for permute in permutes if not model.is_hidden_by_attention(permute)]
    by_backend = Counter()
    token_bytes = defaultdict(set)
    config = model.config
    num_tokens = num_sequences(config) * config.data.seq_len / num_ring_steps(config)
    for permute in permutes:
        by_backend[" ".join(filter(None, _transport(permute.collective)))] += permute.times
        transfer = permute.collective.transfer
        is_send = scopes.RING_SEND in components(transfer.start.op_name)
        if is_send and not config.memory.tile_tokens:  # tiles send parts of blocks
            sizes = (array.bytes / num_tokens for array in transfer.done.arrays)
            token_bytes[permute.pass_name].update(sizes)
    return Ring(
        hops=_count(permutes),
        hidden=_count(permutes) - _count(exposed),
        exposed=_count(exposed),
        exposed_forward=_count(permute for permute in exposed if permute.pass_name == "forward"),
        by_backend=dict(by_backend),
        token_bytes={
            name: tuple(sorted(token_bytes[name])) for name in PASSES if token_bytes[name]
        },
    )


def kernels(program: AnalyzedProgram) -> dict[str, int]:
    """Executions per step of attention kernels by pass, of matrix products, and of library calls by
    name.

    Matrix products are Triton fusions wherever XLA has a choice: without a GPU it does not time
    other libraries.
    """
    counts = Counter()
    for call, times in program.attention_calls:
        counts[f"{call.kernel} attention {call.pass_name}"] += times
    for computation in program:
        for instruction in computation:
            name = _library_call(instruction)
            if name is None or attention_kernel(program, computation, instruction):
                continue
            if program.execution_counts[computation.name]:
                counts[name] += program.execution_counts[computation.name]
    return dict(counts.most_common())


def _library_call(instruction: Instruction) -> str | None:
    if name := expert_kernel(instruction):
        return f"{name} experts {pass_of(instruction.op_name)}"
    if name := delta_kernel(instruction):
        return f"pallas {name}"
    if instruction.opcode == "custom-call":
        name = instruction.call_target
        return None if name == ALLOCATE_BUFFER else name  # which runs nothing
    if instruction.opcode == "fusion":
        kind = instruction.backend_config.get("fusion_backend_config", {}).get("kind", "")
        return "triton gemm" if "gemm" in kind else None
    return None


def _transport(collective: Collective) -> tuple[str, str]:
    """(backend, mode), as in `CollectiveStats`."""
    name = collective.transport
    return ("NVSHMEM" if name == "nvshmem" else "NCCL"), (
        name if name in ("symmetric", "peer") else ""
    )


def _count(exchanges: Iterable[AttentionCollective]) -> int:
    return sum(exchange.times for exchange in exchanges)
