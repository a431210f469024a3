"""The dry run of the GPU suite, without the packages that GPU machines may lack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Runs the script as if these packages were not installed, and jaxlc neither.
_BARE_MACHINE = """
import os, runpy, sys
absent = {"grain", "tokenizers", "tensorboardX", "matplotlib", "pyarrow", "datasets", "qwix"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Absent())
sys.path = [path for path in sys.path if not os.path.isdir(os.path.join(path, "jaxlc"))]
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
sys.argv[1:] = ["--dry_run"]
runpy.run_path("scripts/gpu_suite.py", run_name="__main__")
"""


@pytest.mark.heavy
def test_gpu_suite_dry_run_with_few_packages():
    command = [sys.executable, "-c", _BARE_MACHINE]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    suite = json.loads(ran.stdout)
    assert suite["jax"] and suite["commit"] is not None
    parts = ("workspaces", "correctness", "ring_steps", "train_steps", "kernels")
    rows = [row for part in parts for row in suite[part]]
    assert not [row for row in rows if "error" in row or "skipped" in row]
    assert all(row[name] < 1e-5 for row in suite["correctness"] for name in ("out", "dq", "dk", "dv"))
    assert {row["mask"] for row in suite["correctness"]} >= {"causal", "full", "window, packed documents"}
    assert suite["ring_steps"][0]["ring_over_whole"] > 0 and suite["train_steps"][0]["loss"] > 0
    assert suite["kernels"][0]["both_tflops"] > 0 and suite["workspaces"][0]["known_bytes"] > 0
