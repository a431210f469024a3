import pytest

from jaxlc.hlo import parse
from jaxlc.hlo.parser import Array, parse_shape
from tests.hlo.snippets import RING, program


def test_parse_shape_returns_arrays_and_bytes():
    assert parse_shape("bf16[1,32768,32,128]{3,2,1,0:T(8,128)S(5)}") == (
        Array("bf16", (1, 32768, 32, 128), 5),
    )
    assert parse_shape("(s32[], (pred[7]{0}, token[]))") == (
        Array("s32", (), 0), Array("pred", (7,), 0), Array("token", (), 0),
    )  # fmt: skip
    arrays = parse_shape("(bf16[3,5], s4[3], f8e4m3fn[2,2], s32[], pred[6], token[], c64[2])")
    assert [array.bytes for array in arrays] == [30, 2, 4, 4, 6, 0, 16]
    assert parse_shape("f32[<=10,2]")[0].bytes == 80  # an upper bound


def test_parse_program_with_loop():
    read = parse(RING)
    assert read.is_scheduled
    assert list(read.computations) == ["body", "condition", "main"]
    assert read.entry is read.computations["main"]
    (loop,) = (op for op in read.entry if op.opcode == "while")
    assert set(loop.called) == {"condition", "body"}
    body = read.computations["body"]
    root = body.instructions["next"]
    assert root.opcode == "tuple" and [operand.name for operand in body.operands(root)] == [
        "i",
        "late-done",
    ]
    start = body.instructions["hop-start"]
    assert start.op_name.endswith("shard_map/core_attention/ppermute")
    assert start.backend_config["collective_backend_config"]["backend"] == "NVSHMEM"
    assert [array.bytes for array in start.arrays] == [4096, 4096]
    assert read.computations["condition"].instructions["three"].arguments == "3"


def test_parse_ignores_brackets_in_quotes():
    text = program(
        r'%x = f32[2]{0} custom-call(), custom_call_target="a, (b=\"{", calls=%main,'
        r' backend_config={ir = "ML\22, (", n = 1}',
        "ROOT %y = f32[] constant(2), sharding={replicated}",
    )
    first, second = parse(text).entry
    assert first.attributes["custom_call_target"] == r'"a, (b=\"{"'
    assert first.called == ("main",) and first.backend_config == {}
    assert second.attributes == {"sharding": "{replicated}"}


def test_parse_without_entry_raises():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule m\n")
