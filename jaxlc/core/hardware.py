"""What the GPUs can do, each number with its source. Imports nothing of jax."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Rates are peaks; what is reached is lower (an H100's bf16 product measured near 800e12 FLOP/s)."""

    name: str
    device_kind: str  # as `jax.Device.device_kind` has it, so variants with other figures are not taken for this one
    bf16_flops_per_second: float  # dense: datasheets print twice as much, "with sparsity"
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    nvlink_bandwidth_bytes_per_second: float  # to all peers together, in one direction


# memory_bytes and memory bandwidth: XLA's own specs, xla/backends/gpu/target_config/specs.
# NVLink: the published total, halved, since that counts both directions.
# [1] glennklockwood.com/garden/processors/h100 and /garden/peak-FLOPS, [2] .../processors/B200, both after NVIDIA's
#     papers; [3] verda.com/blog/gb300-nvl72-architecture. Secondary sources.
DEVICES = (
    Device(
        name="a100",
        device_kind="NVIDIA A100-SXM4-80GB",
        bf16_flops_per_second=312e12,  # NVIDIA's published 312 TFLOPS, 624 with sparsity
        memory_bytes=85_100_068_864,
        memory_bandwidth_bytes_per_second=2.039e12,
        nvlink_bandwidth_bytes_per_second=300e9,  # NVLink 3: 600 GB/s
    ),
    Device(
        name="h100",
        device_kind="NVIDIA H100 80GB HBM3",
        bf16_flops_per_second=989.4e12,  # 132 SMs x 4 tensor cores x 1024 FLOP a clock x 1.83 GHz [1]
        memory_bytes=84_942_979_072,
        memory_bandwidth_bytes_per_second=3.35232e12,
        nvlink_bandwidth_bytes_per_second=450e9,  # NVLink 4: 900 GB/s
    ),
    Device(
        name="h200",
        device_kind="NVIDIA H200",
        bf16_flops_per_second=989.4e12,  # the compute die is the H100's [1]
        memory_bytes=151_397_597_184,
        memory_bandwidth_bytes_per_second=4.8e12,
        nvlink_bandwidth_bytes_per_second=450e9,  # NVLink 4: 900 GB/s
    ),
    Device(
        name="b200",
        device_kind="NVIDIA B200",
        bf16_flops_per_second=2250e12,  # HGX at 1,000 W: 4,500 TFLOPS with sparsity [2]
        memory_bytes=191_514_411_008,
        memory_bandwidth_bytes_per_second=7.67232e12,
        nvlink_bandwidth_bytes_per_second=900e9,  # NVLink 5: 1.8 TB/s
    ),
    Device(
        name="gb200",
        device_kind="NVIDIA GB200",
        bf16_flops_per_second=2500e12,  # at 1,200 W: 5,000 TFLOPS with sparsity [2]; [3] says 2250e12
        memory_bytes=197_897_748_480,
        memory_bandwidth_bytes_per_second=7.928064e12,
        nvlink_bandwidth_bytes_per_second=900e9,  # NVLink 5: 1.8 TB/s
    ),
)


def find(device_kind: str) -> Device | None:
    """The device of that name or `jax.Device.device_kind`; None if it is not listed, as no CPU is."""
    return next((device for device in DEVICES if device_kind in (device.name, device.device_kind)), None)
