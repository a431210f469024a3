"""The 80% interval of estimated step times, from published runs of other trainers.

`python -m benchmarks.calibration` computes the three constants (docs/calibration.md); a test
compares them with its stored results. They are for the published rates of `roofline`. A file of
measured constants can replace them.
"""

import math
from typing import NamedTuple

LEVEL = 0.8
# Published over estimated time: weighted median of all sources.
TIME_SCALE = 1.077
# The published time is within a factor of exp(+-spread) of the scaled estimate.
TIME_SPREAD = 0.563
# The same for the ratio of two steps of one model on the same GPUs, of similar length: errors that both have cancel.
# Only 7 published pairs, of 2 sources.
PAIR_SPREAD = 0.331


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


PUBLISHED = time_interval()  # for the published rates of `roofline`


def is_distinguishable(
    one_seconds: float, other_seconds: float, spread: float = PAIR_SPREAD
) -> bool:
    """Whether the estimates of two steps of one model on the same GPUs differ by more than the
    interval of a ratio.
    """
    return abs(math.log(one_seconds / other_seconds)) > spread


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
