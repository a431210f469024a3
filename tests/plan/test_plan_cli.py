"""`python -m jaxlc.plan`: command line, error messages; tests/test_package.py has its output."""

import re
from pathlib import Path

import pytest

from jaxlc.cli import main_of, planning
from jaxlc.config import load
from tests.plan.gpus import small_config

CONFIG = """
from tests.plan.gpus import small_config

def get_config(variant):
    return small_config()
"""


_EIGHT_GPUS = ["--topology=h100:1x8", "--config.runtime.simulated_devices=2"]


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
    (["--topology=h100:1x4", "--devices_per_process=two"], "--devices_per_process=two: expected an integer"),
    (["--topology=h100:1x4", "--devices_per_process=3"], "devices per process (3) must divide the 4 GPUs"),
    (["--topology=h100:1x4", "--json=/nowhere/at/all.json"], "all.json: the directory does not exist"),
    (["--topology=h100:1x4", "--html=/nowhere/plan.html"], "plan.html: the directory does not exist"),
    (["--topology=h100:1x4", "--host_memory_gib=lots"], "invalid --host_memory_gib=lots: expected a finite number"),
    (["--topology=h100:1x4", "--host_memory_gib=0"], "invalid --host_memory_gib=0.0: expected greater than 0"),
    (["--topology=h100:1x4", "--advise=maybe"], "invalid --advise=maybe: expected true or false"),
    (["--topology=h100:1x4", "--prompt_tokens=x"], "expected tokens, such as 131072, 32K or 1M (1M = 1,048,576)"),
    (["--prompt-tokens=5"], "unknown flag --prompt-tokens: use --prompt_tokens"),
    (["--price-per-gpu-hour=2"], "unknown flag --price-per-gpu-hour: use --price_per_gpu_hour"),
    (["--topology=h100:1x4", "--advice"], "unknown flag --advice: did you mean --advise?"),
    (["--topology=h100:1x4", "--config.mesh.contxt=8"], "did you mean config.mesh.context?"),
    pytest.param(_EIGHT_GPUS, "h100:1x8 has 8; use --config.mesh.", marks=pytest.mark.gpu_compiler),
])  # fmt: skip
def test_command_with_invalid_flags_exits_with_status_2(
    config, arguments, words, capsys, monkeypatch
):
    monkeypatch.setattr(planning, "start_on_cpu", lambda: None)  # JAX has started
    argv = ["jaxlc.plan", f"--config={config}", *arguments]
    assert main_of("plan")(argv) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert re.search(re.escape(words), stderr), stderr


@pytest.mark.gpu_compiler
def test_prompt_tokens_prints_the_bytes_of_the_cache(config, capsys, monkeypatch):
    """Those of all tokens, up to the 16 sizes per power of two; the mesh has 4 GPUs."""
    monkeypatch.setattr(planning, "start_on_cpu", lambda: None)
    assert (
        main_of("plan")(
            ["jaxlc.plan", f"--config={config}", "--topology=h100:1x4", "--prompt_tokens=1M"]
        )
        == 0
    )
    cache, _ = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:])
    model = load(small_config()).model
    exact = (
        2
        * 2
        * model.num_layers
        * 2**20
        * model.attention.num_kv_heads
        * model.attention.head_dim
        / 4
        / 2**30
    )
    assert exact - 0.01 <= cache <= 1.07 * exact + 0.01
