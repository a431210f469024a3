"""Roofline: seconds of kernels and transfers from a device's peaks and the fraction of them that is reached.

    kernel    FLOPs / (peak FLOP/s x efficiency), or bytes / (memory bandwidth x efficiency)
    transfer  latency + bytes / (link bandwidth x efficiency)

Efficiencies depend on sizes: `efficiency` has the curves and their sources. A JSON file of measured constants can
replace each of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxlc.core import hardware
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import MAX_JSON_BYTES, parse_json, read_limited
from jaxlc.core.hardware import Device, Efficiency
from jaxlc.hlo.kernel_costs import Product
from jaxlc.simulate import efficiency, interval

# Peak FLOP/s of matrix products relative to bfloat16, by operand data type; the same on all devices listed.
_PEAK_OVER_BF16 = {"f32": 0.5, "f8": 2.0}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Efficiencies (fractions of a device's peaks that are reached) and latencies; fields are the keys of the file.

    None: the published value of the GPU (`efficiency.rates`).
    """

    attention_share: Mapping[str, Efficiency] = field(default_factory=dict)  # kernels that are absent: as None
    attention_half_keys_masked: float = efficiency.HALF_KEYS_MASKED
    attention_half_keys_unmasked: float = efficiency.HALF_KEYS_UNMASKED
    matmul_share: float | None = None
    f8_matmul_share: float | None = None
    expert_kernel_share: float | None = None  # products of runtime.expert_kernel=mosaic; None: an assumed value
    matmul_ramp_seconds: float | None = None
    matmul_wave_weight: float = 1.0  # 0: products are not slower because of partial waves of tiles
    memory_share: float | None = None
    link_share: float = hardware.LINK_EFFICIENCY
    host_share: float = hardware.HOST_LINK_EFFICIENCY
    nvlink_latency_seconds: float = efficiency.NCCL_LAUNCH_SECONDS + efficiency.NVLINK_STEP_SECONDS  # first step
    nvlink_step_seconds: float = efficiency.NVLINK_STEP_SECONDS  # each further step
    network_latency_seconds: float = efficiency.NCCL_LAUNCH_SECONDS + efficiency.NETWORK_STEP_SECONDS
    network_step_seconds: float = efficiency.NETWORK_STEP_SECONDS
    host_latency_seconds: float = hardware.HOST_LATENCY_SECONDS
    kernel_gap_seconds: float = hardware.KERNEL_GAP_SECONDS
    synchronization_seconds: float = hardware.SYNCHRONIZATION_SECONDS
    nccl_multiprocessors: float = efficiency.NCCL_MULTIPROCESSORS
    # The interval of estimated times (`interval`). Rates measured on the GPUs of the run justify a narrower one.
    time_scale: float = interval.TIME_SCALE
    time_spread: float = interval.TIME_SPREAD
    pair_spread: float = interval.PAIR_SPREAD

    def attention_seconds(
        self,
        device: Device,
        kernel: str,
        *,
        is_backward: bool,
        flops: float,
        num_keys: float = float("inf"),
        head_dim: int = 128,
        is_masked: bool = False,
    ) -> float:
        """Seconds of attention kernels that compute `flops`.

        Args:
          kernel: a key of `attention_share`.
          num_keys: of a call; a call with few keys achieves a lower rate.
          is_masked: the kernel skips pairs of a query and a key.
        """
        share = self.attention_share.get(kernel, efficiency.rates(device).attention[kernel])
        rate = device.bf16_flops_per_second * (share.backward if is_backward else share.forward)
        half_keys = self.attention_half_keys_masked if is_masked else self.attention_half_keys_unmasked
        curve = efficiency.head_dim_efficiency(head_dim, is_backward=is_backward)
        if num_keys != float("inf"):
            curve *= efficiency.saturation(num_keys, half_keys)
        return flops / (rate * curve)

    def matmul_seconds(self, device: Device, dtype: str, flops: float, products: Sequence[Product] = ()) -> float:
        """Seconds of matrix products; `dtype` is XLA's name: "bf16", "f32", "f8e4m3fn".

        Args:
          products: the shapes of these products. Empty: large ones, which achieve the full rate.
        """
        family = dtype[:2] if dtype.startswith("f8") else dtype
        published = efficiency.rates(device)
        share, default = (
            (self.f8_matmul_share, published.f8_matmul)
            if family == "f8"
            else (self.matmul_share, published.bf16_matmul)
        )
        share = default if share is None else share
        rate = device.bf16_flops_per_second * _PEAK_OVER_BF16.get(family, 1.0) * share
        if not products:
            return flops / rate
        seconds = sum(product.flops * self._slowdown(device, product, share) for product in products) / rate
        ramp = published.matmul_ramp_seconds if self.matmul_ramp_seconds is None else self.matmul_ramp_seconds
        return seconds + ramp * len(products)

    def memory_seconds(self, device: Device, num_bytes: float) -> float:
        share = efficiency.rates(device).memory if self.memory_share is None else self.memory_share
        return num_bytes / (device.memory_bandwidth_bytes_per_second * share)

    def nvlink_seconds(self, device: Device, num_bytes: float, num_steps: int = 1) -> float:
        """Seconds until `num_bytes` that each GPU sends within its NVLink domain have arrived.

        Args:
          num_steps: consecutive steps of the algorithm (`efficiency.num_steps`).
        """
        latency = self.nvlink_latency_seconds + (num_steps - 1) * self.nvlink_step_seconds
        return latency + num_bytes / (device.nvlink_bandwidth_bytes_per_second * self.link_share)

    def network_seconds(self, device: Device, num_bytes: float, num_steps: int = 1) -> float:
        """Seconds until `num_bytes` that each GPU's network card sends have arrived. Arguments as `nvlink_seconds`."""
        latency = self.network_latency_seconds + (num_steps - 1) * self.network_step_seconds
        return latency + num_bytes / (device.network_bandwidth_bytes_per_second * self.link_share)

    def host_seconds(self, device: Device, num_bytes: float) -> float:
        """Seconds of a copy to or from host memory."""
        return self.host_latency_seconds + num_bytes / (device.host_bandwidth_bytes_per_second * self.host_share)

    def compute_share_during_nccl(self, device: Device) -> float:
        """The fraction of a GPU's multiprocessors that kernels have while an NCCL collective runs."""
        return 1 - self.nccl_multiprocessors / efficiency.rates(device).num_multiprocessors

    def _slowdown(self, device: Device, product: Product, share: float) -> float:
        """The time of a product relative to that of a large one, which achieves `share` of the peak."""
        if product.is_grouped:
            return share / (self.expert_kernel_share or efficiency.EXPERT_KERNEL)
        shape = (product.rows, product.columns, product.batch)
        occupied = efficiency.wave_efficiency(*shape, efficiency.rates(device).num_multiprocessors)
        return 1 + self.matmul_wave_weight * (1 / occupied - 1)


def from_file(path: str) -> Roofline:
    """The constants in a JSON file; the defaults if `path` is empty. Raises UserError as `read` does."""
    if not path:
        return Roofline()
    try:
        text = read_limited(Path(path), MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the constants file {path}: {reason_of(error)}") from error
    return read(text)


def read(text: str | bytes) -> Roofline:
    """Constants from JSON such as {"matmul_share": 0.7, "attention_share": {"cudnn": [0.62, 0.5]}}, else the defaults.

    Raises:
      UserError: the text is not JSON, a key is unknown, or a value is not a number in its range.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"the constants file is not valid JSON: {error}") from error
    known = [field.name for field in dataclasses.fields(Roofline)]
    if not isinstance(values, dict) or not values.keys() <= set(known):
        raise UserError(f"invalid constants file: expected an object with some of the keys {', '.join(known)}")
    attention = values.pop("attention_share", {})
    if not isinstance(attention, dict) or not all(_is_pair(name, pair) for name, pair in attention.items()):
        kernels = ", ".join(efficiency.KERNELS)
        raise UserError(
            f"invalid attention_share in the constants file: expected pairs [forward, backward] for {kernels}"
        )
    shares = (("attention_share", number) for pair in attention.values() for number in pair)
    for name, number in (*values.items(), *shares):
        _check_number(name, number)
    efficiencies = {name: Efficiency(*pair) for name, pair in attention.items()}
    return Roofline(**values, attention_share=efficiencies)


def _is_pair(name: str, value: object) -> bool:
    return name in efficiency.KERNELS and isinstance(value, list) and len(value) == 2


def _check_number(name: str, value: object) -> None:
    """Raises UserError if the value of a constant is not a number in its range."""
    if name.endswith("_share"):
        expected, is_valid = "a fraction of the peak, greater than 0 and at most 1", lambda x: 0 < x <= 1
    elif name in ("time_scale", "time_spread", "pair_spread"):
        expected, is_valid = "a positive number", lambda x: 0 < x < math.inf
    elif name == "nccl_multiprocessors":
        expected, is_valid = "a number from 0 to 100", lambda x: 0 <= x <= 100
    else:
        expected, is_valid = "a number of at least 0", lambda x: 0 <= x < math.inf
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_valid(value):
        raise UserError(f"invalid {name}={value} in the constants file: expected {expected}")
