"""What hides the ring's hops, in the real step: two layers of Llama 3 8B at 262,144 tokens, compiled for H100s."""

import dataclasses
import functools
import importlib.util
from collections import Counter

import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.attention_overlap import CompiledStep, compile_step, two_layers
from jaxlc.attention import api, local
from jaxlc.attention.contract import Masks
from jaxlc.attention.merge import merge
from jaxlc.config import defaults, load
from jaxlc.hlo.attention_flops import imbalance
from jaxlc.hlo.attention_hops import Hop
from jaxlc.hlo.liveness import most_alive
from jaxlc.hlo.op_names import PASSES
from jaxlc.simulate.topology import topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="the extra `plan` is not installed"
)
TOKENS = 262_144
LAYERS = 2


@functools.cache
def ring(context: int) -> CompiledStep:
    """All GPUs in one NVLink domain."""
    return compile_step(two_layers("ring", context, TOKENS, kernel="cudnn"), topology(f"h100:1x{context}"))


def exposed(step: CompiledStep) -> list[Hop]:
    return [hop for hop in step.hops if not step.is_hidden(hop)]


rings = pytest.mark.parametrize("context", [8, pytest.param(64, marks=pytest.mark.heavy)])


@rings
def test_every_hop_hides_behind_attention_but_the_last_one_home(context):
    step = ring(context)
    times = Counter()
    for hop in step.hops:
        (array,) = hop.collective.transfer.done.arrays
        times[hop.which, array.dtype] += hop.times
    assert times == {
        ("forward", "bf16"): LAYERS * (context - 1),  # K and V go round once
        ("recomputation", "bf16"): LAYERS * (context - 1),
        ("backward", "bf16"): LAYERS * (context - 2),  # the first hop is the recomputation's, too
        ("backward", "f32"): LAYERS * context,  # dK and dV travel with them, and home
    }
    (home,) = exposed(step)
    assert home.which == "backward" and home.times == LAYERS
    assert home.collective.transfer.done.arrays[0].dtype == "f32"


@rings
def test_no_more_than_three_blocks_of_keys_and_values_exist_at_once(context):
    step = ring(context)
    (block,) = {hop.collective.transfer.done.arrays for hop in step.hops if hop.which == "forward"}
    assert most_alive(step.program, lambda array: array in block) <= 3


@rings
def test_every_rank_does_the_same_work_and_hardly_more_than_the_mask_asks_for(context):
    step = ring(context)
    flops = step.attention_flops()
    assert flops.keys() == set(PASSES)
    for which, by_rank in flops.items():
        assert imbalance(by_rank) <= 1.01
        assert 1 <= sum(by_rank) / step.least_attention_flops(which) <= 1.03


def plain_ring(q, k, v, masks, kernel, spec, ranks):
    """What one would write first: a permute and a kernel call in a plain loop. (No mask: it is here to be timed.)"""
    spec = type(spec)(causal=False)
    out, lse = local.attend(q, k, v, Masks(None, None, None, None), kernel, spec)
    for _ in range(1, ranks.size):
        k, v = (lax.ppermute(x, ranks.axis, [(r, (r + 1) % ranks.size) for r in range(ranks.size)]) for x in (k, v))
        out, lse = merge(out, lse, *local.attend(q, k, v, Masks(None, None, None, None), kernel, spec))
    return out.astype(q.dtype), lse.astype(jnp.float32)


@pytest.mark.heavy
def test_the_plain_loop_hides_nothing_and_holds_all_blocks(monkeypatch):
    config, gpus = two_layers("ring", 8, TOKENS, kernel="cudnn"), topology("h100:1x8")
    # A small vocabulary, or the head's gradients would decide how much memory both take.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=1024))
    ours = compile_step(config, gpus)
    monkeypatch.setitem(api.STRATEGIES, "ring", api.Strategy(plain_ring, implicit_positions=True))
    step = compile_step(config, gpus)
    forward = [hop for hop in step.hops if hop.which == "forward"]
    assert sum(hop.times for hop in forward) == LAYERS * 2 * 7  # K and V apart
    assert sum(hop.times for hop in forward if step.is_hidden(hop)) <= LAYERS * 2  # some wait for the last block alone
    (block,) = {hop.collective.transfer.done.arrays for hop in forward}
    assert most_alive(step.program, lambda array: array in block) > 2 * 3
    assert step.temp_bytes > ours.temp_bytes


@pytest.mark.heavy
def test_the_whole_model_fits_64_gpus_with_room_to_spare():
    """1.4 GiB of state, and 5.3 of temporaries where nothing of size tokens x tokens or tokens x vocabulary is kept."""
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.update(context=8, tensor=8)
    config.data.seq_len = TOKENS
    config.attention.update(kernel="blockwise", query_block_tokens=1024, key_block_tokens=1024)
    step = compile_step(load(config), topology("h100:8x8"))
    assert step.temp_bytes < 6 * 2**30
    assert len(exposed(step)) == 1
