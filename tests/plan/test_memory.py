"""Memory estimates that the compiler does not provide, and parsing of its memory reports."""

import dataclasses

import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.hlo import analyze, parse
from jaxlc.hlo.collectives import Collective
from jaxlc.hlo.memory_dump import Dump, LiveTensor, maker, read
from jaxlc.plan.program import Memory, nccl_bytes, unified_host_bytes, workspace_bytes
from jaxlc.simulate.topology import topology
from tests.hlo.snippets import RING

GIB = 2**30
PEER = 32 * 12 * 2**20
MEMORY = Memory(
    device_capacity_bytes=100 * GIB,
    device_arguments_bytes=20 * GIB,
    parameters_bytes=7 * GIB,
    optimizer_bytes=13 * GIB,
    batch_bytes=0,
    device_temp_bytes=40 * GIB,
    workspace_bytes=10 * GIB,
    symmetric_used_bytes=3 * GIB,
    nvshmem_heap_bytes=4 * GIB,
    nccl_bytes=1 * GIB,
    scheduler_limit_bytes=57 * GIB,
    host_parameters_bytes=0,
    host_optimizer_bytes=0,
    host_bytes_per_device=9 * GIB,
    host_bytes_per_node=72 * GIB,
    staging_bytes_per_node=8 * GIB,
    host_capacity_per_node_bytes=100 * GIB,
    unified_host_bytes=0,
    is_unified_over_pcie=False,
    largest=(),
    memory_fraction=0.9,
    host_pool_bytes=64 * GIB,
    host_pools_per_node_bytes=0,
)


def test_memory_parts_count_against_capacity():
    assert MEMORY.device_peak_bytes == 75 * GIB
    assert MEMORY.pool_share == 0.90  # 95 minus the 5 outside of the pool
    assert MEMORY.fits


def test_workspace_that_the_program_contains_is_not_added():
    """On a GPU the compiler writes the size of the workspace into the program; see
    `workspace_bytes`.
    """
    backward = "__cudnn$fmhaSoftmaxBackward"
    for size, expected in ((0, 4 * 64 * 2 * 16 + 4 * 64 * 2), (1000, 0)):
        result = f"(bf16[1,64,2,16]{{3,2,1,0}}, u8[{size}]{{0}})"
        text = RING.replace('"__cudnn$fmhaSoftmax"', f'"{backward}"').replace(
            "core_attention/fwd", "transpose(x)/bwd"
        )
        before, after = text.split("%fmha = ")
        text = f"{before}%fmha = {result} custom-call({after.partition('custom-call(')[2]}"
        assert workspace_bytes(analyze(text)) == expected


def test_pool_share_without_other_buffers_is_usable_share():
    """In floating point, 95% of 80 GiB are 94.99999999999999 percent."""
    alone = dataclasses.replace(
        MEMORY, device_capacity_bytes=84_942_979_072, symmetric_used_bytes=0, nccl_bytes=0
    )
    assert dataclasses.replace(alone, nvshmem_heap_bytes=0).pool_share == 0.95


def test_fits_up_to_the_usable_bytes():
    """The share of the pool is rounded down; a step that needs 0.2 GiB less than the usable 95 GiB
    still fits.
    """
    full = dataclasses.replace(MEMORY, nccl_bytes=MEMORY.nccl_bytes + 20 * GIB - GIB // 5)
    assert (
        full.fits
        and full.excess_bytes <= 0
        and full.pool_bytes <= full.pool_share * full.device_capacity_bytes
    )
    above = dataclasses.replace(full, device_temp_bytes=full.device_temp_bytes + GIB)
    assert not above.fits and above.excess_bytes == pytest.approx(0.8 * GIB, rel=0.02)


@pytest.mark.parametrize("part, size", [
    ("device_arguments_bytes", 41), ("device_temp_bytes", 61), ("workspace_bytes", 31), ("symmetric_used_bytes", 25),
    ("nvshmem_heap_bytes", 25), ("nccl_bytes", 22), ("host_bytes_per_node", 83), ("staging_bytes_per_node", 19),
])  # fmt: skip
def test_fits_fails_for_each_part_alone(part, size):
    assert dataclasses.replace(MEMORY, **{part: (size - 1) * GIB}).fits
    assert not dataclasses.replace(MEMORY, **{part: size * GIB}).fits


def test_fits_fails_if_the_pinned_host_pool_is_too_small():
    """9 GiB per GPU; plans of older versions do not know the pool."""
    assert dataclasses.replace(MEMORY, host_pool_bytes=9 * GIB).fits
    assert not dataclasses.replace(MEMORY, host_pool_bytes=9 * GIB - 1).fits


def test_pool_is_resized_if_the_step_or_the_buffers_need_it():
    """The step needs 70 GiB of 100 in the pool, and the buffers outside leave it 90."""
    assert MEMORY.pool_settings == {}
    assert dataclasses.replace(MEMORY, memory_fraction=0.69).pool_settings == {
        "runtime.memory_fraction": 0.9
    }
    assert dataclasses.replace(MEMORY, nccl_bytes=2 * GIB).pool_settings == {
        "runtime.memory_fraction": 0.89
    }
    heap = dataclasses.replace(MEMORY, symmetric_used_bytes=4 * GIB + 1).pool_settings
    assert heap == {"runtime.nvshmem_heap_bytes": 5 * GIB}


def test_fits_with_unified_memory_counts_host_memory():
    # 135 in total, 5 of them outside of the pool
    large = dataclasses.replace(MEMORY, device_temp_bytes=100 * GIB)
    assert not large.fits and large.spilled_bytes == 0
    unified = dataclasses.replace(large, unified_host_bytes=50 * GIB)
    assert unified.fits and unified.pool_share == 1.40 and unified.spilled_bytes == 40 * GIB
    assert not dataclasses.replace(large, unified_host_bytes=39 * GIB).fits


def test_unified_host_bytes_only_on_coherent_hosts():
    on, pinned = RuntimeConfig(unified_memory=True), 64 * GIB
    gb200, gh200 = topology("gb200:1x8"), topology("gh200:4x1")
    assert unified_host_bytes(on, gb200, pinned) == (0.9 * 960 - 64) / 4 * GIB
    assert unified_host_bytes(on, gh200, pinned) == (0.9 * 480 - 64) * GIB
    assert unified_host_bytes(on, gh200, 500 * GIB) == 0
    half_more = RuntimeConfig(unified_memory=True, unified_memory_fraction=1.5)
    assert unified_host_bytes(half_more, gh200, pinned) == gh200.device.memory_bytes // 2
    assert unified_host_bytes(on, topology("h100:1x8"), 0) is None
    assert unified_host_bytes(RuntimeConfig(), gh200, 0) is None


def test_schedulers_limit_is_reached_before_memory_is_full():
    temporaries = int((0.95 * 57 - 3) * GIB)  # 3 more are symmetric
    assert not dataclasses.replace(MEMORY, device_temp_bytes=temporaries - 1).is_at_schedulers_limit
    near = dataclasses.replace(MEMORY, device_temp_bytes=temporaries + 1)
    assert near.is_at_schedulers_limit and near.fits


def collective(kind, groups, backend="DEFAULT"):
    return Collective(None, kind, groups, 0, backend, "", 1)


def test_nccl_bytes_count_communicators_and_peers():
    pairs, rings = ((0, 2), (2, 0)), ((0, 1, 2, 3), (4, 5, 6, 7))
    permute, gather = collective("collective-permute", pairs), collective("all-gather", rings)
    assert nccl_bytes([]) == 0
    # one communicator, and a ring
    assert nccl_bytes([gather, gather, collective("all-reduce", rings)]) == PEER
    assert nccl_bytes([gather, permute]) == 2 * PEER
    assert nccl_bytes([collective("all-to-all", rings)]) == 3 * PEER
    assert nccl_bytes([collective("all-to-all", (tuple(range(64)),))]) == 7 * PEER
    assert nccl_bytes([collective("collective-permute", pairs, "NVSHMEM")]) == 0


USAGE = """\
Memory Space: default (color=0)
Total bytes: 1000 (1000B)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list

Memory Space: vmem (color=1)
Total bytes: 300 (300B)

Memory Space: cmem (color=5)
Total bytes: 50 (50B)
"""
LIVE_RANGE = """\
  Live ranges:
    made{}:0-4
  Live ranges at 3 (peak):
    kept{}: 800 bytes (cumulative: 800 bytes)
    loop{1}: 400 bytes (cumulative: 1200 bytes)
    on_host{}: 1600 bytes (cumulative: 2800 bytes)
    loop{0}: 4 bytes (cumulative: 2804 bytes)
  Stack trace breakdown for peak usage: 2 804 bytes
    made (100.0%, total: 2 804 bytes, current: 0 bytes, remaining: 0 bytes)
"""
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%body (carry: (s32[], f32[100])) -> (s32[], f32[100]) {
  %carry = (s32[], f32[100]{0}) parameter(0)
  %count = s32[] get-tuple-element(%carry), index=0
  %old = f32[100]{0} get-tuple-element(%carry), index=1
  %next = s32[] add(%count, %count), metadata={op_name="jit(step)/while/body/add"}
  %made = f32[100]{0} negate(%old), metadata={op_name="jit(step)/while/body/neg"}
  %copied = f32[100]{0} copy(%made)
  ROOT %round = (s32[], f32[100]{0}) tuple(%next, %copied)
}

ENTRY %main (kept: f32[200], on_host: f32[400]) -> f32[100] {
  %kept = f32[200]{0} parameter(0), metadata={op_name="state.params"}
  %on_host = f32[400]{0:S(5)} parameter(1)
  %first = (s32[], f32[100]{0}) custom-call(), custom_call_target="first"
  %loop = (s32[], f32[100]{0}) while(%first), condition=%done, body=%body
  ROOT %result = f32[100]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture
def dump(tmp_path) -> Dump:
    (tmp_path / "module_0001.jit_step-memory-usage-report.txt").write_text(USAGE)
    (tmp_path / "module_0001.jit_step-live-range.txt").write_text(LIVE_RANGE)
    (tmp_path / "module_0001.jit_step.sm_9.0_gpu_after_optimizations.txt").write_text(PROGRAM)
    (tmp_path / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(
        "001: kCustomKernel [source | sink]\n"
    )
    (tmp_path / "module_0001.jit_step.thunk_metadata.txt").write_text(
        'thunk_metadata {\n  thunk_info {\n    profile_annotation: "made"\n    thunk_id: 1\n  }\n}\n'
    )
    return read(tmp_path)


def test_dump_symmetric_bytes_exclude_device_and_host(dump):
    assert dump.bytes_by_space == {0: 1000, 1: 300, 5: 50}
    assert dump.symmetric_bytes == 300
    assert dump.thunks == {"made": "kCustomKernel"}


def test_dump_largest_names_the_instruction_that_made_it(dump):
    assert dump.largest(2) == (
        LiveTensor(800, "f32[200]", "state.params"),
        LiveTensor(400, "f32[100]", "jit(step)/while/body/neg"),
    )


def test_maker_of_a_carry_is_in_the_previous_round():
    program = parse(PROGRAM)
    body = program.computations["body"]
    assert maker(program, body, body.instructions["carry"], (0,)) == "jit(step)/while/body/add"
    assert (
        maker(program, program.entry, program.entry.instructions["result"], ())
        == "jit(step)/while/body/neg"
    )
