import pytest

from jaxlc.hlo import analyze
from jaxlc.hlo.collectives import mesh_axes
from tests.hlo.snippets import RING, program


def one(kind: str, attributes: str):
    text = program(
        "%x = f32[1024]{0} constant({...})", f"ROOT %c = f32[1024]{{0}} {kind}(%x), {attributes}"
    )
    (collective,) = analyze(text).collectives
    return collective


def test_collectives_in_loop_count_every_round():
    first, second = analyze(RING).collectives
    assert first.kind == "collective-permute" and first.times == second.times == 3
    assert first.groups == ((0, 1), (1, 2), (2, 3), (3, 0)) and first.sent_bytes == 4096
    assert (first.backend, first.mode) == ("NVSHMEM", "X") and second.backend == "DEFAULT"


@pytest.mark.parametrize("written, groups", [
    ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
    ("[2,2]<=[4]", ((0, 1), (2, 3))),
    ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
    ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
    ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
    ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
    ("mesh['a'=1,'b'=4,'c'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'c'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ("mesh['a'=2,'b'=2, device_ids=([2,2]T(1,0))] {'b'}", ((0, 2), (1, 3))),
])  # fmt: skip
def test_replica_groups_in_all_notations(written, groups):
    assert one("all-gather", f"replica_groups={written}, dimensions={{0}}").groups == groups


def test_replica_groups_in_unknown_notation_raise():
    with pytest.raises(ValueError, match="unknown notation"):
        one("all-gather", "replica_groups=?")


@pytest.mark.parametrize("kind, sent", [
    ("all-gather", 3 * 4096), ("reduce-scatter", 3072), ("all-to-all", 3072), ("all-reduce", 6144),
])  # fmt: skip
def test_sent_bytes_of_one_device_in_four(kind, sent):
    assert one(kind, "replica_groups={{0,1,2,3}}").sent_bytes == sent


def test_mesh_axes_are_those_that_differ_in_groups():
    shape = dict(data=2, context=2, tensor=3)
    assert mesh_axes(((0, 3), (1, 4)), shape) == ("context",)
    assert mesh_axes(((0, 1, 2), (3, 4, 5)), shape) == ("tensor",)
    assert mesh_axes(((0, 3, 6, 9), (1, 4, 7, 10)), shape) == ("data", "context")
