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

start = importlib.import_module("jaxlc.runtime.start")  # the package's `start` is the function
ROOT = Path(__file__).parents[2]


def environment_for(config: RuntimeConfig, **environment: str) -> dict[str, str]:
    start._set_environment(config, environment)
    return environment


def run_python(*codes: str, **variables: str) -> list[subprocess.CompletedProcess]:
    """Runs programs at the same time, as a user with none of the tests' settings would."""
    tests_own = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in tests_own} | variables
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, **pipes) for code in codes]
    try:
        outputs = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *output) for p, output in zip(running, outputs)]


def test_simulated_devices_are_shared_out_over_processes():
    environment = environment_for(RuntimeConfig(simulated_devices=8, num_processes=2))
    assert "--xla_force_host_platform_device_count=4" in environment["XLA_FLAGS"].split()
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_the_users_xla_flags_stay_and_come_last():
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds=5"
    environment = environment_for(RuntimeConfig(simulated_devices=8), XLA_FLAGS=flag)
    assert environment["XLA_FLAGS"].endswith(" " + flag)
    assert environment_for(RuntimeConfig(), XLA_FLAGS=flag)["XLA_FLAGS"] == flag


def test_flags_do_not_pile_up():
    once = environment_for(RuntimeConfig(simulated_devices=8))
    assert environment_for(RuntimeConfig(simulated_devices=8), **once) == once


def test_xla_flags_that_contradict_the_config():
    with pytest.raises(UserError, match="count=8, but config.runtime.simulated_devices=4 over 1 processes needs .*=4;"):
        environment_for(RuntimeConfig(simulated_devices=4), XLA_FLAGS="--xla_force_host_platform_device_count=8")


@pytest.mark.parametrize(("has_driver", "platforms"), [(False, "cpu"), (True, None)])
def test_cpu_where_there_is_no_driver(has_driver, platforms, monkeypatch):
    monkeypatch.setattr(start, "_has_nvidia_driver", lambda: has_driver)
    assert environment_for(RuntimeConfig()).get("JAX_PLATFORMS") == platforms
    assert environment_for(RuntimeConfig(), JAX_PLATFORMS="cuda")["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize(
    ("has_driver", "simulated_devices", "is_prepared"), [(True, 0, True), (True, 8, False), (False, 0, False)]
)
def test_transport_is_prepared_for_gpus_only(has_driver, simulated_devices, is_prepared, monkeypatch):
    monkeypatch.setattr(start, "_has_nvidia_driver", lambda: has_driver)
    monkeypatch.setattr(start.transport, "prepare", lambda config, environment: environment.update(PREPARED="yes"))
    config = RuntimeConfig(simulated_devices=simulated_devices, num_processes=8, transport="nvshmem")
    assert ("PREPARED" in environment_for(config)) == is_prepared


def test_driver_is_found_by_nvidia_smi(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start._has_nvidia_driver()


def test_started_already():
    """This very process runs on 8 simulated devices."""
    runtime.start(RuntimeConfig(simulated_devices=8))
    runtime.start(RuntimeConfig())
    with pytest.raises(UserError, match="already started with 8 cpu devices and .*simulated_devices=4 needs 4 of cpu"):
        runtime.start(RuntimeConfig(simulated_devices=4))
    with pytest.raises(UserError, match="already started with 1 processes and config.runtime.num_processes is 2"):
        runtime.start(RuntimeConfig(num_processes=2))


def test_started_on_a_gpu_where_cpu_devices_are_asked_for():
    with pytest.raises(UserError, match="8 gpu devices"):
        start._check_started(RuntimeConfig(simulated_devices=8), "gpu", 8, 1)


_START_TWICE = (
    "from jaxlc import runtime; from jaxlc.config import RuntimeConfig\n"
    "config = RuntimeConfig(simulated_devices=3); runtime.start(config); runtime.start(config)\n"
    "import jax; print(jax.default_backend(), jax.device_count())"
)


def test_a_process_of_its_own():
    """Nothing but what was asked for is printed, also where the CUDA plugin is installed and no driver."""
    (done,) = run_python(_START_TWICE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu 3\n", "")


def test_jax_imported_beforehand():
    """As in a notebook."""
    (done,) = run_python(f"import jax\n{_START_TWICE}")
    assert (done.returncode, done.stdout) == (0, "cpu 3\n"), done.stderr


def test_errors_on_stderr_are_not_held_back_for_good():
    (done,) = run_python(
        "import os; from jaxlc.runtime.start import _without_driver_notes\n"
        "with _without_driver_notes():\n"
        "    os.write(2, b'Could not find cuda drivers\\nan error\\n')"
    )
    assert (done.returncode, done.stderr) == (0, "an error\n")


def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "from jaxlc import runtime; from jaxlc.config import RuntimeConfig\n"
        "config = RuntimeConfig(simulated_devices=4, num_processes=2, process_id={id},"
        " coordinator_address='127.0.0.1:{port}')\n"
        "runtime.start(config); runtime.start(config)\n"
        "import jax, jax.numpy as jnp\n"
        "mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
        "ones = jax.make_array_from_callback((4,), sharding, lambda i: jnp.arange(4.0)[i])\n"
        "print(jax.process_index(), jax.local_device_count(), float(jax.jit(jnp.sum)(ones)))"
    )
    done = run_python(*(code.format(id=i, port=port) for i in range(2)))
    for i, process in enumerate(done):
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines()[-1] == f"{i} 2 6.0"
