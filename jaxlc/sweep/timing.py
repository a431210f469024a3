"""Timing a compiled function, and the environment_info that belong beside every figure."""

import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax


def seconds_of_calls(function, *args, repeats: int) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after one that is not counted; each waits for its result."""
    (seconds,) = seconds_in_turn([lambda: function(*args)], repeats)
    return seconds


def seconds_in_turn(calls: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """The same of several functions, one call of each in every round: what disturbs the machine disturbs them all."""
    for call in calls:
        jax.block_until_ready(call())
    seconds = [[] for _ in calls]
    for _ in range(repeats):
        for call, its_seconds in zip(calls, seconds):
            start_seconds = time.perf_counter()
            jax.block_until_ready(call())
            its_seconds.append(time.perf_counter() - start_seconds)
    return seconds


def environment_info() -> dict[str, str | int]:
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
