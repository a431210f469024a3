"""The 80% interval of estimated step times, from published runs of other trainers.

`python -m benchmarks.calibration` computes the three constants (docs/calibration.md); a test compares them with its
stored results. They are for the published rates of `efficiency`. A file of measured constants can replace them.
"""

import math
from typing import NamedTuple

LEVEL = 0.8
# Published over estimated time: weighted median of all sources.
TIME_SCALE = 1.106
# The published time is within a factor of exp(+-spread) of the scaled estimate.
TIME_SPREAD = 0.585
# The same for the ratio of two steps of one model on the same GPUs, of similar length: errors that both have cancel.
# Only 4 published pairs, of 2 sources.
PAIR_SPREAD = 0.324


class Interval(NamedTuple):
    """Factors on an estimated time: the time is expected between `low` and `high` times the estimate."""

    low: float
    high: float


def time_interval(scale: float = TIME_SCALE, spread: float = TIME_SPREAD) -> Interval:
    """The interval of a time relative to its estimate."""
    return Interval(scale * math.exp(-spread), scale * math.exp(spread))


def is_distinguishable(one_seconds: float, other_seconds: float, spread: float = PAIR_SPREAD) -> bool:
    """Whether the estimates of two steps of one model on the same GPUs differ by more than the interval of a ratio."""
    return abs(math.log(one_seconds / other_seconds)) > spread
