"""Roofline: seconds of kernels and transfers from a device's peaks and the fraction of them that is reached.

    kernel    FLOPs / (peak FLOP/s x efficiency), or bytes / (memory bandwidth x efficiency)
    transfer  latency + bytes / (link bandwidth x efficiency)

A JSON file of measured constants can replace the defaults, whose sources are in `core/hardware.py`.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.core.hardware import Device, Efficiency

# Peak FLOP/s of matrix products relative to bfloat16, by operand data type; the same on all devices listed.
_PEAK_OVER_BF16 = {"f32": 0.5, "f8": 2.0}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Efficiencies (fractions of a device's peaks that are reached) and latencies; fields are the keys of the file."""

    attention_share: Mapping[str, Efficiency] = field(default_factory=lambda: hardware.ATTENTION_SHARE_OF_PEAK)
    matmul_share: float = hardware.BF16_MATMUL_SHARE
    f8_matmul_share: float = hardware.F8_MATMUL_SHARE
    memory_share: float = hardware.MEMORY_SHARE
    link_share: float = hardware.LINK_SHARE
    host_share: float = hardware.HOST_SHARE
    nvlink_latency_seconds: float = hardware.NVLINK_LATENCY_SECONDS
    network_latency_seconds: float = hardware.NETWORK_LATENCY_SECONDS
    host_latency_seconds: float = hardware.HOST_LATENCY_SECONDS
    kernel_gap_seconds: float = hardware.KERNEL_GAP_SECONDS

    def attention_seconds(self, device: Device, kernel: str, *, is_backward: bool, flops: float) -> float:
        """Seconds of attention kernels that compute `flops`; `kernel` is a key of `attention_share`."""
        efficiency = self.attention_share[kernel]
        return flops / (device.bf16_flops_per_second * (efficiency.backward if is_backward else efficiency.forward))

    def matmul_seconds(self, device: Device, dtype: str, flops: float) -> float:
        """Seconds of matrix products; `dtype` is XLA's name: "bf16", "f32", "f8e4m3fn"."""
        family = dtype[:2] if dtype.startswith("f8") else dtype
        efficiency = self.f8_matmul_share if family == "f8" else self.matmul_share
        return flops / (device.bf16_flops_per_second * _PEAK_OVER_BF16.get(family, 1.0) * efficiency)

    def memory_seconds(self, device: Device, num_bytes: float) -> float:
        return num_bytes / (device.memory_bandwidth_bytes_per_second * self.memory_share)

    def nvlink_seconds(self, device: Device, num_bytes: float) -> float:
        """Seconds until `num_bytes` that each GPU sends within its NVLink domain have arrived."""
        return self.nvlink_latency_seconds + num_bytes / (device.nvlink_bandwidth_bytes_per_second * self.link_share)

    def network_seconds(self, device: Device, num_bytes: float) -> float:
        """Seconds until `num_bytes` that each GPU's network card sends have arrived."""
        return self.network_latency_seconds + num_bytes / (device.network_bandwidth_bytes_per_second * self.link_share)

    def host_seconds(self, device: Device, num_bytes: float) -> float:
        """Seconds of a copy to or from host memory."""
        return self.host_latency_seconds + num_bytes / (device.host_bandwidth_bytes_per_second * self.host_share)


def from_file(path: str) -> Roofline:
    """The constants in a JSON file; the defaults if `path` is empty. Raises UserError as `read` does."""
    if not path:
        return Roofline()
    try:
        return read(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the constants file: {error}") from error


def read(text: str) -> Roofline:
    """Constants from JSON such as {"matmul_share": 0.7, "attention_share": {"cudnn": [0.62, 0.5]}}, else the defaults.

    Raises:
      UserError: the text is not JSON, a key is unknown, or a value is not a positive number.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"the constants file is not valid JSON: {error}") from error
    known = [field.name for field in dataclasses.fields(Roofline)]
    if not isinstance(values, dict) or not values.keys() <= set(known):
        raise UserError(f"invalid constants file: expected an object with some of the keys {', '.join(known)}")
    attention = values.pop("attention_share", {})
    if not isinstance(attention, dict) or not all(_is_pair(name, pair) for name, pair in attention.items()):
        kernels = ", ".join(hardware.ATTENTION_SHARE_OF_PEAK)
        raise UserError(
            f"invalid attention_share in the constants file: expected pairs [forward, backward] for {kernels}"
        )
    numbers = [*values.values(), *(number for pair in attention.values() for number in pair)]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise UserError("invalid constants file: expected positive numbers only")
    efficiencies = {name: Efficiency(*pair) for name, pair in attention.items()}
    return Roofline(**values, attention_share={**hardware.ATTENTION_SHARE_OF_PEAK, **efficiencies})


def _is_pair(name: str, value: object) -> bool:
    return name in hardware.ATTENTION_SHARE_OF_PEAK and isinstance(value, list) and len(value) == 2
