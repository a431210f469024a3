from types import SimpleNamespace

import pytest

from jaxlc.config import load, read_config
from jaxlc.step.loss import loss_chunk_tokens


def mesh(device_kind: str, **axes) -> SimpleNamespace:
    devices = SimpleNamespace(flat=[SimpleNamespace(device_kind=device_kind)])
    return SimpleNamespace(devices=devices, shape=dict(data=1, fsdp=1, context=1, tensor=1) | axes)


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
    assert loss_chunk_tokens(load(config), mesh("NVIDIA H100 80GB HBM3", **axes)) == chosen
    if memory["loss_chunk_tokens"] == 0:
        assert loss_chunk_tokens(load(config), mesh("cpu", **axes)) == 1024
