"""The mesh: axes, order of devices, and a wrong number of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlc.config import MeshConfig
from jaxlc.core.axes import MESH_AXES
from jaxlc.core.errors import UserError
from jaxlc.sharding.mesh import make_mesh


def test_make_mesh_axes_and_device_order():
    mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()
    assert mesh.devices[0, 0, 0].tolist() == jax.devices()[:2]  # tensor peers are neighbors


def test_make_mesh_uses_given_devices():
    devices = jax.devices()[3:5]
    np.testing.assert_array_equal(make_mesh(MeshConfig(data=2), devices).devices.flat, devices)


def test_make_mesh_wrong_number_of_devices_is_refused():
    with pytest.raises(
        UserError,
        match=r"context=4 x tensor=1 needs 4 devices but 2 are given; use a mesh of that size, or pass devices=",
    ):
        make_mesh(MeshConfig(context=4), jax.devices()[:2])
