"""Roofline: seconds of kernels and transfers from a device's peaks and the fraction of them that is
reached.

    kernel    FLOPs / (peak FLOP/s x efficiency), or bytes / (memory bandwidth x efficiency)
    transfer  latency + bytes / (link bandwidth x efficiency)

A JSON file of measured constants can replace each of them. Efficiencies depend on sizes, each with
its published source:

    matrix products   tiles over multiprocessors (wave quantization), and a ramp of a few microseconds
    attention         saturation with the number of keys, by head dim
    NCCL              latency per step of the algorithm, by kind of collective and number of ranks

None of them was fitted to a training step. docs/calibration.md lists the sources and compares
steps.

The 80% interval of an estimated step is built from its parts (`Roofline.step_interval`). Kernels on
a GPU on which steps of jaxlc were measured have the spread of these steps. Communication, other
kernels and other GPUs have the spread of published runs of other trainers. `python -m benchmarks.calibration`
computes the constants (docs/calibration.md); a test compares them with its stored results. A file
of constants can replace them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxlc.core import UserError, hardware, reason_of
from jaxlc.core.files import MAX_JSON_BYTES, local_path, parse_json, read_limited
from jaxlc.core.hardware import Device, Efficiency
from jaxlc.hlo.kernel_costs import Product

LEVEL = 0.8
# Published over estimated time: weighted median of all sources.
TIME_SCALE = 1.077
# The published time is within a factor of exp(+-spread) of the scaled estimate.
TIME_SPREAD = 0.563
# The same for the ratio of two steps of one model on the same GPUs, of similar length: errors that both have cancel.
# Only 7 published pairs, of 2 sources.
PAIR_SPREAD = 0.331
# (scale, spread) as above, of steps of jaxlc that ran on one GPU (benchmarks/measured_runs.toml), by its name
MEASURED = MappingProxyType({"h100": (0.993, 0.081)})
# attention kernels whose rates were measured on these GPUs, and up to which head dim
MEASURED_ATTENTION = MappingProxyType(dict(cudnn=256, cudnn_packed=256, pallas=128))


class Interval(NamedTuple):
    """Factors on an estimated time: the time is expected between `low` and `high` times the
    estimate.
    """

    low: float
    high: float

    @property
    def median(self) -> float:
        """The factor in the middle of the interval: the time is as likely to be longer as to be
        shorter.
        """
        return math.sqrt(self.low * self.high)

    @property
    def inverse(self) -> "Interval":
        """The interval of a rate, such as tokens per second."""
        return Interval(1 / self.high, 1 / self.low)


def time_interval(scale: float = TIME_SCALE, spread: float = TIME_SPREAD) -> Interval:
    """The interval of a time relative to its estimate."""
    return Interval(scale * math.exp(-spread), scale * math.exp(spread))


PUBLISHED = time_interval()  # of published runs


# Text of estimates. Wherever a quantity is printed, it has the same digits; JSON files have the
# exact point estimates.


def two_digits(value: float) -> str:
    """A number of at least 0 with two significant digits: 0.0523 as "0.052", 40.4 as "40", 1,234 as
    "1,200".
    """
    rounded = float(f"{value:.1e}")
    decimals = max(0, 1 - math.floor(math.log10(rounded))) if rounded else 0
    return f"{rounded:,.{decimals}f}"


def seconds_text(seconds: float) -> str:
    """A time with two significant digits: "40 s", "2.5 ms", "25 us"."""
    unit, scale = _unit(seconds)
    return f"{two_digits(seconds / scale)} {unit}"


def estimate_text(seconds: float, interval: Interval = PUBLISHED) -> str:
    """An estimated time as it is printed everywhere, the median and the 80% interval: "about 40 s
    (23 to 73)".

    Args:
      seconds: the point estimate, such as `Prediction.step_seconds`.
      interval: `Prediction.interval` of the same estimate.
    """
    unit, scale = _unit(interval.median * seconds)
    return range_text(seconds / scale, unit, interval)


def range_text(value: float, unit: str, interval: Interval) -> str:
    """The same for a point estimate in any unit: "about 12 h (6.7 to 22)", "about 41% (23 to 74)".

    Args:
      unit: printed after the median; "" if it stands elsewhere.
    """
    middle = two_digits(interval.median * value) + (f" {unit}" if unit not in ("", "%") else unit)
    return f"about {middle} ({two_digits(interval.low * value)} to {two_digits(interval.high * value)})"


def _unit(seconds: float) -> tuple[str, float]:
    """A unit in which the time is at least 1, and its seconds."""
    rounded = float(f"{seconds:.1e}")
    return ("s", 1.0) if rounded >= 1 else ("ms", 1e-3) if rounded >= 1e-3 else ("us", 1e-6)


class Rates(NamedTuple):
    """Fractions of a GPU's peaks that large kernels achieve, and its number of multiprocessors."""

    bf16_matmul: float
    f8_matmul: float  # fraction of the FP8 peak
    memory: float
    attention: Mapping[str, Efficiency]  # by kernel; long sequences, head dim 128, unmasked
    num_multiprocessors: int
    # Time that a product takes in addition to its waves of tiles and to the time of any kernel (`KERNEL_GAP_SECONDS`):
    # filling and draining the pipeline.
    matmul_ramp_seconds: float
    are_assumed: bool = False  # not one of them was measured


# [1] Azure/AI-benchmarking-guide, Azure_Results: ND A100 v4, ND H100 v5, ND H200 v5, ND GB200 v6. cuBLASLt on random
#     data, 16,384 cubed: FP16 256.5 of 312 TFLOP/s on an A100; FP8 1,377 of 1,979 on an H100.
#     HBM copy: 1.61 of 2.04, 2.90 of 3.35, 4.01 of 4.8 TB/s. Ramp of products: FP8 on an H100, 1,024 cubed takes 7.8 us
#     and 2,048 cubed 17.0 us, of which 3.2 and 13 us are waves of tiles and 1.4 us the time of any kernel; on a GB200
#     4.4 and 7.7 us.
# [2] github.com/stas00/ml-engineering, compute/accelerator, MAMF: bf16 792 of 989 TFLOP/s on an H100, the best shape.
# [3] NVIDIA/cudnn-frontend, benchmark/attention_training/results/llama3.1, 2026-09-28, cuDNN 9.27, 64 heads of 128, no
#     mask, 32,768 tokens, forward and backward: H200 622 and 543 TFLOP/s, GB200 1,558 and 1,231, A100 (PCIe) 181 and
#     146.
# [4] FlashAttention-3 (arXiv:2407.08608), figures 5 and 6, H100, 8K: plain PyTorch 139 TFLOP/s forward and 181
#     backward, which are used for plain XLA.
# [5] github.com/stas00/ml-engineering, insights/when-to-upgrade-gpus, MAMF on a B200: bf16 1,745 of 2,250 TFLOP/s, FP8
#     3,432 of 4,500. [1] has 2,907 of 5,000 for FP8 on a GB200, with an earlier cuBLAS, but Llama 3 8B on 8 B200 and
#     8 GB200 trains faster than such products allow (benchmarks/published_runs.toml).
# [6] benchmarks/2026-11-26-h100.md: one H100 with 700 W, JAX 0.11.2, cuDNN 9.19, loops of single kernels and traces of
#     steps, random data. Products of 8,192 x 4,096 x 4,096 and more achieve 665 to 725 TFLOP/s; [2] has 792 at best.
#     cuDNN, causal, 16,384 and 131,072 tokens: 570 and 559 TFLOP/s forward, 508 and 531 backward; in steps with
#     32,768 tokens 579 to 655 and 500 to 533.
# [7] the same page, "FlashAttention-3", 32,768 tokens: direct calls in times the rate of cuDNN, forward and backward,
#     1.22 and 1.35 (32 heads of 64), 1.15 and 1.17 (32 of 128), 1.20 and 1.24 (16 of 256).
# Assumed: all rates of the GPUs without NVLink, whose power limits are low; Mosaic between Triton and cuDNN; kernels
# other than cuDNN achieve an H100's fractions on all GPUs, and packed documents in cuDNN on a B200 are a little below
# its rate without.
_ATTENTION_ON_HOPPER = {
    "cudnn": Efficiency(0.60, 0.53),  # [6]; [3] has 0.63 and 0.55 on an H200
    "cudnn_packed": Efficiency(0.58, 0.49),  # [6]
    # [7] relative to cuDNN, in the same call; packed documents as cuDNN's
    "fa3": Efficiency(0.69, 0.62),
    "fa3_packed": Efficiency(0.67, 0.57),
    # [6]; the backward counts the products that it computes twice
    "pallas": Efficiency(0.42, 0.52),
    "mosaic": Efficiency(0.50, 0.40),
    "blockwise": Efficiency(0.14, 0.18),  # [4]
}
_ATTENTION_ON_AMPERE = {**_ATTENTION_ON_HOPPER, "cudnn": Efficiency(0.58, 0.47)}  # [3]
_ATTENTION_ON_BLACKWELL = {
    **_ATTENTION_ON_HOPPER,
    "cudnn": Efficiency(0.62, 0.49),  # [3]
    "cudnn_packed": Efficiency(0.59, 0.46),
}
_ASSUMED = Rates(0.7, 0.7, 0.85, _ATTENTION_ON_AMPERE, 108, 3.1e-6, are_assumed=True)
KERNELS = tuple(_ATTENTION_ON_HOPPER)
# Fractions of the peak that kernels of experts achieve. mosaic: about 280 TFLOP/s in the trace of a step on one H100
# (benchmarks/2026-11-27-h100.md). pallas: assumed; other grouped products in Triton have 469 to 490 TFLOP/s on an H200
# (tile-ai/TileOPs, issue 1567).
EXPERT_KERNELS = dict(mosaic=0.28, pallas=0.45)
_RATES = MappingProxyType(
    {
        "t4": _ASSUMED._replace(num_multiprocessors=40),
        "rtx3090": _ASSUMED._replace(num_multiprocessors=82),
        "l4": _ASSUMED._replace(num_multiprocessors=58),
        "rtx4090": _ASSUMED._replace(num_multiprocessors=128),
        "8.0": Rates(0.82, 0.82, 0.79, _ATTENTION_ON_AMPERE, 108, 3.1e-6),
        # [6] but FP8, which is [1]
        "9.0": Rates(0.72, 0.69, 0.85, _ATTENTION_ON_HOPPER, 132, 3.1e-6),
        "10.0": Rates(0.78, 0.76, 0.86, _ATTENTION_ON_BLACKWELL, 148, 1.1e-6),
    }
)

# rows and columns that one multiprocessor computes
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128))

# Number of keys at which an attention kernel achieves half of its rate, from [3], an H200, 2,048 and 4,096 tokens:
# masked forward 534 and 616, backward 402 and 495 of 619 and 528 TFLOP/s; without mask 660 and 519 at 2,048.
HALF_KEYS_MASKED = 400.0
HALF_KEYS_UNMASKED = 100.0
# Rates relative to head dim 128: [6], cuDNN in traces of steps with 8,192 tokens (64) and 32,768 tokens (256). [4] has
# 0.69 and 0.98 for the forward of its own kernel.
_HEAD_DIM_EFFICIENCY = (
    (64, Efficiency(0.71, 0.73)),
    (128, Efficiency(1.0, 1.0)),
    (256, Efficiency(1.1, 0.69)),
)
_HEAD_DIM_EFFICIENCIES = dict(
    fa3=(  # [7] times the rates of cuDNN
        (64, Efficiency(0.75, 0.84)),
        (128, Efficiency(1.0, 1.0)),
        (256, Efficiency(1.15, 0.73)),
    ),
    # assumed: 256 as the backward of cuDNN; blocks have half as many tokens above 128
    pallas=(*_HEAD_DIM_EFFICIENCY[:2], (256, Efficiency(0.69, 0.69))),
)

# NCCL's own model of latency, src/graph/tuning.cc (2.19), ring algorithm, protocol Simple: 8.4 us per collective, and
# per step 3.4 us over NVLink or 9.6 us over a network. It agrees with the all-reduces of [1]: 16 MiB over 8 H100s takes
# 125 us, of which 61 us are 29 MB at 479 GB/s, and 56 us are 8.4 us and 14 steps.
NCCL_LAUNCH_SECONDS = 8.4e-6
NVLINK_STEP_SECONDS = 3.4e-6
NETWORK_STEP_SECONDS = 9.6e-6
# Multiprocessors that NCCL's kernels occupy while a collective runs: DeepSeek-V3 (arXiv:2412.19437, section 3.2.2)
# reserves 20 of an H800's 132. Transports that use copy engines occupy none.
NCCL_MULTIPROCESSORS = 20


def rates(device: Device) -> Rates:
    """Rates of a GPU; the rates of Hopper if neither it nor its architecture has an entry."""
    return _RATES.get(device.name) or _RATES.get(device.compute_capability, _RATES["9.0"])


def wave_efficiency(rows: int, columns: int, batch: int, num_multiprocessors: int) -> float:
    """The fraction of multiprocessors that a product's tiles occupy, padding included; with the
    best of `_TILES`.

    A product of [rows, k] and [k, columns], `batch` times. NVIDIA, "Matrix Multiplication
    Background User's Guide", sections "Tile quantization" and "Wave quantization". Smaller tiles
    read more from shared memory, which is ignored.
    """

    def occupied(tile: tuple[int, int]) -> float:
        num_tiles = batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
        # those that could be computed in the same time
        num_slots = math.ceil(num_tiles / num_multiprocessors) * num_multiprocessors
        return rows * columns * batch / (num_slots * math.prod(tile))

    return max(map(occupied, _TILES))


def saturation(num_keys: float, half_keys: float) -> float:
    """The fraction of the rate for long sequences that an attention kernel achieves with this
    number of keys.
    """
    return num_keys / (num_keys + half_keys)


def head_dim_efficiency(head_dim: int, *, is_backward: bool, kernel: str) -> float:
    """The rate of an attention kernel relative to head dim 128, linear between the measured head
    dims.
    """
    curve = _HEAD_DIM_EFFICIENCIES.get(kernel.removesuffix("_packed"), _HEAD_DIM_EFFICIENCY)
    rates_of_dims = [x.backward if is_backward else x.forward for _, x in curve]
    return float(np.interp(head_dim, [dim for dim, _ in curve], rates_of_dims))


def num_steps(kind: str, num_ranks: int) -> int:
    """Consecutive steps of NCCL's algorithm, each with the latency of a link.

    All-gather and reduce-scatter pass blocks around a ring; an all-reduce does both. Sends of a
    permute or an all-to-all are concurrent.
    """
    around = max(1, num_ranks - 1)
    if kind == "all-reduce":
        return 2 * around
    return around if kind in ("all-gather", "reduce-scatter", "collective-broadcast") else 1


# Text of estimates. Wherever a quantity is printed, it has the same digits; JSON files have the
# exact point estimates.


# Peak FLOP/s of matrix products relative to bfloat16, by operand data type; the same on all devices
# listed.
_PEAK_OVER_BF16 = {"f32": 0.5, "f8": 2.0}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Efficiencies (fractions of a device's peaks that are reached) and latencies; fields are the
    keys of the file.

    None: the published value of the GPU (`rates`).
    """

    # kernels that are absent: as None
    attention_share: Mapping[str, Efficiency] = field(default_factory=dict)
    attention_half_keys_masked: float = HALF_KEYS_MASKED
    attention_half_keys_unmasked: float = HALF_KEYS_UNMASKED
    matmul_share: float | None = None
    f8_matmul_share: float | None = None
    # products of runtime.expert_kernel=mosaic
    expert_kernel_share: float | None = None
    matmul_ramp_seconds: float | None = None
    matmul_wave_weight: float = 1.0  # 0: products are not slower because of partial waves of tiles
    memory_share: float | None = None
    link_share: float = hardware.LINK_EFFICIENCY
    host_share: float = hardware.HOST_LINK_EFFICIENCY
    nvlink_latency_seconds: float = NCCL_LAUNCH_SECONDS + NVLINK_STEP_SECONDS  # first step
    nvlink_step_seconds: float = NVLINK_STEP_SECONDS  # each further step
    network_latency_seconds: float = NCCL_LAUNCH_SECONDS + NETWORK_STEP_SECONDS
    network_step_seconds: float = NETWORK_STEP_SECONDS
    host_latency_seconds: float = hardware.HOST_LATENCY_SECONDS
    kernel_gap_seconds: float = hardware.KERNEL_GAP_SECONDS
    synchronization_seconds: float = hardware.SYNCHRONIZATION_SECONDS
    nccl_multiprocessors: float = NCCL_MULTIPROCESSORS
    # the interval of all estimated times; None: built from their parts (`step_interval`)
    time_scale: float | None = None
    time_spread: float | None = None
    pair_spread: float = PAIR_SPREAD

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
        share = self.attention_share.get(kernel, rates(device).attention[kernel])
        rate = device.bf16_flops_per_second * (share.backward if is_backward else share.forward)
        half_keys = (
            self.attention_half_keys_masked if is_masked else self.attention_half_keys_unmasked
        )
        curve = head_dim_efficiency(head_dim, is_backward=is_backward, kernel=kernel)
        if num_keys != float("inf"):
            curve *= saturation(num_keys, half_keys)
        return flops / (rate * curve)

    def matmul_seconds(
        self, device: Device, dtype: str, flops: float, products: Sequence[Product] = ()
    ) -> float:
        """Seconds of matrix products; `dtype` is XLA's name: "bf16", "f32", "f8e4m3fn".

        Args:
          products: the shapes of these products. Empty: large ones, which achieve the full rate.
        """
        family = dtype[:2] if dtype.startswith("f8") else dtype
        published = rates(device)
        share, default = (
            (self.f8_matmul_share, published.f8_matmul)
            if family == "f8"
            else (self.matmul_share, published.bf16_matmul)
        )
        share = default if share is None else share
        rate = device.bf16_flops_per_second * _PEAK_OVER_BF16.get(family, 1.0) * share
        if not products:
            return flops / rate
        seconds = (
            sum(product.flops * self._slowdown(device, product, share) for product in products)
            / rate
        )
        ramp = (
            published.matmul_ramp_seconds
            if self.matmul_ramp_seconds is None
            else self.matmul_ramp_seconds
        )
        return seconds + ramp * len(products)

    def memory_seconds(self, device: Device, num_bytes: float) -> float:
        share = rates(device).memory if self.memory_share is None else self.memory_share
        return num_bytes / (device.memory_bandwidth_bytes_per_second * share)

    def nvlink_seconds(self, device: Device, num_bytes: float, num_steps: int) -> float:
        """Seconds until `num_bytes` that each GPU sends within its NVLink domain have arrived.

        Args:
          num_steps: consecutive steps of the algorithm (the function `num_steps`).
        """
        latency = self.nvlink_latency_seconds + (num_steps - 1) * self.nvlink_step_seconds
        return latency + num_bytes / (device.nvlink_bandwidth_bytes_per_second * self.link_share)

    def network_seconds(self, device: Device, num_bytes: float, num_steps: int) -> float:
        """Seconds until `num_bytes` that each GPU's network card sends have arrived. Arguments as
        `nvlink_seconds`.
        """
        latency = self.network_latency_seconds + (num_steps - 1) * self.network_step_seconds
        return latency + num_bytes / (device.network_bandwidth_bytes_per_second * self.link_share)

    def host_seconds(self, device: Device, num_bytes: float) -> float:
        """Seconds of a copy to or from host memory."""
        return self.host_latency_seconds + num_bytes / (
            device.host_bandwidth_bytes_per_second * self.host_share
        )

    def step_interval(
        self, device: Device, seconds: float, other_seconds: float, hidden_seconds: float
    ) -> Interval:
        """The interval of a step's time, as factors on its estimate.

        Args:
          seconds: the estimate.
          other_seconds: the part of it that was never measured on `device`: kernels, and
            communication for which kernels wait.
          hidden_seconds: communication during kernels. If it takes longer than estimated, nothing
            of the additional time is assumed to be hidden.
        """
        scale = self.time_scale or TIME_SCALE
        spread = self.time_spread or TIME_SPREAD
        published = time_interval(scale, spread)
        if device.name not in MEASURED or (self.time_scale, self.time_spread) != (None, None):
            return published
        measured = time_interval(*MEASURED[device.name])
        other = other_seconds / seconds
        low, high = ((1 - other) * x + other * y for x, y in zip(measured, published, strict=True))
        high += (published.high - 1) * hidden_seconds / seconds
        return Interval(low, min(high, published.high))

    def compute_share_during_nccl(self, device: Device) -> float:
        """The fraction of a GPU's multiprocessors that kernels have while an NCCL collective runs."""
        return 1 - self.nccl_multiprocessors / rates(device).num_multiprocessors

    def _slowdown(self, device: Device, product: Product, share: float) -> float:
        """The time of a product relative to that of a large one, which achieves `share` of the
        peak.
        """
        if kernel := product.expert_kernel:
            measured = self.expert_kernel_share if kernel == "mosaic" else None
            return share / (measured or EXPERT_KERNELS[kernel])
        shape = (product.rows, product.columns, product.batch)
        occupied = wave_efficiency(*shape, rates(device).num_multiprocessors)
        return 1 + self.matmul_wave_weight * (1 / occupied - 1)


def from_file(path: str) -> Roofline:
    """The constants in a JSON file; the defaults if `path` is empty. Raises UserError as `read`
    does.
    """
    if not path:
        return Roofline()
    try:
        text = read_limited(local_path(path), MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the constants file {path}: {reason_of(error)}") from error
    return read(text)


def read(text: str | bytes) -> Roofline:
    """Constants from JSON such as {"matmul_share": 0.7, "attention_share": {"cudnn": [0.62, 0.5]}},
    else the defaults.

    Raises:
      UserError: the text is not JSON, a key is unknown, or a value is not a number in its range.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"the constants file is not valid JSON: {error}") from error
    known = [field.name for field in dataclasses.fields(Roofline)]
    if not isinstance(values, dict) or not values.keys() <= set(known):
        raise UserError(
            f"invalid constants file: expected an object with some of the keys {', '.join(known)}"
        )
    attention = values.pop("attention_share", {})
    if not isinstance(attention, dict) or not all(
        name in KERNELS and isinstance(pair, list) and len(pair) == 2
        for name, pair in attention.items()
    ):
        kernels = ", ".join(KERNELS)
        raise UserError(
            f"invalid attention_share in the constants file: expected pairs [forward, backward] for {kernels}"
        )
    shares = (("attention_share", number) for pair in attention.values() for number in pair)
    for name, number in (*values.items(), *shares):
        _check_number(name, number)
    efficiencies = {name: Efficiency(*pair) for name, pair in attention.items()}
    return Roofline(**values, attention_share=efficiencies)


def _check_number(name: str, value: object) -> None:
    """Raises UserError if the value of a constant is not a number in its range."""
    if name.endswith("_share"):
        expected = "a fraction of the peak, greater than 0 and at most 1"
        is_valid = lambda x: 0 < x <= 1
    elif name in ("time_scale", "time_spread", "pair_spread"):
        expected = "a positive number"
        is_valid = lambda x: 0 < x < math.inf
    elif name == "nccl_multiprocessors":
        expected = "a number from 0 to 100"
        is_valid = lambda x: 0 <= x <= 100
    else:
        expected = "a number of at least 0"
        is_valid = lambda x: 0 <= x < math.inf
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_valid(value):
        raise UserError(f"invalid {name}={value} in the constants file: expected {expected}")
