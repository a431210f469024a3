"""The program that allocates pinned host memory before the first step, compiled for absent GPUs."""

import pytest

from jaxlc.config import MeshConfig
from jaxlc.sharding.mesh import make_mesh
from jaxlc.simulate.topology import topology
from jaxlc.train.loop import jitted_allocation

GIB = 2**30


@pytest.mark.gpu_compiler
def test_allocation_is_one_host_buffer_written_in_parts():
    mesh = make_mesh(MeshConfig(context=2), topology("h100:1x2").devices)
    memory = jitted_allocation(mesh, 4 * GIB - 1).lower().compile().memory_analysis()
    assert memory.host_temp_size_in_bytes == 4 * GIB
    assert memory.temp_size_in_bytes < 0.1 * GIB
