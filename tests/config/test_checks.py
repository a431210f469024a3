import dataclasses
import math

import pytest

from jaxlc.config import MeshConfig, check_num_devices, load
from jaxlc.config.checks import RANGES
from jaxlc.config.mesh_checks import mesh_overrides, working_mesh
from tests.config.test_loading import changed, rejected

NUMBERS = [(section, name) for section, ranges in RANGES.items() for name in ranges]


@pytest.mark.parametrize(("section", "name"), NUMBERS)
def test_every_number_has_a_lower_end(section, name):
    sentence = rejected(changed(section, **{name: -1}))
    assert sentence.startswith(f"config.{section}.{name} is -1")
    assert "must be" in sentence


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_shares_have_an_upper_end(name):
    assert "less than 1" in rejected(changed("optimizer", **{name: 1.0}))


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("model", dict(num_heads=4, num_kv_heads=3), ["num_heads=4", "num_kv_heads=3"]),
        ("model", dict(head_dim=31), ["head_dim=31", "use 32"]),
        (
            "model",
            dict(rope_scaling_factor=8.0, rope_scaling_low_freq_factor=4.0),
            ["rope_scaling_low_freq_factor=4.0 must be less than rope_scaling_high_freq_factor=4.0"],
        ),
        ("optimizer", dict(schedule="wsd"), ["needs config.optimizer.decay_steps"]),
        (
            "optimizer",
            dict(schedule="wsd", decay_steps=91),
            ["warmup_steps=10 and decay_steps=91", "train.steps=100", "101 steps or more"],
        ),
        ("data", dict(sources=()), ["config.data.sources is empty"]),
        ("data", dict(sources=("a", "")), ["an empty name"]),
        ("data", dict(seq_len=4097), ["4097", "2 x mesh.context x mesh.tensor = 2", "use 4096 or 4098"]),
        ("data", dict(seq_len=1), ["use 2"]),
        ("train", dict(gradient_accumulation_steps=2), ["config.train.global_batch_size=1", "= 2; use 2"]),
        (
            "train",
            dict(gradient_accumulation_steps=2, global_batch_size=5),
            ["config.train.global_batch_size=5", "use 4 or 6"],
        ),
        ("runtime", dict(process_id=1), ["process_id=1 is too large for num_processes=1"]),
        ("runtime", dict(simulated_devices=5, num_processes=2), ["simulated_devices=5", "a multiple of 2"]),
        ("runtime", dict(num_processes=2, coordinator_address="here"), ["'here'", "host:port"]),
        ("runtime", dict(num_processes=2, transport="peer"), ["'peer'", "num_processes=2", "'symmetric'"]),
        ("runtime", dict(nvshmem_heap_bytes=1, transport="nccl"), ["nvshmem_heap_bytes=1", "'nccl'"]),
        ("runtime", dict(unified_memory_fraction=2.0), ["unified_memory_fraction=2.0", "unified_memory=True"]),
        ("runtime", dict(unified_memory_fraction=0.9), ["is 0.9; it must be 0 or greater than 1"]),
    ],
)
def test_contradictions(section, values, words):
    sentence = rejected(changed(section, **values))
    for word in words:
        assert word in sentence


def test_wsd_that_just_fits():
    load(changed("optimizer", schedule="wsd", decay_steps=90))


@pytest.mark.parametrize(
    ("model", "tensor", "words"),
    [
        (dict(), 8, ["num_heads=4", "tensor=8", "--config.mesh.tensor=4"]),
        (dict(num_heads=6, num_kv_heads=2), 3, ["num_kv_heads=2", "tensor=3", "--config.mesh.context=3"]),
        (dict(ffn_dim=385), 2, ["ffn_dim=385", "tensor=2", "--config.mesh.tensor=1"]),
    ],
)
def test_tensor_that_divides_nothing_is_told_a_mesh_that_works(model, tensor, words):
    config = changed("model", **model)
    config.mesh.tensor = tensor
    config.data.seq_len = 4608
    sentence = rejected(config)
    for word in words:
        assert word in sentence
    for override in sentence.split("use ")[1].split():
        axis, size = override.removeprefix("--config.mesh.").split("=")
        config.mesh[axis] = int(size)
    assert load(config).mesh.num_devices == tensor


def test_tensor_greater_than_the_number_of_kv_heads():
    config = changed("model", num_heads=8, num_kv_heads=2)
    config.mesh.tensor = 8
    load(config)


def test_rows_that_do_not_split_over_data_and_fsdp():
    config = changed("mesh", data=2, fsdp=3)
    config.train.global_batch_size = 6
    assert "config.train.eval_sequences=4 is not divisible by mesh.data x mesh.fsdp = 6; use 6" in rejected(config)
    config.train.eval_sequences = 6
    load(config)


def test_mesh_of_another_size_than_the_simulated_devices():
    config = changed("mesh", context=3, tensor=2)
    config.runtime.simulated_devices = 8
    sentence = rejected(config)
    assert "context=3 x tensor=2 needs 6 devices but config.runtime.simulated_devices is 8" in sentence
    assert sentence.endswith("use --config.mesh.context=4")  # 6 devices would not split 4,096 tokens
    config.mesh.context = 1
    assert "use --config.mesh.context=4, or --config.runtime.simulated_devices=2, on CPU" in rejected(config)
    config.mesh.context = 4
    load(config)


def test_no_advice_that_does_not_work():
    config = changed("data", seq_len=4)
    config.runtime.simulated_devices = 8
    assert "--config.mesh" not in rejected(config)
    config.runtime.simulated_devices = 0
    with pytest.raises(ValueError, match="the devices here are 8; use --config.runtime.simulated_devices=1, on CPU"):
        check_num_devices(load(config), 8, "the devices here are")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 8, 64])
def test_working_mesh_works(num_devices):
    config = load(changed("data", seq_len=4096 * 3))
    mesh = working_mesh(config, num_devices)
    assert math.prod(dataclasses.astuple(mesh)) == num_devices
    load(dataclasses.replace(config, mesh=mesh))


def test_mesh_overrides_name_what_differs():
    assert mesh_overrides(MeshConfig(context=4, tensor=2), MeshConfig(context=2, tensor=2)) == "--config.mesh.context=2"
