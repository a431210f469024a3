"""The suite for GPU machines: its dry run, with nothing installed that such machines do not have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Everything of pyproject.toml that a bare image with jax and flax may lack.
_WITHOUT = """
import runpy, sys
absent = {"grain", "tokenizers", "tensorboardX", "matplotlib", "pyarrow", "datasets", "qwix"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ImportError(f"no {name} here")
sys.meta_path.insert(0, Absent())
sys.argv[1:] = ["--dry_run"]
runpy.run_path("scripts/gpu_suite.py", run_name="__main__")
"""


@pytest.mark.heavy
def test_dry_run_without_the_packages_that_it_does_not_need():
    command = [sys.executable, "-c", _WITHOUT]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    suite = json.loads(ran.stdout)
    assert suite["jax"] and suite["commit"] is not None
    parts = ("workspaces", "correctness", "ring_steps", "train_steps", "kernels")
    rows = [row for part in parts for row in suite[part]]
    assert not [row for row in rows if "error" in row or "left_out" in row]
    assert all(row[what] < 1e-5 for row in suite["correctness"] for what in ("out", "dq", "dk", "dv"))
    assert {row["mask"] for row in suite["correctness"]} >= {"causal", "full", "window, packed documents"}
    assert suite["ring_steps"][0]["ring_over_whole"] > 0 and suite["train_steps"][0]["loss"] > 0
    assert suite["kernels"][0]["both_tflops"] > 0 and suite["workspaces"][0]["known_bytes"] > 0
