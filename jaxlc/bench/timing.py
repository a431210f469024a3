"""Timing a compiled function, and the circumstances that belong beside every figure."""

import platform
import subprocess
import time
from pathlib import Path

import jax


def seconds_of_calls(function, *args, repeats: int) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after one that is not counted; each waits for its result."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        start_seconds = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start_seconds)
    return seconds


def circumstances() -> dict[str, str | int]:
    """Device, number of devices, versions and commit."""
    device = jax.devices()[0]
    return dict(
        device=f"{platform.machine()} {device.device_kind}" if device.platform == "cpu" else device.device_kind,
        num_devices=jax.device_count(),
        jax=jax.__version__,
        python=platform.python_version(),
        commit=_commit(),
    )


def _commit() -> str:
    """Of the checkout that this file is in; "+" where it has changes, "" where it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""
