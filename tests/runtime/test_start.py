import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlc import runtime
from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError

pytestmark = pytest.mark.jax_version

start = importlib.import_module("jaxlc.runtime.start")  # the package's `start` is the function
ROOT = Path(__file__).parents[2]


def environment_for(config: RuntimeConfig, **environment: str) -> dict[str, str]:
    start._set_environment(config, environment)
    return environment


def run_python(*codes: str, **variables: str) -> list[subprocess.CompletedProcess]:
    """Runs programs at the same time, without the environment variables of the tests."""
    test_variables = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in test_variables} | variables
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, **pipes) for code in codes]
    try:
        outputs = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *output) for p, output in zip(running, outputs)]


def test_environment_simulated_devices_are_split_over_processes():
    environment = environment_for(RuntimeConfig(simulated_devices=8, num_processes=2))
    assert "--xla_force_host_platform_device_count=4" in environment["XLA_FLAGS"].split()
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_environment_users_xla_flags_come_last():
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds=5"
    environment = environment_for(RuntimeConfig(simulated_devices=8), XLA_FLAGS=flag)
    assert environment["XLA_FLAGS"].endswith(" " + flag)
    assert environment_for(RuntimeConfig(), XLA_FLAGS=flag)["XLA_FLAGS"] == flag


def test_environment_second_call_changes_nothing():
    once = environment_for(RuntimeConfig(simulated_devices=8))
    assert environment_for(RuntimeConfig(simulated_devices=8), **once) == once


def test_environment_contradicting_xla_flags_are_refused():
    with pytest.raises(
        UserError, match="count=8, but config.runtime.simulated_devices=4 over 1 processes requires .*=4;"
    ):
        environment_for(RuntimeConfig(simulated_devices=4), XLA_FLAGS="--xla_force_host_platform_device_count=8")


@pytest.mark.parametrize(("has_driver", "platforms"), [(False, "cpu"), (True, None)])
def test_environment_without_driver_selects_cpu(has_driver, platforms, monkeypatch):
    monkeypatch.setattr(start, "_has_nvidia_driver", lambda: has_driver)
    assert environment_for(RuntimeConfig()).get("JAX_PLATFORMS") == platforms
    assert environment_for(RuntimeConfig(), JAX_PLATFORMS="cuda")["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize(
    ("has_driver", "simulated_devices", "is_prepared"), [(True, 0, True), (True, 8, False), (False, 0, False)]
)
def test_environment_transport_is_prepared_for_gpus_only(has_driver, simulated_devices, is_prepared, monkeypatch):
    monkeypatch.setattr(start, "_has_nvidia_driver", lambda: has_driver)
    monkeypatch.setattr(start.transport, "prepare", lambda config, environment: environment.update(PREPARED="yes"))
    config = RuntimeConfig(simulated_devices=simulated_devices, num_processes=8, transport="nvshmem")
    assert ("PREPARED" in environment_for(config)) == is_prepared


def test_nvidia_driver_is_detected_by_nvidia_smi(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start._has_nvidia_driver()


def test_start_again_with_other_settings_is_refused():
    """The test process runs on 8 simulated devices."""
    runtime.start(RuntimeConfig(simulated_devices=8))
    runtime.start(RuntimeConfig())
    with pytest.raises(
        UserError, match="already started with 8 cpu devices, but .*simulated_devices=4 requires 4 cpu devices"
    ):
        runtime.start(RuntimeConfig(simulated_devices=4))
    with pytest.raises(UserError, match="already started with 1 process, but config.runtime.num_processes is 2"):
        runtime.start(RuntimeConfig(num_processes=2))


def test_start_simulated_devices_on_started_gpu_is_refused():
    with pytest.raises(UserError, match="8 gpu devices"):
        start._check_started(RuntimeConfig(simulated_devices=8), "gpu", 8, 1)


_START_TWICE = """
import os
from jaxlc import runtime
from jaxlc.config import RuntimeConfig
from jaxlc.runtime.start import _without_driver_notes

config = RuntimeConfig(simulated_devices=3, unified_memory=True)
runtime.start(config)
runtime.start(config)
import jax
print(jax.default_backend(), jax.device_count(), "TF_FORCE_UNIFIED_MEMORY" in os.environ)
with _without_driver_notes():
    os.write(2, b"Could not find cuda drivers\\nan error\\n")
"""


def test_start_twice_prints_one_line():
    """Unified memory has no effect on CPU, which is printed once. Without a driver, the notes of the CUDA plugin
    are removed from stderr; other errors are not."""
    (process,) = run_python(_START_TWICE)
    assert process.stdout == "unified memory: no effect on CPU\ncpu 3 False\n", process.stderr
    assert (process.returncode, process.stderr) == (0, "an error\n")


_ONE_OF_TWO = """
{first_line}
from jaxlc import runtime
from jaxlc.config import RuntimeConfig

config = RuntimeConfig(
    simulated_devices=4, num_processes=2, process_id={process_id}, coordinator_address="127.0.0.1:{port}"
)
runtime.start(config)
runtime.start(config)
import jax, jax.numpy as jnp
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
integers = jax.make_array_from_callback((4,), sharding, lambda i: jnp.arange(4.0)[i])
print(jax.process_index(), jax.default_backend(), jax.local_device_count(), float(jax.jit(jnp.sum)(integers)))
"""


def test_start_two_processes_share_devices():
    """One of them imports JAX before jaxlc, as in a notebook."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first_lines = ["", "import jax"]
    codes = [_ONE_OF_TWO.format(first_line=line, process_id=i, port=port) for i, line in enumerate(first_lines)]
    for i, process in enumerate(run_python(*codes)):
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines()[-1] == f"{i} cpu 2 6.0"
