"""Advice for steps that do not fit: which changes are compiled, in which order, and how they are printed."""

import dataclasses
import json

import pytest

from jaxlc.config import Config, defaults, load, with_settings
from jaxlc.plan.memory import Memory
from jaxlc.plan.record import Change
from jaxlc.plan.report import interval_factors_text, page, summary
from jaxlc.plan.result import Plan
from jaxlc.plan.summary import Ring
from jaxlc.search import advise, space
from jaxlc.search.compile_order import Layout, Rates
from jaxlc.simulate.roofline import Roofline
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


GPUS = topology("h100:1x8")


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
    none = dict.fromkeys(("device_arguments_bytes", "workspace_bytes", "nvshmem_heap_bytes", "nccl_bytes"), 0)

    def plan_step(config, gpus, starting, **options):
        starting()
        configs.append(config)
        rates = Rates(gpus, Roofline())
        estimate = Layout(config, rates, {"full": "cudnn"}).estimate(config.memory)
        temporaries = int(estimate.exact_bytes + 1.5 * estimate.working_bytes)
        sizes = dict(device_capacity_bytes=gpus.device.memory_bytes, symmetric_used_bytes=0, **none)
        return plan_of(dataclasses.replace(MEMORY, device_temp_bytes=temporaries, **sizes))

    monkeypatch.setattr(advise, "plan_step", plan_step)
    return configs


@pytest.mark.gpu_compiler
def test_advice_compiles_the_fastest_changes_that_should_fit(compiled):
    descriptions = []
    result = advise.plan_with_advice(config_8b(remat="matmuls"), GPUS, descriptions.append)
    assert descriptions == ["the training step for h100:1x8", *(f"with {change.overrides}" for change in result.advice)]
    assert [change.fits for change in result.advice] == [True, True] and len(compiled) == 3
    assert {(config.mesh, config.attention) for config in compiled} == {(compiled[0].mesh, compiled[0].attention)}
    first = result.advice[0]
    assert "--config.memory.remat=attention" in first.overrides and "recomputes" in first.cost
    assert first.device_peak_bytes < result.memory.device_peak_bytes
    assert "VERDICT: does not fit" in str(result) and first.overrides in str(result)


@pytest.mark.gpu_compiler
def test_advice_that_cannot_fit_is_short(compiled):
    config = dataclasses.replace(config_8b(), data=dataclasses.replace(config_8b().data, seq_len=2**27))
    result = advise.plan_with_advice(config, GPUS, lambda description: None)
    assert result.advice == () and len(compiled) == 1


def test_plan_with_advice_of_fitting_step_compiles_once(compiled):
    result = advise.plan_with_advice(config_8b(remat="full"), GPUS, lambda description: None)
    assert result.advice is None and len(compiled) == 1


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
    for settings in space.changes(config):
        assert space.cost(config, settings) or settings.get("memory.tile_tokens") == 0 or "device" in settings.values()
        assert all(space.value_of(config, path) != value for path, value in settings.items())
        overrides.append(space.overrides(settings))
        assert "(" not in overrides[-1]
        changed = with_settings(config, settings)  # raises if settings are incompatible
        assert changed.mesh == config.mesh and changed.attention == config.attention
    assert len(set(overrides)) == len(overrides)


def test_cost_joins_the_parts_of_a_change():
    config = long_config()
    settings = {"memory.remat": "full", "memory.offload": ("residual",), "memory.optimizer": "host"}
    assert space.cost(config, settings) == (
        "copies every layer's input to host memory and back, and recomputes everything else;"
        " copies AdamW's moments from host memory and back in every update"
    )
    assert "tiles of tokens" in space.cost(config, {"memory.tile_tokens": 8192})
    assert "smaller microbatches" in space.cost(config, {"train.gradient_accumulation_steps": 2})


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
