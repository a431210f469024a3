"""The settings of published runs; compiling them all is for scripts/calibrate_plan.py."""

import pytest

from benchmarks.calibration import RUNS, config_of
from jaxlc.simulate.topology import topology


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_mesh_of_a_published_run_has_its_gpus(run):
    config = config_of(run)
    assert config.mesh.num_devices == topology(run.topology).num_gpus
    assert f"{config.data.seq_len // 1024}K" in run.name or "1M" in run.name
