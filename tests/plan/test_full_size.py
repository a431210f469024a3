"""The plan at full size: Llama 3 8B and 70B on 64 GPUs, a context of 64, and the memory docs/memory.md promises."""

import pytest

from benchmarks import memory_cases
from jaxlc import plan
from jaxlc.config import defaults
from tests.plan.gpus import ignores_cache, needs_gpu_compiler

pytestmark = [pytest.mark.heavy, needs_gpu_compiler, ignores_cache]


def planned(preset: str, topology: str, **mesh):
    config = defaults()
    config.model.preset = preset
    config.mesh.update(mesh)
    config.attention.document_mask = False
    config.memory.remat = "full"
    config.data.seq_len = 262_144
    return plan.plan(config, topology)


def test_llama3_8b_on_64_h100s():
    found = planned("llama3.1-8b", "h100:8x8", context=8, tensor=8)
    assert found.compile_seconds < 60
    gib = {name: size / 2**30 for name, size in found.to_json()["memory"].items() if name.endswith("_bytes")}
    assert gib["device_arguments_bytes"] == pytest.approx(1.41, abs=0.02)  # 12 B for each of 8.03e9 / 64 parameters
    assert 3 < gib["device_temp_bytes"] < 5
    # The backward's call of a rank's whole piece: 4 B for each of 32,768 x 4 heads x 128 numbers of dq, and row sums,
    # and dk and dv for each query head.
    assert gib["workspace_bytes"] == pytest.approx((64 + 0.5 + 64) / 1024)
    assert found.memory.fits
    assert (found.ring.hops, found.ring.exposed_forward) == (28 * 32, 0)
    assert found.kernels["cudnn attention forward"] == 8 * 32


@pytest.mark.parametrize("preset, topology, mesh", [
    ("llama3.1-70b", "gb200:1x64", dict(context=8, tensor=8)),
    ("llama3.1-8b", "h100:8x8", dict(context=64)),
])  # fmt: skip
def test_large_models_and_long_rings(preset, topology, mesh):
    found = planned(preset, topology, **mesh)
    assert found.memory.fits and found.memory.device_peak_bytes > 2**30
    assert len(found.memory.largest) == 5
    assert found.ring.hops == found.ring.hidden + found.ring.exposed > 0


@pytest.mark.parametrize("baseline, max_gib, max_seconds", list(zip(
    memory_cases.baselines(), (24, 18, 6.5, 4, 52.3), (None, None, None, None, 300), strict=True
)))  # fmt: skip
def test_plan_baseline_cases_need_less_memory(baseline, max_gib, max_seconds):
    """The last of our cases for each baseline; arguments and temporaries, as the baselines are measured."""
    case = baseline.ours[-1]
    found = plan.plan(memory_cases.point(case).config, case.topology)
    memory = found.memory
    assert (memory.device_arguments_bytes + memory.device_temp_bytes) / 2**30 < max_gib
    assert memory.fits
    assert max_seconds is None or found.predicted.step_seconds < max_seconds
