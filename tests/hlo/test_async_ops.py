import pytest

from jaxlc.hlo import parse
from jaxlc.hlo.parser import transfers
from tests.hlo.snippets import RING, program

ASYNC = """
%send (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-to-all = f32[4]{0} all-to-all(%p), replica_groups={{0,1}}, dimensions={0}
}
"""


def entry_transfers(text: str):
    read = parse(text)
    return [
        (transfer.kind, [op.name for op in transfer.overlapped_ops])
        for transfer in transfers(read, read.entry)
    ]


def test_transfers_of_permutes_list_overlapped_ops():
    read = parse(RING)
    first, second = transfers(read, read.computations["body"])
    assert [line.name for line in first.overlapped_ops] == ["fmha"] and second.overlapped_ops == ()
    assert not first.overlaps(second)


def test_transfers_of_all_kinds_are_paired():
    text = program(
        "%x = f32[4]{0} constant({1,2,3,4})",
        "%copy-start = (f32[4]{0:S(5)}, f32[4]{0}, u32[]) copy-start(%x)",
        "%async = ((f32[4]{0}), f32[4]{0}) async-start(%x), calls=%send",
        "%step = ((f32[4]{0}), f32[4]{0}) async-update(%async), calls=%send",
        "%work = f32[4]{0} negate(%x)",
        "%copy-done = f32[4]{0:S(5)} copy-done(%copy-start)",
        "%more = f32[4]{0} negate(%work)",
        "%async-done = f32[4]{0} async-done(%step), calls=%send",
        "ROOT %sum = f32[4]{0} all-reduce(%more), replica_groups={{0,1}}, to_apply=%send",
        more=ASYNC,
    )
    assert entry_transfers(text) == [
        ("copy", ["async", "step", "work"]),
        ("all-to-all", ["step", "work", "copy-done", "more"]),
        ("all-reduce", []),
    ]
    read = parse(text)
    copy, exchange, _ = transfers(read, read.entry)
    assert copy.overlaps(exchange) and exchange.overlaps(copy)


def test_transfers_marked_synchronous_overlap_nothing():
    text = program(
        "%x = f32[4]{0} constant({1,2,3,4})",
        "%gather = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1}},"
        ' backend_config={"collective_backend_config":{"is_sync":true}}',
        "%work = f32[4]{0} negate(%x)",
        "ROOT %done = f32[8]{0} all-gather-done(%gather)",
    )
    assert entry_transfers(text) == [("all-gather", [])]
    assert entry_transfers(text.replace("true}}", "false}}")) == [("all-gather", ["work"])]


def test_transfers_of_unscheduled_program_raise():
    with pytest.raises(ValueError, match="not scheduled"):
        entry_transfers(RING.replace(", is_scheduled=true", ""))
