"""Peaks of GPUs, and fractions that links achieve, each number with its source. Efficiencies of
kernels are in `jaxlc.simulate.roofline`.

This module does not import jax.
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Rates are peaks; achieved rates are lower (an H100's bf16 product measured near
    800e12 FLOP/s).
    """

    name: str
    # equal to `jax.Device.device_kind`, so that variants with other figures do not match
    device_kind: str
    compute_capability: str  # equal to `jax.Device.compute_capability`
    bf16_flops_per_second: float  # dense: datasheets print twice as much, "with sparsity"
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    # to all peers in total, in one direction; over PCIe where there is no NVLink
    nvlink_bandwidth_bytes_per_second: float
    network_bandwidth_bytes_per_second: float  # one network card per GPU, in one direction
    # between a GPU and the memory of its host, in one direction
    host_bandwidth_bytes_per_second: float


class Efficiency(NamedTuple):
    """Fractions of peak FLOP/s that a kernel achieves."""

    forward: float
    backward: float


# Time of a kernel in addition to its products or bytes, so the period of a kernel with hardly any work: 1.3 and 1.4 us
# in a CUDA graph, which XLA makes of chains of kernels; 3.6 and 5.3 us outside of one (benchmarks/2026-11-26-h100.md).
KERNEL_GAP_SECONDS = 1.4e-6
# The GPU is idle while the host reads the predicate of a loop or a conditional and launches what follows: 11 and 13 us,
# with the kernel of the predicate (as above).
SYNCHRONIZATION_SECONDS = 12e-6
# The fraction of link bandwidth that large copies achieve: NCCL gets 370 of NVLink's 450
# GB/s on 8 H100s (its author in github.com/NVIDIA/nccl-tests/issues/212), and 340 of 400 GB/s over 8 cards per node
# (github.com/NVIDIA/nccl/issues/1218); 680 of 900 GB/s on GB200 (Azure/AI-benchmarking-guide).
LINK_EFFICIENCY = 0.8
# The same for the host link: 52 of 63 GB/s over PCIe 5.0, 193 to 201 of 225 GB/s on GB200; pinned memory, one GPU
# at a time. Azure/AI-benchmarking-guide, ND H200 v5 and ND GB200 v6. benchmarks/2026-11-26-h100.md: 55 GB/s from the
# host over PCIe 5.0.
HOST_LINK_EFFICIENCY = 0.83
# Launch and first byte of a copy to or from host memory: assumed.
HOST_LATENCY_SECONDS = 10e-6


# memory_bytes and memory bandwidth: XLA's own specs, xla/backends/gpu/target_config/specs.
# NVLink: half of the published total, which counts both directions.
# Network: the cards of NVIDIA's own systems, from the datasheets named at each figure.
# [1] glennklockwood.com/garden/processors/h100 and /garden/peak-FLOPS, [2] .../processors/B200, both citing NVIDIA's
#     papers; [3] verda.com/blog/gb300-nvl72-architecture. Secondary sources.
# GPUs without NVLink: memory_bytes as PyTorch prints the capacity, other figures from NVIDIA's datasheets and
# architecture papers; peers exchange data over PCIe.
_H100 = Device(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    # 132 SMs x 4 tensor cores x 1024 FLOP a clock x 1.83 GHz [1]
    bf16_flops_per_second=989.4e12,
    memory_bytes=84_942_979_072,
    memory_bandwidth_bytes_per_second=3.35232e12,
    nvlink_bandwidth_bytes_per_second=450e9,  # NVLink 4: 900 GB/s
    network_bandwidth_bytes_per_second=50e9,  # DGX H100: ConnectX-7, NDR 400 Gb/s a GPU
    host_bandwidth_bytes_per_second=63e9,  # PCIe 5.0 x16: 16 lanes x 32 GT/s x 128/130
)
_B200 = Device(
    name="b200",
    device_kind="NVIDIA B200",
    compute_capability="10.0",
    bf16_flops_per_second=2250e12,  # HGX at 1,000 W: 4,500 TFLOPS with sparsity [2]
    memory_bytes=191_514_411_008,
    memory_bandwidth_bytes_per_second=7.67232e12,
    nvlink_bandwidth_bytes_per_second=900e9,  # NVLink 5: 1.8 TB/s
    network_bandwidth_bytes_per_second=50e9,  # DGX B200: ConnectX-7, 400 Gb/s a GPU
    host_bandwidth_bytes_per_second=63e9,  # PCIe 5.0 x16 in HGX and DGX
)
DEVICES = (
    Device(
        name="t4",
        device_kind="Tesla T4",
        compute_capability="7.5",
        bf16_flops_per_second=65e12,  # of fp16; it has no bf16
        memory_bytes=15_835_660_288,
        memory_bandwidth_bytes_per_second=0.320e12,
        nvlink_bandwidth_bytes_per_second=15.75e9,
        network_bandwidth_bytes_per_second=3e9,  # of a cloud instance: assumed
        host_bandwidth_bytes_per_second=15.75e9,  # PCIe 3.0 x16: 16 lanes x 8 GT/s x 128/130
    ),
    Device(
        name="rtx3090",
        device_kind="NVIDIA GeForce RTX 3090",
        compute_capability="8.6",
        bf16_flops_per_second=71e12,  # with float32 accumulation; with fp16 accumulation 142
        memory_bytes=25_447_170_048,
        memory_bandwidth_bytes_per_second=0.936e12,
        nvlink_bandwidth_bytes_per_second=31.5e9,
        network_bandwidth_bytes_per_second=1.25e9,  # Ethernet of 10 Gb/s: assumed
        host_bandwidth_bytes_per_second=31.5e9,  # PCIe 4.0 x16
    ),
    Device(
        name="l4",
        device_kind="NVIDIA L4",
        compute_capability="8.9",
        bf16_flops_per_second=121e12,  # 242 with sparsity
        memory_bytes=23_800_000_000,  # 22.17 GiB
        memory_bandwidth_bytes_per_second=0.300e12,
        nvlink_bandwidth_bytes_per_second=31.5e9,
        network_bandwidth_bytes_per_second=3e9,  # of a cloud instance: assumed
        host_bandwidth_bytes_per_second=31.5e9,  # PCIe 4.0 x16
    ),
    Device(
        name="rtx4090",
        device_kind="NVIDIA GeForce RTX 4090",
        compute_capability="8.9",
        bf16_flops_per_second=165.2e12,  # with float32 accumulation; with fp16 accumulation 330
        memory_bytes=25_380_000_000,  # 23.64 GiB
        memory_bandwidth_bytes_per_second=1.008e12,
        nvlink_bandwidth_bytes_per_second=31.5e9,
        network_bandwidth_bytes_per_second=1.25e9,  # Ethernet of 10 Gb/s: assumed
        host_bandwidth_bytes_per_second=31.5e9,  # PCIe 4.0 x16
    ),
    Device(
        name="a100",
        device_kind="NVIDIA A100-SXM4-80GB",
        compute_capability="8.0",
        bf16_flops_per_second=312e12,  # NVIDIA's published 312 TFLOPS, 624 with sparsity
        memory_bytes=85_100_068_864,
        memory_bandwidth_bytes_per_second=2.039e12,
        nvlink_bandwidth_bytes_per_second=300e9,  # NVLink 3: 600 GB/s
        network_bandwidth_bytes_per_second=25e9,  # DGX A100: ConnectX-6, HDR 200 Gb/s a GPU
        host_bandwidth_bytes_per_second=31.5e9,  # PCIe 4.0 x16: 16 lanes x 16 GT/s x 128/130
    ),
    _H100,
    # The compute die is the H100's [1], and so are its links; network as DGX H100.
    replace(
        _H100,
        name="h200",
        device_kind="NVIDIA H200",
        memory_bytes=151_397_597_184,
        memory_bandwidth_bytes_per_second=4.8e12,
    ),
    # NVIDIA's datasheet of the GH200 Grace Hopper Superchip, with 96 GB of HBM3 and 480 GB of
    # LPDDR5X. The compute die is the H100's [1]. NVLink 4: 900 GB/s, with a switch, as in the NVL32.
    # Network: a ConnectX-7 of 400 Gb/s a superchip.
    replace(
        _H100,
        name="gh200",
        device_kind="NVIDIA GH200 480GB",  # 480 GB is the memory of the CPU
        # 94.88 GiB, printed by PyTorch in github.com/Lightning-AI/litgpt/issues/1892
        memory_bytes=101_870_000_000,
        memory_bandwidth_bytes_per_second=4.0e12,
        host_bandwidth_bytes_per_second=450e9,  # NVLink-C2C: 900 GB/s in both directions
    ),
    _B200,
    # NVLink 5: 1.8 TB/s. GB200 NVL72: ConnectX-7, 400 Gb/s a GPU.
    replace(
        _B200,
        name="gb200",
        device_kind="NVIDIA GB200",
        # at 1,200 W: 5,000 TFLOPS with sparsity [2]; [3] says 2250e12
        bf16_flops_per_second=2500e12,
        memory_bytes=197_897_748_480,
        memory_bandwidth_bytes_per_second=7.928064e12,
        # NVLink-C2C: 900 GB/s in both directions per Grace, for two GPUs
        host_bandwidth_bytes_per_second=225e9,
    ),
)


def is_coherent_with_host(device_kind: str) -> bool:
    """Whether GPU and CPU can access each other's memory over NVLink-C2C: on the Grace superchips
    GH200, GB200 and GB300. Other GPUs use PCIe. C2C moves 900 GB/s, half of it in each direction
    (NVIDIA's GH200 datasheet)."""
    return re.search(r"\bG[HB]\d{3}\b", device_kind, re.IGNORECASE) is not None


def find(device_kind: str) -> Device | None:
    """The device with this name or `jax.Device.device_kind`; None if it is not listed, as for CPUs."""
    return next(
        (device for device in DEVICES if device_kind in (device.name, device.device_kind)), None
    )
