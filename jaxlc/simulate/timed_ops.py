"""What each instruction of a compiled step does and how long that takes, for the walk of `jaxlc.simulate.timeline`."""

from collections import Counter
from typing import NamedTuple

from jaxlc.config import Config
from jaxlc.hlo import Program
from jaxlc.hlo.attention_kernels import AttentionKernelCall, attention_kernel
from jaxlc.hlo.collectives import Collective, collectives
from jaxlc.hlo.host_transfers import host_copies
from jaxlc.hlo.kernel_costs import kernel_cost
from jaxlc.hlo.parser import Computation, Instruction
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import Topology

# Lanes of transfers, and what a wait for one is a wait for. The two directions of the way to the host do not meet.
LINKS = {"NVLink": "NVLink", "network": "network", "to host": "host", "from host": "host"}


class Kernel(NamedTuple):
    kind: str  # "attention", "matrix products", "other kernels"
    resource: str  # what bounds it: "compute" or "HBM"
    seconds: float
    flops: float  # of matrix products; of attention, those that its mask leaves


class Transfer(NamedTuple):
    start: Instruction
    link: str  # a key of LINKS
    seconds: float  # alone on the link


class Step(NamedTuple):
    """What one instruction does; of these, in this order, what is not None."""

    kernel: Kernel | None = None
    starts: Transfer | None = None
    awaits: Transfer | None = None
    loop: Instruction | None = None
    branches: tuple[Computation, ...] = ()  # of which one runs


class TimedOps:
    """The program as steps, computation by computation."""

    def __init__(self, program: Program, gpus: Topology, config: Config, rates: Roofline):
        self.program = program
        self._gpus, self._config, self._rates = gpus, config, rates
        self._collectives = {each.transfer.start: each for each in collectives(program)}
        self._steps: dict[str, list[Step]] = {}

    def of(self, computation: Computation) -> list[Step]:
        """What the computation does, in its order; instructions that do nothing are left out."""
        if computation.name not in self._steps:
            starts, awaits = self._transfers(computation)
            steps = (self._step(computation, each, starts.get(each), awaits.get(each)) for each in computation)
            self._steps[computation.name] = [step for step in steps if step != Step()]
        return self._steps[computation.name]

    def _step(self, computation: Computation, what: Instruction, starts: Transfer | None, awaits: Transfer | None):
        if starts is not None or awaits is not None:
            return Step(starts=starts, awaits=awaits)
        call = attention_kernel(self.program, computation, what)
        if call is not None:
            return Step(kernel=self._attention(call))
        if what.opcode == "while":
            return Step(loop=what)
        if what.opcode in ("call", "conditional"):
            return Step(branches=tuple(self.program.computations[name] for name in what.called))
        if what.opcode.endswith(("-done", "-update")):  # of what counted where it started
            return Step()
        return Step(kernel=self._kernel(computation, what))

    def _transfers(self, computation: Computation) -> tuple[dict[Instruction, Transfer], dict[Instruction, Transfer]]:
        """What starts and what is awaited at each instruction. What lets nothing run beside it is awaited at once."""
        starts, awaits = {}, {}
        for instruction in computation:
            if instruction in self._collectives:
                found = self._collectives[instruction]
                starts[instruction] = transfer = self._collective(found)
                awaits[found.transfer.done if found.transfer.meanwhile else instruction] = transfer
        for copy in host_copies(self.program, computation):
            link = "to host" if copy.is_to_host else "from host"
            seconds = self._rates.host_seconds(self._gpus.device, copy.bytes)
            starts[copy.start] = awaits[copy.done] = Transfer(copy.start, link, seconds)
        return starts, awaits

    def _kernel(self, computation: Computation, instruction: Instruction) -> Kernel | None:
        cost = kernel_cost(self.program, computation, instruction)
        if cost is None:
            return None
        device, rates = self._gpus.device, self._rates
        compute = rates.matmul_seconds(device, cost.dtype, cost.flops)
        memory = rates.memory_seconds(device, cost.bytes)
        kind = "matrix products" if cost.flops else "other kernels"
        seconds = rates.kernel_gap_seconds + max(compute, memory)
        return Kernel(kind, "compute" if compute > memory else "HBM", seconds, cost.flops)

    def _attention(self, call: AttentionKernelCall) -> Kernel:
        flops = call.full_flops * visible_share(call, self._config)
        seconds = self._rates.attention_seconds(
            self._gpus.device, call.kernel, is_backward=call.is_backward, flops=flops
        )
        return Kernel("attention", "compute", self._rates.kernel_gap_seconds + seconds, flops)

    def _collective(self, collective: Collective) -> Transfer:
        """Timed by the slower of NVLink and network. What crosses domains is on the network's lane."""
        device, start = self._gpus.device, collective.transfer.start
        seconds = self._rates.nvlink_seconds(device, collective.sent_bytes)
        crossing_bytes = _crossing_bytes(collective, self._gpus.gpus_per_domain)
        if not crossing_bytes:
            return Transfer(start, "NVLink", seconds)
        return Transfer(start, "network", max(seconds, self._rates.network_seconds(device, crossing_bytes)))


def _crossing_bytes(collective: Collective, gpus_per_domain: int) -> float:
    """What each GPU's network card sends of a collective.

    A hop may lead outside. An all-to-all sends outside what is for members outside. Of the others the same bytes go
    around all members, so a domain sends them on once, and its members' cards share that.
    """
    members = [Counter(member // gpus_per_domain for member in group) for group in collective.groups]
    if all(len(domains) == 1 for domains in members):
        return 0
    if collective.kind == "collective-permute":
        return collective.sent_bytes
    inside, size = min(min(domains.values()) for domains in members), len(collective.groups[0])
    if "all-to-all" in collective.kind:
        return collective.sent_bytes * (size - inside) / (size - 1)
    return collective.sent_bytes / inside


def visible_share(call: AttentionKernelCall, config: Config) -> float:
    """The part of a call's pairs of query and key that its mask leaves, for rows of one document.

    A call over a rank's own piece of the sequence, or over all of it, is causal: half. Later steps of a ring pair half
    pieces, all of which is visible; their masks are for documents. Of a layer in tiles, calls with a mask are causal,
    or else are for documents as well and cannot be told apart; most of those are whole.
    """
    if not call.is_masked:
        return 1.0
    if config.memory.tile_tokens:
        return 1.0 if config.attention.document_mask else 0.5
    attention, num_tokens = config.attention, config.data.seq_len
    ring = config.mesh.context // (attention.ulysses_degree if attention.strategy == "hybrid" else 1)
    piece_tokens = num_tokens if attention.strategy == "ulysses" else num_tokens // ring
    if attention.window:
        return min(0.5, attention.window / piece_tokens)
    if call.sizes is not None:
        return 0.5 if call.sizes.num_queries >= piece_tokens else 1.0
    # A loop over tiles: told by its FLOPs, 2 or 5 matrix products a pair. Two half pieces make half as many pairs.
    rows = config.train.global_batch_size / (
        config.train.gradient_accumulation_steps * config.mesh.data * config.mesh.fsdp
    )
    products = (5 if call.is_backward else 2) * rows * config.model.num_heads / config.mesh.tensor
    piece_flops = 2.0 * products * config.model.head_dim * piece_tokens**2
    return 0.5 if call.full_flops > 0.75 * piece_flops else 1.0
