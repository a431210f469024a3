"""Estimates how long a compiled step takes by simulating its schedule. Analytical; not validated on
hardware.

Kernels run one after the other in schedule order. Attention and matrix products take the time that
`Roofline` gives for their FLOPs, or for the bytes that they move if that is longer; other kernels
the time for their bytes (`jaxlc.hlo.kernel_costs`). Collectives and host copies start and end where
the schedule starts and ends them, and run concurrently with kernels. A kernel that has to wait for
one to end waits; that time is exposed. Transfers of one queue run one after the other, in the order
in which they start: XLA launches all collectives on one stream, for any link (openxla/xla pull
request 17749), and a copy engine executes the copies of one direction.

A loop is simulated round by round as long as a transfer that began before it is in flight. All
later rounds are alike: one is simulated and multiplied by their number. Of a conditional, the
longest branch counts; of a ring that may skip steps, the one that
`AnalyzedProgram.skips_ring_steps` names.

NCCL's kernels occupy some multiprocessors: kernels that are bound by compute take longer while a
collective of NCCL runs. That additional time counts as waiting for NCCL_SMS. Where the host reads a
predicate of a loop or a conditional, kernels wait for the HOST.

Not modelled: memory bandwidth that collectives take from kernels, clocks that drop under load,
input, and a host that launches slower than the GPU runs. Masks are taken to be causal over one
document per sequence, or leave the pairs of `TimeModel.work`, which counts the slowest rank of each
ring step. The schedule of a step that does not fit the GPU's memory saves memory and overlaps less;
its estimate is pessimistic.

`TimedOps` has the operations of each instruction with their durations; `layer_timeline` the events
of one layer.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from jaxlc.config.kinds.experts import block_rows, num_blocks
from jaxlc.core.scopes import CORE_ATTENTION, EXPANSION, EXPERTS, MIXTURE, RECURRENCE
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.kernel_costs import AttentionKernelCall, kernel_cost
from jaxlc.hlo.parser import (
    Computation,
    Instruction,
    called,
    innermost_scope,
    is_data_dependent,
    is_host_controlled,
)
from jaxlc.simulate.roofline import MEASURED_ATTENTION, Interval, rates
from jaxlc.simulate.time_model import TimeModel, num_sequences

# Lane of a transfer -> the resource that kernels wait for. The two directions of the host link are
# independent.
LINKS = {"NVLink": "NVLink", "network": "network", "to host": "host", "from host": "host"}
# Lane of a transfer -> the queue in which transfers run one after the other.
QUEUES = {
    "NVLink": "collectives",
    "network": "collectives",
    "to host": "to host",
    "from host": "from host",
}
PRODUCTS, OTHER_KERNELS = "matrix products", "other kernels"  # kinds of kernels, as "attention"


class Kernel(NamedTuple):
    kind: str  # "attention", PRODUCTS or OTHER_KERNELS
    resource: str  # what bounds it: "compute" or "HBM"
    seconds: float
    flops: float  # matrix products, or attention without what its mask skips
    scope: str  # part of the model or the training step: "mlp"; "" if it is unknown


class TimedTransfer(NamedTuple):
    start: Instruction
    link: str  # a key of LINKS
    seconds: float  # without the time that it waits for other transfers
    compute_share: float = 1.0  # fraction of the multiprocessors that kernels have meanwhile


class TimedOp(NamedTuple):
    """The operations of one instruction; those that are not None are executed in this order."""

    kernel: Kernel | None = None
    synchronization_seconds: float = 0.0  # kernels wait for the host
    starts: TimedTransfer | None = None
    awaits: TimedTransfer | None = None
    loop: Instruction | None = None
    branches: tuple[Computation, ...] = ()  # one of them runs


def attention_op(call: AttentionKernelCall, model: TimeModel) -> TimedOp:
    """One call of an attention kernel. A blockwise loop starts kernels for each pair of blocks that
    is not masked.
    """
    flops = model.attention_flops(call)
    num_kernels = max(1, call.num_kernels * flops / call.full_flops)
    seconds = num_kernels * model.roofline.kernel_gap_seconds + model.attention_seconds(call)
    return TimedOp(
        kernel=Kernel("attention", "compute", seconds, flops, CORE_ATTENTION),
        synchronization_seconds=call.num_conditionals * model.roofline.synchronization_seconds,
    )


class TimedOps:
    """The instructions of a program as timed operations, by computation."""

    def __init__(self, program: AnalyzedProgram, model: TimeModel):
        self.program = program
        self._model = model
        self._synchronization_seconds = model.roofline.synchronization_seconds
        self._collectives = {
            collective.transfer.start: collective for collective in program.collectives
        }
        self._ops: dict[str, list[TimedOp]] = {}

    def of(self, computation: Computation) -> list[TimedOp]:
        """The operations of a computation in schedule order, without instructions that do nothing."""
        if computation.name not in self._ops:
            starts, awaits = self._transfers(computation)
            ops = (self._op(computation, x, starts.get(x), awaits.get(x)) for x in computation)
            self._ops[computation.name] = [op for op in ops if op != TimedOp()]
        return self._ops[computation.name]

    def num_rounds(self, loop: Instruction) -> float:
        """`TimeModel.num_rounds`."""
        return self._model.num_rounds(self.program, loop)

    def _op(
        self,
        computation: Computation,
        instruction: Instruction,
        starts: TimedTransfer | None,
        awaits: TimedTransfer | None,
    ) -> TimedOp:
        if starts is not None or awaits is not None:
            return TimedOp(starts=starts, awaits=awaits)
        call = self.program.attention_call_of.get(instruction)
        if call is not None and not is_data_dependent(instruction.op_name):
            return attention_op(call, self._model)
        if instruction.opcode == "while":
            count = 1 + self.num_rounds(instruction) if is_host_controlled(instruction) else 0
            return TimedOp(
                loop=instruction, synchronization_seconds=count * self._synchronization_seconds
            )
        if instruction.opcode in ("call", "conditional"):
            names = called(self.program, instruction, self.program.skips_ring_steps)
            branches = tuple(self.program.computations[name] for name in names)
            count = int(instruction.opcode == "conditional")
            return TimedOp(
                branches=branches, synchronization_seconds=count * self._synchronization_seconds
            )
        if instruction.opcode.endswith(("-done", "-update")):  # the start was counted
            return TimedOp()
        cost = kernel_cost(self.program, computation, instruction)
        if cost is None:
            return TimedOp()
        kind = PRODUCTS if cost.flops else OTHER_KERNELS
        seconds, resource = self._model.kernel_seconds(cost)
        seconds += self._model.roofline.kernel_gap_seconds
        scope = innermost_scope(instruction.op_name)
        return TimedOp(kernel=Kernel(kind, resource, seconds, cost.flops, scope))

    def _transfers(
        self, computation: Computation
    ) -> tuple[dict[Instruction, TimedTransfer], dict[Instruction, TimedTransfer]]:
        """Transfers by the instruction that starts, and by the one that awaits them; the same if
        synchronous.
        """
        starts = {}
        awaits = {}
        for instruction in computation:
            if instruction in self._collectives:
                collective = self._collectives[instruction]
                seconds, link = self._model.collective_seconds(collective, collective.sent_bytes)
                share = self._model.compute_share(collective)
                starts[instruction] = transfer = TimedTransfer(instruction, link, seconds, share)
                is_async = bool(collective.transfer.overlapped_ops)
                awaits[collective.transfer.done if is_async else instruction] = transfer
        for copy in self.program.host_copies[computation.name]:
            link = "to host" if copy.is_to_host else "from host"
            seconds = self._model.host_copy_seconds(copy.bytes)
            # A kernel that accesses host memory takes the multiprocessors: other kernels wait for
            # it.
            end = copy.start if copy.is_kernel else copy.done
            starts[copy.start] = awaits[end] = TimedTransfer(copy.start, link, seconds)
        return starts, awaits


KERNELS = "kernels"  # the lane of kernels; the other lanes are links
# the resource that kernels wait for while NCCL's kernels occupy multiprocessors
NCCL_SMS = "SMs of NCCL"
HOST = "host synchronization"  # the resource that kernels wait for while the host reads a predicate
_COMMUNICATION = ("NVLink", "network")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Estimates for one optimizer step."""

    step_seconds: float  # one optimizer step
    tokens_per_second_per_device: float  # padding included
    mfu_causal: float  # causal model FLOPs (jaxlc.config.flops) over the bf16 peak of all devices
    # (FLOPs of the program - model FLOPs) / model FLOPs, attention included
    recomputed_share: float
    exposed_communication_seconds: float  # during which kernels wait for collectives
    communication_seconds: float  # sum over all collectives, each alone on its link
    exposed_host_copy_seconds: float  # during which kernels wait for host copies
    host_copy_seconds: float  # sum over all host copies, each alone on its link
    host_copies: int  # between host and GPU memory
    exposed_host_copies: int  # number of host copies that kernels wait for
    bound_by: str  # the key of seconds_by_resource with the most seconds
    # By the resource that bounds the kernels, "compute" or "HBM", or for which they wait: "NVLink", "network", "host",
    # NCCL_SMS, HOST.
    seconds_by_resource: dict[str, float]
    seconds_by_kind: dict[str, float]  # "attention", "matrix products", "other kernels", "waiting"
    # sums as above, by resource: "NVLink", "network", "host"
    transfer_seconds_by_resource: dict[str, float]
    # Time outside of attention kernels and of the model's own matrix products: waiting for "NVLink", "network" and
    # "host", "recomputed matrix products" (all FLOPs of products above the model's), and other kernels by their
    # innermost scope, such as "mlp kernels". Largest first.
    overhead_seconds: dict[str, float]
    # Kernels of recurrent layers between their projections, products included; a part of
    # overhead_seconds.
    recurrence_seconds: float = 0.0
    # Kernels of experts beyond the products of the rows that are routed to them: routing, sorting, copies of weights
    # for each block, and products of padding; a part of overhead_seconds. Waiting for gathers of weights is not in it.
    experts_overhead_seconds: float = 0.0
    # Kernels that expand latents to keys and values, and their gradients, products included.
    expansion_seconds: float = 0.0
    are_rates_assumed: bool = False  # of this kind of GPU
    # in which the step is expected in 80% of cases, lowest first
    step_seconds_interval: tuple[float, float]

    @property
    def interval(self) -> Interval:
        """`step_seconds_interval` as factors on `step_seconds`; for its parts as well."""
        low, high = self.step_seconds_interval
        return Interval(low / self.step_seconds, high / self.step_seconds)

    @property
    def overhead_share(self) -> float:
        """`overhead_seconds` in total, as a fraction of the step."""
        return sum(self.overhead_seconds.values()) / self.step_seconds


class Event(NamedTuple):
    """A kernel or transfer in the timeline."""

    lane: str  # KERNELS, or a link
    kind: str  # kind of the kernel; opcode of the transfer
    start_seconds: float
    end_seconds: float


def predict(program: AnalyzedProgram, model: TimeModel) -> Prediction:
    """Estimates one run of `program`, the training step of `model.config` compiled for
    `model.gpus`.

    Raises:
      ValueError: the program is not scheduled, or the trip count of a loop is unknown.
    """
    gpus = model.gpus
    config = model.config
    simulator = Simulator(TimedOps(program, model))
    simulator.run(program.entry)
    flops = config.flops_per_step
    by_resource = Counter()
    by_kind = Counter()
    for (kind, resource), seconds in simulator.seconds.items():
        by_resource[resource] += seconds
        by_kind[kind] += seconds
    exposed_seconds = sum(by_resource[link] for link in _COMMUNICATION)
    communication_seconds = sum(simulator.transfer_seconds[link] for link in _COMMUNICATION)
    other_seconds = exposed_seconds + by_resource[NCCL_SMS]
    calls = (call for call, _ in program.attention_calls)
    if any(call.head_dim > MEASURED_ATTENTION.get(call.kernel, 0) for call in calls):
        other_seconds += by_kind["attention"]
    low, high = model.roofline.step_interval(
        gpus.device, simulator.now, other_seconds, communication_seconds - exposed_seconds
    )
    return Prediction(
        step_seconds=simulator.now,
        tokens_per_second_per_device=config.tokens_per_step / simulator.now / gpus.num_gpus,
        recomputed_share=simulator.flops * gpus.num_gpus / flops - 1,
        mfu_causal=flops / (simulator.now * gpus.num_gpus * gpus.device.bf16_flops_per_second),
        exposed_communication_seconds=exposed_seconds,
        communication_seconds=communication_seconds,
        exposed_host_copy_seconds=by_resource["host"],
        host_copy_seconds=simulator.transfer_seconds["host"],
        host_copies=simulator.num_transfers["host"],
        exposed_host_copies=simulator.num_exposed["host"],
        are_rates_assumed=rates(gpus.device).are_assumed,
        bound_by=max(by_resource, key=by_resource.get),
        seconds_by_resource=dict(by_resource.most_common()),
        seconds_by_kind=dict(by_kind.most_common()),
        transfer_seconds_by_resource=dict(simulator.transfer_seconds.most_common()),
        recurrence_seconds=sum(simulator.other_seconds[scope] for scope in RECURRENCE),
        expansion_seconds=simulator.product_seconds[EXPANSION] + simulator.other_seconds[EXPANSION],
        experts_overhead_seconds=_experts_overhead(simulator, model),
        overhead_seconds=dict(_overhead(simulator, model).most_common()),
        step_seconds_interval=(low * simulator.now, high * simulator.now),
    )


def _overhead(simulator: "Simulator", model: TimeModel) -> Counter[str]:
    """`Prediction.overhead_seconds`."""
    overhead = Counter(
        {
            resource: seconds
            for (kind, resource), seconds in simulator.seconds.items()
            if kind == "waiting"
        }
    )
    for scope, seconds in simulator.other_seconds.items():
        overhead[f"{scope} kernels" if scope else "kernels without a scope"] += seconds
    if simulator.product_flops:
        own_flops = model.config.step_flops(0).products / model.gpus.num_gpus
        recomputed = max(0, 1 - own_flops / simulator.product_flops)
        overhead["recomputed matrix products"] = simulator.product_seconds.total() * recomputed
    return overhead


def _experts_overhead(simulator: "Simulator", model: TimeModel) -> float:
    """`Prediction.experts_overhead_seconds`."""
    product_seconds = simulator.product_seconds
    other_seconds = simulator.other_seconds
    if not product_seconds[EXPERTS]:
        return 0.0
    config = model.config  # rows that one call of the experts of a rank routes
    tokens = num_sequences(config) * config.data.seq_len / config.mesh.context
    num_tokens = round(config.memory.tile_tokens or tokens)
    num_rows = num_tokens * config.model.experts.experts_per_token
    sizes = num_rows, config.model.experts.num_experts, config.runtime.expert_kernel
    used = num_rows / (num_blocks(*sizes) * block_rows(*sizes))
    all_seconds = sum(product_seconds[scope] + other_seconds[scope] for scope in MIXTURE)
    return all_seconds - used * product_seconds[EXPERTS]


def events(program: AnalyzedProgram, model: TimeModel, computation: Computation) -> list[Event]:
    """The events of one run of `computation`, ordered by their end.

    After `_MAX_EVENTS`, a loop that starts with idle links has a few joined kernels of each kind,
    and no transfers: the layer of a sequence of 8M tokens in tiles has millions of kernels.
    """
    simulator = Simulator(TimedOps(program, model), events=[])
    simulator.run(computation)
    return sorted(simulator.events, key=lambda event: event.end_seconds)


class Simulator:
    """The clock, the links, and the time spent by kind and resource."""

    def __init__(
        self,
        timed_ops: TimedOps,
        single_runs: dict[str, "Simulator"] | None = None,
        events: list[Event] | None = None,
    ):
        self.timed_ops = timed_ops
        self.now = 0.0
        self.flops = 0.0  # attention and matrix products
        self.product_flops = 0.0  # matrix products outside of the recurrence
        self.product_seconds: Counter[str] = Counter()  # of the same products, by scope
        # other kernels, those of the recurrence included, by scope
        self.other_seconds: Counter[str] = Counter()
        # by kind and resource; they add up to `now`
        self.seconds: Counter[tuple[str, str]] = Counter()
        # by resource, each transfer alone on its link
        self.transfer_seconds: Counter[str] = Counter()
        self.num_transfers: Counter[str] = Counter()  # by resource
        self.num_exposed: Counter[str] = Counter()  # by resource: transfers that kernels wait for
        self.events = events
        self._queue_ends: defaultdict[str, float] = defaultdict(float)  # of the last transfers
        self._ends: dict[Instruction, float] = {}  # of transfers, by start
        # ends and compute shares of transfers in the queue of collectives, in their order
        self._collectives: list[tuple[float, float]] = []
        # one run of a computation, links idle
        self._single_runs = {} if single_runs is None else single_runs

    def run(self, computation: Computation) -> None:
        for op in self.timed_ops.of(computation):
            if op.kernel is not None:
                self._run_kernel(op.kernel)
            if op.synchronization_seconds:
                self.seconds["waiting", HOST] += op.synchronization_seconds
                self.now += op.synchronization_seconds
            if op.starts is not None:
                self._start(op.starts)
            if op.awaits is not None:
                link = op.awaits.link
                seconds = max(0.0, self._ends.get(op.awaits.start, 0.0) - self.now)
                self.seconds["waiting", LINKS[link]] += seconds
                self.num_exposed[LINKS[link]] += seconds > _ROUNDING_SECONDS
                self.now += seconds
            if op.loop is not None:
                self._run_loop(op.loop)
            if op.branches:
                self.run(max(op.branches, key=lambda branch: self._single_run(branch).now))

    def _start(self, transfer: TimedTransfer) -> None:
        """Transfers of a queue run one after the other."""
        link = transfer.link
        queue = QUEUES[link]
        self.transfer_seconds[LINKS[link]] += transfer.seconds
        self.num_transfers[LINKS[link]] += 1
        begin = max(self.now, self._queue_ends[queue])
        end = begin + transfer.seconds
        self._queue_ends[queue] = self._ends[transfer.start] = end
        self._record(link, transfer.start.opcode, begin, end)
        if queue == QUEUES["NVLink"]:
            in_flight = [x for x in self._collectives if x[0] > self.now]
            self._collectives = [*in_flight, (end, transfer.compute_share)]

    def _beside_collectives(self, seconds: float) -> float:
        """Seconds of a kernel that takes `seconds` with all multiprocessors, while the collectives in
        flight run.
        """
        total = 0.0
        for end, compute_share in self._collectives:
            remaining = max(0.0, end - self.now - total)
            progress = remaining * compute_share
            if progress >= seconds:
                return total + seconds / compute_share
            total += remaining
            seconds -= progress
        return total + seconds

    def _run_kernel(self, kernel: Kernel) -> None:
        seconds = kernel.seconds
        if kernel.resource == "compute":
            seconds = self._beside_collectives(kernel.seconds)
            if seconds > kernel.seconds + _ROUNDING_SECONDS:
                self.seconds["waiting", NCCL_SMS] += seconds - kernel.seconds
        self._record(KERNELS, kernel.kind, self.now, self.now + seconds)
        self.seconds[kernel.kind, kernel.resource] += kernel.seconds
        self.flops += kernel.flops
        if kernel.kind == PRODUCTS and kernel.scope not in RECURRENCE:
            self.product_flops += kernel.flops
            self.product_seconds[kernel.scope] += kernel.seconds
        elif kernel.kind in (PRODUCTS, OTHER_KERNELS):
            self.other_seconds[kernel.scope] += kernel.seconds
        self.now += seconds

    def _run_loop(self, loop: Instruction) -> None:
        program = self.timed_ops.program
        body = program.computations[loop.attributes["body"].lstrip("%")]
        remaining = self.timed_ops.num_rounds(loop)
        is_recorded = self.events is not None and len(self.events) < _MAX_EVENTS
        while remaining >= 1 and (
            is_recorded
            or max(self._queue_ends.values(), default=0.0) > self.now + _ROUNDING_SECONDS
        ):
            self.run(body)
            remaining -= 1
            is_recorded = is_recorded and len(self.events or ()) < _MAX_EVENTS
        if remaining:
            single_run = self._single_run(body)
            end = self.now
            for (kind, _), seconds in _JOINED_RUNS * [*single_run.seconds.items()]:
                if kind != "waiting":
                    start = end
                    end += remaining / _JOINED_RUNS * seconds
                    self._record(KERNELS, kind, start, end)
            self.now += remaining * single_run.now
            self.flops += remaining * single_run.flops
            self.product_flops += remaining * single_run.product_flops
            for name in (
                "seconds",
                "product_seconds",
                "other_seconds",
                "transfer_seconds",
                "num_transfers",
                "num_exposed",
            ):
                totals = getattr(self, name)
                for key, value in getattr(single_run, name).items():
                    totals[key] += remaining * value

    def _single_run(self, computation: Computation) -> "Simulator":
        """One run of a computation that starts with idle links."""
        if computation.name not in self._single_runs:
            simulator = self._single_runs[computation.name] = Simulator(
                self.timed_ops, self._single_runs
            )
            simulator.run(computation)
        return self._single_runs[computation.name]

    def _record(self, lane: str, kind: str, start: float, end: float) -> None:
        if self.events is not None:
            self.events.append(Event(lane, kind, start, end))


_MAX_EVENTS = 100_000  # recorded run by run
_JOINED_RUNS = 10  # runs of a loop, if it is not recorded run by run
_ROUNDING_SECONDS = 1e-12  # above the rounding error of a time, which counts from the first kernel


_MAX_LAYER_EVENTS = 1000  # per pass; in longer timelines, short kernels are joined
LAYER_PASSES = ("forward", "backward")  # the backward of a layer includes its recomputation


class LayerEvent(NamedTuple):
    """A transfer, or one kernel or several adjacent ones (`_merged`). Times are relative to the
    start of the pass.
    """

    pass_name: str  # one of LAYER_PASSES
    lane: str  # "kernels", or a link: "NVLink", "network", "to host", "from host"
    kind: str  # kernels: "attention", "matrix products", "other kernels"; transfers: the opcode
    start_seconds: float  # since the start of the pass
    end_seconds: float  # since the start of the pass


def layer_timeline(program: AnalyzedProgram, model: TimeModel) -> tuple[LayerEvent, ...]:
    """The events of one layer, by pass and end. Empty if the program has no loop over layers."""
    timeline = []
    for pass_name in LAYER_PASSES:
        computation = layer(program, pass_name)
        if computation is not None:
            timeline += [
                LayerEvent(pass_name, *event)
                for event in _merged(events(program, model, computation))
            ]
    return tuple(timeline)


def layer(program: AnalyzedProgram, pass_name: str) -> Computation | None:
    """The body of the loop over layers in one of LAYER_PASSES; None if there is no such loop.

    It is the outermost computation that runs attention of this pass only. Layers may contain loops,
    over tiles of tokens, and the loop over microbatches contains the layers of both passes.
    """
    own = {"forward": {"forward"}, "backward": {"backward", "recomputation"}}[pass_name]
    bodies = []
    for computation in program:
        passes = _attention_passes(program, computation)
        is_run = program.execution_counts[computation.name] and computation is not program.entry
        if is_run and pass_name in passes and passes <= own:
            bodies.append(computation)
    inner = {
        name for computation in bodies for instruction in computation for name in instruction.called
    }
    outermost = [computation for computation in bodies if computation.name not in inner]
    return max(
        outermost, key=lambda computation: program.execution_counts[computation.name], default=None
    )


def _attention_passes(program: AnalyzedProgram, computation: Computation) -> set[str]:
    """The passes whose attention kernels run in a computation and in those that it calls."""
    passes = set()
    for instruction in computation:
        call = program.attention_call_of.get(instruction)
        if call is not None:
            passes.add(call.pass_name)
        else:
            passes.update(
                *(
                    _attention_passes(program, program.computations[name])
                    for name in instruction.called
                )
            )
    return passes


def _merged(timeline: list[Event]) -> list[Event]:
    """Joins adjacent kernels of one kind: a layer has hundreds of kernels, or tens of thousands in
    tiles.

    In a long timeline, adjacent kernels of any kind are joined until they take a thousandth of its
    duration. Kinds are assigned so that the total of each kind is preserved up to that resolution.
    """
    transfers = [event for event in timeline if event.lane != KERNELS]
    kernels = _joined([event for event in timeline if event.lane == KERNELS])
    if len(kernels) + len(transfers) > _MAX_LAYER_EVENTS:
        kernels = _joined(_coarse(kernels, max(event.end_seconds for event in timeline) / 1000))
    return sorted([*kernels, *transfers], key=lambda event: event.end_seconds)


def _joined(kernels: list[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in kernels:
        if joined and _follows(joined[-1], event) and joined[-1].kind == event.kind:
            event = joined.pop()._replace(end_seconds=event.end_seconds)
        joined.append(event)
    return joined


def _coarse(kernels: list[Event], resolution_seconds: float) -> list[Event]:
    coarse: list[Event] = []
    # by kind: time of kernels minus time that was assigned to the kind
    missing_seconds: Counter[str] = Counter()
    for event in kernels:
        missing_seconds[event.kind] += event.end_seconds - event.start_seconds
        if coarse and _follows(coarse[-1], event):
            previous_seconds = coarse[-1].end_seconds - coarse[-1].start_seconds
            if previous_seconds < resolution_seconds:
                event = coarse.pop()._replace(end_seconds=event.end_seconds)
                missing_seconds[event.kind] += previous_seconds
        (kind, _), *_ = missing_seconds.most_common(1)
        missing_seconds[kind] -= event.end_seconds - event.start_seconds
        coarse.append(event._replace(kind=kind))
    return coarse


def _follows(before: Event, event: Event) -> bool:
    return before.end_seconds == event.start_seconds
