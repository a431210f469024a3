"""Predicted times: on small programs against times worked out by hand, on a real step against bounds."""

import dataclasses

import pytest

from benchmarks.attention_overlap import compile_step, two_layers
from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError
from jaxlc.core.flops import num_matmul_params, training_flops
from jaxlc.core.hardware import Efficiency
from jaxlc.hlo import parse
from jaxlc.hlo.attention_kernels import AttentionKernelCall, Sizes
from jaxlc.simulate import roofline as plan_rates
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.timed_ops import visible_share
from jaxlc.simulate.timeline import Prediction, events, predict
from jaxlc.simulate.timeline_plot import layer, plot_layer
from jaxlc.simulate.topology import topology
from tests.hlo.snippets import program
from tests.plan.gpus import ignores_cache, needs_gpu_compiler

# Nothing to begin with, and peaks that are reached: times are bytes over H100's bandwidths, or FLOPs over its peak.
IDEAL = Roofline(
    attention_share={"cudnn": Efficiency(1.0, 1.0)},
    matmul_share=1.0,
    memory_share=1.0,
    link_share=1.0,
    host_share=1.0,
    nvlink_latency_seconds=0,
    network_latency_seconds=0,
    host_latency_seconds=0,
    kernel_gap_seconds=0,
)
HOP_BYTES = 450_000_000  # a millisecond of NVLink, 9 of the network
HOP = 1e-3
SQUARE = 8192
DOT = 2 * SQUARE**3 / 989.4e12  # 1.11 ms
COPIED = 209_520_000  # floats that the GPU's memory reads and writes in half a millisecond
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


def predicted(*lines: str, more: str = "", gpus: str = "h100:1x2", rates: Roofline = IDEAL) -> Prediction:
    found = parse(program(*INPUTS, *lines, END, more=more))
    return predict(found, topology(gpus), load(defaults()), rates)


def approx(seconds: float):
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_kernels_take_the_longer_of_arithmetic_and_memory():
    found = predicted(dot(), copy())
    assert found.seconds_by_kind == {"other kernels": approx(COPY), "matrix products": approx(DOT)}
    assert found.seconds_by_resource == {"HBM": approx(COPY), "compute": approx(DOT)}
    assert found.bound_by == "compute"


def test_a_transfer_that_is_shorter_than_what_hides_it_costs_nothing():
    found = predicted(permute_start(), dot(), permute_done())
    assert found.step_seconds == approx(DOT)
    assert found.exposed_communication_seconds == 0
    assert found.communication_seconds == approx(HOP)


def test_of_a_longer_transfer_the_difference_is_exposed():
    found = predicted(permute_start(), copy(), dot(), permute_done(), gpus="h100:2x1")  # over the network
    assert found.step_seconds == approx(9 * HOP)
    assert found.exposed_communication_seconds == approx(9 * HOP - DOT - COPY)
    assert found.bound_by == "network"


def test_what_runs_after_the_end_of_a_transfer_does_not_hide_it():
    found = predicted(permute_start(), permute_done(), dot())
    assert found.step_seconds == approx(HOP + DOT)


def test_a_synchronous_transfer_hides_behind_nothing():
    notes = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    found = predicted(permute_start() + notes, dot(), permute_done())
    assert found.exposed_communication_seconds == approx(HOP)


def test_transfers_on_one_link_share_it_and_others_do_not_wait():
    """The second begins when half of the first is over. The rest takes twice as long; then a dot hides the second."""
    found = predicted(permute_start("s"), copy(), permute_start("t"), permute_done("s"), dot(), permute_done("t"))
    assert found.step_seconds == approx(COPY + HOP + DOT)
    both = predicted(permute_start("s"), permute_start("t"), copy(), permute_done("s"), permute_done("t"))
    assert both.step_seconds == approx(2 * HOP)
    outside = permute_start("t", "source_target_pairs={{0,2},{2,0}}")
    apart = predicted(permute_start("s"), outside, permute_done("s"), permute_done("t"), gpus="h100:2x2")
    assert apart.step_seconds == approx(9 * HOP)


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


def looped(*lines: str, rounds: int, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Prediction:
    body = LOOP.format(lines="\n".join(f"  {line}" for line in (*INPUTS, *lines)))
    return predicted(*before, WHILE.replace("ROUNDS", str(rounds)), *after, more=body)


def test_a_loop_multiplies():
    found = looped(permute_start(), copy(), permute_done(), dot(), rounds=1000)
    assert found.step_seconds == approx(1000 * (HOP + DOT))
    assert found.communication_seconds == approx(1000 * HOP)
    assert found.exposed_communication_seconds == approx(1000 * (HOP - COPY))


@pytest.mark.parametrize("rounds, exposed", [(1, 9 * HOP - DOT), (7, 9 * HOP - 7 * DOT), (10, 0), (1000, 0)])
def test_a_transfer_goes_on_through_a_loop(rounds, exposed):
    body = LOOP.format(lines="\n".join(f"  {line}" for line in (*INPUTS, dot())))
    found = predicted(
        permute_start("o"), WHILE.replace("ROUNDS", str(rounds)), permute_done("o"), more=body, gpus="h100:2x1"
    )
    assert found.exposed_communication_seconds == approx(exposed)
    assert found.step_seconds == approx(max(9 * HOP, rounds * DOT))


def test_a_transfer_through_a_loop_slows_those_inside_until_it_ends():
    """1 ms of it beside hops of 1 ms: the first hop takes 2 ms, in which it ends, too; the others take 1 ms."""
    found = looped(permute_start(), permute_done(), rounds=5, before=(permute_start("o"),), after=(permute_done("o"),))
    assert found.step_seconds == approx(6 * HOP)


def test_of_a_conditional_the_longest_branch_counts():
    branches = "".join(
        f"%{name} () -> s32[] {{\n" + "\n".join(f"  {line}" for line in (*INPUTS, *lines, END)) + "\n}\n\n"
        for name, lines in dict(short=(copy(),), long=(dot(), copy())).items()
    )
    found = predicted("%b = s32[] conditional(%x), branch_computations={%long, %short}", more=branches)
    assert found.step_seconds == approx(DOT + COPY)


@pytest.mark.parametrize("opcode, shape, seconds", [
    ("all-gather", "bf16[1800000000]", 3 * HOP_BYTES / 2 / 50e9),  # 3 blocks go round, over 2 cards of a domain
    ("reduce-scatter", "bf16[56250000]", 0.75 * HOP_BYTES / 2 / 50e9),
    ("all-to-all", "bf16[225000000]", 0.5 * HOP_BYTES / 50e9),  # half of the members are outside
])  # fmt: skip
def test_collectives_over_domains_share_their_cards(opcode, shape, seconds):
    line = f"%g = {shape}{{0}} {opcode}(%x), replica_groups={{{{0,1,2,3}}}}"
    found = predicted(line, gpus="h100:2x2")
    assert found.step_seconds == approx(seconds)
    assert found.seconds_by_resource.keys() == {"network"}
    assert predicted(line, gpus="h100:1x4").seconds_by_resource.keys() == {"NVLink"}


def test_copies_from_the_host_are_another_lane():
    start = "%hs = (bf16[225000000]{0}, bf16[225000000]{0:S(5)}, u32[]) copy-start(%h)"
    found = predicted(permute_start(), start, dot(), permute_done(), "%hd = bf16[225000000]{0} copy-done(%hs)")
    assert found.exposed_host_copy_seconds == approx(HOP_BYTES / 63e9 - DOT)
    assert found.host_copy_seconds == approx(HOP_BYTES / 63e9)
    assert (found.host_copies, found.exposed_host_copies) == (1, 1)
    assert found.exposed_communication_seconds == 0
    assert found.bound_by == "host"


def test_copies_are_counted_with_their_loops_and_exposed_where_they_are_waited_for():
    start = "%hs = (bf16[225000000]{0}, bf16[225000000]{0:S(5)}, u32[]) copy-start(%h)"
    done = "%hd = bf16[225000000]{0} copy-done(%hs)"
    hidden = looped(start, *(dot(f"k{i}") for i in range(7)), done, rounds=5)  # 7.8 ms beside 7.1
    assert (hidden.host_copies, hidden.exposed_host_copies, hidden.exposed_host_copy_seconds) == (5, 0, 0)
    exposed = looped(start, dot(), done, rounds=5)
    assert (exposed.host_copies, exposed.exposed_host_copies) == (5, 5)


ATTENTION = (
    "%q = bf16[1,4096,32,128]{3,2,1,0} parameter(4)",
    "%f = (bf16[1,32,4096,128]{3,2,1,0}, f32[1,32,4096]{2,1,0}) custom-call(%q, %q, %q),"
    ' custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"mask_type":"MASK"}}',
)


def test_a_causal_call_over_its_own_piece_is_half():
    full = 4 * 32 * 128 * 4096**2 / 989.4e12
    for mask, share in dict(NO_MASK=1.0, CAUSAL=0.5).items():
        found = predicted(*(line.replace('"MASK"', f'"{mask}"') for line in ATTENTION))
        assert found.seconds_by_kind == {"attention": approx(share * full)}


@pytest.mark.parametrize("strategy, num_queries, num_keys, share", [
    ("ring", 1024, 1024, 0.5),  # a rank's own piece
    ("ring", 512, 512, 1.0),  # half pieces at a later step, with a mask for documents
    ("all_gather", 1024, 4096, 0.5),
    ("ulysses", 4096, 4096, 0.5),
])  # fmt: skip
def test_what_a_mask_leaves(strategy, num_queries, num_keys, share):
    config = defaults()
    config.mesh.context = 4
    config.data.seq_len = 4096
    config.attention.strategy = strategy
    call = AttentionKernelCall(None, "pallas", "forward", 1.0, True, Sizes(4, num_queries, num_keys))
    assert visible_share(call, load(config)) == share
    assert visible_share(call._replace(is_masked=False), load(config)) == 1.0


@pytest.mark.parametrize("which, products", [("forward", 2), ("backward", 5)])
def test_what_a_mask_leaves_of_a_loop_over_tiles_is_told_by_its_flops(which, products):
    config = load(defaults())
    model, num_tokens = config.model, config.data.seq_len
    own = 2.0 * products * model.num_heads * model.head_dim * num_tokens**2
    call = AttentionKernelCall(None, "blockwise", which, own, True, None)
    assert visible_share(call, config) == 0.5
    assert visible_share(call._replace(full_flops=own / 2), config) == 1.0


def test_measured_rates_replace_those_of_the_table():
    measured = plan_rates.read('{"matmul_share": 0.5, "attention_share": {"cudnn": [0.7, 0.6]}}')
    assert measured == dataclasses.replace(
        Roofline(), matmul_share=0.5, attention_share={**Roofline().attention_share, "cudnn": Efficiency(0.7, 0.6)}
    )
    assert predicted(dot(), rates=measured).step_seconds == approx(2 * DOT + measured.kernel_gap_seconds)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"speed": 1}',
        '{"matmul_share": 0}',
        '{"attention_share": {"x": [1, 1]}}',
        '{"attention_share": {"cudnn": [1]}}',
    ],
)
def test_a_file_of_rates_that_is_wrong_is_told(text):
    with pytest.raises(UserError, match="constants"):
        plan_rates.read(text)


def test_rates_come_from_a_file_where_one_is_named(tmp_path):
    path = tmp_path / "constants.json"
    path.write_text('{"memory_share": 0.5}')
    assert plan_rates.from_file(str(path)) == dataclasses.replace(Roofline(), memory_share=0.5)
    assert plan_rates.from_file("") == Roofline()
    with pytest.raises(UserError, match="cannot be read"):
        plan_rates.from_file(str(tmp_path / "nowhere.json"))


@pytest.fixture(scope="module")
def step():
    """Two layers of Llama 3 8B, recomputed in the backward, in a ring of 8 over the network."""
    return compile_step(two_layers("ring", 8, 131_072, kernel="cudnn"), topology("h100:8x1"))


@needs_gpu_compiler
@ignores_cache
class TestOfARealStep:
    def test_the_prediction_lies_within_its_bounds(self, step):
        found = predict(step.program, step.topology, step.config)
        model = step.config.model
        flops = training_flops(model, rows=1, seq_len=131_072, attention="causal")
        assert found.step_seconds > flops / 8 / 989.4e12
        assert found.step_seconds == pytest.approx(sum(found.seconds_by_resource.values()))
        assert found.step_seconds == pytest.approx(sum(found.seconds_by_kind.values()))
        assert 0 < found.exposed_communication_seconds < found.communication_seconds
        assert 0.1 < found.mfu_causal < 0.6
        assert found.tokens_per_second_per_device == pytest.approx(131_072 / 8 / found.step_seconds)
        assert found == predict(step.program, step.topology, step.config)

    def test_all_matrix_products_and_all_attention_are_found(self, step):
        """At the peak they take what FLOPs take: layers twice forward, attention with 5 products in its backward."""
        found = predict(step.program, step.topology, step.config, IDEAL)
        model, per_gpu = step.config.model, 8 * 989.4e12
        head = model.model_dim * model.vocab_size
        layers = num_matmul_params(model) - head
        products = 131_072 * (8 * layers + 6 * head) / per_gpu
        assert found.seconds_by_kind["matrix products"] == pytest.approx(products, rel=0.03)
        pairs = model.num_layers * model.num_heads * model.head_dim * 131_072**2 / 2
        attention = 2 * (2 + 2 + 5) * pairs / per_gpu
        assert found.seconds_by_kind["attention"] == pytest.approx(attention, rel=0.01)

    def test_the_timeline_has_the_rings_hops_on_the_network(self, step):
        body = layer(step.program, "forward")
        found = events(step.program, step.topology, step.config, body)
        hops = [event for event in found if event.lane == "network" and event.kind == "collective-permute-start"]
        assert len(hops) == 7
        kernels = [event for event in found if event.lane == "kernels"]
        assert sum(event.kind == "attention" for event in kernels) == 8
        for earlier, later in zip(kernels, kernels[1:], strict=False):
            assert earlier.end_seconds <= later.start_seconds + 1e-12

    def test_the_picture(self, step, tmp_path):
        plot_layer(step.program, step.topology, step.config, tmp_path / "timeline.png")
        assert (tmp_path / "timeline.png").stat().st_size > 10_000
