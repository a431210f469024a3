import dataclasses
from types import SimpleNamespace

import pytest

from jaxlc.config import MeshConfig, load, read_config
from jaxlc.config.flops import loss_chunk_tokens
from jaxlc.core import hardware
from jaxlc.search.analytic_cost import Layout, Rates
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import topology
from jaxlc.step.loss import chunk_tokens


def mesh(device_kind: str) -> SimpleNamespace:
    return SimpleNamespace(devices=SimpleNamespace(flat=[SimpleNamespace(device_kind=device_kind)]))


@pytest.mark.parametrize(
    ("memory", "axes", "chosen"),
    [
        (dict(loss_chunk_tokens=512), {}, 512),
        # 4096 x 128256 logits take 2.0 GiB, 4% of 51 GiB
        (dict(loss_chunk_tokens=0), dict(fsdp=64), 4096),
        # state and gradients take 16 x 8e9 / 2 bytes, 60 GiB
        (dict(loss_chunk_tokens=0), dict(fsdp=2), 1024),
        (dict(loss_chunk_tokens=0), dict(fsdp=3), 2048),
        (dict(loss_chunk_tokens=0, optimizer="host"), dict(fsdp=2), 4096),
        (dict(loss_chunk_tokens=0), dict(fsdp=2, tensor=4), 4096),
    ],
)
def test_loss_chunk_tokens_by_free_memory(memory, axes, chosen):
    config = read_config("64k:h100")
    config.memory.update(memory)
    config = dataclasses.replace(load(config), mesh=MeshConfig(**axes))
    assert chunk_tokens(config, mesh("NVIDIA H100 80GB HBM3")) == chosen
    assert loss_chunk_tokens(config.model, config, hardware.find("h100")) == chosen  # of a search
    if memory["loss_chunk_tokens"] == 0:
        assert chunk_tokens(config, mesh("cpu")) == 1024


@pytest.mark.parametrize("parameters, chosen", [("device", 1024), ("host", 4096)])
def test_frozen_weights_leave_less_memory_for_chunks(parameters, chosen):
    """The bf16 weights of 70B take 65 GiB on each of two devices."""
    config = read_config("64k:h100")
    config.model.preset, config.lora.rank, config.precision.frozen = "llama3.1-70b", 8, "bf16"
    config.memory.parameters = parameters
    config = dataclasses.replace(load(config), mesh=MeshConfig(fsdp=2))
    assert loss_chunk_tokens(config.model, config, hardware.find("h100")) == chosen


@pytest.mark.parametrize("axes, chosen", [(dict(context=8), 4096), (dict(fsdp=2), 1024)])
def test_estimate_of_automatic_chunk_is_that_of_its_size(axes, chosen):
    config = load(read_config("64k:h100"))
    train = dataclasses.replace(config.train, gradient_accumulation_steps=32)
    config = dataclasses.replace(config, mesh=MeshConfig(**axes), train=train)
    gpus = topology(f"h100:1x{config.mesh.num_devices}")
    layout = Layout(config, Rates(gpus, Roofline()), {"full": "cudnn"})
    automatic, same, other = (
        layout.estimate(dataclasses.replace(config.memory, loss_chunk_tokens=size))
        for size in (0, chosen, 512)
    )
    assert automatic == same
    assert automatic.step_seconds < other.step_seconds
    assert automatic.working_bytes > other.working_bytes
