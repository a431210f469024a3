import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import pytest

import jaxlc
from jaxlc.config import RuntimeConfig, defaults, load
from jaxlc.core.errors import UserError
from jaxlc.runtime import launcher, start
from tests.helpers import TIMEOUT_SECONDS
from tests.launch import slurm

pytestmark = pytest.mark.jax_version

ROOT = Path(__file__).parents[2]


def environment_for(config: RuntimeConfig, **environment: str) -> dict[str, str]:
    is_resolved = config.num_processes > 1
    start._set_environment(
        dataclasses.replace(config, process_id=0)
        if is_resolved
        else launcher.resolve(config, None),
        environment,
    )
    return environment


def run_python(
    *codes: str, variables: Sequence[Mapping[str, str]] = ({},)
) -> list[subprocess.CompletedProcess]:
    """Runs programs at the same time, without the environment variables of the tests.

    Args:
      variables: further variables of each program.
    """
    return run_commands(*([sys.executable, "-c", code] for code in codes), variables=variables)


def run_commands(
    *commands: list[str], variables: Sequence[Mapping[str, str]]
) -> list[subprocess.CompletedProcess]:
    test_variables = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in test_variables}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment | own, **pipes)
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        subprocess.CompletedProcess(p.args, p.returncode, *output)
        for p, output in zip(running, outputs)
    ]


def test_start_with_number_out_of_range_raises():
    with pytest.raises(
        UserError,
        match="invalid value -1 for config.runtime.simulated_devices: expected at least 0",
    ):
        jaxlc.start(simulated_devices=-1)


def test_environment_simulated_devices_are_split_over_processes():
    environment = environment_for(RuntimeConfig(simulated_devices=8, num_processes=2))
    assert "--xla_force_host_platform_device_count=4" in environment["XLA_FLAGS"].split()
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_environment_has_threads_for_collectives_that_wait_at_the_same_time():
    environment = environment_for(RuntimeConfig(simulated_devices=8))
    assert int(environment["PJRT_NPROC"]) >= 16
    environment = environment_for(RuntimeConfig(simulated_devices=8), PJRT_NPROC="9")
    assert environment["PJRT_NPROC"] == "9"


def test_environment_users_xla_flags_come_last():
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds=5"
    environment = environment_for(RuntimeConfig(simulated_devices=8), XLA_FLAGS=flag)
    assert environment["XLA_FLAGS"].endswith(" " + flag)
    assert environment_for(RuntimeConfig(), XLA_FLAGS=flag)["XLA_FLAGS"] == flag


def test_training_with_a_watchdog_starts_without_the_heartbeat_of_jax(monkeypatch):
    seconds: list[int] = []
    for module, name in (
        (start, "backends_are_initialized"), (start, "_set_environment"), (start, "_check_started"),
        (start.peers, "connect"), (start.compilation_cache, "configure"), (jax.distributed, "is_initialized"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *_, **options: seconds.append(options["heartbeat_timeout_seconds"]),
    )
    config = defaults()
    config.runtime.update(
        num_processes=2, coordinator_address="localhost:1", process_id=0, heartbeat_seconds=10
    )
    for config.runtime.watchdog_factor in (10.0, 0.0):
        start.start_training(load(config).runtime, 0)
    assert seconds == [start._NO_HEARTBEAT_SECONDS, 10]


def test_environment_second_call_changes_nothing():
    once = environment_for(RuntimeConfig(simulated_devices=8))
    assert environment_for(RuntimeConfig(simulated_devices=8), **once) == once


def test_environment_contradicting_xla_flags_are_refused():
    with pytest.raises(
        UserError,
        match="count=8, but config.runtime.simulated_devices=4 over 1 processes requires .*=4;",
    ):
        environment_for(
            RuntimeConfig(simulated_devices=4), XLA_FLAGS="--xla_force_host_platform_device_count=8"
        )
    with pytest.raises(UserError, match="JAX_NUM_CPU_DEVICES is 8, but .* requires 4; unset it"):
        environment_for(RuntimeConfig(simulated_devices=4), JAX_NUM_CPU_DEVICES="8")
    for number in ("", "-1", "4"):
        environment_for(RuntimeConfig(simulated_devices=4), JAX_NUM_CPU_DEVICES=number)


def test_models_with_64_bits_are_refused():
    with jax.enable_x64(True):
        jaxlc.start(simulated_devices=jax.device_count())  # for the attention alone
        with pytest.raises(UserError, match="unsupported: JAX_ENABLE_X64.*; unset it"):
            start.start(RuntimeConfig(num_processes=1))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_disable_jit", True),
        ("jax_check_tracer_leaks", True),
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_transfer_guard", "disallow"),
    ],
)
def test_models_with_debug_options_are_refused(option, value):
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        jaxlc.start(simulated_devices=jax.device_count())
        with pytest.raises(UserError, match=f"unsupported: {option.upper()}.*; unset it"):
            start.start(RuntimeConfig(num_processes=1))
    finally:
        jax.config.update(option, "allow" if option == "jax_transfer_guard" else before)


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'x'")]
)
def test_platforms_without_devices_are_named(error, monkeypatch):
    """JAX 0.10 to 0.12 has an assertion without text for JAX_PLATFORMS=cuda on a machine without GPU."""

    def no_devices():
        raise error

    monkeypatch.setattr(jax, "devices", no_devices)
    reason = f" \\({error}\\)" if str(error) else ""
    with pytest.raises(
        UserError, match=f"JAX has no devices for JAX_PLATFORMS=[a-z]*{reason}; unset"
    ):
        start.start(RuntimeConfig(num_processes=1))


@pytest.mark.parametrize(("has_driver", "platforms"), [(False, "cpu"), (True, None)])
def test_environment_without_driver_selects_cpu(has_driver, platforms, monkeypatch):
    monkeypatch.setattr(start.stderr, "has_nvidia_driver", lambda: has_driver)
    assert environment_for(RuntimeConfig()).get("JAX_PLATFORMS") == platforms
    assert environment_for(RuntimeConfig(), JAX_PLATFORMS="")["JAX_PLATFORMS"] == (platforms or "")
    assert environment_for(RuntimeConfig(), JAX_PLATFORMS="cuda")["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize(
    ("has_driver", "simulated_devices", "is_prepared"),
    [(True, 0, True), (True, 8, False), (False, 0, False)],
)
def test_environment_transport_is_prepared_for_gpus_only(
    has_driver, simulated_devices, is_prepared, monkeypatch
):
    monkeypatch.setattr(start.stderr, "has_nvidia_driver", lambda: has_driver)
    monkeypatch.setattr(
        start.xla_flags, "prepare", lambda config, environment: environment.update(PREPARED="yes")
    )
    config = RuntimeConfig(
        simulated_devices=simulated_devices, num_processes=8, transport="nvshmem"
    )
    assert ("PREPARED" in environment_for(config)) == is_prepared


def test_nvidia_driver_is_detected_by_nvidia_smi(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start.stderr.has_nvidia_driver()


def test_start_again_with_other_settings_is_refused():
    """The test process runs on 8 simulated devices."""
    start.start(RuntimeConfig(simulated_devices=8))
    start.start(RuntimeConfig())
    with pytest.raises(
        UserError,
        match="already started with 8 cpu devices, but .*simulated_devices=4 requires 4 cpu devices",
    ):
        start.start(RuntimeConfig(simulated_devices=4))
    with pytest.raises(
        UserError, match="already started with 1 process, but config.runtime.num_processes is 2"
    ):
        start.start(RuntimeConfig(num_processes=2, process_id=0))


def test_start_simulated_devices_on_started_gpu_is_refused():
    with pytest.raises(UserError, match="8 gpu devices"):
        start._check_started(RuntimeConfig(num_processes=1, simulated_devices=8), "gpu", 8, 1)


_START_TWICE = """
import os
from jaxlc.runtime.start import start
from jaxlc.config import RuntimeConfig
from jaxlc.runtime.stderr import without_driver_notes

config = RuntimeConfig(simulated_devices=3, unified_memory=True)
start(config)
start(config)
import jax
print(jax.default_backend(), jax.device_count(), "TF_FORCE_UNIFIED_MEMORY" in os.environ)
with without_driver_notes():
    os.write(2, b"Could not find cuda drivers\\nan error\\n")
"""


def test_start_twice_prints_one_line():
    """Unified memory has no effect on CPU, which is printed once. Without a driver, the notes of
    the CUDA plugin are removed from stderr; other errors are not."""
    (process,) = run_python(_START_TWICE)
    assert process.stdout == "unified memory: no effect on CPU\ncpu 3 False\n", process.stderr
    assert (process.returncode, process.stderr) == (0, "an error\n")


_END_WHILE_REMOVING = """
import os, sys, time
from jaxlc.runtime import stderr

with stderr.without_lines(["a note"]):
    os.write(2, b"a note\\nlast words of C++\\n")
    time.sleep(0.5)
    print("error of Python", file=sys.stderr)
    os._exit(3)
"""


def test_process_that_ends_at_its_start_prints_why():
    """XLA ends the process at flags that it cannot parse, and threads such as the watchdog's end it
    at any time.
    """
    start_jax = "from jaxlc.runtime.start import start; from jaxlc.config import RuntimeConfig; start(RuntimeConfig())"
    variables = [
        dict(XLA_FLAGS="--xla_nonsense=1"),
        dict(XLA_FLAGS="--xla_dump_hlo_as_text=maybe"),
        {},
    ]
    unknown, invalid, removing = run_python(
        start_jax, start_jax, _END_WHILE_REMOVING, variables=variables
    )
    assert unknown.returncode and "Unknown flag in XLA_FLAGS: --xla_nonsense=1" in unknown.stderr
    assert invalid.returncode and "value maybe for flag xla_dump_hlo_as_text" in invalid.stderr
    assert (removing.returncode, removing.stderr) == (3, "last words of C++\nerror of Python\n")


@pytest.mark.parametrize("flags", ["xla_dump_hlo_as_text=true", "flags.txt", "--xla_dump_to=a b"])
def test_environment_word_that_is_no_xla_flag_is_refused(flags):
    with pytest.raises(UserError, match=rf"XLA_FLAGS contains {flags.split()[-1]}"):
        environment_for(RuntimeConfig(simulated_devices=2), XLA_FLAGS=flags)
    quoted = "'--xla_dump_hlo_pass_re=a b' --xla_dump_to=c"
    assert (
        quoted in environment_for(RuntimeConfig(simulated_devices=2), XLA_FLAGS=quoted)["XLA_FLAGS"]
    )


def test_environment_on_gpus_reports_what_is_set(monkeypatch, capsys):
    """Each process gets its part of the GPUs; process 0 prints the pools and the variables that
    change a run.
    """
    monkeypatch.setattr(start.stderr, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(start.launcher, "num_gpus_on_machine", lambda: 8)
    environment = dict(NCCL_DEBUG="INFO", XLA_FLAGS="--a=1", HOME="/")
    config = RuntimeConfig(num_processes=4, process_id=0, transport="nccl")
    place = launcher.Launch("Slurm", 4, 0, "node0:9753", local_id=0, num_local=4)
    start._set_environment(config, environment, launch=place)
    assert (
        environment["CUDA_VISIBLE_DEVICES"] == "0,1"
        and environment["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    )
    assert capsys.readouterr().out.splitlines() == [
        "GPU memory pool: 0.9 of each GPU's memory (config.runtime.memory_fraction)",
        "environment: CUDA_VISIBLE_DEVICES=0,1 NCCL_DEBUG=INFO XLA_FLAGS=--a=1",
    ]
    start._set_environment(
        dataclasses.replace(config, process_id=1), environment, launch=place._replace(local_id=1)
    )
    assert capsys.readouterr().out == ""


_ONE_OF_TWO = """
{first_line}
from jaxlc.runtime.start import start
from jaxlc.config import RuntimeConfig

config = RuntimeConfig(simulated_devices=4)
start(config)
start(config)
import jax, jax.numpy as jnp
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
integers = jax.make_array_from_callback((4,), sharding, lambda i: jnp.arange(4.0)[i])
gpus = jax.config.values["jax_cuda_visible_devices"]
print(jax.process_index(), jax.default_backend(), jax.local_device_count(), float(jax.jit(jnp.sum)(integers)), gpus)
{last_line}
"""


def test_start_two_slurm_processes_share_devices():
    """JAX must not select a GPU by SLURM_LOCALID. One process imports JAX before jaxlc, as in a
    notebook.
    """
    job_id = slurm.free_job_id()
    variables = [slurm.task_variables(i, num_tasks=2, job_id=job_id) for i in range(2)]
    codes = [_ONE_OF_TWO.format(first_line=line, last_line="") for line in ("", "import jax")]
    for i, process in enumerate(run_python(*codes, variables=variables)):
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines()[-1] == f"{i} cpu 2 6.0 all"


# The kill comes after both processes have ended their collective, which would fail in process 0.
_KILL_PROCESS_1 = """
marker = pathlib.Path(os.environ["MARKER"])
if jax.process_index() == 0:
    marker.touch()
else:
    while not marker.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_slurm_script_restarts_after_a_killed_process(tmp_path):
    """launch/slurm/train.sbatch with an srun that starts two processes. One is killed: the other
    one ends with a line that names it, and the script requeues the job."""
    code = _ONE_OF_TWO.format(
        first_line="import os, pathlib, signal, time", last_line=_KILL_PROCESS_1
    )
    command = ["bash", "launch/slurm/train.sbatch", sys.executable, "-c", code]
    (done,) = run_commands(
        command,
        variables=[slurm.job_variables(num_tasks=2) | dict(MARKER=str(tmp_path / "marker"))],
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    host = socket.gethostname()
    assert errors == [
        f"error: process 1 of 2 on {host} ended unexpectedly; start all processes again"
    ], done.stderr
    # the largest status of a task; that of the other one is 75
    assert done.returncode == 128 + signal.SIGKILL
    assert "restarting job" in done.stdout and "scontrol requeue" in done.stdout
