"""A second equal run, in the same process and after a restart, loads its compiled step from the
cache.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import FAST_COMPILATION
from tests.helpers import TIMEOUT_SECONDS
from tests.train import runs

pytestmark = [pytest.mark.heavy, pytest.mark.jax_version]

PROGRAM = """
import sys
from jaxlc import train
from jaxlc.config import read_config
from jaxlc.train.reports import run_report

run_report.write_plots = lambda *_: []
config, *workdirs = sys.argv[1:]
for workdir in workdirs:
    settings = read_config(config)
    settings.mesh.update(context=2, tensor=1)
    settings.runtime.simulated_devices = 2
    settings.model.num_layers = 1
    settings.train.update(steps=1, eval_every_steps=0, checkpoint_every_steps=0)
    train.run(settings, workdir)
"""


def compile_lines(directory: Path, *workdirs: str) -> list[str]:
    """Runs the program in an environment without tests' JAX variables; returns its lines about
    compilation.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    environment |= dict(
        XLA_FLAGS=FAST_COMPILATION,
        XDG_CACHE_HOME=str(directory / "user_cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    command = [sys.executable, "-c", PROGRAM, str(directory / "config.py"), *workdirs]
    done = subprocess.run(
        command,
        cwd=runs.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aot_loader" not in done.stderr
    return re.findall(r"compiled the training step in .*", done.stdout)


def test_equal_run_and_restart_load_the_step_from_the_cache(tmp_path):
    runs.write_config(tmp_path)
    first, second = compile_lines(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"))
    assert re.fullmatch(r"compiled the training step in [\d.]+ s", first)
    assert re.fullmatch(r"compiled the training step in [\d.]+ s \(from the cache\)", second)
    assert [
        path.name.partition("-")[0]
        for path in (tmp_path / "user_cache/jaxlc/xla").glob("jit__step-*-cache")
    ]
    (restarted,) = compile_lines(tmp_path, str(tmp_path / "c"))
    assert restarted.endswith("(from the cache)")
    losses = [runs.rows(tmp_path / name)[0]["loss"] for name in "abc"]
    assert losses[0] == losses[1] == losses[2]
