"""The device mesh: devices in a grid, whose directions are named in core/axes.py."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxlc.config import MeshConfig
from jaxlc.core.axes import MESH_AXES
from jaxlc.core.errors import UserError


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (None: all there are), in their order: tensor peers are neighbours.

    Axes are of type Auto, so that the compiler completes the shardings that the code leaves open;
    `jax.make_mesh` would make them Explicit.

    Raises:
      UserError: the mesh needs another number of devices. (`config.check_num_devices` also says what does work.)
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices != len(devices):
        raise UserError(f"{config} needs {config.num_devices} devices and there are {len(devices)}; give it that many")
    shape = tuple(vars(config)[axis] for axis in MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
