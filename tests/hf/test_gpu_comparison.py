"""The dry run of `benchmarks.gpu_comparison`: the models of PyTorch have the losses of jaxlc."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_comparison import ROWS, loss_difference
from tests.environment import for_user
from tests.hf.comparison import PYTHON, needs_transformers
from tests.tolerances import FLOAT32_LOSS, FLOAT32_PARITY

pytestmark = needs_transformers
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The result of each row and column."""
    out = tmp_path_factory.mktemp("comparison") / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_comparison", "--dry_run", f"--out={out}"]
    command += ["--columns=jaxlc,cudnn_op", f"--torch_python={PYTHON}"]
    command += ["--seconds=3000", "--repeats=1"]
    environment = for_user(PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line for line in read if "seconds" not in line] == []
    return {(line["row"], line["column"]): line for line in read}


@pytest.mark.parametrize("row", ROWS)
def test_losses_of_both_sides_agree_before_and_after_updates(lines, row):
    ours, theirs = lines[row, "jaxlc"]["losses"], lines[row, "cudnn_op"]["losses"]
    assert loss_difference(ours, theirs, 1) <= FLOAT32_LOSS
    if not ROWS[row].lora:  # its adapters start from other random values
        assert loss_difference(ours, theirs, 3) <= FLOAT32_PARITY
    assert lines[row, "cudnn_op"]["attention_seconds"] > 0
    assert lines[row, "cudnn_op"]["product_seconds"] > 0
