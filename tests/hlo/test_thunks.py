"""Thunks of a program, and the host copies that are kernels."""

import pytest

from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.hlo.memory_dump import Launches, count_launches, kinds, parse_commands
from jaxlc.step.verify_compiled import check_host_copies
from tests.hlo.snippets import program

# As JAX 0.12 writes them, of a loop that reads one slice of an array in host memory by a copy, and one by a kernel. In
# 0.10.1 the copy is directly below the start.
SEQUENCE = """\
005: kCopy         [source        | next=007 (1) ] MemcpyDeviceToDeviceCmd
062: kWhile        [prev=051 (11) | next=171 (10)]   
condition:
    063: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    070: kAsyncStart   [source        | next=146 (62)] stream=computation_stream[2], async_id=94784693180112
        069: kDynamicSliceFusion [source | sink] params=1, results=1
            068: kCopy [source | sink] kCopy
    072: kAsyncStart   [source        | next=147 (62)] stream=computation_stream[3], async_id=94784659173984
        071: kCustomKernel [source | sink] wrapped_dynamic_slice grid: [16, 1, 1] threads: [128, 1, 1]
    080: kAsyncDone [prev=070 (1) | next=081 (1)] async_id=94784693180112
    000: kCommandBuffer [prev=080 (1) | next=090 (1)]
        081: kCustomKernel [prev=080 (1) | sink] loop_add_fusion grid: [1, 1, 1] threads: [128, 1, 1]
        082: kCopy     [source | sink] MemcpyDeviceToDeviceCmd
    090: kConditional  [prev=000 (1) | sink]
      branch_0:
        091: kMemset   [source | sink]
      branch_1:
        092: kCuDnn    [source | sink] CuDnnCmd
        093: kCopy     [source | sink] MemcpyDeviceToDeviceCmd
"""  # noqa: W291
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n'
    f'  thunk_kind: "not read"\n}}\n'
    for number, name in {
        5: "copy.420", 62: "loop", 70: "read-start.55.0", 68: "slice.1", 69: "wrapped_dynamic-slice.9",
        72: "read-start.56.0", 71: "wrapped_dynamic-slice.10", 80: "read-done.55.0", 81: "loop_add_fusion.12",
    }.items()
)  # fmt: skip
LOOP = """
%slice_computation (stack.1: f32[4,8], i.1: s32[]) -> f32[1,8] {
  %stack.1 = f32[4,8]{1,0:S(5)} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%stack.1, %i.1, %i.1), dynamic_slice_sizes={1,8}
}

%body (carry: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %carry = (s32[], f32[4,8]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %stack = f32[4,8]{1,0:S(5)} get-tuple-element(%carry), index=1
  %read-start.55.0 = ((f32[4,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%stack, %i), calls=%slice_computation
  %read-start.56.0 = ((f32[4,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%stack, %i), calls=%slice_computation, metadata={op_name="jit(step)/while/body/fetch"}
  %read-done.55.0 = f32[1,8]{1,0} fusion-done(%read-start.55.0)
  %read-done.56.0 = f32[1,8]{1,0} fusion-done(%read-start.56.0)
  ROOT %next = (s32[], f32[4,8]{1,0:S(5)}) tuple(%i, %stack)
}

%condition (carry.1: (s32[], f32[4,8])) -> pred[] {
  %carry.1 = (s32[], f32[4,8]{1,0:S(5)}) parameter(0)
  ROOT %less = pred[] compare(%carry.1, %carry.1), direction=LT
}
"""  # noqa: E501
PROGRAM = program(
    "%x = (s32[], f32[4,8]{1,0:S(5)}) parameter(0)",
    "%loop = (s32[], f32[4,8]{1,0:S(5)}) while(%x), condition=%condition, body=%body,"
    ' backend_config={"known_trip_count":{"n":"4"}}',
    "ROOT %end = s32[] constant(0)",
    more=LOOP,
)


def test_parse_thunks_of_async_start_gives_the_kind_that_runs():
    kind = kinds(parse_commands(SEQUENCE, METADATA))
    assert kind["read-start.55.0"] == "kCopy" and kind["read-start.56.0"] == "kCustomKernel"
    assert (kind["copy.420"], kind["loop"], kind["loop_add_fusion.12"]) == (
        "kCopy",
        "kWhile",
        "kCustomKernel",
    )
    assert kind["wrapped_dynamic-slice.9"] == "kCopy"
    assert kind["read-done.55.0"] == "kAsyncDone" and "unknown" not in kind


def test_count_launches_of_loop_counts_rounds_graphs_and_synchronizations():
    """A round has two reads, a graph of two operations, and a conditional whose longest branch has
    two.
    """
    commands = parse_commands(
        SEQUENCE.replace("branch_0", "false_branch").replace("branch_1", "true_branch"), METADATA
    )
    assert count_launches(analyze(PROGRAM), commands) == Launches(1 + 4 * 6, 1 + 4 * 5, 4, 4)
    counted = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    counted = counted.replace("ROOT %less", "%four = s32[] constant(4)\n  ROOT %less")
    # the condition runs once more than the body
    rounds = Launches(1 + 5 + 4 * 6, 1 + 5 + 4 * 5, 4, 4 + 5)
    assert count_launches(analyze(counted), commands) == rounds


def test_check_host_copies_with_a_kernel_in_a_loop_raises():
    thunks = kinds(parse_commands(SEQUENCE, METADATA))
    with pytest.raises(
        UserError,
        match=r"^1 of 2 host copies in loops .* are kernels .*: jit\(step\)/while/body/fetch;",
    ):
        check_host_copies(analyze(PROGRAM, thunks))
    check_host_copies(analyze(PROGRAM, dict.fromkeys(thunks, "kCopy")))
    fixed = PROGRAM.replace(
        "%i = s32[] get-tuple-element(%carry), index=0", "%i = s32[] constant(3)"
    )
    check_host_copies(analyze(fixed, thunks))
    check_host_copies(analyze(PROGRAM))  # unknown thunks
    check_host_copies(analyze(PROGRAM.replace('"n":"4"', '"n":"0"'), thunks))  # never runs
