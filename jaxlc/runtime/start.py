"""Sets the environment variables that JAX reads at its start, and connects the processes of a run.

JAX and XLA read XLA_FLAGS, the platform and the number of devices when the first device is used,
not when JAX is imported (JAX 0.10.1, 0.11.2 and 0.12.0.1). Two variables are read at the import:
TF_CPP_MIN_LOG_LEVEL, and JAX_PLATFORMS, whose option can be set later.
"""

import functools
import os
import sys
from collections.abc import Mapping

import jaxlc.runtime.stderr  # noqa: F401  imports JAX without the notes of its CUDA plugin
from jaxlc._jax_internals import backends_are_initialized, register_plugins
from jaxlc.config import RuntimeConfig
from jaxlc.core import UserError, count_text, reason_of
from jaxlc.runtime import compilation_cache, launcher, memory, peers, rendezvous, stderr, xla_flags
from jaxlc.runtime.xla_flags import check_users_flags

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_DEVICE_COUNT_VARIABLE = "JAX_NUM_CPU_DEVICES"
# Simulated devices share few cores, so one may be late by more than the 40 s after which XLA assumes that a CPU
# collective is stuck and aborts. XLA knows both flags in every JAX version from 0.10.1 to 0.12.
_COLLECTIVE_TIMEOUTS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
)
# XLA has as many threads as simulated devices or cores, and a collective blocks one. A device may wait in two
# independent collectives of a step; then the last device finds no thread, and the step hangs (distill_128k:mini). More
# threads make steps slower: quickstart on two cores by 10% with two for each device, by 18% with four.
_THREADS_VARIABLE = "PJRT_NPROC"
_THREADS_PER_DEVICE = 2
# A year. After a missed heartbeat JAX aborts the process with status 134 and a C++ stack, with recoverable tasks too if
# process 0 is the silent one, and its callback for this ends with std::bad_cast (measured on JAX 0.10.1 and 0.12.0.1).
# `peers` detects processes and machines that have ended, and `watchdog` those that hang.
_NO_HEARTBEAT_SECONDS = 365 * 24 * 3600
# Options of JAX: the values with which models do not run, and what they do. Most are set to debug other programs.
_UNSUPPORTED_OPTIONS = {
    "jax_enable_x64": ([True], "parameters would be float64"),
    "jax_disable_jit": ([True], "steps cannot be compiled"),
    "jax_check_tracer_leaks": ([True], "saved activations are taken for leaks"),
    "jax_numpy_rank_promotion": (["raise"], "broadcasting is an error"),
    "jax_numpy_dtype_promotion": (["strict"], "masks times floats are an error"),
    "jax_transfer_guard_host_to_device": (
        ["disallow", "disallow_explicit"],
        "batches do not reach the devices",
    ),
}


def start(
    config: RuntimeConfig,
    *,
    pinned_host_bytes: int = 0,
    is_watched: bool = False,
    is_for_model: bool = True,
) -> None:
    """Starts JAX with the devices and processes of `config`. It may be called again with an equal config.

    Args:
      pinned_host_bytes: pinned host memory that a training step needs for each GPU, for runtime.pinned_host_gib=0.
      is_watched: a watchdog detects processes that hang, so JAX's heartbeat is off.
      is_for_model: parameters will be made, whose dtype follows JAX's default.
    Raises:
      UserError: an option of JAX has a value that models do not support, JAX has no devices of JAX_PLATFORMS or has
        already started with other settings, XLA_FLAGS contradicts the config, the directory of the compilation cache
        cannot be created, or another process of the run is missing or contradicts this one.
    """
    import jax

    for option, (values, reason) in _UNSUPPORTED_OPTIONS.items():
        if is_for_model and getattr(jax.config, option) in values:
            raise UserError(
                f"unsupported: {option.upper()}, or {option} of JAX's config, with which {reason}; unset it"
            )
    launch = launcher.find(os.environ)
    config = launcher.resolve(config, launch)
    if not backends_are_initialized():
        _set_environment(config, os.environ, launch=launch, pinned_host_bytes=pinned_host_bytes)
        if "JAX_PLATFORMS" in os.environ:
            jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        if config.num_processes > 1 and not jax.distributed.is_initialized():
            peers.connect(config, functools.partial(print, file=sys.stderr, flush=True))
            jax.distributed.initialize(
                config.coordinator_address,
                num_processes=config.num_processes,
                process_id=config.process_id,
                cluster_detection_method="deactivate",  # see launcher.py
                coordinator_bind_address=rendezvous.bind_address(config.coordinator_address),
                initialization_timeout=config.start_timeout_seconds,
                heartbeat_timeout_seconds=_NO_HEARTBEAT_SECONDS
                if is_watched
                else config.heartbeat_seconds,
            )
    # XLA parses its flags later, and ends the process at an unknown one
    with stderr.without_driver_notes():
        register_plugins()
    platform = _platform()
    compilation_cache.configure(config, platform)
    _check_started(config, platform, jax.local_device_count(), jax.process_count())


def start_training(
    config: RuntimeConfig, pinned_host_bytes: int, *, is_preflight: bool = False
) -> None:
    """Starts JAX for a training run, as `start`.

    Args:
      pinned_host_bytes: see `start`; the most of all stages.
      is_preflight: the run is only checked, without a watchdog.
    """
    is_watched = config.watchdog_factor > 0 and not is_preflight
    start(config, pinned_host_bytes=pinned_host_bytes, is_watched=is_watched)


def _set_environment(
    config: RuntimeConfig,
    environment: dict[str, str],
    *,
    launch: launcher.Launch | None = None,
    pinned_host_bytes: int = 0,
) -> None:
    """Sets JAX_PLATFORMS, XLA_FLAGS, CUDA_VISIBLE_DEVICES and the variables of NVSHMEM and of XLA's
    allocators.

    Variables that the user has set are not changed. Process 0 prints the sizes of the allocators'
    pools.

    Args:
      config: with all values resolved.
    """
    check_users_flags(environment)
    if config.simulated_devices:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = _simulation_flags(config, environment)
        num_threads = max(os.cpu_count() or 1, _THREADS_PER_DEVICE * config.simulated_devices)
        environment.setdefault(_THREADS_VARIABLE, str(num_threads))
    elif not (stderr.has_nvidia_driver() or environment.get("JAX_PLATFORMS")):
        # The CUDA plugin may still be installed; without a driver it prints a traceback. An empty value, which errors
        # of JAX advise, is none.
        environment["JAX_PLATFORMS"] = "cpu"
    lines = []
    if environment.get("JAX_PLATFORMS") != "cpu":
        if launch is not None:
            gpus = launcher.gpus_of_process(launch, environment, launcher.num_gpus_on_machine())
            if gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpus
        xla_flags.prepare(config, environment)
        users_variables = _variables_line(environment)  # before memory_pools adds variables
        num_local = launch.num_local if launch is not None and config.num_processes > 1 else 1
        lines = [
            *memory.prepare(config, environment, pinned_host_bytes, num_local),
            *users_variables,
        ]
    elif config.unified_memory:
        lines = ["unified memory: no effect on CPU"]
    if config.process_id == 0:
        for line in lines:
            print(line, flush=True)


def _platform() -> str:
    """The platform of JAX's default devices."""
    import jax

    try:
        return jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # AssertionError: no CUDA plugin, or no GPU
        platforms = jax.config.jax_platforms or ""
        reason = f" ({reason_of(error)})" if str(error) else ""
        raise UserError(
            f"JAX has no devices for JAX_PLATFORMS={platforms}{reason}; unset it for the default devices, or install"
            " JAX with support for them"
        ) from error


def _variables_line(environment: Mapping[str, str]) -> list[str]:
    """One line with the variables of NCCL, CUDA and XLA that are set, because they change speed and
    results.
    """
    prefixes = ("NCCL_", "CUDA_", "NVSHMEM_", "XLA_", "TF_FORCE_")
    pairs = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(prefixes)
    ]
    return [f"environment: {' '.join(pairs)}"] if pairs else []


def _simulation_flags(config: RuntimeConfig, environment: Mapping[str, str]) -> str:
    """XLA_FLAGS for this process's share of the simulated devices. The user's flags are last and
    take precedence.
    """
    if config.simulated_devices % config.num_processes:
        raise UserError(
            f"config.runtime.simulated_devices={config.simulated_devices} does not divide among {config.num_processes}"
            f" processes; use a multiple of {config.num_processes}"
        )
    num_local = config.simulated_devices // config.num_processes
    device_count = f"{_DEVICE_COUNT_FLAG}={num_local}"
    users_flags = environment.get("XLA_FLAGS", "")
    users_counts = [flag for flag in users_flags.split() if flag.startswith(_DEVICE_COUNT_FLAG)]
    about = f"config.runtime.simulated_devices={config.simulated_devices} over {config.num_processes} processes"
    if users_counts and users_counts[-1] != device_count:
        raise UserError(
            f"XLA_FLAGS contains {users_counts[-1]}, but {about} requires {device_count}; remove it from XLA_FLAGS"
        )
    users_number = environment.get(_DEVICE_COUNT_VARIABLE)  # JAX prefers it to the flag
    if users_number and users_number not in ("-1", str(num_local)):
        raise UserError(
            f"{_DEVICE_COUNT_VARIABLE} is {users_number}, but {about} requires {num_local}; unset it"
        )
    ours = [device_count, *_COLLECTIVE_TIMEOUTS]
    return " ".join(
        [*(flag for flag in ours if flag not in users_flags.split()), users_flags]
    ).strip()


def _check_started(
    config: RuntimeConfig, platform: str, num_local_devices: int, num_processes: int
) -> None:
    if num_processes != config.num_processes:
        raise UserError(
            f"JAX has already started with {num_processes} process{'' if num_processes == 1 else 'es'}, but"
            f" config.runtime.num_processes is {config.num_processes}; call jaxlc.start or jaxlc.train.run before any"
            " code uses a device"
        )
    if config.unified_memory and platform != "cpu" and not memory.is_on(os.environ):
        raise UserError(
            "JAX has already started without unified memory, but config.runtime.unified_memory=True; restart Python (in"
            " a notebook, the kernel) and call jaxlc.train.run first"
        )
    num_simulated = config.simulated_devices // config.num_processes
    if num_simulated and (platform != "cpu" or num_local_devices != num_simulated):
        raise UserError(
            f"JAX has already started with {count_text(num_local_devices, f'{platform} device')}, but"
            f" config.runtime.simulated_devices={config.simulated_devices} requires"
            f" {count_text(num_simulated, 'cpu device')} in this process; restart Python (in a notebook, the kernel)"
            f" and call jaxlc.start(simulated_devices={config.simulated_devices}) first"
        )
