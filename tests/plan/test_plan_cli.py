"""`python -m jaxlc.plan`: command line, output, error messages."""

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
from tests.helpers import png_size
from tests.plan.gpus import small_config

ROOT = Path(__file__).parents[2]
CONFIG = """
from tests.helpers import png_size
from tests.plan.gpus import small_config

def get_config(variant):
    return small_config()
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


@pytest.mark.gpu_compiler
def test_command_prints_page_and_writes_json(config, tmp_path):
    figures = tmp_path / "figures.json"
    arguments = [
        f"--config={config}",
        "--topology=h100:1x4",
        "--transport=auto",
        f"--json={figures}",
        "--advise",
        "--evaluation",
    ]
    arguments += ["--host-memory-gib=100", f"--html={tmp_path / 'plan.html'}", f"--timeline={tmp_path / 'layer.png'}"]
    ours = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-m", "jaxlc.plan", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "compiling the training step for h100:1x4 ...\n"
    assert "peak of an evaluation" in done.stdout
    assert "VERDICT: fits" in done.stdout and "cudnn attention forward" in done.stdout
    values = json.loads(figures.read_text())
    assert values["topology"] == "h100:1x4" and values["num_devices"] == 4 and values["memory"]["fits"] is True
    assert values["advice"] is None
    assert values["memory"]["host_capacity_per_node_bytes"] == 100 * 2**30
    (backend,) = values["ring"]["by_backend"]
    assert backend in ("NVSHMEM", "NCCL")  # auto, on JAX 0.10.1 and on 0.12
    memory = values["memory"]
    assert (memory["symmetric_used_bytes"] > 0) == (backend == "NVSHMEM")  # its permutes use symmetric buffers
    assert memory["symmetric_used_bytes"] <= memory["symmetric_bytes"]
    state_bytes = memory["parameters_bytes"] + memory["optimizer_bytes"]
    assert state_bytes < values["evaluation_peak_bytes"] < memory["device_peak_bytes"]
    parts = ("device_arguments_bytes", "device_temp_bytes", "workspace_bytes", "symmetric_bytes", "nccl_bytes")
    assert memory["device_peak_bytes"] == sum(memory[part] for part in parts)
    assert ">fits</span>" in (tmp_path / "plan.html").read_text()
    assert png_size(tmp_path / "layer.png") > (500, 200)


@pytest.mark.parametrize("arguments, words", [
    ([], "no topology: pass target GPUs, such as --topology=h100:8x8"),
    (["--topology=h101:8x8"], "invalid topology 'h101:8x8': unknown GPU"),
    (["--topology=h100:64"], "expected GPU:DOMAINSxGPUS_PER_DOMAIN"),
    (["--topology=h100:1x4", "--transport=infiniband"], "invalid value 'infiniband' for config.runtime.transport"),
    (["--topology=h100:1x4", "--devices-per-process=two"], "--devices-per-process=two: expected a whole number"),
    (["--topology=h100:1x4", "--devices-per-process=3"], "devices per process (3) must divide the 4 GPUs"),
    (["--topology=h100:1x4", "--json=/nowhere/at/all.json"], "all.json: the directory does not exist"),
    (["--topology=h100:1x4", "--html=/nowhere/plan.html"], "plan.html: the directory does not exist"),
    (["--topology=h100:1x4", "--host-memory-gib=lots"], "invalid --host-memory-gib=lots: expected a positive number"),
    (["--topology=h100:1x4", "--host-memory-gib=0"], "invalid --host-memory-gib=0: expected a positive number"),
    (["--topology=h100:1x4", "--advice"], "unknown flag --advice: did you mean --advise?"),
    (["--topology=h100:1x4", "--config.mesh.contxt=8"], "did you mean config.mesh.context?"),
    pytest.param(["--topology=h100:1x8"], "h100:1x8 has 8; use --config.mesh.", marks=pytest.mark.gpu_compiler),
])  # fmt: skip
def test_command_with_invalid_flags_exits_with_status_2(config, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(command, "_start_on_cpu", lambda: None)  # JAX has started
    argv = ["jaxlc.plan", f"--config={config}", *arguments]
    assert run_main(command.main, argv, description="", extra_flags=command._FLAGS) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert re.search(re.escape(words), stderr), stderr


def test_transport_flag_resets_nvshmem_heap():
    config = small_config()
    config.runtime.update(transport="nvshmem", nvshmem_heap_bytes=2**30)
    runtime = with_settings(load(config), transport_settings("nccl")).runtime
    assert (runtime.transport, runtime.nvshmem_heap_bytes) == ("nccl", 0)
    runtime = with_settings(load(config), transport_settings("auto")).runtime
    assert (runtime.transport, runtime.nvshmem_heap_bytes) == ("auto", 2**30)
