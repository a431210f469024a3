"""Advice for steps that do not fit: which changes are compiled, in which order, and how they are
printed.
"""

import dataclasses

import pytest

from jaxlc import plan
from jaxlc.config import Config, defaults, load, read_config, with_settings
from jaxlc.core import hardware
from jaxlc.search import best_first, space
from jaxlc.search.analytic_cost import Layout, Rates
from jaxlc.simulate.roofline import Roofline
from tests.plan.gpus import small_config
from tests.plan.sample_plan import MEMORY, PREDICTED, plan_of

H100 = hardware.find("h100")


def config_8b(**memory) -> Config:
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.mesh.context = 8
    config.data.seq_len = 262_144
    config.train.update(global_batch_size=4, gradient_accumulation_steps=4)
    config.attention.update(strategy="ulysses", document_mask=False)
    config.memory.update(memory)
    return load(config)


@pytest.fixture
def compiled(monkeypatch) -> list[Config]:
    """Configs that are "compiled": the working set of a layer is 1.5 times the estimated one."""
    configs = []
    none = dict.fromkeys(
        ("device_arguments_bytes", "workspace_bytes", "nvshmem_heap_bytes", "nccl_bytes"), 0
    )

    def plan_step(config, gpus, starting, **options):
        starting()
        configs.append(config)
        rates = Rates(gpus, Roofline())
        estimate = Layout(config, rates, {"full": "cudnn"}).estimate(config.memory)
        temporaries = int(estimate.exact_bytes + 1.5 * estimate.working_bytes)
        seconds = 1.1 * estimate.step_seconds
        predicted = dataclasses.replace(
            PREDICTED,
            step_seconds=seconds,
            tokens_per_second_per_device=config.tokens_per_step / seconds / 8,
        )
        sizes = dict(device_capacity_bytes=gpus.device.memory_bytes, symmetric_used_bytes=0, **none)
        memory = dataclasses.replace(MEMORY, device_temp_bytes=temporaries, **sizes)
        return dataclasses.replace(plan_of(memory), predicted=predicted)

    monkeypatch.setattr(plan, "plan_step", plan_step)
    monkeypatch.setattr(best_first, "plan_step", plan_step)
    return configs


@pytest.mark.gpu_compiler
def test_advice_compiles_the_fastest_changes_that_should_fit(compiled):
    descriptions = []
    result = plan.plan(
        config_8b(remat="matmuls"), "h100:1x8", advise=True, starting=descriptions.append
    )
    assert descriptions == [
        "the training step for h100:1x8",
        *(f"with {change.overrides}" for change in result.advice),
    ]
    assert [change.fits for change in result.advice] == [True, True] and len(compiled) == 3
    assert {(config.mesh, config.attention) for config in compiled} == {
        (compiled[0].mesh, compiled[0].attention)
    }
    first = result.advice[0]
    assert "--config.memory.remat=attention" in first.overrides and "recomputes" in first.cost
    assert first.device_peak_bytes < result.memory.device_peak_bytes
    assert "VERDICT: does not fit" in str(result) and first.overrides in str(result)


@pytest.mark.gpu_compiler
def test_advice_that_cannot_fit_is_short(compiled):
    config = dataclasses.replace(
        config_8b(), data=dataclasses.replace(config_8b().data, seq_len=2**27)
    )
    result = plan.plan(config, "h100:1x8", advise=True)
    assert result.advice == () and len(compiled) == 1


def test_advice_of_fitting_step_compiles_once(compiled):
    result = plan.plan(config_8b(remat="full"), "h100:1x8", advise=True)
    assert result.advice is None and len(compiled) == 1


def long_config(**memory) -> Config:
    config = small_config()
    config.data.seq_len = 2 * 65_536  # half of it per device
    config.train.update(global_batch_size=8, eval_sequences=8)
    config.memory.update(memory)
    return load(config)


@pytest.mark.parametrize("memory", [
    {}, dict(remat="none"), dict(remat="matmuls"), dict(remat="attention", save=("mlp_gate",)),
    dict(tile_tokens=8192, optimizer="host", parameters="host", layers_per_remat_group=2),
])  # fmt: skip
def test_changes_are_valid_and_have_a_cost(memory):
    config = long_config(**memory)
    overrides = []
    for settings in space.changes(config, H100):
        assert (
            space.cost(config, settings)
            or settings.get("memory.tile_tokens") == 0
            or "device" in settings.values()
        )
        assert all(space.value_of(config, path) != value for path, value in settings.items())
        overrides.append(space.overrides(settings))
        assert "(" not in overrides[-1]
        changed = with_settings(config, settings)  # raises if settings are incompatible
        assert changed.mesh == config.mesh and changed.attention == config.attention
    assert len(set(overrides)) == len(overrides)


@pytest.mark.parametrize(
    "given, smaller", [(0, {0, 1024, 256}), (4096, {4096, 1024, 256}), (1024, {1024, 256})]
)
def test_changes_offer_smaller_chunks_of_the_loss_than_the_one_of_the_run(given, smaller):
    config = load(read_config("64k:h100"))  # 4,096 if chosen
    config = with_settings(config, {"memory.loss_chunk_tokens": given})
    path = "memory.loss_chunk_tokens"
    assert {x.get(path, given) for x in space.changes(config, H100)} == smaller


def test_cost_joins_the_parts_of_a_change():
    config = long_config()
    settings = {"memory.remat": "full", "memory.offload": ("residual",), "memory.optimizer": "host"}
    assert space.cost(config, settings) == (
        "copies every layer's input to host memory and back, and recomputes everything else;"
        " copies AdamW's moments from host memory and back in every update"
    )
    assert "tiles of tokens" in space.cost(config, {"memory.tile_tokens": 8192})
    assert "smaller microbatches" in space.cost(config, {"train.gradient_accumulation_steps": 2})
