"""Timing of compiled functions, and the environment to record with every measurement."""

import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax


def seconds_of_calls(function, *args, repeats: int) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls after one warm-up call. Each call waits for its result."""
    (seconds,) = interleaved_seconds([lambda: function(*args)], repeats)
    return seconds


def interleaved_seconds(calls: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Times several functions, one call of each per round, so that other load on the machine affects all of them.

    Returns:
      For each function the wall-clock seconds of its `repeats` calls, after one warm-up call.
    """
    for call in calls:
        jax.block_until_ready(call())
    seconds = [[] for _ in calls]
    for _ in range(repeats):
        for call, call_seconds in zip(calls, seconds):
            start_seconds = time.perf_counter()
            jax.block_until_ready(call())
            call_seconds.append(time.perf_counter() - start_seconds)
    return seconds


def environment_info() -> dict[str, str | int]:
    """Device kind, number of devices, versions, and git commit of the checkout."""
    device = jax.devices()[0]
    return dict(
        device=f"{platform.machine()} {device.device_kind}" if device.platform == "cpu" else device.device_kind,
        num_devices=jax.device_count(),
        jax=jax.__version__,
        python=platform.python_version(),
        commit=_commit(),
    )


def _commit() -> str:
    """The commit of the checkout that contains this file, with "+" after it if files were changed; "" without one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""
