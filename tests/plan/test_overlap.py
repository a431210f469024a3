"""Overlap of ring communication in the real step: two layers of Llama 3 8B at 262,144 tokens,
compiled for H100s.
"""

import functools
from collections import Counter

import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.attention_overlap import CompiledStep, compile_step, two_layers
from benchmarks.causal_work import imbalance
from jaxlc.attention.contract import merge
from jaxlc.attention.strategies import sharded_attention
from jaxlc.attention.strategies.strategy import ShardedQKV
from jaxlc.attention.strategies.ulysses import attend_on_device
from jaxlc.config import defaults, load
from jaxlc.hlo.kernel_costs import AttentionCollective
from jaxlc.hlo.parser import PASSES
from jaxlc.simulate.topology import topology
from tests.hlo.liveness import max_alive

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]
TOKENS = 262_144
LAYERS = 2


@functools.cache
def ring(context: int) -> CompiledStep:
    """All GPUs in one NVLink domain."""
    return compile_step(
        two_layers("ring", context, TOKENS, kernel="cudnn"), topology(f"h100:1x{context}")
    )


def not_hidden(step: CompiledStep) -> list[AttentionCollective]:
    return [
        permute for permute in step.program.attention_collectives if not step.is_hidden(permute)
    ]


rings = pytest.mark.parametrize("context", [8, pytest.param(64, marks=pytest.mark.full)])


@rings
def test_attention_hides_all_permutes_but_the_last_send(context):
    step = ring(context)
    times = Counter()
    for permute in step.program.attention_collectives:
        (array,) = permute.collective.transfer.done.arrays
        times[permute.pass_name, array.dtype] += permute.times
    assert times == {
        ("forward", "bf16"): LAYERS * (context - 1),  # K and V go around the ring once
        ("recomputation", "bf16"): LAYERS * (context - 1),
        # the first permute is shared with the recomputation
        ("backward", "bf16"): LAYERS * (context - 2),
        # dK and dV, including the last send back to the owner rank
        ("backward", "f32"): LAYERS * context,
    }
    (last,) = not_hidden(step)
    assert last.pass_name == "backward" and last.times == LAYERS
    assert last.collective.transfer.done.arrays[0].dtype == "f32"


@rings
def test_ring_holds_at_most_three_kv_blocks(context):
    step = ring(context)
    permutes = step.program.attention_collectives
    (block,) = {
        permute.collective.transfer.done.arrays
        for permute in permutes
        if permute.pass_name == "forward"
    }
    assert max_alive(step.program, lambda array: array in block) <= 3


@rings
def test_attention_work_is_balanced_and_near_the_minimum(context):
    step = ring(context)
    flops = step.attention_flops()
    assert flops.keys() == set(PASSES)
    for which, by_rank in flops.items():
        assert imbalance(by_rank) <= 1.01
        assert 1 <= sum(by_rank) / step.causal_attention_flops(which) <= 1.03


def plain_ring(qkv, kernel, spec, ranks):
    """A straightforward ring: a permute and a kernel call in a Python loop. Without a mask, only
    for comparison.
    """
    spec = type(spec)(causal=False)
    q, k, v, *_ = qkv
    out, lse = attend_on_device(ShardedQKV(q, k, v, None), kernel, spec)
    for _ in range(1, ranks.size):
        k, v = (
            lax.ppermute(x, ranks.axis, [(r, (r + 1) % ranks.size) for r in range(ranks.size)])
            for x in (k, v)
        )
        out, lse = merge(out, lse, *attend_on_device(ShardedQKV(q, k, v, None), kernel, spec))
    return out.astype(q.dtype), lse.astype(jnp.float32)


@pytest.mark.heavy
def test_plain_ring_hides_nothing_and_holds_all_blocks(monkeypatch):
    monkeypatch.setitem(
        sharded_attention.STRATEGIES,
        "ring",
        sharded_attention.STRATEGIES["ring"]._replace(attend=plain_ring),
    )
    step = compile_step(two_layers("ring", 8, TOKENS, kernel="cudnn"), topology("h100:1x8"))
    forward = [
        permute for permute in step.program.attention_collectives if permute.pass_name == "forward"
    ]
    assert sum(permute.times for permute in forward) == LAYERS * 2 * 7  # K and V separately
    hidden = sum(permute.times for permute in forward if step.is_hidden(permute))
    assert hidden <= LAYERS * 2  # the last block's may be
    (block,) = {permute.collective.transfer.done.arrays for permute in forward}
    assert max_alive(step.program, lambda array: array in block) > 2 * 3


@pytest.mark.heavy
@pytest.mark.full  # test_full_size.py has the memory of this model, and the tests of rings above what is hidden
def test_whole_model_on_64_gpus_needs_under_6_gib():
    """1.4 GiB of state and 5.3 GiB of temporaries, without arrays of size tokens x tokens or tokens
    x vocabulary.
    """
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.update(context=8, tensor=8)
    config.data.seq_len = TOKENS
    config.attention.update(kernel="blockwise", query_block_tokens=1024, key_block_tokens=1024)
    step = compile_step(load(config), topology("h100:8x8"))
    assert step.temp_bytes < 6 * 2**30
    exposed = [
        (x.collective.kind, x.times, x.collective.transfer.done.arrays[0].dtype)
        for x in not_hidden(step)
    ]
    # The last send of dK and dV in each layer; once per step, positions and segment ids of the documents, and whether
    # they need all ring steps.
    once = [("all-gather", 1, "pred"), ("all-gather", 1, "s32")]
    assert sorted(exposed) == [*once, ("collective-permute", 32, "f32")]
