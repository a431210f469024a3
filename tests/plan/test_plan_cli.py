"""`python -m jaxlc.plan`: what a user types, what stands on the screen, and what is a sentence."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlc.config import load, transport_settings, with_settings
from jaxlc.config.command_line import run_main
from jaxlc.plan import __main__ as command
from tests.plan.gpus import needs_gpu_compiler, small_config

ROOT = Path(__file__).parents[2]
CONFIG = """
from tests.plan.gpus import small_config

def get_config(variant):
    return small_config()
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


@needs_gpu_compiler
def test_a_page_on_stdout_figures_in_json_and_no_noise(config, tmp_path):
    figures = tmp_path / "figures.json"
    arguments = [f"--config={config}", "--topology=h100:1x4", "--transport=auto", f"--json={figures}", "--advise"]
    ours = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-m", "jaxlc.plan", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "compiling the training step for h100:1x4 ...\n"
    assert "IT FITS" in done.stdout and "cudnn attention forward" in done.stdout
    found = json.loads(figures.read_text())
    assert found["topology"] == "h100:1x4" and found["num_devices"] == 4 and found["memory"]["fits"] is True
    assert found["advice"] is None
    memory = found["memory"]  # between processes hops are not NCCL's usual ones, and use symmetric buffers
    assert 0 < memory["symmetric_used_bytes"] <= memory["symmetric_bytes"]
    parts = ("device_arguments_bytes", "device_temp_bytes", "workspace_bytes", "symmetric_bytes", "nccl_bytes")
    assert memory["device_peak_bytes"] == sum(memory[part] for part in parts)
    assert list(found["ring"]["by_backend"]) in (["NVSHMEM"], ["NCCL symmetric"])


@pytest.mark.parametrize("arguments, words", [
    ([], "no topology is given; name GPUs to compile for, such as --topology=h100:8x8"),
    (["--topology=h101:8x8"], "names no known GPU"),
    (["--topology=h100:64"], "has no size; write NVLink domains x GPUs in each"),
    (["--topology=h100:1x4", "--transport=infiniband"], "invalid value 'infiniband' for config.runtime.transport"),
    (["--topology=h100:1x4", "--devices-per-process=two"], "--devices-per-process is 'two'"),
    (["--topology=h100:1x4", "--devices-per-process=3"], "3 devices per process do not divide the 4 GPUs"),
    (["--topology=h100:1x4", "--json=/nowhere/at/all.json"], "--json=/nowhere/at/all.json is in a directory"),
    (["--topology=h100:1x4", "--advice"], "unknown flag --advice: did you mean --advise?"),
    (["--topology=h100:1x4", "--config.mesh.contxt=8"], "did you mean config.mesh.context?"),
    pytest.param(["--topology=h100:1x8"], "h100:1x8 has 8; use --config.mesh.", marks=needs_gpu_compiler),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_status_2(config, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(command, "_start_on_cpu", lambda: None)  # JAX has started
    argv = ["jaxlc.plan", f"--config={config}", *arguments]
    assert run_main(command.main, argv, description="", extra_flags=command._FLAGS) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert re.search(re.escape(words), stderr), stderr


def test_another_transport_needs_no_heap_of_nvshmem():
    config = small_config()
    config.runtime.update(transport="nvshmem", nvshmem_heap_bytes=2**30)
    runtime = with_settings(load(config), transport_settings("nccl")).runtime
    assert (runtime.transport, runtime.nvshmem_heap_bytes) == ("nccl", 0)
    runtime = with_settings(load(config), transport_settings("auto")).runtime
    assert (runtime.transport, runtime.nvshmem_heap_bytes) == ("auto", 2**30)
