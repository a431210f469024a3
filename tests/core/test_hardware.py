import dataclasses

import pytest

from jaxlc.core.hardware import DEVICES, find, is_coherent_with_host


def test_find_by_name_and_device_kind():
    assert find("h100") is find("NVIDIA H100 80GB HBM3")
    assert find("h100").name == "h100"


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", ""])
def test_find_unlisted_device_returns_none(kind):
    assert find(kind) is None


def test_is_coherent_with_host_only_for_grace():
    assert {device.name for device in DEVICES if is_coherent_with_host(device.device_kind)} == {
        "gh200",
        "gb200",
    }
    assert is_coherent_with_host("NVIDIA GH200 144G HBM3e") and is_coherent_with_host(
        "NVIDIA GB300"
    )
    assert not is_coherent_with_host("NVIDIA H100 PCIe") and not is_coherent_with_host("cpu")


def test_devices_have_figures_in_the_units_of_their_names():
    bounds = dict(
        bf16_flops_per_second=(5e13, 1e16),
        memory_bytes=(1e10, 4e11),
        memory_bandwidth_bytes_per_second=(2e11, 1e13),
        nvlink_bandwidth_bytes_per_second=(1e10, 1e12),
        network_bandwidth_bytes_per_second=(1e9, 1e12),
    )
    for device in DEVICES:
        for name, (low, high) in bounds.items():
            assert low < dataclasses.asdict(device)[name] < high, (device.name, name)
    assert (
        len({device.device_kind for device in DEVICES})
        == len({device.name for device in DEVICES})
        == len(DEVICES)
    )
