import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.config import MeshConfig
from jaxlc.core.errors import UserError
from jaxlc.core.hardware import DEVICES
from jaxlc.simulate import topology as topology_module
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology

pytestmark = pytest.mark.jax_version


def test_topology_parses_a_name():
    gpus = topology("h100:8x4")
    assert str(gpus) == "h100:8x4" and gpus.device.device_kind == "NVIDIA H100 80GB HBM3"
    assert (gpus.num_gpus, gpus.gpus_per_domain, gpus.devices_per_process) == (32, 4, 1)


def test_topology_host_memory_defaults_to_whole_node():
    assert topology("h100:1x1").host_memory_bytes_per_node == 2 * 2**40
    gb200 = topology("gb200:1x64")
    assert (gb200.gpus_per_node, gb200.host_memory_bytes_per_node) == (4, 960 * 2**30)
    gh200 = topology("gh200:2x1")
    assert (gh200.gpus_per_node, gh200.host_memory_bytes_per_node) == (1, 480 * 2**30)
    t4 = topology("t4:3x2", devices_per_process=2)  # 3 machines of 2 GPUs
    assert (t4.gpus_per_node, t4.host_memory_bytes_per_node) == (2, 24 * 2**30)
    assert topology("h100:1x8", host_memory_gib=1000).host_memory_bytes_per_node == 1000 * 2**30


@pytest.mark.parametrize(
    "name, says",
    [
        (
            "v100:8x8",
            "unknown GPU; expected one of t4, rtx3090, l4, rtx4090, a100, h100, h200, gh200, b200, gb200",
        ),
        ("", "unknown GPU"),
        ("h100", "such as h100:8x8"),
        ("H100:8", "expected GPU:DOMAINSxGPUS_PER_DOMAIN, such as h100:1x8"),
        ("h100:0x8", "invalid topology"),
        ("h100:8x8x2", "invalid topology"),
        (f"h100:1x{'9' * 23}", "expected at most 1,048,576 GPUs"),
    ],
)
def test_topology_with_invalid_name_raises(name, says):
    with pytest.raises(UserError, match=says):
        topology(name)


def test_topology_in_capitals_is_the_same():
    assert str(topology("H100:8X8")) == "h100:8x8"


def test_topology_takes_any_host_memory():
    assert topology("h100:1x8", host_memory_gib=1e300).host_memory_bytes_per_node == sys.maxsize


def test_topology_with_indivisible_processes_raises():
    with pytest.raises(UserError, match=r"devices per process \(3\) must divide the 8 GPUs"):
        topology("h100:1x8", devices_per_process=3)


def test_make_mesh_of_another_size_raises():
    with pytest.raises(UserError, match="h100:8x8 has 64 GPUs and .* needs 32; both must be equal"):
        make_mesh(topology("h100:8x8"), MeshConfig(context=32))


def test_make_mesh_without_gpu_compiler_raises(monkeypatch):
    monkeypatch.setattr(topology_module, "has_gpu_compiler", lambda: False)
    with pytest.raises(UserError, match=r"pip install -e '\.\[plan\]'"):
        make_mesh(topology("h100:1x1"), MeshConfig())


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_known_gpu_is_a_compile_target(device):
    mesh = make_mesh(topology(f"{device.name}:2x2"), MeshConfig(data=2, context=2))
    assert mesh.devices.flat[0].device_kind == device.device_kind
    x = jax.ShapeDtypeStruct(
        (64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("context"))
    )
    compiled = (
        jax.jit(lambda x: (x @ x.T).sum()).lower(x).compile(compiler_options=dict(WITHOUT_GPU))
    )
    assert (
        "is_scheduled=true" in compiled.as_text()
        and compiled.memory_analysis().argument_size_in_bytes == 64 * 64
    )


@pytest.mark.parametrize("compute, uses_triton", [("bf16", True), ("fp8", False)])
def test_options_without_gpu_avoid_triton_for_8_bits(compute, uses_triton):
    assert (
        topology_module.options_without_gpu(compute).get("xla_gpu_enable_triton_gemm", True)
        == uses_triton
    )


@pytest.mark.gpu_compiler
def test_devices_are_ordered_by_process_and_domain():
    gpus = topology("h100:2x4", devices_per_process=2)
    assert [device.process_index for device in gpus.devices] == [0, 0, 1, 1, 2, 2, 3, 3]
    mesh = make_mesh(gpus, MeshConfig(context=2, tensor=4))
    # tensor peers share a domain
    assert [device.id for device in mesh.devices.flat] == list(range(8))
