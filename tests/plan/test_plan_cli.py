"""`python -m jaxlc.plan`: command line, error messages; tests/test_package.py has its output."""

import re
from pathlib import Path

import pytest

from jaxlc.config import load, transport_settings, with_settings
from jaxlc.config.command_line import run_main
from jaxlc.plan import __main__ as command
from tests.plan.gpus import small_config

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
    (["--topology=h100:1x4", "--advise=false"], "invalid --advise=false: expected --advise without a value"),
    (["--topology=h100:1x4", "--advice"], "unknown flag --advice: did you mean --advise?"),
    (["--topology=h100:1x4", "--config.mesh.contxt=8"], "did you mean config.mesh.context?"),
    pytest.param(["--topology=h100:1x8"], "h100:1x8 has 8; use --config.mesh.", marks=pytest.mark.gpu_compiler),
])  # fmt: skip
def test_command_with_invalid_flags_exits_with_status_2(config, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(command, "_start_on_cpu", lambda: None)  # JAX has started
    argv = ["jaxlc.plan", f"--config={config}", *arguments]
    flags = dict(extra_flags=command._FLAGS, switches=command._SWITCHES)
    assert run_main(command.main, argv, description="", **flags) == 2
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
