"""What the plan found: as a page to read, and as JSON with stable keys."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from jaxlc.plan.memory import DEFAULT_POOL_SHARE, USABLE_HOST_SHARE, USABLE_SHARE, Memory
from jaxlc.plan.summary import CollectiveStats, Ring
from jaxlc.simulate.timeline import Prediction

_ASK = "jaxlc.plan.plan(config, topology, advise=True)"  # who is in a notebook asks like this
_WIDTH = 118
_LONGEST_PATH = 70  # characters of an operation's name
_SMALL_BYTES = 2**20  # collectives that send less in a whole step are summed up in one line


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings under which the step was compiled again."""

    overrides: str  # of the command line: "--config.memory.remat=full"
    cost: str
    device_peak_bytes: int
    host_bytes_per_node: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training step compiled for GPUs that are not here. Bytes are of one GPU, counts of one optimizer step."""

    topology: str
    num_devices: int
    mesh: dict[str, int]
    sequence_tokens: int
    tokens_per_step: int
    compile_seconds: float
    predicted: Prediction
    memory: Memory
    collectives: tuple[CollectiveStats, ...]
    ring: Ring
    kernels: dict[str, int]
    kernel_choice: str  # of attention, and why that one
    transport_choice: str  # of attention's hops, and why that one
    advice: tuple[Change, ...] | None = None  # None: not asked for

    def __str__(self) -> str:
        return page(self, _ASK)

    def to_json(self) -> dict:
        """Plain JSON types."""
        values = dataclasses.asdict(self)
        values["memory"] |= {name: getattr(self.memory, name) for name in _DERIVED}
        values["memory"]["largest"] = [each._asdict() for each in self.memory.largest]
        values["collectives"] = [each._asdict() | {"axes": list(each.axes)} for each in self.collectives]
        return values


_DERIVED = ("symmetric_bytes", "device_peak_bytes", "pool_share", "fits")


def page(plan: Plan, how_to_ask: str) -> str:
    """Plain text of at most 120 columns.

    Args:
      how_to_ask: the command that compiles for changes that fit, told where the step does not.
    """
    sections = (
        _head(plan), _memory(plan.memory), _collectives(plan), _ring(plan), _kernels(plan), _predicted(plan.predicted)
    )  # fmt: skip
    lines = [line for section in sections for line in (*section, "")]
    return "\n".join([*lines, *_verdict(plan, how_to_ask)])


def _head(plan: Plan) -> Iterator[str]:
    axes = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    yield f"{plan.topology}: {plan.num_devices} GPUs, {axes}; compiled in {plan.compile_seconds:.0f} s"
    yield f"rows of {plan.sequence_tokens:,} tokens, {plan.tokens_per_step:,} tokens a step"
    yield from textwrap.wrap(f"attention kernel {plan.kernel_choice}", _WIDTH, subsequent_indent="  ")
    yield from textwrap.wrap(f"transport {plan.transport_choice}", _WIDTH, subsequent_indent="  ")


def _memory(memory: Memory) -> Iterator[str]:
    yield "MEMORY of a GPU                  GiB"
    yield _row("arguments", memory.device_arguments_bytes)
    yield _row("  parameters", memory.parameters_bytes)
    yield _row("  optimizer", memory.optimizer_bytes)
    yield _row("  batch", memory.batch_bytes)
    yield _row("temporaries", memory.device_temp_bytes)
    yield _row("kernel workspaces", memory.workspace_bytes, "at most; not known to the compiler without a GPU")
    yield _row("symmetric buffers", memory.symmetric_bytes, f"of which {_gib(memory.symmetric_used_bytes)} are used")
    yield _row("NCCL's buffers", memory.nccl_bytes, "at most; an estimate")
    yield _row("peak", memory.device_peak_bytes)
    beside = f", and {_gib(memory.unified_host_bytes)} of the host's" if memory.unified_host_bytes else ""
    yield _row("usable", memory.usable_bytes, f"{USABLE_SHARE:.0%} of {_gib(memory.device_capacity_bytes)}{beside}")
    if memory.is_unified_over_pcie:
        yield "  runtime.unified_memory is not counted: these GPUs reach their host over PCIe, far too slow"
    if memory.host_bytes_per_device:
        yield _row("pinned host memory", memory.host_bytes_per_device)
        yield _row("  parameters", memory.host_parameters_bytes)
        yield _row("  optimizer", memory.host_optimizer_bytes)
    usable_bytes = USABLE_HOST_SHARE * memory.host_capacity_per_node_bytes
    yield _row("a node's pinned host memory", memory.host_bytes_per_node, f"usable for both: {_gib(usable_bytes)}")
    yield _row("a node's checkpoint staging", memory.staging_bytes_per_node, "while a checkpoint is written")
    yield "largest arrays when the program holds most"
    for each in memory.largest:
        yield _row(f"  {each.shape}", each.bytes, _short(each.made_by))


def _collectives(plan: Plan) -> Iterator[str]:
    yield "COLLECTIVES of a step       times  GiB sent  over"
    large = [each for each in plan.collectives if each.bytes >= _SMALL_BYTES]
    for each in large:
        where = "network" if each.crosses_domains else "NVLink"
        how = " ".join(filter(None, (each.backend, each.mode)))
        yield f"  {each.kind:<22} {each.count:>9,} {_gib(each.bytes):>9}  {where:<8} {'+'.join(each.axes):<24} {how}"
    small = [each for each in plan.collectives if each.bytes < _SMALL_BYTES]
    yield f"  {'of less than 1 MiB':<22} {sum(each.count for each in small):>9,}"


def _ring(plan: Plan) -> Iterator[str]:
    ring = plan.ring
    if not ring.hops:
        yield "RING: no hops"
        return
    by = ", ".join(f"{count:,} by {name}" for name, count in ring.by_backend.items())
    yield f"RING: {ring.hops:,} hops, {by}; by the model of time (jaxlc/core/hardware.py)"
    exposed = f"{ring.exposed:,} exposed ({ring.exposed_forward:,} in the forward)"
    yield f"  {ring.hidden:,} hidden behind attention, {exposed}"
    if ring.exposed and plan.memory.is_at_schedulers_limit:
        yield "  XLA gives up overlap where temporaries near the limit it sets itself (docs/plan.md); this lifts it:"
        yield "  XLA_FLAGS=--xla_gpu_memory_limit_slop_factor=160"


def _kernels(plan: Plan) -> Iterator[str]:
    yield "KERNELS of a step           times"
    for name, count in plan.kernels.items():
        note = "on a GPU XLA also tries cuBLAS, and takes the faster" if name == "triton gemm" else ""
        yield f"  {name:<34} {count:>7,}  {note}".rstrip()


def _predicted(predicted: Prediction) -> Iterator[str]:
    yield "PREDICTED TIME of a step, by a model that no GPU has confirmed (docs/calibration.md)"
    speed = f"{predicted.tokens_per_second_per_device:,.0f} tokens/s a GPU, MFU {predicted.mfu_causal:.1%} (causal)"
    yield f"  {_seconds(predicted.step_seconds)}: {speed}; bound by {predicted.bound_by}"
    yield f"  {predicted.recomputed_share:.0%} more FLOPs than the model's, since parts of it are computed again"
    exposed, sent = predicted.exposed_communication_seconds, predicted.communication_seconds
    yield f"  of {_seconds(sent)} of communication {_seconds(exposed)} are exposed"
    if predicted.host_copies:
        exposed, sent = predicted.exposed_host_copy_seconds, predicted.host_copy_seconds
        copies = f"{predicted.host_copies:,} copies to and from the host ({_seconds(sent)})"
        yield f"  of {copies} {predicted.exposed_host_copies:,} are waited for, {_seconds(exposed)} in all"
    for seconds in (predicted.seconds_by_kind, predicted.seconds_by_resource):
        yield "  " + ", ".join(f"{name} {each / predicted.step_seconds:.1%}" for name, each in seconds.items())


def _verdict(plan: Plan, how_to_ask: str) -> Iterator[str]:
    memory = plan.memory
    if 0 < memory.nvshmem_heap_bytes < memory.symmetric_used_bytes:
        heap_bytes = -(-memory.symmetric_used_bytes * 9 // 8 // 2**30) * 2**30  # an eighth for what lies between arrays
        yield f"NVSHMEM's heap is too small for the hops: set --config.runtime.nvshmem_heap_bytes={heap_bytes}."
    if memory.fits:
        yield f"IT FITS: {_gib(memory.device_peak_bytes)} of {_gib(memory.usable_bytes)} GiB a GPU."
        if memory.spilled_bytes:
            spilled = f"{_gib(memory.spilled_bytes)} GiB of it lie in the host's memory"
            yield f"With unified memory {spilled}; the predicted time does not count the way there."
        elif not memory.unified_host_bytes and memory.pool_bytes > DEFAULT_POOL_SHARE * memory.device_capacity_bytes:
            share = f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory.pool_share:.2f}"
            yield f"But run it with {share}: JAX takes only {DEFAULT_POOL_SHARE:.0%} of a GPU's memory by default."
        return
    if not memory.device_fits:
        over_bytes = memory.device_peak_bytes - memory.usable_bytes
        yield f"IT DOES NOT FIT: {_gib(over_bytes)} GiB too much on each GPU."
    if not memory.host_fits:
        needed_bytes = memory.host_bytes_per_node + memory.staging_bytes_per_node
        over_bytes = needed_bytes - USABLE_HOST_SHARE * memory.host_capacity_per_node_bytes
        yield f"IT DOES NOT FIT: {_gib(over_bytes)} GiB too much in the memory of each node."
    if plan.advice is None:
        yield f"Changes that make it fit are found by: {how_to_ask}"
        return
    helps = any(change.fits for change in plan.advice)
    yield f"Changes, compiled, cheapest first{':' if helps else '; none is enough, so combine them:'}"
    for change in plan.advice:
        yield f"  {_gib(change.device_peak_bytes):>7} GiB  {'fits' if change.fits else 'does not'}  {change.overrides}"
        yield f"               {change.cost}"


def _row(name: str, size: float, note: str = "") -> str:
    return f"  {name:<29} {_gib(size):>7}  {note}".rstrip()


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"


# What every path has, and what says nothing to a reader.
_NOISE = re.compile(r"\b(jit\(_step\)|while|body|closed_call|checkpoint|rematted_computation|shard_map)(/|$)")


def _short(op_name: str) -> str:
    """The parts of an operation's path that name something, at most the last: "transpose(jvp())/BTF,FD->BTD/mul"."""
    text = _NOISE.sub("", op_name).rstrip("/").replace("\\'", "'") or op_name
    return text if len(text) <= _LONGEST_PATH else "..." + text[-_LONGEST_PATH:]
