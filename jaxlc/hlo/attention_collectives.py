"""Collectives of attention in a compiled program, and the attention kernels that the schedule overlaps with them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxlc.hlo.attention_kernels import AttentionKernelCall, calls_within
from jaxlc.hlo.collectives import Collective
from jaxlc.hlo.op_names import Pass, has_window, is_in_attention, pass_of
from jaxlc.hlo.parser import Program


class AttentionCollective(NamedTuple):
    """One collective that attention runs, on all ranks at once."""

    collective: Collective
    pass_name: Pass
    # Attention kernels between its start and its done; of kernels in a loop, one entry with the FLOPs of all rounds.
    overlapped_calls: tuple[AttentionKernelCall, ...]
    has_window: bool  # it belongs to a layer with a sliding window
    link_bytes: int  # sent between its start and its done: its own bytes and the bytes of overlapping ones

    @property
    def times(self) -> int:
        """How often it runs in one run of the program."""
        return self.collective.times

    @property
    def is_unoverlapped(self) -> bool:
        """Whether no attention kernel runs between start and done. This is read from the schedule, not estimated."""
        return not self.overlapped_calls


def find_attention_collectives(program: Program, collectives: Sequence[Collective]) -> Iterator[AttentionCollective]:
    """Those of `collectives`, the program's, that run in the scope `core_attention`."""
    of_attention = [collective for collective in collectives if is_in_attention(collective.transfer.start.op_name)]
    for collective in of_attention:
        yield _with_overlap(program, collective, of_attention)


def _with_overlap(program: Program, collective: Collective, others: list[Collective]) -> AttentionCollective:
    transfer = collective.transfer
    calls = (call for op in transfer.overlapped_ops for call in calls_within(program, transfer.computation, op))
    concurrent = (other for other in others if other is not collective and transfer.overlaps(other.transfer))
    return AttentionCollective(
        collective,
        pass_of(transfer.start.op_name),
        tuple(calls),
        has_window(transfer.start.op_name),
        collective.sent_bytes + sum(other.sent_bytes for other in concurrent),
    )
