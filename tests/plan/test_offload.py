"""Offloaded activations: the program for GPUs holds exactly their bytes in host memory."""

import jax
import pytest

from jaxlc.config import load
from jaxlc.core.errors import UserError
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.step import TrainStep, build_step
from tests.plan.gpus import small_config

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]
LAYERS, TOKENS = 4, 4096


def small_step(**memory) -> TrainStep:
    config = small_config()
    config.model.num_layers = LAYERS
    config.data.seq_len = TOKENS
    config.memory.update(memory)
    config = load(config)
    return build_step(config, make_mesh(topology("h100:1x4"), config.mesh))


def host_bytes(step: TrainStep) -> int:
    return step.compile(extra_options=dict(WITHOUT_GPU)).memory_analysis().host_temp_size_in_bytes


@pytest.mark.heavy
def test_offload_residual_holds_one_per_layer_group():
    step = small_step(offload=("residual",), layers_per_remat_group=2)
    # bfloat16, split over context and tensor
    residuals = LAYERS * TOKENS * step.config.model.model_dim * 2 // 4
    assert host_bytes(step) == residuals // 2


def test_offload_of_all_tensors_holds_residual_out_and_lse():
    step = small_step(offload=("residual", "attention_out", "attention_lse"))
    model = step.config.model
    bytes_per_head = model.attention.head_dim * 2 + 4  # out in bfloat16, lse in float32
    bytes_per_token = model.model_dim * 2 + model.attention.num_heads * bytes_per_head
    assert host_bytes(step) == LAYERS * TOKENS * bytes_per_token // 4


@pytest.mark.heavy
def test_compile_without_requested_offload_raises(monkeypatch: pytest.MonkeyPatch):
    """A remat policy that gets lost must not go unnoticed, as it did in openxla/xla#17541."""
    step = small_step(offload=("residual",))
    monkeypatch.setattr(
        "jaxlc.step.remat._policy", lambda *_: jax.checkpoint_policies.nothing_saveable
    )
    with pytest.raises(
        UserError, match=r"memory.offload=\('residual',\) has no effect: the compiled step"
    ):
        step.compile(extra_options=dict(WITHOUT_GPU))
