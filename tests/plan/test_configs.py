"""Every config and variant, planned at full size: peak memory and ring lines as in tests/goldens/plans.txt."""

from pathlib import Path

import jax
import pytest

from tests.plan.config_lines import NAMES, line
from tests.plan.gpus import ignores_cache, needs_gpu_compiler

pytestmark = [
    pytest.mark.heavy,
    needs_gpu_compiler,
    ignores_cache,
    pytest.mark.skipif(jax.__version__ != "0.10.1", reason="the lines are of the last XLA that has NVSHMEM"),
]
GOLDEN = Path(__file__).parents[1] / "goldens" / "plans.txt"


@pytest.mark.parametrize("name", NAMES)
def test_peak_memory_and_ring(name):
    (wanted,) = (each for each in GOLDEN.read_text().splitlines() if each.split()[0] == name)
    assert line(name) == wanted, "python -m tests.plan.config_lines > tests/goldens/plans.txt"
