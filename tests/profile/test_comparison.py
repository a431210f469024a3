"""Traces by class. The GPU traces are miniatures with JAX's structure; the CPU trace is in
train/test_run_api.py.
"""

import dataclasses

import jax
import pytest
from jax.profiler import ProfileData

from jaxlc.cli import main_of
from jaxlc.config import defaults, load, to_dict
from jaxlc.config.flops import document_pairs
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.profile import comparison, trace_events
from jaxlc.profile.comparison import GAP, Activity, Estimate, TracedRun, predict
from jaxlc.profile.trace_events import (
    ATTENTION,
    COMMUNICATION,
    HOST_COPY,
    MATMUL,
    OTHER,
    EventClasses,
    TraceEvent,
)
from jaxlc.simulate.roofline import two_digits
from jaxlc.train.step_profiler import PAIRS
from tests.hlo.snippets import RING, program
from tests.plan.sample_plan import PREDICTED
from tests.profile.xspace import Event, profile_data
from tests.simulate.test_timeline import ATTENTION as KERNELS

main = main_of("profile")

pytestmark = pytest.mark.jax_version

COMPUTE, COLLECTIVES, COPIES = "Stream #13(Compute)", "Stream #14(Compute)", "Stream #15(MemcpyH2D)"
ROUND = (  # of the ring in the snippet, in microseconds
    (COMPUTE, "cudnn_fmha_kernel", 0, 10, "fmha"),
    (COLLECTIVES, "ncclDevKernel_SendRecv", 1, 9, "hop-start"),  # hidden by attention
    (COLLECTIVES, "ncclDevKernel_SendRecv", 10, 15, "late"),  # exposed, and named without "-start"
    # not in the program; overlaps with the permute by 1 us
    (COMPUTE, "nvjet_hsh_128x256", 14, 18, "gemm.1"),
    (COPIES, "MemcpyH2D", 17, 20, ""),  # 2 us exposed
)
ROUND_US = 21  # 1 us without any event
NUM_ROUNDS, NUM_STEPS = 6, 2


def gpu_trace() -> trace_events.Trace:
    events = [
        Event(
            line,
            name,
            start + i * ROUND_US,
            end + i * ROUND_US,
            dict(hlo_op=op, hlo_module="jit_f", name=""),
        )
        for i in range(NUM_ROUNDS)
        for line, name, start, end, op in ROUND
    ]
    # not a stream
    derived = Event("XLA Ops", "fmha", 0, 1e3, dict(hlo_op="fmha", hlo_module="jit_f"))
    steps = [Event("python", "train", 0, 1, dict(step_num=step)) for step in (10, 11)]
    return trace_events.trace_from(
        profile_data(
            {"/device:GPU:0": [*events, derived], "/device:GPU:1": events, "/host:CPU": steps}
        ),
        "miniature",
    )


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 6)


def test_gpu_trace_is_partitioned_into_classes():
    result = comparison.compare(gpu_trace(), TracedRun(program=analyze(RING)), None)
    rounds = NUM_ROUNDS / NUM_STEPS
    assert (result.num_devices, result.num_steps) == (2, 2)
    assert {row.name: round(1e6 * row.measured_seconds, 6) for row in result.classes} == {
        "attention": 10 * rounds,
        "matrix products": 4 * rounds,
        "other kernels": 0,
        "host copies by kernels": 0,
        "exposed communication": 4 * rounds,
        "exposed host copies": 2 * rounds,
        "gaps between kernels": 1 * (NUM_ROUNDS - 1) / NUM_STEPS,
    }
    assert sum(row.measured_seconds for row in result.classes) == pytest.approx(result.step_seconds)
    assert microseconds(result.communication_seconds) == 13 * rounds
    assert microseconds(result.host_copy_seconds) == 3 * rounds
    # the product, whose class is known by its name
    assert microseconds(result.unknown_seconds) == 4 * rounds
    hop, late = result.ring_steps
    assert (hop.instruction, hop.pass_name, hop.runs_per_step) == ("hop-start", "forward", 3)
    assert microseconds(hop.measured_seconds) == 8 and hop.exposed_seconds == 0
    assert (
        microseconds(late.measured_seconds) == 5
        and microseconds(late.exposed_seconds) == 4 * rounds
    )
    page = str(result)
    assert "late-start" in page and "no estimate" in page and "12.00" not in page


def test_gpu_trace_without_program_has_classes_by_name():
    with_program, without = (
        comparison.compare(gpu_trace(), TracedRun(program=known), None)
        for known in (analyze(RING), None)
    )
    assert without.classes == with_program.classes and without.ring_steps == ()


def test_estimates_are_printed_as_medians_with_two_digits():
    """A median of 80 ms, four times the point estimate."""
    predicted = dataclasses.replace(
        PREDICTED, step_seconds=0.02, step_seconds_interval=(0.04, 0.16)
    )
    predicted = dataclasses.replace(predicted, seconds_by_kind={"attention": 0.012345})
    result = comparison.compare(
        gpu_trace(), TracedRun(), Estimate(prediction=predicted, model=None)
    )
    page = str(result)
    assert "estimated step: about 80 ms (40 to 160), median" in page
    (attention,) = (line.split()[3:] for line in page.splitlines() if line.startswith("attention"))
    assert attention == ["49", two_digits(30e-6 / (4 * 0.012345))]
    assert result.to_json()["classes"][0]["estimated_seconds"] == 0.012345


def test_trace_without_step_ranges_needs_number_of_steps():
    trace = gpu_trace()._replace(steps=())
    with pytest.raises(UserError, match="set --steps"):
        comparison.compare(trace, TracedRun(), None)
    assert comparison.compare(trace, TracedRun(), None, num_steps=3).num_steps == 3
    with pytest.raises(UserError, match="invalid number of traced steps -1"):
        comparison.compare(trace, TracedRun(), None, num_steps=-1)


def test_time_use_counts_each_instant_once():
    use = comparison.measure(
        [
            Activity(COMMUNICATION, "a", 0, 4),
            Activity(COMMUNICATION, "b", 1, 3),
            Activity(OTHER, "", 2, 5),
            Activity(ATTENTION, "", 4, 6),
            Activity(HOST_COPY, "", -1, 20),
        ],
        0,
        10,
    )
    assert use.by_class == {COMMUNICATION: 2, OTHER: 2, ATTENTION: 2, HOST_COPY: 4}
    assert use.exposed_by_collective == {"a": 2, "b": 1}
    assert use.busy_by_class == {COMMUNICATION: 4, OTHER: 3, ATTENTION: 2, HOST_COPY: 10}
    assert comparison.measure([], 0, 3).by_class == {GAP: 3}


@pytest.mark.parametrize(
    ("name", "instruction", "op_name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "all-gather-start.3", "", COMMUNICATION),
        ("MemcpyP2P", "collective-permute-start.1", "", COMMUNICATION),
        ("MemcpyD2H", "copy-start.2", "", HOST_COPY),
        ("MemcpyD2D", "copy.2", "", OTHER),
        ("nvjet_hsh_256x128", "custom-call.4", "", MATMUL),
        ("gemm_fusion_dot_12", "gemm_fusion_dot.12", "", MATMUL),
        ("cudnn_generated_fort_native_sdpa_sm90", "custom-call.9", "", ATTENTION),
        (
            "flash_forward",
            "custom-call.8",
            "jit(f)/attention/core_attention/pallas_call",
            ATTENTION,
        ),
        ("loop_add_fusion", "loop_add_fusion", "jit(f)/mlp/add", OTHER),
        ("while.9", "while.9", "", None),
    ],
)
def test_class_of_event_without_program(name, instruction, op_name, kind):
    event = TraceEvent(name, instruction, "jit_f", op_name, 0, 1)
    assert EventClasses(None).class_of(event) == kind


def test_host_slice_run_by_a_kernel_has_its_own_class():
    text = program(
        "%weights = f32[4,8]{1,0:S(5)} parameter(0)",
        "%i = s32[] parameter(1)",
        "%slice = f32[1,8]{1,0} dynamic-slice(%weights, %i, %i), dynamic_slice_sizes={1,8}",
        "ROOT %result = f32[] constant(1)",
    )
    classes = EventClasses(analyze(text))
    kernel = TraceEvent("wrapped_dynamic_slice", "slice", "m", "", 0, 1)
    assert classes.class_of(kernel) == "host copies by kernels"
    assert classes.class_of(kernel._replace(name="MemcpyH2D")) == "host copies"


def test_kernel_of_a_cuda_graph_is_known_by_its_name():
    text = program(
        "%x = f32[8,8]{1,0} parameter(0)",
        "%gemm_fusion_dot.2 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT %result = f32[] constant(1)",
    )
    classes = EventClasses(analyze(text))
    event = TraceEvent("gemm_fusion_dot_2", "command_buffer", "m", "", 0, 1)
    assert (
        classes.instruction_of(event) == "gemm_fusion_dot.2" and classes.class_of(event) == MATMUL
    )
    assert classes.instruction_of(event._replace(name="other")) is None


EXPERTS_KERNEL = (
    '%experts = bf16[8,8]{1,0} custom-call(%x, %x, %w), custom_call_target="mosaic_gpu_v2",'
    ' metadata={op_name="jit(f)/mlp/experts/pallas_call"}'
)
# kernels of the H100's traces (benchmarks/2026-11-26-h100.jsonl, and of experts with Mosaic)
GRAPH = (
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0",
        ATTENTION,
    ),
    ("body_mosaic_gpu_kernel", MATMUL),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", MATMUL),
    ("gemm_fusion_dot_842", MATMUL),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", MATMUL),
    ("input_scatter_fusion_2", OTHER),
    ("memcpy128", OTHER),
)


@pytest.mark.parametrize("instruction", ["command_buffer", "call.7", ""])
def test_kernels_of_cuda_graphs_have_classes_by_name(instruction):
    """The instruction of such a kernel is the graph, which some versions of XLA have as a call, or
    nothing.
    """
    text = program(
        "%x = bf16[8,8]{1,0} parameter(0)",
        "%w = bf16[2,8,8]{2,1,0} parameter(1)",
        EXPERTS_KERNEL,
        "%call.7 = bf16[8,8]{1,0} call(%x), to_apply=%command_buffer",
        "ROOT %result = f32[] constant(1)",
        more="%command_buffer (p: bf16[8,8]) -> bf16[8,8] {\n  ROOT %p = bf16[8,8]{1,0} parameter(0)\n}\n",
    )
    stats = dict(hlo_op=instruction, hlo_module="jit_f", name="")
    events = [Event(COMPUTE, name, 10 * i, 10 * i + 10, stats) for i, (name, _) in enumerate(GRAPH)]
    trace = trace_events.trace_from(profile_data({"/device:GPU:0": events}), "miniature")
    for known in (analyze(text), None):
        result = comparison.compare(trace, TracedRun(program=known), None, num_steps=1)
        seconds = {row.name: microseconds(row.measured_seconds) for row in result.classes}
        for kind in (ATTENTION, MATMUL, OTHER):
            assert seconds[kind] == 10 * sum(x == kind for _, x in GRAPH), (kind, known)
        assert ("such as those of CUDA graphs: their class follows" in str(result)) == (
            known is not None
        )
    assert (
        microseconds(
            comparison.compare(
                trace, TracedRun(program=analyze(text)), None, num_steps=1
            ).unknown_seconds
        )
        == 70
    )


def test_mosaic_kernels_have_the_class_of_the_program():
    """Of experts or of attention, if it has only one of them; otherwise JAX names those of experts
    "body".
    """
    arrays = ("%x = bf16[8,8]{1,0} parameter(0)", "%w = bf16[2,8,8]{2,1,0} parameter(1)")
    experts = EventClasses(
        analyze(program(*arrays, EXPERTS_KERNEL, "ROOT %result = f32[] constant(1)"))
    )
    event = TraceEvent("kernel_mosaic_gpu_kernel", "", "jit_f", "", 0, 1)
    body = event._replace(name="body_mosaic_gpu_kernel")
    assert [experts.class_of(x) for x in (event, body)] == [MATMUL, MATMUL]
    assert [EventClasses(None).class_of(x) for x in (event, body)] == [ATTENTION, MATMUL]
    scoped = body._replace(op_name="jit(f)/attention/core_attention/mosaic_forward/pallas_call")
    assert EventClasses(None).class_of(scoped) == ATTENTION


def test_estimate_counts_the_pairs_of_the_traced_steps():
    """Documents with a quarter of the pairs take a quarter of the time of attention."""
    config = defaults()
    config.model.attention.num_heads, config.data.seq_len = 32, 4096
    config = load(config)
    whole = config.train.global_batch_size * document_pairs(config.model, [4096])
    run = TracedRun(
        program=analyze(program(*KERNELS, "ROOT %result = f32[] constant(1)")),
        about=dict(config=to_dict(config), device_kind="NVIDIA H100 80GB HBM3", num_devices=1),
    )
    packed = dataclasses.replace(run, about=run.about | {PAIRS: whole / 4})
    one, quarter = (
        predict(x, plan="", topology_name="h100:1x1", constants="") for x in (run, packed)
    )
    assert (one.pairs_share, quarter.pairs_share) == (1, 0.25)
    seconds = [estimate.prediction.seconds_by_kind["attention"] for estimate in (one, quarter)]
    # the start of a kernel takes as long
    assert seconds[1] == pytest.approx(seconds[0] / 4, abs=2e-6)
    assert "estimated attention: 25.0% of the pairs" in str(
        comparison.compare(gpu_trace(), packed, quarter)
    )


def test_profile_command_reports_missing_and_damaged_traces(tmp_path, capsys):
    assert main(["jaxlc profile", str(tmp_path)]) == 2
    assert "no trace" in capsys.readouterr().err
    (tmp_path / "a.xplane.pb").write_bytes(b"not a trace")
    assert main(["jaxlc profile", str(tmp_path)]) == 2
    assert "cannot read the trace" in capsys.readouterr().err


def test_trace_without_device_events_raises(tmp_path):
    with jax.profiler.trace(tmp_path):
        pass
    with pytest.raises(UserError, match="no events of devices"):
        trace_events.read(trace_events.find(tmp_path))


def test_device_without_events_does_not_count():
    idle = 'planes { name: "/device:GPU:1" lines { name: "Stream #13(Compute)" } }'
    busy = idle.replace("GPU:1", "GPU:0").replace(" } }", " events { duration_ps: 5 } } }")
    trace = trace_events.trace_from(ProfileData.from_text_proto(f"{idle}\n{busy}"), "miniature")
    assert comparison.compare(trace, TracedRun(), None, num_steps=1).num_devices == 1


def test_comparison_converts_to_plain_json():
    result = comparison.compare(gpu_trace(), TracedRun(program=analyze(RING)), None)
    values = result.to_json()
    assert values == dataclasses.asdict(result) and values["classes"][0]["name"] == "attention"
