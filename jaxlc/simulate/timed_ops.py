"""The operations of each instruction of a compiled step and their durations, for the simulator in `timeline`."""

from typing import NamedTuple

from jaxlc.core.scopes import CORE_ATTENTION
from jaxlc.hlo import AnalyzedProgram
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.hlo.parser import Computation, Instruction, called, innermost_scope, is_data_dependent, is_host_controlled
from jaxlc.simulate.time_model import TimeModel

# Lane of a transfer -> the resource that kernels wait for. The two directions of the host link are independent.
LINKS = {"NVLink": "NVLink", "network": "network", "to host": "host", "from host": "host"}
# Lane of a transfer -> the queue in which transfers run one after the other.
QUEUES = {"NVLink": "collectives", "network": "collectives", "to host": "to host", "from host": "from host"}
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


class TimedOps:
    """The instructions of a program as timed operations, by computation."""

    def __init__(self, program: AnalyzedProgram, model: TimeModel):
        self.program = program
        self._model = model
        self._synchronization_seconds = model.roofline.synchronization_seconds
        self._collectives = {collective.transfer.start: collective for collective in program.collectives}
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
            seconds = self._model.roofline.kernel_gap_seconds + self._model.attention_seconds(call)
            flops = self._model.attention_flops(call)
            return TimedOp(kernel=Kernel("attention", "compute", seconds, flops, CORE_ATTENTION))
        if instruction.opcode == "while":
            count = 1 + self.num_rounds(instruction) if is_host_controlled(instruction) else 0
            return TimedOp(loop=instruction, synchronization_seconds=count * self._synchronization_seconds)
        if instruction.opcode in ("call", "conditional"):
            names = called(self.program, instruction, self.program.skips_ring_steps)
            branches = tuple(self.program.computations[name] for name in names)
            count = int(instruction.opcode == "conditional")
            return TimedOp(branches=branches, synchronization_seconds=count * self._synchronization_seconds)
        if instruction.opcode.endswith(("-done", "-update")):  # the start was counted
            return TimedOp()
        return TimedOp(kernel=self._kernel(computation, instruction))

    def _transfers(
        self, computation: Computation
    ) -> tuple[dict[Instruction, TimedTransfer], dict[Instruction, TimedTransfer]]:
        """Transfers by the instruction that starts, and by the one that awaits them; the same if synchronous."""
        starts, awaits = {}, {}
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
            # A kernel that accesses host memory takes the multiprocessors: other kernels wait for it.
            end = copy.start if copy.is_kernel else copy.done
            starts[copy.start] = awaits[end] = TimedTransfer(copy.start, link, seconds)
        return starts, awaits

    def _kernel(self, computation: Computation, instruction: Instruction) -> Kernel | None:
        cost = kernel_cost(self.program, computation, instruction)
        if cost is None:
            return None
        kind = PRODUCTS if cost.flops else OTHER_KERNELS
        seconds, resource = self._model.kernel_seconds(cost)
        seconds += self._model.roofline.kernel_gap_seconds
        return Kernel(kind, resource, seconds, cost.flops, innermost_scope(instruction.op_name))
