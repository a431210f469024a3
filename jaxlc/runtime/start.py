"""Prepares the environment that JAX reads when it starts, and joins the processes of a run."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxlc._jax_internals import backends_are_initialized
from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.runtime import transport, unified_memory

_DRIVER_NOTES = ("Could not find cuda drivers", "before absl::InitializeLog() is called")
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Simulated devices share few cores, so one may wait for another far longer than the 40 s after which XLA takes a
# collective on CPU for dead and aborts. Both flags are known to the XLA of every jax from 0.10.1 to 0.12.
_PATIENT_COLLECTIVES = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)


def start(config: RuntimeConfig) -> None:
    """Starts JAX as `config` asks. May be called again, and in a notebook, as long as it asks for the same.

    Raises:
      UserError: JAX has already started with something else, or XLA_FLAGS contradicts the config.
    """
    import_jax()
    import jax

    if not backends_are_initialized():
        _set_environment(config, os.environ)
        if "JAX_PLATFORMS" in os.environ:  # jax reads it when it is imported, which may have been long ago
            jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        if config.num_processes > 1 and not jax.distributed.is_initialized():
            jax.distributed.initialize(
                config.coordinator_address,
                num_processes=config.num_processes,
                process_id=config.process_id,
                heartbeat_timeout_seconds=config.heartbeat_seconds,
            )
    with _without_driver_notes():
        platform = jax.devices()[0].platform
    _check_started(config, platform, jax.local_device_count(), jax.process_count())


def import_jax() -> None:
    """Imports jax, without starting it and without XLA's notes. Programs that import jax at the top call it first."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # warnings and errors only; read at jax's import
    with _without_driver_notes():
        import jax  # noqa: F401


def _set_environment(config: RuntimeConfig, environment: dict[str, str]) -> None:
    """Writes JAX_PLATFORMS, XLA_FLAGS and what NVSHMEM and XLA's allocator read; what the user has set stays."""
    if config.simulated_devices:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = _simulation_flags(config, environment.get("XLA_FLAGS", ""))
    elif not _has_nvidia_driver():
        # The CUDA plugin may be installed all the same; without a driver it prints a traceback.
        environment.setdefault("JAX_PLATFORMS", "cpu")
    if environment.get("JAX_PLATFORMS") != "cpu":
        transport.prepare(config, environment)
    if config.unified_memory:
        is_cpu = environment.get("JAX_PLATFORMS") == "cpu"
        done = "unified memory: no effect on CPU" if is_cpu else unified_memory.prepare(config, environment)
        if config.process_id == 0:
            print(done, flush=True)


def _simulation_flags(config: RuntimeConfig, users_flags: str) -> str:
    """XLA_FLAGS for this process's share of the simulated devices; the user's flags come last, and so win."""
    wanted = f"{_DEVICE_COUNT_FLAG}={config.simulated_devices // config.num_processes}"
    theirs = [flag for flag in users_flags.split() if flag.startswith(_DEVICE_COUNT_FLAG)]
    if theirs and theirs[-1] != wanted:
        raise UserError(
            f"XLA_FLAGS holds {theirs[-1]}, but config.runtime.simulated_devices={config.simulated_devices} over"
            f" {config.num_processes} processes needs {wanted}; remove it from XLA_FLAGS"
        )
    ours = [wanted, *_PATIENT_COLLECTIVES]
    return " ".join([*(flag for flag in ours if flag not in users_flags.split()), users_flags]).strip()


@contextlib.contextmanager
def _without_driver_notes() -> Iterator[None]:
    """Where the CUDA plugin is installed for compiling and there is no driver, its C++ says so on stderr, several
    times, whatever the log level. Those lines are left out; anything else comes a moment late."""
    if _has_nvidia_driver():
        yield
        return
    sys.stderr.flush()
    real_stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real_stderr, 2)
            os.close(real_stderr)
            held_back.seek(0)
            lines = held_back.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if not any(note in line for note in _DRIVER_NOTES)))


def _has_nvidia_driver() -> bool:
    places = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia")  # under WSL there is only nvidia-smi
    return any(Path(place).exists() for place in places) or shutil.which("nvidia-smi") is not None


def _check_started(config: RuntimeConfig, platform: str, num_local_devices: int, num_processes: int) -> None:
    if num_processes != config.num_processes:
        raise UserError(
            f"JAX has already started with {num_processes} processes and config.runtime.num_processes is"
            f" {config.num_processes}; call jaxlc.runtime.start(config.runtime) before anything uses a device"
        )
    if config.unified_memory and platform != "cpu" and not unified_memory.is_on(os.environ):
        raise UserError(
            "JAX has already started without unified memory, for config.runtime.unified_memory=True; restart Python (in"
            " a notebook, the kernel) and call jaxlc.runtime.start(config.runtime) first"
        )
    wanted = config.simulated_devices // config.num_processes
    if wanted and (platform != "cpu" or num_local_devices != wanted):
        raise UserError(
            f"JAX has already started with {num_local_devices} {platform} devices and"
            f" config.runtime.simulated_devices={config.simulated_devices} needs {wanted} of cpu; restart Python (in a"
            " notebook, the kernel) and call jaxlc.runtime.start(config.runtime) first"
        )
