"""The data type in which a step compiled for H100s sums the gradients of layer weights over ranks."""

import pytest

from jaxlc.config import load
from jaxlc.hlo import analyze
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.step import build_step
from tests.plan.gpus import small_config

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]


@pytest.mark.heavy
def test_reduce_in_fp32_scatters_float32_and_gathers_bfloat16():
    config = small_config(
        model_dim=256, num_heads=2, num_kv_heads=2, head_dim=64, ffn_dim=512, vocab_size=512
    )
    config.model.num_layers = 1
    config.mesh.update(context=4, tensor=1)
    config.precision.update(compute="bf16", reduce="fp32")
    config = load(config)
    step = build_step(config, make_mesh(topology("h100:1x4"), config.mesh))
    collectives = analyze(step.compile(extra_options=dict(WITHOUT_GPU)).as_text()).collectives
    arrays = [
        (x.kind, array)
        for x in collectives
        for array in x.transfer.done.arrays
        if x.sent_bytes > 10_000
    ]
    sums = {array.dtype for kind, array in arrays if kind in ("reduce-scatter", "all-reduce")}
    gathers = {array.dtype for kind, array in arrays if kind == "all-gather"}
    assert sums == {"f32"} and gathers == {"bf16"}
