"""The bytes of the state, and the pinned host memory, of steps that are not compiled."""

import json
from pathlib import Path

import pytest

from jaxlc.config import defaults, load, read_config
from jaxlc.config.flops import num_params
from jaxlc.runtime.memory import STAGING_BYTES, host_pool_bytes
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.memory import pinned_bytes, state_bytes
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import build_step

GIB = 2**30
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_state_bytes_are_those_of_the_state(lora_rank):
    config = defaults()
    config.mesh.update(context=4, tensor=2)
    config.lora.rank = lora_rank
    config = load(config)
    step = build_step(config, make_mesh(config.mesh))
    state = state_bytes(config)
    assert state.trained + state.frozen == bytes_per_device(step.abstract_state.params)
    assert state.optimizer == bytes_per_device(step.abstract_state.opt_state)
    assert (state.frozen > 0) == bool(lora_rank)
    assert state.reference == 0


def test_pool_of_1m_on_one_gpu_fits_a_machine_with_620_gib():
    """State of 90 GiB in regions up to 128 GiB, then one buffer of 282 GiB, in a pool that grows up
    to its limit.
    """
    config = load(read_config("1m_1gpu"))
    pinned = pinned_bytes(config)
    limit = host_pool_bytes(config.runtime, pinned.pooled) // GIB
    left, region, state = limit, 2 / 1024, 0.97 * 12 * num_params(config.model) / GIB
    while state > 0:  # the growth of XLA's allocator: regions of doubling size
        left, state, region = left - min(region, left), state - region, 2 * region
    temporaries = pinned.temporary / GIB
    assert temporaries > 250 and left > temporaries
    checkpoint = 12 * num_params(config.model)
    assert limit + (STAGING_BYTES + checkpoint) / GIB < 0.9 * 620


def test_pinned_bytes_match_compiled_programs():
    """docs/memory.jsonl has the host memory of compiled steps with many combinations of settings."""
    checked = 0
    for line in (ROOT / "docs" / "memory.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["host_bytes_per_node"] == 0 or row["model"] != "llama3.1-8b":
            continue
        config = defaults()
        config.model.preset = row["model"]
        config.mesh.update({axis: row[axis] for axis in ("data", "fsdp", "context", "tensor")})
        flags = (flag.removeprefix("--config.").partition("=") for flag in row["overrides"].split())
        for path, _, value in flags:
            section, _, name = path.partition(".")
            config[section][name] = int(value) if value.isdigit() else value
        num_domains, gpus_per_domain = map(int, row["topology"].partition(":")[2].split("x"))
        compiled_bytes = row["host_bytes_per_node"] / min(8, num_domains * gpus_per_domain)
        loaded = load(config)
        estimated_bytes = sum(pinned_bytes(loaded))
        assert estimated_bytes > 0.999 * compiled_bytes
        # else copies for checkpoints may be larger
        if loaded.memory.optimizer == loaded.memory.parameters == "host":
            assert estimated_bytes < 1.03 * compiled_bytes
        checked += 1
    assert checked > 30


def test_pinned_bytes_without_host_memory_are_0():
    config = defaults()
    assert sum(pinned_bytes(load(config))) == 0
    config.data.seq_len = 131_072  # more bytes than the copies for a checkpoint
    config.memory.update(remat="full", offload=("residual",))
    offloaded = sum(pinned_bytes(load(config)))
    config.train.update(global_batch_size=4, gradient_accumulation_steps=2)
    assert 0 < offloaded < sum(pinned_bytes(load(config)))


def test_pinned_bytes_count_the_reference_model():
    config = defaults()
    config.attention.shared_prefixes = True
    config.posttrain.update(loss="dpo", reference="model", reference_model="unused")
    weights = 4 * num_params(load(config).model)
    assert sum(pinned_bytes(load(config))) == weights <= pinned_bytes(load(config)).pooled
    config.memory.optimizer = "host"
    with_optimizer = sum(pinned_bytes(load(config)))
    config.posttrain.update(reference="record", reference_model="")
    assert with_optimizer - sum(pinned_bytes(load(config))) == weights
