"""Plans at full size: Llama 3 8B and 70B on 64 GPUs, context=64, and the memory that docs/memory.md
states.
"""

import time

import pytest

from benchmarks import memory_cases
from jaxlc import plan
from jaxlc.config import defaults

pytestmark = [pytest.mark.heavy, pytest.mark.gpu_compiler]


def planned(preset: str, topology: str, **mesh):
    config = defaults()
    config.model.preset = preset
    config.mesh.update(mesh)
    config.attention.document_mask = False
    config.memory.remat = "full"
    config.data.seq_len = 262_144
    return plan.plan(config, topology)


def test_plan_of_llama3_8b_on_64_h100s():
    start = time.process_time()  # CPU seconds, which do not depend on what else the machine does
    result = planned("llama3.1-8b", "h100:8x8", context=8, tensor=8)
    assert time.process_time() - start < 60 and result.compile_seconds > 0
    gib = {
        name: size / 2**30
        for name, size in result.to_json()["memory"].items()
        if name.endswith("_bytes")
    }
    # 12 B for each of 8.03e9 / 64 parameters
    assert gib["device_arguments_bytes"] == pytest.approx(1.41, abs=0.02)
    assert 3 < gib["device_temp_bytes"] < 5
    # The backward call on a rank's local chunk: 4 B for each of 32,768 x 4 heads x 128 elements of dq, row sums, and dk
    # and dv for each query head.
    assert gib["workspace_bytes"] == pytest.approx((64 + 0.5 + 64) / 1024)
    assert result.memory.fits
    assert (result.ring.hops, result.ring.exposed_forward) == (28 * 32, 0)
    assert result.kernels["cudnn attention forward"] == 8 * 32


@pytest.mark.parametrize("preset, topology, mesh", [
    pytest.param("llama3.1-70b", "gb200:1x64", dict(context=8, tensor=8), marks=pytest.mark.full),
    # The test above has this model, with a ring across NVLink domains.
    pytest.param("llama3.1-8b", "h100:8x8", dict(context=64), marks=pytest.mark.full),
])  # fmt: skip
def test_plan_of_large_models_and_long_rings(preset, topology, mesh):
    result = planned(preset, topology, **mesh)
    assert result.memory.fits and result.memory.device_peak_bytes > 2**30
    assert len(result.memory.largest) == 5
    assert result.ring.hops == result.ring.hidden + result.ring.exposed > 0


_MAX_GIB = (24, 18, 6.5, 4, 52.3)
_MAX_SECONDS = (None, None, None, None, 300)


@pytest.mark.full  # test_configs.py has a plan with tiles, and test_offload.py what is in host memory
@pytest.mark.parametrize(
    "baseline, max_gib, max_seconds",
    list(zip(memory_cases.baselines(), _MAX_GIB, _MAX_SECONDS, strict=True)),
)
def test_plan_baseline_cases_need_less_memory(baseline, max_gib, max_seconds):
    """The last of our cases for each baseline; arguments and temporaries, as the baselines are
    measured.
    """
    case = baseline.ours[-1]
    result = plan.plan(memory_cases.point(case).config, case.topology)
    memory = result.memory
    assert (memory.device_arguments_bytes + memory.device_temp_bytes) / 2**30 < max_gib
    assert memory.fits
    assert max_seconds is None or result.predicted.step_seconds < max_seconds
