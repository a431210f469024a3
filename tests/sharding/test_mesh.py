"""The mesh: axes, order of devices, and a mismatch that names overrides which work."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlc.config import MeshConfig
from jaxlc.core.axes import MESH_AXES
from jaxlc.core.errors import UserError
from jaxlc.sharding.mesh import make_mesh


def test_axes_and_order():
    mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()
    assert mesh.devices[0, 0, 0].tolist() == jax.devices()[:2]  # tensor peers are neighbours


def test_given_devices_only():
    devices = jax.devices()[3:5]
    np.testing.assert_array_equal(make_mesh(MeshConfig(data=2), devices).devices.flat, devices)


@pytest.mark.parametrize("axes", [
    dict(), dict(context=3), dict(context=4, tensor=4), dict(data=2, fsdp=4, context=2, tensor=2), dict(tensor=6),
], ids=str)
@pytest.mark.parametrize("num_devices", [2, 7, 8])
def test_a_mismatch_names_overrides_that_work(axes, num_devices):
    config, devices = MeshConfig(**axes), jax.devices()[:num_devices]
    with pytest.raises(UserError, match=f"needs {config.num_devices} devices and there are {num_devices}") as error:
        make_mesh(config, devices)
    message = str(error.value)
    overrides = {axis: int(size) for axis, size in re.findall(r"--config\.mesh\.(\w+)=(\d+)", message)}
    assert make_mesh(dataclasses.replace(config, **overrides), devices).size == num_devices
    assert all(getattr(config, axis) % size == 0 for axis, size in overrides.items() if axis != "context")
    assert f"--config.runtime.simulated_devices={config.num_devices}" in message
