"""Advice for steps that do not fit: which changes are compiled, in which order, and how they are printed."""

import dataclasses

import pytest

from jaxlc.config import Config, load, with_settings
from jaxlc.core.errors import UserError
from jaxlc.search import advise
from jaxlc.simulate.topology import topology
from tests.plan.gpus import small_config
from tests.plan.sample_plan import plan_of, with_temporaries


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
