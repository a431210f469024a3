"""Plans of all configs and variants at full size, compared with tests/goldens/plans.txt."""

from pathlib import Path

import jax
import pytest

from tests.plan.config_lines import NAMES, line

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(
        jax.__version__ != "0.10.1", reason="the goldens are from the last XLA with NVSHMEM"
    ),
]
GOLDEN = Path(__file__).parents[1] / "goldens" / "plans.txt"


# A ring on 64 GPUs, and one device with state and activations in host memory, and tiles. test_full_size.py has a ring
# across NVLink domains, and test_tiled_attention.py Ulysses.
_SAMPLE = ("256k:", "1m_1gpu:")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in _SAMPLE else pytest.mark.full) for x in NAMES]
)
def test_plan_of_config_matches_golden(name):
    (golden,) = (text for text in GOLDEN.read_text().splitlines() if text.split()[0] == name)
    assert line(name) == golden, "python -m tests.plan.config_lines > tests/goldens/plans.txt"
