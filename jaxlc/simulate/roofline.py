"""The model of time: what kernels and transfers take on a device. A file of measured rates may replace those here."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.core.hardware import Device, Efficiency

# Peaks of matrix products over that of bfloat16, by the data type multiplied: so it is on each of the devices.
_PEAK_OVER_BF16 = {"f32": 0.5, "f8": 2.0}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What is reached of a device's peaks, and what it takes to begin; the sources are in `core/hardware.py`."""

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
        shares = self.attention_share[kernel]
        return flops / (device.bf16_flops_per_second * (shares.backward if is_backward else shares.forward))

    def matmul_seconds(self, device: Device, dtype: str, flops: float) -> float:
        """`dtype` as XLA names it: "bf16", "f32", "f8e4m3fn"."""
        family = dtype[:2] if dtype.startswith("f8") else dtype
        share = self.f8_matmul_share if family == "f8" else self.matmul_share
        return flops / (device.bf16_flops_per_second * _PEAK_OVER_BF16.get(family, 1.0) * share)

    def memory_seconds(self, device: Device, num_bytes: float) -> float:
        return num_bytes / (device.memory_bandwidth_bytes_per_second * self.memory_share)

    def nvlink_seconds(self, device: Device, num_bytes: float) -> float:
        """Of what each GPU sends to others of its NVLink domain."""
        return self.nvlink_latency_seconds + num_bytes / (device.nvlink_bandwidth_bytes_per_second * self.link_share)

    def network_seconds(self, device: Device, num_bytes: float) -> float:
        """Of what each GPU's card sends."""
        return self.network_latency_seconds + num_bytes / (device.network_bandwidth_bytes_per_second * self.link_share)

    def host_seconds(self, device: Device, num_bytes: float) -> float:
        """In one direction."""
        return self.host_latency_seconds + num_bytes / (device.host_bandwidth_bytes_per_second * self.host_share)


def from_file(path: str) -> Roofline:
    """The rates that a file of JSON has; those of the table where `path` is empty. UserError: see `read`."""
    if not path:
        return Roofline()
    try:
        return read(Path(path).read_text())
    except OSError as error:
        raise UserError(f"the file of constants cannot be read: {error}") from error


def read(text: str) -> Roofline:
    """Rates from JSON such as {"matmul_share": 0.7, "attention_share": {"cudnn": [0.62, 0.5]}}; the rest is kept.

    Raises:
      UserError: what is not JSON, not a rate, or not a positive number.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"the file of constants is not JSON: {error}") from error
    known = [each.name for each in dataclasses.fields(Roofline)]
    if not isinstance(values, dict) or not values.keys() <= set(known):
        raise UserError(f"the file of constants must be an object whose keys are some of: {', '.join(known)}")
    attention = values.pop("attention_share", {})
    if not isinstance(attention, dict) or not all(_is_pair(name, pair) for name, pair in attention.items()):
        kernels = ", ".join(hardware.ATTENTION_SHARE_OF_PEAK)
        raise UserError(f"attention_share in the file of constants must have pairs [forward, backward] of {kernels}")
    numbers = [*values.values(), *(share for pair in attention.values() for share in pair)]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise UserError("all numbers in the file of constants must be positive")
    shares = {name: Efficiency(*pair) for name, pair in attention.items()}
    return Roofline(**values, attention_share={**hardware.ATTENTION_SHARE_OF_PEAK, **shares})


def _is_pair(name: str, value: object) -> bool:
    return name in hardware.ATTENTION_SHARE_OF_PEAK and isinstance(value, list) and len(value) == 2
