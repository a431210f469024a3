"""The device mesh: devices in a grid, whose directions are named in core/axes.py."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxlc.config import MeshConfig
from jaxlc.core.axes import CONTEXT, DATA, FSDP, MESH_AXES, TENSOR
from jaxlc.core.errors import UserError


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (None: all there are), in their order: tensor peers are neighbours.

    Axes are of type Auto, so that the compiler completes the shardings that the code leaves open;
    `jax.make_mesh` would make them Explicit.

    Raises:
      UserError: the mesh needs another number of devices; names overrides that work on these.
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices != len(devices):
        raise UserError(_mismatch(config, devices))
    shape = tuple(_sizes(config).values())
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _sizes(config: MeshConfig) -> dict[str, int]:
    return {axis: getattr(config, axis) for axis in MESH_AXES}


def _mismatch(config: MeshConfig, devices: Sequence[jax.Device]) -> str:
    sizes = _sizes(config)
    wanted = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    fitting = _fitting_sizes(sizes, len(devices))
    overrides = " ".join(f"--config.mesh.{axis}={fitting[axis]}" for axis in MESH_AXES if fitting[axis] != sizes[axis])
    sentence = (
        f"the mesh {wanted} needs {config.num_devices} devices and there are {len(devices)};"
        f" use e.g. {overrides} for the {len(devices)} here"
    )
    if devices[0].platform == "cpu":
        sentence += f", or simulate the rest with --config.runtime.simulated_devices={config.num_devices}"
    return sentence


def _fitting_sizes(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Sizes whose product is num_devices. No axis but context grows, and each shrinks to a divisor of itself, so
    that what was divisible by it (heads, rows) still is."""
    fitting = {}
    for axis in (TENSOR, FSDP, DATA):
        fitting[axis] = math.gcd(sizes[axis], num_devices)
        num_devices //= fitting[axis]
    return fitting | {CONTEXT: num_devices}
