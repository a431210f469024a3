"""Estimated times: of small programs against values calculated manually, of a real step against
bounds.
"""

import dataclasses
import math

import pytest

from benchmarks.attention_overlap import compile_step, two_layers
from jaxlc.config import Config, defaults, load
from jaxlc.config.flops import StepFlops, product_entries
from jaxlc.core import scopes
from jaxlc.core.errors import UserError
from jaxlc.core.hardware import Efficiency
from jaxlc.hlo import analyze
from jaxlc.hlo.kernel_costs import AttentionKernelCall, Sizes
from jaxlc.plan import program as plan_program
from jaxlc.plan.figures import timeline_figure
from jaxlc.simulate import roofline
from jaxlc.simulate import roofline as roofline_module
from jaxlc.simulate.packed_work import AttentionWork
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import TimeModel, visible_fraction
from jaxlc.simulate.timeline import (
    Event,
    Prediction,
    _merged,
    attention_op,
    events,
    layer,
    layer_timeline,
    predict,
)
from jaxlc.simulate.topology import topology
from tests.helpers import png_size
from tests.hlo.snippets import FORWARD, program

# No latencies or curves, and efficiency 1: times are bytes over an H100's bandwidths, or FLOPs over
# its peak.
IDEAL = Roofline(
    attention_share={"cudnn": Efficiency(1.0, 1.0)},
    matmul_share=1.0,
    memory_share=1.0,
    link_share=1.0,
    host_share=1.0,
    nvlink_latency_seconds=0,
    nvlink_step_seconds=0,
    network_latency_seconds=0,
    network_step_seconds=0,
    host_latency_seconds=0,
    kernel_gap_seconds=0,
    synchronization_seconds=0,
    attention_half_keys_masked=0,
    attention_half_keys_unmasked=0,
    matmul_ramp_seconds=0,
    matmul_wave_weight=0,
    nccl_multiprocessors=0,
)
HOP_BYTES = 450_000_000  # 1 ms on NVLink, 9 ms on the network
HOP = 1e-3
SQUARE = 8192
DOT = 2 * SQUARE**3 / 989.4e12  # 1.11 ms
COPIED = 209_520_000  # floats that device memory reads and writes in 0.5 ms
COPY = 5e-4

INPUTS = (
    "%x = bf16[225000000]{0} parameter(0)",
    f"%a = bf16[{SQUARE},{SQUARE}]{{1,0}} parameter(1)",
    f"%c = f32[{2 * COPIED}]{{0}} parameter(2)",
    "%h = bf16[225000000]{0:S(5)} parameter(3)",
)
PAIRS = "source_target_pairs={{0,1},{1,0}}"
END = "ROOT %end = s32[] constant(0)"


def permute_start(name: str = "s", pairs: str = PAIRS) -> str:
    return f"%{name} = (bf16[225000000]{{0}}, bf16[225000000]{{0}}) collective-permute-start(%x), {pairs}"


def permute_done(name: str = "s") -> str:
    return f"%{name}.d = bf16[225000000]{{0}} collective-permute-done(%{name})"


def dot(name: str = "k") -> str:
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} = bf16[{SQUARE},{SQUARE}]{{1,0}} dot(%a, %a), {dims}"


def copy(name: str = "m") -> str:
    return f"%{name} = f32[{COPIED}]{{0}} slice(%c), slice={{[0:{COPIED}]}}"


def predicted(
    *lines: str, more: str = "", gpus: str = "h100:1x2", roofline: Roofline = IDEAL, **settings
) -> Prediction:
    config = defaults()
    config.model.attention.num_heads, config.data.seq_len = 32, 4096  # those of ATTENTION
    config.update_from_flattened_dict(settings)
    analyzed = analyze(program(*INPUTS, *lines, END, more=more))
    return predict(analyzed, TimeModel(topology(gpus), load(config), roofline))


def approx(seconds: float):
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


def approx_interval(low: float, high: float):
    return pytest.approx((low, high), rel=1e-9)


def test_kernel_time_is_maximum_of_compute_and_memory():
    estimate = predicted(dot(), copy())
    assert estimate.seconds_by_kind == {
        "other kernels": approx(COPY),
        "matrix products": approx(DOT),
    }
    assert estimate.seconds_by_resource == {"HBM": approx(COPY), "compute": approx(DOT)}
    assert estimate.bound_by == "compute"


def test_step_interval_has_scale_and_spread_of_constants():
    constants = dataclasses.replace(IDEAL, time_scale=1.5, time_spread=math.log(2))
    assert predicted(dot(), roofline=constants).step_seconds_interval == (
        approx(0.75 * DOT),
        approx(3 * DOT),
    )


def test_step_interval_is_built_from_its_parts():
    """Kernels of an H100 were measured; exposed communication, kernels without a measurement and
    other GPUs have the interval of published runs. Hidden communication moves the upper end only.
    """
    published, measured = roofline.PUBLISHED, roofline.time_interval(*roofline.MEASURED["h100"])
    assert published.low < measured.low and measured.high < published.high
    assert predicted(dot()).interval == approx_interval(*measured)
    assert predicted(dot(), gpus="h200:1x2").interval == approx_interval(*published)

    hidden = predicted(permute_start(), *map(dot, "ab"), permute_done())
    late = (published.high - 1) * HOP / (2 * DOT)
    assert hidden.interval == approx_interval(measured.low, measured.high + late)

    exposed = predicted(permute_start(), permute_done())
    assert exposed.interval == approx_interval(*published)
    half = predicted(permute_start(), permute_done(), dot())
    share = HOP / (HOP + DOT)
    mixed = [share * x + (1 - share) * y for x, y in zip(published, measured, strict=True)]
    assert half.interval == approx_interval(*mixed)


def test_step_interval_of_attention_without_a_measurement_is_published(monkeypatch):
    measured = predicted(*ATTENTION)
    monkeypatch.setattr("jaxlc.simulate.timeline.MEASURED_ATTENTION", dict(cudnn=64))
    assert predicted(*ATTENTION).interval == approx_interval(*roofline.PUBLISHED)
    assert measured.interval != approx_interval(*roofline.PUBLISHED)


def test_overhead_excludes_attention_and_own_matrix_products(monkeypatch):
    """Half of the FLOPs of four products are the model's, the others are recomputed."""
    num_gpus, own_products = 2, 2
    own = StepFlops(num_gpus * own_products * 2.0 * SQUARE**3, 1.0)
    monkeypatch.setattr(Config, "step_flops", lambda *_: own)
    named = (
        copy("n")
        + ', metadata={op_name="jit(step)/while/body/attention/core_attention/ring_step/add"}'
    )
    lines = (permute_start(), copy(), named, permute_done(), *(dot(f"k{i}") for i in range(4)))
    estimate = predicted(*lines, *ATTENTION, gpus="h100:2x1")
    assert estimate.overhead_seconds == {
        "network": approx(9 * HOP - 2 * COPY),
        "recomputed matrix products": approx(2 * DOT),
        "ring_step kernels": approx(COPY),
        "kernels without a scope": approx(COPY),
    }
    attention = estimate.seconds_by_kind["attention"]
    assert estimate.overhead_share == approx(1 - (attention + 2 * DOT) / estimate.step_seconds)


def test_recomputed_products_of_adapters_are_those_beyond_the_model():
    """Frozen weights have no gradients, which would be a third of the model's products."""
    config = defaults()
    config.lora.rank, config.model.attention.num_heads, config.data.seq_len = 8, 32, 4096
    own_flops = load(config).step_flops(0).products / 2  # of each of two GPUs
    overhead = predicted(dot(), **{"lora.rank": 8}).overhead_seconds
    assert overhead == {
        "recomputed matrix products": approx(DOT * (1 - own_flops / (2 * SQUARE**3)))
    }


def test_overhead_of_experts_excludes_products_of_routed_rows():
    """4,096 tokens with 2 of 8 experts: 8,192 rows in blocks of 256, and 7 more blocks for padding;
    39 in all.
    """

    def scoped(line: str, scope: str) -> str:
        return f'{line}, metadata={{op_name="jit(step)/while/body/mlp/{scope}/dot"}}'

    lines = (
        *(scoped(dot(f"k{i}"), scopes.EXPERTS) for i in range(3)),
        *(scoped(copy(scope), scope) for scope in (scopes.EXPERTS, scopes.ROUTER)),
        scoped(dot("r"), scopes.ROUTER),
    )
    experts = {
        "model.experts.num_experts": 8,
        "model.experts.experts_per_token": 2,
        "model.experts.ffn_dim": 64,
    }
    estimate = predicted(*lines, dot(), copy(), **experts)
    assert estimate.experts_overhead_seconds == approx(2 * COPY + DOT + 7 / 39 * 3 * DOT)
    assert predicted(dot(), copy()).experts_overhead_seconds == 0


def test_short_transfer_is_hidden_by_kernels():
    estimate = predicted(permute_start(), dot(), permute_done())
    assert estimate.step_seconds == approx(DOT)
    assert estimate.exposed_communication_seconds == 0
    assert estimate.communication_seconds == approx(HOP)


def test_nccl_collective_takes_multiprocessors_from_kernels():
    """Half of the multiprocessors for 1 ms: the product has done 0.5 ms of its 1.11 ms, and the
    copy is not slower.
    """
    half = dataclasses.replace(IDEAL, nccl_multiprocessors=66)
    estimate = predicted(permute_start(), dot(), copy(), permute_done(), roofline=half)
    assert estimate.step_seconds == approx(HOP + (DOT - 0.5 * HOP) + COPY)
    assert estimate.overhead_seconds["SMs of NCCL"] == approx(0.5 * HOP)
    assert estimate.step_seconds == approx(sum(estimate.seconds_by_kind.values()))
    later = predicted(copy(), permute_start(), dot(), permute_done(), roofline=half)
    assert later.step_seconds == approx(estimate.step_seconds)
    nvshmem = (
        permute_start() + ', backend_config={"collective_backend_config":{"backend":"NVSHMEM"}}'
    )
    assert predicted(nvshmem, dot(), copy(), permute_done(), roofline=half).step_seconds == approx(
        DOT + COPY
    )


def test_long_transfer_exposes_the_difference():
    # over the network
    estimate = predicted(permute_start(), copy(), dot(), permute_done(), gpus="h100:2x1")
    assert estimate.step_seconds == approx(9 * HOP)
    assert estimate.exposed_communication_seconds == approx(9 * HOP - DOT - COPY)
    assert estimate.bound_by == "network"


def test_kernel_after_done_does_not_hide_transfer():
    estimate = predicted(permute_start(), permute_done(), dot())
    assert estimate.step_seconds == approx(HOP + DOT)


def test_synchronous_transfer_is_exposed():
    notes = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    estimate = predicted(permute_start() + notes, dot(), permute_done())
    assert estimate.exposed_communication_seconds == approx(HOP)


def test_transfers_of_all_links_run_one_after_the_other():
    """The second starts when half of the first is done, and waits for the rest of it; then a dot
    hides it.
    """
    estimate = predicted(
        permute_start("s"), copy(), permute_start("t"), permute_done("s"), dot(), permute_done("t")
    )
    assert estimate.step_seconds == approx(HOP + DOT)
    both = predicted(
        permute_start("s"), permute_start("t"), copy(), permute_done("s"), permute_done("t")
    )
    assert both.step_seconds == approx(2 * HOP)
    outside = permute_start("t", "source_target_pairs={{0,2},{2,0}}")
    apart = predicted(
        permute_start("s"), outside, permute_done("s"), permute_done("t"), gpus="h100:2x2"
    )
    # NVLink, then the network: both on XLA's stream of collectives
    assert apart.step_seconds == approx(10 * HOP)
    behind = predicted(
        outside, permute_start("s"), permute_done("s"), dot(), permute_done("t"), gpus="h100:2x2"
    )
    assert behind.exposed_communication_seconds == approx(10 * HOP)  # 9 of them for the network's


LOOP = """
%body (carry: (s32[])) -> (s32[]) {{
  %carry = (s32[]) parameter(0)
{lines}
  ROOT %next = (s32[]) tuple(%carry)
}}

%condition (carry.1: (s32[])) -> pred[] {{
  %carry.1 = (s32[]) parameter(0)
  ROOT %less = pred[] compare(%carry.1, %carry.1), direction=LT
}}
"""
WHILE = '%l = (s32[]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"ROUNDS"}}'


def looped(
    *lines: str, rounds: int, before: tuple[str, ...] = (), after: tuple[str, ...] = ()
) -> Prediction:
    body = LOOP.format(lines="\n".join(f"  {line}" for line in (*INPUTS, *lines)))
    return predicted(*before, WHILE.replace("ROUNDS", str(rounds)), *after, more=body)


def test_loop_multiplies_times():
    estimate = looped(permute_start(), copy(), permute_done(), dot(), rounds=1000)
    assert estimate.step_seconds == approx(1000 * (HOP + DOT))
    assert estimate.communication_seconds == approx(1000 * HOP)
    assert estimate.exposed_communication_seconds == approx(1000 * (HOP - COPY))


def test_events_of_long_loop_are_joined():
    """A million runs of two kernels: the events preserve the time of each kind."""
    body = LOOP.format(lines="\n".join(f"  {line}" for line in (*INPUTS, dot(), copy())))
    analyzed = analyze(program(*INPUTS, WHILE.replace("ROUNDS", "1000000"), END, more=body))
    timeline = events(
        analyzed, TimeModel(topology("h100:1x2"), load(defaults()), IDEAL), analyzed.entry
    )
    assert len(timeline) < 101_000
    for kind, seconds in (("matrix products", DOT), ("other kernels", COPY)):
        total = sum(
            event.end_seconds - event.start_seconds for event in timeline if event.kind == kind
        )
        assert total == pytest.approx(1e6 * seconds, rel=1e-6)


@pytest.mark.parametrize(
    "rounds, exposed", [(1, 9 * HOP - DOT), (7, 9 * HOP - 7 * DOT), (10, 0), (1000, 0)]
)
def test_transfer_continues_through_a_loop(rounds, exposed):
    body = LOOP.format(lines="\n".join(f"  {line}" for line in (*INPUTS, dot())))
    estimate = predicted(
        permute_start("o"),
        WHILE.replace("ROUNDS", str(rounds)),
        permute_done("o"),
        more=body,
        gpus="h100:2x1",
    )
    assert estimate.exposed_communication_seconds == approx(exposed)
    assert estimate.step_seconds == approx(max(9 * HOP, rounds * DOT))


def test_transfer_through_a_loop_delays_those_inside():
    """It takes 1 ms, as the permutes inside: the first permute ends after 2 ms; the others take 1
    ms.
    """
    estimate = looped(
        permute_start(),
        permute_done(),
        rounds=5,
        before=(permute_start("o"),),
        after=(permute_done("o"),),
    )
    assert estimate.step_seconds == approx(6 * HOP)


def test_conditional_counts_its_longest_branch_and_a_synchronization():
    branches = "".join(
        f"%{name} () -> s32[] {{\n"
        + "\n".join(f"  {line}" for line in (*INPUTS, *lines, END))
        + "\n}\n\n"
        for name, lines in dict(short=(copy(),), long=(dot(), copy())).items()
    )
    waiting = dataclasses.replace(IDEAL, synchronization_seconds=1e-3)
    conditional = "%b = s32[] conditional(%x), branch_computations={%long, %short}"
    estimate = predicted(
        permute_start(), conditional, permute_done(), more=branches, roofline=waiting
    )
    assert estimate.step_seconds == approx(DOT + COPY + 1e-3)
    assert estimate.seconds_by_resource["host synchronization"] == approx(1e-3)
    assert estimate.exposed_communication_seconds == 0


def test_loop_over_further_documents_has_the_rounds_of_the_work():
    """The host reads the condition once more than the body runs; for one document the body does not
    run.
    """
    body = LOOP.format(lines="\n".join(f"  {line}" for line in (*INPUTS, copy())))
    loop = (
        WHILE.partition(", backend_config")[0]
        + f', metadata={{op_name="jit(step)/{scopes.MORE_DOCUMENTS}/while"}}'
    )
    analyzed = analyze(program(*INPUTS, loop, END, more=body))
    waiting = dataclasses.replace(IDEAL, synchronization_seconds=1e-3)
    model = TimeModel(topology("h100:1x2"), load(defaults()), waiting)
    assert predict(analyzed, model).step_seconds == approx(1e-3)
    packed = dataclasses.replace(
        model, work=AttentionWork(1, 1, 1, own_further_calls=2.5, ring_step_further_calls=9)
    )
    assert predict(analyzed, packed).step_seconds == approx(2.5 * COPY + 3.5e-3)


@pytest.mark.parametrize("opcode, shape, seconds", [
    # 3 blocks, over a domain's 2 network cards
    ("all-gather", "bf16[1800000000]", 3 * HOP_BYTES / 2 / 50e9),
    ("reduce-scatter", "bf16[56250000]", 0.75 * HOP_BYTES / 2 / 50e9),
    # half of the members are in the other domain
    ("all-to-all", "bf16[225000000]", 0.5 * HOP_BYTES / 50e9),
])  # fmt: skip
def test_collectives_across_domains_share_network_cards(opcode, shape, seconds):
    line = f"%g = {shape}{{0}} {opcode}(%x), replica_groups={{{{0,1,2,3}}}}"
    estimate = predicted(line, gpus="h100:2x2")
    assert estimate.step_seconds == approx(seconds)
    assert estimate.seconds_by_resource.keys() == {"network"}
    assert predicted(line, gpus="h100:1x4").seconds_by_resource.keys() == {"NVLink"}


def test_host_copies_have_their_own_lane():
    start = "%hs = (bf16[225000000]{0}, bf16[225000000]{0:S(5)}, u32[]) copy-start(%h)"
    estimate = predicted(
        permute_start(), start, dot(), permute_done(), "%hd = bf16[225000000]{0} copy-done(%hs)"
    )
    assert estimate.exposed_host_copy_seconds == approx(HOP_BYTES / 63e9 - DOT)
    assert estimate.host_copy_seconds == approx(HOP_BYTES / 63e9)
    assert (estimate.host_copies, estimate.exposed_host_copies) == (1, 1)
    assert estimate.exposed_communication_seconds == 0
    assert estimate.bound_by == "host"


def test_host_copies_in_loops_are_counted_and_exposed():
    start = "%hs = (bf16[225000000]{0}, bf16[225000000]{0:S(5)}, u32[]) copy-start(%h)"
    done = "%hd = bf16[225000000]{0} copy-done(%hs)"
    # kernels 7.8 ms, copy 7.1 ms
    hidden = looped(start, *(dot(f"k{i}") for i in range(7)), done, rounds=5)
    assert (hidden.host_copies, hidden.exposed_host_copies, hidden.exposed_host_copy_seconds) == (
        5,
        0,
        0,
    )
    exposed = looped(start, dot(), done, rounds=5)
    assert (exposed.host_copies, exposed.exposed_host_copies) == (5, 5)


ATTENTION = (
    "%q = bf16[1,4096,32,128]{3,2,1,0} parameter(4)",
    "%f = (bf16[1,32,4096,128]{3,2,1,0}, f32[1,32,4096]{2,1,0}) custom-call(%q, %q, %q),"
    ' custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"mask_type":"MASK"}}',
)


def test_call_in_a_fusion_with_slices_counts_as_the_call():
    query, call = ATTENTION
    body = f"%sliced () -> () {{\n  {query}\n  ROOT {call}\n}}\n"
    shape = call.partition("= ")[2].partition(" custom-call")[0]
    fusion = f"%fused = {shape} fusion(%q), kind=kCustom, calls=%sliced"
    fused = predicted(query, fusion, more=body)
    assert fused.step_seconds == predicted(*ATTENTION).step_seconds > 0
    assert set(fused.seconds_by_kind) == {"attention"}
    program_of = analyze(program(query, fusion, END, more=body))
    assert plan_program.kernels(program_of) == {"cudnn attention forward": 1}
    alone = analyze(program(*ATTENTION, END))
    workspace = plan_program.workspace_bytes
    assert workspace(program_of) == workspace(alone)


def test_causal_call_over_local_chunk_counts_half():
    full = 4 * 32 * 128 * 4096**2 / 989.4e12
    for mask, share in dict(NO_MASK=1.0, CAUSAL=0.5).items():
        estimate = predicted(*(line.replace('"MASK"', f'"{mask}"') for line in ATTENTION))
        assert estimate.seconds_by_kind == {"attention": approx(share * full)}


@pytest.mark.parametrize("strategy, sizes, is_ring_step, share", [
    ("ring", Sizes(4, 1024, 1024), False, 0.5),  # a rank's local chunk
    # a batch of two half chunks at a later ring step, with a document mask
    ("ring", Sizes(8, 512, 512), True, 1.0),
    ("ring", Sizes(4, 1024, 1024), True, 0.5),  # whole chunks at a later ring step
    ("all_gather", Sizes(4, 1024, 4096), False, 0.5),
    ("ulysses", Sizes(1, 4096, 4096), False, 0.5),
])  # fmt: skip
def test_visible_fraction_by_strategy(strategy, sizes, is_ring_step, share):
    config = defaults()
    config.mesh.context = 4
    config.data.seq_len = 4096
    config.attention.strategy = strategy
    call = AttentionKernelCall(
        None, "pallas", "forward", 1.0, True, sizes, is_ring_step=is_ring_step
    )
    assert visible_fraction(call, load(config)) == share
    assert visible_fraction(call._replace(is_masked=False), load(config)) == 1.0


def test_visible_fraction_of_each_kind_counts_its_heads():
    config = defaults()
    config.model.update(layer_kinds="full,narrow", kinds=dict(narrow=dict(num_heads=2)))
    config.mesh.context = 4
    config.data.seq_len = 4096
    for num_heads in (4, 2):
        call = AttentionKernelCall(
            None, "pallas", "forward", 1.0, True, Sizes(num_heads, 1024, 1024), head_dim=32
        )
        assert visible_fraction(call, load(config)) == 0.5


@pytest.mark.parametrize("strategy, num_keys", [
    ("ring", 512 + 99),  # a chunk and its halo
    ("all_gather", 512 + 99),
    ("ulysses", 4096),
])  # fmt: skip
def test_visible_fraction_in_window_counts_pairs(strategy, num_keys):
    config = defaults()
    config.model.update(layer_kinds="full,sliding", window=100)
    config.mesh.context = 4
    config.data.seq_len = 4096
    config.attention.strategy = strategy
    call = AttentionKernelCall(
        None, "pallas", "forward", 1.0, True, Sizes(4, 512, num_keys), has_window=True
    )
    visible = sum(min(position + 1, 100) for position in range(4096))
    assert visible_fraction(call, load(config)) == approx(visible / (4096 * num_keys))
    assert visible_fraction(call._replace(has_window=False), load(config)) > 0.4


@pytest.mark.parametrize("which, products", [("forward", 2), ("backward", 5)])
def test_visible_fraction_of_blockwise_loop_from_flops(which, products):
    config = load(defaults())
    model, num_tokens = config.model, config.data.seq_len
    own = 2.0 * products * model.attention.num_heads * model.attention.head_dim * num_tokens**2
    call = AttentionKernelCall(None, "blockwise", which, own, True, None)
    assert visible_fraction(call, config) == 0.5
    assert visible_fraction(call._replace(full_flops=own / 2), config) == 1.0


def test_blockwise_attention_starts_kernels_and_waits_for_the_host_for_each_block():
    """Ten kernels of half of the pairs of blocks, which are not masked, and four conditionals."""
    slow = dataclasses.replace(IDEAL, kernel_gap_seconds=1e-3, synchronization_seconds=1e-2)
    config = load(defaults())
    heads = config.model.attention
    pairs = heads.num_heads * config.data.seq_len**2
    call = AttentionKernelCall(
        None, "blockwise", "forward", 4.0 * heads.head_dim * pairs, True, None,
        num_kernels=20, num_conditionals=4,
    )  # fmt: skip
    timed = attention_op(call, TimeModel(topology("h100:1x1"), config, slow))
    compute = call.full_flops / 2 / (989.4e12 * 0.14)
    assert timed.kernel.seconds == approx(10 * 1e-3 + compute)
    assert timed.synchronization_seconds == approx(4 * 1e-2)


def test_roofline_read_replaces_defaults():
    measured = roofline_module.read(
        '{"matmul_share": 0.5, "attention_share": {"cudnn": [0.7, 0.6]}}'
    )
    assert measured == dataclasses.replace(
        Roofline(), matmul_share=0.5, attention_share={"cudnn": Efficiency(0.7, 0.6)}
    )
    assert roofline_module.read('{"nccl_multiprocessors": 0}').nccl_multiprocessors == 0
    ideal_shape = dataclasses.replace(measured, matmul_ramp_seconds=0, matmul_wave_weight=0)
    assert predicted(dot(), roofline=ideal_shape).step_seconds == approx(
        2 * DOT + measured.kernel_gap_seconds
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"speed": 1}',
        '{"matmul_share": 0}',
        '{"matmul_share": 1.5}',
        '{"attention_share": {"cudnn": [0.6, 2]}}',
        '{"nccl_multiprocessors": 200}',
        '{"time_scale": Infinity}',
        '{"attention_share": {"x": [1, 1]}}',
        '{"attention_share": {"cudnn": [1]}}',
    ],
)
def test_roofline_read_of_invalid_file_raises(text):
    with pytest.raises(UserError, match="constants"):
        roofline_module.read(text)


def test_roofline_from_file_reads_path_or_defaults(tmp_path):
    path = tmp_path / "constants.json"
    path.write_text('{"memory_share": 0.5}')
    assert roofline_module.from_file(str(path)) == dataclasses.replace(Roofline(), memory_share=0.5)
    assert roofline_module.from_file("") == Roofline()
    with pytest.raises(UserError, match="cannot read the constants file"):
        roofline_module.from_file(str(tmp_path / "nowhere.json"))


def test_constants_move_estimate_and_ring_exposure_together():
    """A permute takes 1 ms and the overlapping attention kernel 1.1 ms; at half the bandwidth it
    takes 2 ms.
    """
    num_queries = 8192
    attention = (
        ATTENTION[0].replace("4096", str(num_queries)),
        ATTENTION[1].replace("4096", str(num_queries)),
    )
    in_attention = f', metadata={{op_name="{FORWARD}/ppermute"}}'
    lines = (
        permute_start() + in_attention,
        *(line.replace('"MASK"', '"NO_MASK"') for line in attention),
    )
    analyzed = analyze(program(*INPUTS, *lines, permute_done(), END))
    model = TimeModel(topology("h100:1x2"), load(defaults()), IDEAL)
    slow = dataclasses.replace(model, roofline=dataclasses.replace(IDEAL, link_share=0.5))
    seconds = 4 * 32 * 128 * num_queries**2 / 989.4e12
    assert HOP < seconds < 2 * HOP
    for time_model, hop_seconds, exposed in ((model, HOP, 0), (slow, 2 * HOP, 1)):
        estimate = predict(analyzed, time_model)
        assert estimate.step_seconds == approx(max(hop_seconds, seconds))
        assert estimate.exposed_communication_seconds == approx(max(0, hop_seconds - seconds))
        assert plan_program.ring(analyzed.attention_collectives, time_model).exposed == exposed


@pytest.fixture(scope="module")
def step():
    """Two layers of Llama 3 8B with remat=full, in a ring of 8 over the network."""
    return compile_step(two_layers("ring", 8, 131_072, kernel="cudnn"), topology("h100:8x1"))


def test_merged_long_timeline_preserves_total_of_each_kind():
    """4,000 tiles of attention, a matrix product and a copy; after every thousandth tile, kernels
    wait.
    """
    timeline, now = [], 0.0
    for tile in range(4000):
        for kind, seconds in (
            ("attention", 8e-3),
            ("matrix products", 1e-3),
            ("other kernels", 5e-4),
        ):
            timeline.append(Event("kernels", kind, now, now + seconds))
            now += seconds
        if tile % 1000 == 999:
            timeline.append(Event("from host", "copy-start", now, now + 0.1))
            now += 0.1
    merged = _merged(timeline)
    assert len(merged) < 2100
    assert [event for event in merged if event.lane != "kernels"] == [
        x for x in timeline if x.lane != "kernels"
    ]
    for kind in ("attention", "matrix products", "other kernels"):
        totals = [
            sum(x.end_seconds - x.start_seconds for x in xs if x.kind == kind)
            for xs in (merged, timeline)
        ]
        assert totals[0] == pytest.approx(totals[1], abs=0.1)  # two thousandths of 38 s
    kernels = [event for event in merged if event.lane == "kernels"]
    gaps = [y.start_seconds - x.end_seconds for x, y in zip(kernels, kernels[1:], strict=False)]
    assert [gap for gap in gaps if gap] == pytest.approx([0.1] * 3)
    assert kernels[0].start_seconds == 0 and kernels[-1].end_seconds == pytest.approx(now - 0.1)


@pytest.mark.gpu_compiler
class TestRealStep:
    def test_predict_is_within_bounds(self, step):
        estimate = predict(step.program, step.time_model)
        assert estimate.step_seconds > step.config.flops_per_step / 8 / 989.4e12
        assert estimate.step_seconds == pytest.approx(sum(estimate.seconds_by_resource.values()))
        assert estimate.step_seconds == pytest.approx(sum(estimate.seconds_by_kind.values()))
        assert 0 < estimate.exposed_communication_seconds < estimate.communication_seconds
        assert 0.1 < estimate.mfu_causal < 0.6
        assert estimate.tokens_per_second_per_device == pytest.approx(
            131_072 / 8 / estimate.step_seconds
        )
        assert estimate == predict(step.program, step.time_model)

    def test_predict_finds_all_matrix_products_and_attention(self, step):
        """With efficiency 1, times follow from FLOPs: two forward passes, the second without the last
        product of each layer, and 5 products in attention's backward.
        """
        estimate = predict(step.program, dataclasses.replace(step.time_model, roofline=IDEAL))
        model, per_gpu = step.config.model, 8 * 989.4e12
        head = model.model_dim * model.vocab_size
        entries = product_entries(model, step.config.lora, step.config.train).forward
        layers = entries - head
        last = model.num_layers * model.model_dim * model.ffn_dim
        products = 131_072 * (8 * layers - 2 * last + 6 * head) / per_gpu
        assert estimate.seconds_by_kind["matrix products"] == pytest.approx(products, rel=0.03)
        pairs = (
            model.num_layers * model.attention.num_heads * model.attention.head_dim * 131_072**2 / 2
        )
        attention = 2 * (2 + 2 + 5) * pairs / per_gpu
        assert estimate.seconds_by_kind["attention"] == pytest.approx(attention, rel=0.01)

    def test_events_have_permutes_on_the_network(self, step):
        body = layer(step.program, "forward")
        estimate = events(step.program, step.time_model, body)
        hops = [
            event
            for event in estimate
            if event.lane == "network" and event.kind == "collective-permute-start"
        ]
        assert len(hops) == 7
        kernels = [event for event in estimate if event.lane == "kernels"]
        assert sum(event.kind == "attention" for event in kernels) == 8
        for earlier, later in zip(kernels, kernels[1:], strict=False):
            assert earlier.end_seconds <= later.start_seconds + 1e-12

    def test_layer_timeline_merges_adjacent_kernels(self, step):
        """The events of both passes; merging changes neither the end nor the time of any kind of
        kernel.
        """
        timeline = layer_timeline(step.program, step.time_model)
        for pass_name in ("forward", "backward"):
            merged = [event for event in timeline if event.pass_name == pass_name]
            single = events(step.program, step.time_model, layer(step.program, pass_name))
            assert len(merged) < len(single)
            assert max(event.end_seconds for event in merged) == max(
                event.end_seconds for event in single
            )
            for kind in {event.kind for event in single}:
                seconds = [
                    sum(x.end_seconds - x.start_seconds for x in xs if x.kind == kind)
                    for xs in (merged, single)
                ]
                assert seconds[0] == pytest.approx(seconds[1])
            kernels = [event for event in merged if event.lane == "kernels"]
            for earlier, later in zip(kernels, kernels[1:], strict=False):
                assert earlier.kind != later.kind or earlier.end_seconds < later.start_seconds

    def test_timeline_figure_draws_kernels_links_and_waits(self, step, tmp_path):
        timeline = layer_timeline(step.program, step.time_model)
        figure = timeline_figure(timeline, "", is_recomputed=True)
        lanes = {label.get_text() for axes in figure.axes for label in axes.get_yticklabels()}
        assert {"kernels", "network"} <= lanes
        forward, backward = (axes.get_title(loc="left") for axes in figure.axes)
        assert forward.startswith("forward: ") and backward.startswith(
            "backward with recomputation: "
        )
        milliseconds = 1e3 * max(
            event.end_seconds for event in timeline if event.pass_name == "forward"
        )
        assert f"forward: {roofline.two_digits(milliseconds)} ms, of which kernels wait" in forward
        figure.savefig(tmp_path / "timeline.png")
        width, height = png_size(tmp_path / "timeline.png")
        assert width > 500 and height > 200
