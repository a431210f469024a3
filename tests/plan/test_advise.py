"""Advice on steps that do not fit: which changes are tried, in which order, and what is told of them."""

import dataclasses

import pytest

from jaxlc.config import Config, load, with_settings
from jaxlc.core.errors import UserError
from jaxlc.plan import advise
from jaxlc.plan.memory import Memory
from jaxlc.plan.report import Change, Plan, page
from jaxlc.plan.summary import Ring
from jaxlc.simulate.timeline import Prediction
from jaxlc.simulate.topology import topology
from tests.plan.gpus import small_config
from tests.plan.test_memory import GIB, MEMORY

PREDICTED = Prediction(
    step_seconds=2.0,
    tokens_per_second_per_device=1.0,
    mfu_causal=0.4,
    recomputed_share=0.3,
    exposed_communication_seconds=0.1,
    communication_seconds=0.5,
    exposed_host_copy_seconds=0.0,
    host_copy_seconds=0.0,
    host_copies=0,
    exposed_host_copies=0,
    bound_by="compute",
    seconds_by_resource={"compute": 1.9, "NVLink": 0.1},
    seconds_by_kind={"attention": 1.9, "waiting": 0.1},
)


def plan_of(memory: Memory, **advice) -> Plan:
    ring = Ring(hops=0, hidden=0, exposed=0, exposed_forward=0, by_backend={})
    return Plan(
        topology="h100:1x4",
        num_devices=4,
        mesh={},
        sequence_tokens=1,
        tokens_per_step=1,
        compile_seconds=1,
        predicted=PREDICTED,
        memory=memory,
        collectives=(),
        ring=ring,
        kernels={},
        kernel_choice="",
        transport_choice="",
        **advice,
    )


def with_temporaries(gib: int) -> Memory:
    return dataclasses.replace(MEMORY, device_temp_bytes=gib * GIB)


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The remat and the mesh of each step that is "compiled"; steps fit with full remat, or with context=4."""
    steps = []

    def plan_step(config, gpus, starting):
        if config.train.global_batch_size % config.train.gradient_accumulation_steps:
            raise UserError("cannot be")
        starting()
        steps.append((config.memory.remat, config.mesh.context))
        return plan_of(with_temporaries(40 if config.memory.remat == "full" or config.mesh.context == 4 else 80))

    monkeypatch.setattr(advise, "plan_step", plan_step)
    return steps


def test_changes_are_compiled_cheapest_first_until_two_fit(compiled):
    config = small_config()
    config.memory.remat = "attention"
    said = []
    found = advise.plan_with_advice(config, topology("h100:1x4"), said.append)
    # One row cannot be taken in two parts; there is no data axis to split over; a ring is there already.
    assert compiled == [("attention", 2), ("attention", 2), ("full", 2), ("attention", 4)]
    assert said == ["the training step for h100:1x4", *(f"with {change.overrides}" for change in found.advice)]
    assert [(change.overrides, change.fits) for change in found.advice] == [
        ("--config.memory.loss_chunk_tokens=256", False),
        ("--config.memory.remat=full", True),
        ("--config.mesh.tensor=1 --config.mesh.context=4", True),
    ]
    assert found.advice[1].device_peak_bytes == with_temporaries(40).device_peak_bytes
    assert "IT DOES NOT FIT: 20.00 GiB too much" in str(found) and "--config.memory.remat=full" in str(found)


def test_a_step_that_fits_needs_no_advice(compiled):
    found = advise.plan_with_advice(small_config(), topology("h100:1x4"), lambda what: None)
    assert found.advice is None and compiled == [("full", 2)]


def test_without_advice_the_page_says_how_to_ask():
    text = page(plan_of(with_temporaries(80)), "python -m jaxlc.plan --config=x.py --advise")
    assert text.endswith("Changes that make it fit are found by: python -m jaxlc.plan --config=x.py --advise")


def test_changes_that_are_not_enough_are_told_as_such():
    change = Change(overrides="--config.a=1", cost="", device_peak_bytes=0, host_bytes_per_node=0, fits=False)
    assert "none is enough" in page(plan_of(with_temporaries(80), advice=(change,)), "")
    enough = dataclasses.replace(change, fits=True)
    assert "none is enough" not in page(plan_of(with_temporaries(80), advice=(change, enough)), "")


def test_a_heap_that_is_too_small_is_told_with_the_size_it_needs():
    text = page(plan_of(dataclasses.replace(MEMORY, symmetric_used_bytes=4 * GIB + 1)), "")
    assert f"--config.runtime.nvshmem_heap_bytes={5 * GIB}" in text
    assert "nvshmem_heap_bytes" not in page(plan_of(MEMORY), "")


def test_every_candidate_is_made_of_settings_that_there_are():
    config = small_config()
    config.mesh.update(data=2, fsdp=2)
    config.attention.strategy = "all_gather"
    config.memory.remat = "none"
    config.train.update(global_batch_size=16, eval_sequences=16)
    config = load(config)
    found = list(advise.candidates(config))
    assert len(found) == 1 + 1 + 1 + 1 + 3 + 3 + 2 + 1 + 1 + 1 + 0 + 2
    for candidate in found:
        changed = with_settings(config, candidate.settings)
        assert "(" not in candidate.overrides
        assert changed != config and changed.mesh.num_devices == config.mesh.num_devices


def long_config(**memory) -> Config:
    config = small_config()
    config.data.seq_len = 2 * 65_536  # of which a device has half
    config.memory.update(memory)
    return load(config)


def last_two(config: Config) -> list[dict]:
    """The settings of the last two candidates, which are everything at once."""
    return [candidate.settings for candidate in advise.candidates(config)][-2:]


def test_at_last_everything_is_tried_together():
    everything, in_groups = last_two(long_config())
    assert everything == {
        "memory.remat": "full",
        "memory.offload": ("residual",),
        "memory.tile_tokens": 16_384,
        "memory.optimizer": "host",
        "memory.parameters": "host",
    }
    assert in_groups == everything | {"memory.layers_per_remat_group": 2}


@pytest.mark.parametrize("remat", ["none", "matmuls", "attention"])
def test_what_does_not_go_with_a_remat_comes_with_another(remat):
    config = long_config(remat=remat)
    with_tiles = [each for each in advise.candidates(config) if "memory.tile_tokens" in each.settings]
    on_host = [each for each in advise.candidates(config) if each.settings.get("memory.parameters") == "host"]
    assert len(with_tiles) == len(on_host) == 3
    for candidate in (*with_tiles, *on_host):
        with_settings(config, candidate.settings)  # raises where two do not go together


def test_what_is_there_already_is_not_advised():
    config = long_config(tile_tokens=8192, optimizer="host", parameters="host", layers_per_remat_group=2)
    found = [candidate.settings for candidate in advise.candidates(config)]
    assert found[-1] == {"memory.remat": "full", "memory.offload": ("residual",)}
    assert not any("memory.tile_tokens" in settings or "memory.optimizer" in settings for settings in found)


def test_tiles_need_another_strategy_than_all_gather():
    config = dataclasses.replace(
        long_config(), attention=dataclasses.replace(long_config().attention, strategy="all_gather")
    )
    assert last_two(config)[0]["attention.strategy"] == "ring"
