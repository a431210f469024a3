"""The mesh: axes, order of devices, and a wrong number of devices."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxlc
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


def test_make_mesh_of_another_size_gives_advice_that_works():
    with pytest.raises(
        UserError, match=r"context=4 .* the number of devices is 8; .* such as context=8, or"
    ) as error:
        jaxlc.make_mesh(context=4)
    devices = re.search(r"pass devices=(jax.devices\(\)\[:4\])$", str(error.value))[1]
    assert jaxlc.make_mesh(context=4, devices=eval(devices)).shape["context"] == 4
    assert jaxlc.make_mesh(context=8).shape["context"] == 8
    with pytest.raises(
        UserError, match=r"is 8; .*, or on CPU call jaxlc.start\(simulated_devices=16\) before any"
    ):
        make_mesh(MeshConfig(context=16))
