"""The hops of a ring in a compiled program: what hides each of them, and whether that takes long enough."""

from typing import NamedTuple

from jaxlc.core.hardware import Device
from jaxlc.hlo.attention_kernels import AttentionKernelCall, calls_within
from jaxlc.hlo.collectives import Collective, collectives
from jaxlc.hlo.op_names import Pass, is_in_attention, pass_of
from jaxlc.hlo.parser import Program


class Hop(NamedTuple):
    """One exchange of the attention, all ranks at once; in a loop, of each round of it."""

    collective: Collective
    which: Pass
    meanwhile: tuple[
        AttentionKernelCall, ...
    ]  # attention kernels between its start and its done; in loops, of all rounds
    link_bytes: int  # sent while it is under way: its own, and what other exchanges of the kind send beside it

    @property
    def times(self) -> int:
        return self.collective.times

    def seconds(self, device: Device, gpus_per_domain: int) -> float:
        """Modelled time of the exchange; the network's, if it leads anybody out of an NVLink domain."""
        over_network = any(
            member // gpus_per_domain != group[0] // gpus_per_domain
            for group in self.collective.groups
            for member in group
        )
        return device.transfer_seconds(self.link_bytes, over_network=over_network)

    def hiding_seconds(self, device: Device) -> float:
        """Modelled time of the attention meanwhile. A masked call is taken for half: the causal mask."""
        return sum(
            device.kernel_seconds(
                call.kernel, is_backward=call.is_backward, flops=call.full_flops * (0.5 if call.is_masked else 1.0)
            )
            for call in self.meanwhile
        )

    def is_hidden(self, device: Device, gpus_per_domain: int) -> bool:
        return bool(self.meanwhile) and self.hiding_seconds(device) >= self.seconds(device, gpus_per_domain)


def hops(program: Program) -> list[Hop]:
    """All exchanges that attention makes: what `shard_map` sends in the loop over layers."""
    sent = [each for each in collectives(program) if is_in_attention(each.transfer.start.op_name)]
    return [_hop(program, each, sent) for each in sent]


def _hop(program: Program, collective: Collective, sent: list[Collective]) -> Hop:
    transfer = collective.transfer
    calls = (call for each in transfer.meanwhile for call in calls_within(program, transfer.computation, each))
    beside = (each for each in sent if each is not collective and transfer.overlaps(each.transfer))
    return Hop(
        collective,
        pass_of(transfer.start.op_name),
        tuple(calls),
        collective.sent_bytes + sum(each.sent_bytes for each in beside),
    )
