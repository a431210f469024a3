"""Advice for steps that do not fit: which changes are compiled, in which order, and how they are printed."""

import dataclasses
import json

import pytest

from jaxlc.config import Config, load, with_settings
from jaxlc.core.errors import UserError
from jaxlc.plan.memory import Memory
from jaxlc.plan.record import Change
from jaxlc.plan.report import interval_factors_text, page, summary
from jaxlc.plan.result import Plan
from jaxlc.plan.summary import Ring
from jaxlc.search import advise
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
    transfer_seconds_by_resource={"NVLink": 0.5},
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
    """(remat, context) of each step that is "compiled". Steps fit with full remat or with context=4."""
    steps = []

    def plan_step(config, gpus, starting):
        if config.train.global_batch_size % config.train.gradient_accumulation_steps:
            raise UserError("invalid")
        starting()
        steps.append((config.memory.remat, config.mesh.context))
        return plan_of(with_temporaries(40 if config.memory.remat == "full" or config.mesh.context == 4 else 80))

    monkeypatch.setattr(advise, "plan_step", plan_step)
    return steps


def test_advice_stops_after_two_changes_that_fit(compiled):
    config = small_config()
    config.memory.remat = "attention"
    descriptions = []
    result = advise.plan_with_advice(config, topology("h100:1x4"), descriptions.append)
    # One sequence cannot be split into two microbatches; there is no data axis; the strategy is ring already.
    assert compiled == [("attention", 2), ("attention", 2), ("full", 2), ("attention", 4)]
    assert descriptions == ["the training step for h100:1x4", *(f"with {change.overrides}" for change in result.advice)]
    assert [(change.overrides, change.fits) for change in result.advice] == [
        ("--config.memory.loss_chunk_tokens=256", False),
        ("--config.memory.remat=full", True),
        ("--config.mesh.tensor=1 --config.mesh.context=4", True),
    ]
    assert result.advice[1].device_peak_bytes == with_temporaries(40).device_peak_bytes
    assert "VERDICT: does not fit, 20.00 GiB too much" in str(result) and "--config.memory.remat=full" in str(result)


def test_plan_with_advice_of_fitting_step_compiles_once(compiled):
    result = advise.plan_with_advice(small_config(), topology("h100:1x4"), lambda description: None)
    assert result.advice is None and compiled == [("full", 2)]


def test_page_without_advice_prints_the_command():
    text = page(plan_of(with_temporaries(80)), "python -m jaxlc.plan --config=x.py --advise")
    assert text.endswith("To search for settings that fit: python -m jaxlc.plan --config=x.py --advise")


def test_page_with_insufficient_changes_says_so():
    change = Change(overrides="--config.a=1", cost="", device_peak_bytes=0, host_bytes_per_node=0, fits=False)
    assert "none is enough" in page(plan_of(with_temporaries(80), advice=(change,)), "")
    enough = dataclasses.replace(change, fits=True)
    assert "none is enough" not in page(plan_of(with_temporaries(80), advice=(change, enough)), "")


def test_page_with_small_nvshmem_heap_prints_needed_size():
    text = page(plan_of(dataclasses.replace(MEMORY, symmetric_used_bytes=4 * GIB + 1)), "")
    assert f"--config.runtime.nvshmem_heap_bytes={5 * GIB}" in text
    assert "nvshmem_heap_bytes" not in page(plan_of(MEMORY), "")


def test_candidates_are_valid_settings():
    config = small_config()
    config.mesh.update(data=2, fsdp=2)
    config.attention.strategy = "all_gather"
    config.memory.remat = "none"
    config.train.update(global_batch_size=16, eval_sequences=16)
    config = load(config)
    result = list(advise.candidates(config))
    assert len(result) == 1 + 1 + 1 + 1 + 3 + 3 + 2 + 1 + 1 + 1 + 0 + 2
    for candidate in result:
        changed = with_settings(config, candidate.settings)
        assert "(" not in candidate.overrides
        assert changed != config and changed.mesh.num_devices == config.mesh.num_devices


def long_config(**memory) -> Config:
    config = small_config()
    config.data.seq_len = 2 * 65_536  # half of it per device
    config.memory.update(memory)
    return load(config)


def last_two(config: Config) -> list[dict]:
    """Settings of the last two candidates, which combine all changes."""
    return [candidate.settings for candidate in advise.candidates(config)][-2:]


def test_candidates_end_with_all_changes_together():
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
def test_candidates_change_incompatible_remat(remat):
    config = long_config(remat=remat)
    with_tiles = [change for change in advise.candidates(config) if "memory.tile_tokens" in change.settings]
    on_host = [change for change in advise.candidates(config) if change.settings.get("memory.parameters") == "host"]
    assert len(with_tiles) == len(on_host) == 3
    for candidate in (*with_tiles, *on_host):
        with_settings(config, candidate.settings)  # raises if settings are incompatible


def test_candidates_skip_current_settings():
    config = long_config(tile_tokens=8192, optimizer="host", parameters="host", layers_per_remat_group=2)
    result = [candidate.settings for candidate in advise.candidates(config)]
    assert result[-1] == {"memory.remat": "full", "memory.offload": ("residual",)}
    assert not any("memory.tile_tokens" in settings or "memory.optimizer" in settings for settings in result)


def test_tile_candidate_replaces_all_gather():
    config = dataclasses.replace(
        long_config(), attention=dataclasses.replace(long_config().attention, strategy="all_gather")
    )
    assert last_two(config)[0]["attention.strategy"] == "ring"


def test_page_prints_interval_of_step_and_speed(tmp_path):
    """Also of a stored plan; plans of versions without an interval have none."""
    plan = plan_of(MEMORY)
    assert "80%: " not in page(plan, "").replace("(80%: the interval", "")
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(PREDICTED, step_seconds_interval=(1.0, 4.0)))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    assert Plan.from_json(path).predicted == plan.predicted
    text = page(Plan.from_json(path), "")
    assert "2.00 s  80%: 1.00 s to 4.00 s, bound by compute" in text
    assert "80%: 0 to 2" in text  # 1 token/s at 2 s: 0.5 at 4 s, 2 at 1 s
    assert summary(plan).startswith("estimated 2.00 s per step (80%: 1.00 s to 4.00 s), 1 tokens/s per GPU")
    assert interval_factors_text(plan.predicted, "cost").startswith(
        "80% interval: 0.50 to 2.00 times the estimated cost"
    )
