"""The environment of a measurement: device, versions and commit."""

import platform
import subprocess
from pathlib import Path

import jax


def environment_info() -> dict[str, str | int]:
    """Device kind, number of devices, versions, and git commit of the checkout."""
    device = jax.devices()[0]
    return dict(
        device=f"{platform.machine()} {device.device_kind}"
        if device.platform == "cpu"
        else device.device_kind,
        num_devices=jax.device_count(),
        jax=jax.__version__,
        python=platform.python_version(),
        commit=_commit(),
    )


def _commit() -> str:
    """The commit of the checkout that contains this file, with "+" after it if files were changed;
    "" without one.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""
