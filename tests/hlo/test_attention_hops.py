import pytest

from jaxlc.core.hardware import find
from jaxlc.hlo import parse
from jaxlc.hlo.attention_flops import counted_calls, flops_by_rank, imbalance
from jaxlc.hlo.attention_hops import hops
from jaxlc.hlo.attention_kernels import attention_kernels
from jaxlc.hlo.op_names import pass_of
from tests.hlo.snippets import FORWARD, RING, program

H100 = find("h100")


def test_a_hop_with_a_kernel_beside_it_and_one_without():
    first, second = hops(parse(RING))
    assert [call.kernel for call in first.meanwhile] == ["cudnn"] and not second.meanwhile
    assert first.times == second.times == 3 and first.which == second.which == "forward"
    assert not second.is_hidden(H100, gpus_per_domain=4)
    # 64 x 64 tokens take less than the latency of a hop.
    assert 0 < first.hiding_seconds(H100) < first.seconds(H100, gpus_per_domain=4)
    assert not first.is_hidden(H100, gpus_per_domain=4)


def test_long_blocks_hide_their_hop_in_a_domain_and_not_over_a_network():
    (first, _) = hops(parse(RING.replace("64", "12000")))
    assert first.is_hidden(H100, gpus_per_domain=4)
    assert first.seconds(H100, gpus_per_domain=2) > 3 * first.seconds(H100, gpus_per_domain=4)
    assert not first.is_hidden(H100, gpus_per_domain=2)


def test_hops_under_way_together_share_the_link():
    apart = hops(parse(RING))
    lines = RING.splitlines()
    late = next(line for line in lines if "%late-start =" in line)
    lines.remove(late)
    kernel = next(i for i, line in enumerate(lines) if "%fmha =" in line)
    lines.insert(kernel, late.replace("(%hop-done)", "(%block)"))
    together = hops(parse("\n".join(lines)))
    assert [hop.link_bytes for hop in apart] == [4096, 4096]
    assert [hop.link_bytes for hop in together] == [8192, 8192]


def test_what_the_loss_and_the_weights_send_are_no_hops():
    for elsewhere in ("jit(f)/while/body/jvp()/shard_map/while/body", "jit(f)/jvp()/while/body"):
        assert hops(parse(RING.replace(FORWARD, elsewhere))) == []


@pytest.mark.parametrize("path, expected", [
    ("jit(f)/jvp()/while/body/shard_map/dot", "forward"),
    ("jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/shard_map/dot", "recomputation"),
    ("jit(f)/transpose(jvp())/while/body/checkpoint/shard_map/dot", "backward"),
    ("", "forward"),
])  # fmt: skip
def test_passes(path, expected):
    assert pass_of(path) == expected


def test_flops_of_a_cudnn_call_and_how_often_it_runs():
    (counted,) = counted_calls(parse(RING))
    assert counted.times == 3 and not counted.call.is_masked
    assert counted.call.full_flops == 4 * 2 * 16 * 64 * 64


@pytest.mark.parametrize("name, products, tokens, is_masked", [
    ("flash_forward", 2, "%p", True),
    ("flash_dq", 3, "%p", True),
    ("flash_dkv", 4, "%lse", False),
])  # fmt: skip
def test_pallas_kernels_by_name(name, products, tokens, is_masked):
    text = program(
        "%q = bf16[2,32,4,16]{3,2,1,0} constant({...})",
        "%k = bf16[2,64,2,16]{3,2,1,0} constant({...})",
        "%p = s32[2,32]{1,0} constant({...})",
        "%lse = f32[2,4,32]{2,1,0} constant({...})",
        f"ROOT %pallas_call = f32[2,32,4,16]{{3,2,1,0}} custom-call(%q, %k, %k, {tokens}),"
        f' custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{FORWARD}/{name}/pallas_call"}}',
    )
    read = parse(text)
    (call,) = attention_kernels(read, read.entry)
    assert (call.kernel, call.is_masked, call.sizes) == ("pallas", is_masked, (8, 32, 64))
    assert call.full_flops == 2 * products * 8 * 32 * 64 * 16


LOOP = f"""
%c (p.1: f32[8,4]) -> pred[] {{
  ROOT %p.1 = pred[] parameter(0)
}}
%multiply (p.2: f32[8,4]) -> f32[8,8] {{
  %p.2 = f32[8,4]{{1,0}} parameter(0)
  ROOT %dot = f32[8,8]{{1,0}} dot(%p.2, %p.2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
%tile (p.3: f32[8,4]) -> f32[8,4] {{
  %p.3 = f32[8,4]{{1,0}} parameter(0)
  ROOT %f = f32[8,8]{{1,0}} fusion(%p.3), kind=kCustom, calls=%multiply
}}
%tiles (p.4: f32[8,4]) -> f32[8,4] {{
  %p.4 = f32[8,4]{{1,0}} parameter(0)
  ROOT %w = f32[8,4]{{1,0}} while(%p.4), condition=%c, body=%tile, metadata={{op_name="{FORWARD}/while/body/while"}},\
 backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""


def test_a_loop_over_tiles_is_one_call():
    text = program(
        "%x = f32[8,4]{1,0} constant({...})",
        f'ROOT %kernel = f32[8,4]{{1,0}} while(%x), condition=%c, body=%tiles, metadata={{op_name="{FORWARD}/while"}},'
        ' backend_config={"known_trip_count":{"n":"3"}}',
        more=LOOP,
    )
    (counted,) = counted_calls(parse(text))
    assert (counted.call.kernel, counted.call.instruction.name, counted.times) == ("blockwise", "kernel", 1)
    assert counted.call.full_flops == 3 * 5 * 2 * 8 * 8 * 4
    with pytest.raises(ValueError, match="kernel is a loop"):
        flops_by_rank(parse(text), lambda *_: [], num_ranks=1)


def test_flops_by_rank_take_what_a_mask_leaves():
    text = RING.replace("NO_MASK", "CAUSAL")
    assert flops_by_rank(parse(text), lambda *_: [0, 0], 2) == dict(forward=[0, 0])
    whole = 3 * 4 * 2 * 16 * 64 * 64
    by_rank = flops_by_rank(parse(text), lambda num_queries, num_keys: [num_queries * num_keys, 1024], 2)
    assert by_rank == dict(forward=[whole, whole / 4])
    assert flops_by_rank(parse(RING), lambda *_: [0, 0], 2) == dict(forward=[whole, whole])


def test_imbalance():
    assert imbalance([2, 2, 2]) == 1 and imbalance([1, 3]) == 1.5
