"""A model of sliding and full layers, compiled for absent GPUs: what its layers send, and with
which kernels.
"""

from collections import Counter

import pytest

from jaxlc import plan
from jaxlc.config import load
from jaxlc.config.flops import num_params
from jaxlc.hlo import analyze
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.step import TrainStep, build_step
from jaxlc.step.verify_compiled import describe
from tests.plan.gpus import small_config

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]
TOKENS, RANKS, WINDOW = 4096, 4, 257


def step_with(**memory) -> TrainStep:
    """Five layers: two groups of a sliding and a full layer, and a last sliding layer."""
    config = small_config(layer_kinds="sliding,full", window=WINDOW)
    config.model.num_layers = 5
    config.mesh.update(context=RANKS, tensor=1)
    config.data.seq_len = TOKENS
    config.memory.update(memory)
    config = load(config)
    return build_step(config, make_mesh(topology(f"h100:1x{RANKS}"), config.mesh))


@pytest.mark.full
def test_sliding_layers_in_tiles_compute_and_send_only_their_window():
    """A call has a sub-chunk's keys, the window before it and the received tokens, which are sent
    once a pass.
    """
    step = step_with(tile_tokens=512, remat="full")
    program = analyze(step.compile(extra_options=dict(WITHOUT_GPU)).as_text())
    subchunk_tokens, received_tokens = 256, 2 * (WINDOW - 1)
    keys = {call.sizes.num_keys for call, _ in program.attention_calls if call.has_window}
    assert keys == {subchunk_tokens + WINDOW - 1 + received_tokens}
    model = step.config.model
    sent_bytes = sum(
        exchange.times * exchange.collective.sent_bytes
        for exchange in program.attention_collectives
        if exchange.has_window and exchange.pass_name == "forward"
    )
    # 3 layers, bfloat16
    kv_bytes = 3 * received_tokens * 2 * model.attention.num_kv_heads * model.attention.head_dim * 2
    assert kv_bytes <= sent_bytes <= 1.2 * kv_bytes  # positions and segment ids, too


@pytest.mark.heavy
def test_sliding_layers_send_only_their_window():
    """Bytes that each GPU sends in the forward pass, read from the compiled program."""
    step = step_with()
    program = analyze(step.compile(extra_options=dict(WITHOUT_GPU)).as_text())
    sent = Counter()
    for exchange in program.attention_collectives:
        if exchange.pass_name == "forward":
            sent[exchange.has_window] += exchange.times * exchange.collective.sent_bytes
    model = step.config.model
    token_bytes = (
        2 * model.attention.num_kv_heads * model.attention.head_dim * 2
    )  # K and V in bfloat16
    mask_bytes = 2 * 4  # position and segment id
    assert sent[False] == 2 * (RANKS - 1) * TOKENS // RANKS * token_bytes
    halo_tokens = 3 * 2 * (WINDOW - 1)  # 3 layers; 2 chunks on each rank
    assert halo_tokens * token_bytes <= sent[True] <= halo_tokens * (token_bytes + mask_bytes)
    kernels = {(call.has_window, call.kernel) for call, _ in program.attention_calls}
    assert kernels == {(True, "pallas"), (False, "cudnn")}
    assert (
        step.kernel_choice.startswith("sliding: pallas (")
        and "; full: cudnn (" in step.kernel_choice
    )
    lines = describe(program.attention_collectives, strategy="ring", num_layers=5, num_sliding=3)
    assert {line.partition(":")[0] for line in lines} == {"ring", "ring, sliding layers"}
    (ring,) = (line for line in lines if line.startswith("ring:"))
    assert " x 2 layers)" in ring


@pytest.mark.full  # tests/attention/test_sinks.py counts the kernel calls of layers of one size
def test_plan_of_layers_of_different_sizes_has_no_further_kernel_calls_with_sinks():
    wide = dict(num_kv_heads=4, head_dim=64, ffn_dim=512)
    config = small_config(layer_kinds="sliding,wide", window=WINDOW, kinds=dict(wide=wide))
    config.model.attention.sinks = True
    result = plan.plan(config, f"h100:1x{RANKS}")
    # a layer of each kind: two ring steps, and one call of which the backward pass has two kernels
    assert {name: times for name, times in result.kernels.items() if " attention " in name} == {
        "cudnn attention forward": 2,
        "cudnn attention recomputation": 2,
        "cudnn attention backward": 2,
        "pallas attention forward": 1,
        "pallas attention recomputation": 1,
        "pallas attention backward": 2,
    }
    assert (
        result.kernel_choice.startswith("sliding: pallas (")
        and "; wide: cudnn (" in result.kernel_choice
    )
    assert result.memory.parameters_bytes == pytest.approx(
        4 * num_params(load(config).model) / RANKS, rel=0.01
    )


def temp_bytes(layer_kinds: str, num_layers: int) -> int:
    """Bytes of temporaries of a model of full layers whose activations are larger than its weights."""
    config = small_config(layer_kinds=layer_kinds, model_dim=256, ffn_dim=1024)
    config.model.num_layers = num_layers
    config.mesh.update(context=RANKS, tensor=1)
    config.data.seq_len = 4 * TOKENS
    config = load(config)
    step = build_step(config, make_mesh(topology(f"h100:1x{RANKS}"), config.mesh))
    return step.compile(extra_options=dict(WITHOUT_GPU)).memory_analysis().temp_size_in_bytes


@pytest.mark.heavy
def test_groups_of_layers_hold_activations_of_one_layer():
    """Two layers per iteration, and a last one, need little more than one layer per iteration."""
    # 1.04 times as much with JAX 0.10.1, 1.21 with 0.12; 1.5 and 1.6 without `_in_backward_order`
    assert temp_bytes("full,full", 5) < 1.25 * temp_bytes("full", 4)
