import re

import pytest

from benchmarks.causal_work import flops_by_rank, imbalance
from jaxlc.config import defaults, load
from jaxlc.hlo import analyze
from jaxlc.hlo.parser import is_in_attention, label, pass_of
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.topology import topology
from tests.hlo.snippets import FORWARD, RING, program

ONE_DOMAIN = TimeModel(topology("h100:1x4"), load(defaults()))
TWO_DOMAINS = TimeModel(topology("h100:2x2"), load(defaults()))


def test_attention_collectives_list_overlapped_kernels():
    first, second = analyze(RING).attention_collectives
    assert [call.kernel for call in first.overlapped_calls] == [
        "cudnn"
    ] and not second.overlapped_calls
    assert not first.is_unoverlapped and second.is_unoverlapped
    assert first.times == second.times == 3 and first.pass_name == second.pass_name == "forward"
    assert not ONE_DOMAIN.is_hidden_by_attention(second)
    # 64 x 64 tokens take less than the latency of a permute.
    assert 0 < ONE_DOMAIN.overlapped_attention_seconds(first) < ONE_DOMAIN.exchange_seconds(first)
    assert not ONE_DOMAIN.is_hidden_by_attention(first)


def test_long_blocks_hide_permutes_on_nvlink_but_not_on_network():
    (first, _) = analyze(RING.replace("64", "8000")).attention_collectives
    assert ONE_DOMAIN.is_hidden_by_attention(first)
    assert not TWO_DOMAINS.is_hidden_by_attention(first)
    # latency is a small part of its time
    (large, _) = analyze(RING.replace("64", "24000")).attention_collectives
    assert TWO_DOMAINS.exchange_seconds(large) > 3 * ONE_DOMAIN.exchange_seconds(large)


def test_concurrent_permutes_share_the_link():
    apart = analyze(RING).attention_collectives
    lines = RING.splitlines()
    late = next(line for line in lines if "%late-start =" in line)
    lines.remove(late)
    kernel = next(i for i, line in enumerate(lines) if "%fmha =" in line)
    lines.insert(kernel, late.replace("(%hop-done)", "(%block)"))
    together = analyze("\n".join(lines)).attention_collectives
    assert [permute.link_bytes for permute in apart] == [4096, 4096]
    assert [permute.link_bytes for permute in together] == [8192, 8192]


@pytest.mark.parametrize("path", [
    "jit(f)/while/body/jvp()/shard_map/loss/while/body",
    "jit(f)/jvp()/while/body/attention/gather_weights",
    "jit(f)/jvp()/while/body/shard_map",
])  # fmt: skip
def test_collectives_outside_core_attention_are_not_attention(path):
    assert analyze(RING.replace(FORWARD, path)).attention_collectives == ()


def test_analyzed_program_computes_properties_once():
    analyzed = analyze(RING)
    for name in (
        "execution_counts", "collectives", "attention_calls", "attention_call_of", "attention_collectives",
        "host_copies",
    ):  # fmt: skip
        assert getattr(analyzed, name) is getattr(analyzed, name)


@pytest.mark.parametrize("path, expected", [
    ("jit(f)/jvp()/while/body/attention/shard_map/core_attention/ring_send/ppermute", True),
    ("jit(f)/transpose(jvp(core_attention))/ppermute", True),
    ("jit(f)/jvp(core_attention)/jit(loss)/mul", True),
    ("jit(f)/while/body/(attention/gather_weights/x:shard_map/core_attention/all_gather)", False),
    ("jit(f)/while/body/(core_attention/all_gather:shard_map/core_attention/all_gather)", True),
    ("jit(core_attention)/mul", False),
    ("jit(f)/attention/core_attention_like/mul", False),
    ("", False),
])  # fmt: skip
def test_is_in_attention_reads_the_scope(path, expected):
    assert is_in_attention(path) == expected


@pytest.mark.parametrize("path, expected", [
    ("jit(_step)/while/body/closed_call/jvp()/shard_map/loss/psum", "loss, forward: sum over ranks"),
    ("jit(_step)/while/body/transpose(jvp())/shard_map/embedding/while/body/scatter-add",
     "embedding, backward: scatter-add"),
    ("jit(_step)/while/body/eval_jaxpr/jvp(gather_weights)/optimization_barrier", "gather_weights, forward: copy"),
    ("jit(_step)/jvp()/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice",
     "layers, forward: saved activations"),
    ("jit(_step)/jvp()/while/body/attention/(gather_weights/add:mlp/gather_weights/add)",
     "attention/gather_weights, forward: add"),
    ("jit(_step)/something/mul", "something, forward: mul"),
    ("jit(_step)/mul", "step, forward: mul"),
    ("state.params[\\'head\\']", "state.params['head']"),
])  # fmt: skip
def test_label_names_scope_pass_and_operation(path, expected):
    assert label(path) == expected


@pytest.mark.parametrize("path, expected", [
    ("jit(f)/jvp()/while/body/shard_map/dot", "forward"),
    ("jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/shard_map/dot", "recomputation"),
    ("jit(f)/transpose(jvp())/while/body/checkpoint/shard_map/dot", "backward"),
    ("", "forward"),
])  # fmt: skip
def test_pass_of_reads_jax_marks(path, expected):
    assert pass_of(path) == expected


def test_attention_calls_of_cudnn_have_flops_and_count():
    (counted,) = analyze(RING).attention_calls
    assert counted.times == 3 and not counted.call.is_masked
    assert counted.call.full_flops == 4 * 2 * 16 * 64 * 64


@pytest.mark.parametrize("name, products, tokens, is_masked", [
    ("flash_forward", 2, "%p", True),
    ("flash_dq", 3, "%p", True),
    ("flash_dkv", 4, "%lse", False),
])  # fmt: skip
def test_attention_calls_of_pallas_are_known_by_name(name, products, tokens, is_masked):
    text = program(
        "%q = bf16[2,32,4,16]{3,2,1,0} constant({...})",
        "%k = bf16[2,64,2,16]{3,2,1,0} constant({...})",
        "%p = s32[2,32]{1,0} constant({...})",
        "%lse = f32[2,4,32]{2,1,0} constant({...})",
        f"ROOT %pallas_call = f32[2,32,4,16]{{3,2,1,0}} custom-call(%q, %k, %k, {tokens}),"
        f' custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{FORWARD}/{name}/pallas_call"}}',
    )
    ((call, _),) = analyze(text).attention_calls
    assert (call.kernel, call.is_masked, call.sizes) == ("pallas", is_masked, (8, 32, 64))
    assert call.full_flops == 2 * products * 8 * 32 * 64 * 16


def _mosaic_call(name: str, result: str, path: str) -> str:
    return (
        f'%{name} = {result} custom-call(%q, %k, %k, %start), custom_call_target="mosaic_gpu_v2",'
        f' metadata={{op_name="{FORWARD}/{path}/vmap()/mpmd_map"}}'
    )


@pytest.mark.parametrize("result, path, products, is_masked", [
    ("f32[2,32,4,16]{3,2,1,0}", "mosaic_forward", 2, False),
    ("f32[2,32,4,16]{3,2,1,0}", "mosaic_forward/mosaic_causal", 2, True),
    ("bf16[2,32,4,16]{3,2,1,0}", "mosaic_backward", 3, False),
    ("(bf16[2,64,2,16]{3,2,1,0}, bf16[2,64,2,16]{3,2,1,0})", "mosaic_backward", 4, False),
])  # fmt: skip
def test_attention_calls_of_mosaic_are_known_by_scope(result, path, products, is_masked):
    text = program(
        "%q = bf16[2,32,4,16]{3,2,1,0} constant({...})",
        "%k = bf16[2,64,2,16]{3,2,1,0} constant({...})",
        f"%start = {'f32' if path.endswith('backward') else 'bf16'}[2,4,32]{{2,1,0}} constant({{...}})",
        "ROOT " + _mosaic_call("call", result, path),
    )
    ((call, _),) = analyze(text).attention_calls
    assert (call.kernel, call.is_masked, call.sizes) == ("mosaic", is_masked, (8, 32, 64))
    assert call.full_flops == 2 * products * 8 * 32 * 64 * 16


def test_attention_calls_of_mosaic_pairs_are_one_call():
    """3 x 5 pairs of blocks, each with a call for dq and one for dk and dv."""
    path = "mosaic_pairs/while/body/while/body/cond/branch_1_fun/mosaic_backward"
    body = f"""
%c (p.1: bf16[1,32,4,16]) -> pred[] {{
  ROOT %p.1 = pred[] parameter(0)
}}
%pair (q: bf16[1,32,4,16]) -> bf16[1,32,4,16] {{
  %q = bf16[1,32,4,16]{{3,2,1,0}} parameter(0)
  %k = bf16[1,64,2,16]{{3,2,1,0}} constant({{...}})
  %start = s32[1,1,32]{{2,1,0}} constant({{...}})
  {_mosaic_call("dkv", "(bf16[1,64,2,16]{3,2,1,0}, bf16[1,64,2,16]{3,2,1,0})", path)}
  ROOT {_mosaic_call("dq", "bf16[1,32,4,16]{3,2,1,0}", path)}
}}
%kv_block (p.2: bf16[1,32,4,16]) -> bf16[1,32,4,16] {{
  %p.2 = bf16[1,32,4,16]{{3,2,1,0}} parameter(0)
  ROOT %inner = bf16[1,32,4,16]{{3,2,1,0}} while(%p.2), condition=%c, body=%pair,\
 metadata={{op_name="{FORWARD}/mosaic_pairs/while/body/while"}}, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""
    text = program(
        "%x = bf16[1,32,4,16]{3,2,1,0} constant({...})",
        "ROOT %pairs = bf16[1,32,4,16]{3,2,1,0} while(%x), condition=%c, body=%kv_block,"
        f' metadata={{op_name="{FORWARD}/mosaic_pairs/while"}}, backend_config={{"known_trip_count":{{"n":"3"}}}}',
        more=body,
    )
    (counted,) = analyze(text).attention_calls
    call = counted.call
    assert (call.kernel, call.instruction.name, call.is_masked, counted.times) == (
        "mosaic",
        "pairs",
        True,
        1,
    )
    assert call.sizes == (4, 15 * 32, 64) and call.full_flops == 15 * (3 + 4) * 2 * 4 * 32 * 64 * 16


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


CUBLAS_DOT = """custom-call(%p.2, %p.2), custom_call_target="__cublas$gemm", backend_config={\
"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""


@pytest.mark.parametrize("product", [None, CUBLAS_DOT], ids=["triton", "cublas"])
def test_attention_calls_of_blockwise_loop_are_one_call(product):
    loop = re.sub(r"dot\(.*", product, LOOP) if product else LOOP
    text = program(
        "%x = f32[8,4]{1,0} constant({...})",
        f'ROOT %kernel = f32[8,4]{{1,0}} while(%x), condition=%c, body=%tiles, metadata={{op_name="{FORWARD}/while"}},'
        ' backend_config={"known_trip_count":{"n":"3"}}',
        more=loop,
    )
    (counted,) = analyze(text).attention_calls
    assert (counted.call.kernel, counted.call.instruction.name, counted.times) == (
        "blockwise",
        "kernel",
        1,
    )
    assert counted.call.full_flops == 3 * 5 * 2 * 8 * 8 * 4
    assert (counted.call.num_kernels, counted.call.num_conditionals) == (3 * 5, 0)
    with pytest.raises(ValueError, match="kernel is a loop"):
        flops_by_rank(analyze(text), lambda *_: [], num_ranks=1)


def test_flops_by_rank_use_pairs_of_masked_calls():
    text = RING.replace("NO_MASK", "CAUSAL")
    assert flops_by_rank(analyze(text), lambda *_: [0, 0], 2) == dict(forward=[0, 0])
    whole = 3 * 4 * 2 * 16 * 64 * 64
    by_rank = flops_by_rank(
        analyze(text), lambda num_queries, num_keys: [num_queries * num_keys, 1024], 2
    )
    assert by_rank == dict(forward=[whole, whole / 4])
    assert flops_by_rank(analyze(RING), lambda *_: [0, 0], 2) == dict(forward=[whole, whole])


def test_imbalance_is_maximum_over_mean():
    assert imbalance([2, 2, 2]) == 1 and imbalance([1, 3]) == 1.5
