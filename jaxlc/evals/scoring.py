"""Scores of predictions, by the rules of RULER (Hsieh et al. 2024, arXiv:2404.06654, and its published scorer)."""

import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_CONTROL = re.compile(r"[\x00-\x1f]")


class Score(NamedTuple):
    """The mean over examples, in percent; fields as in `ScoreRow`."""

    score: float
    standard_error: float
    num_examples: int


def cleaned(prediction: str) -> str:
    """The prediction without surrounding space; each control character is replaced by a line break."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def match_all(prediction: str, references: Sequence[str]) -> float:
    """The fraction of references that the prediction contains, in any case; RULER's `string_match_all`."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def match_any(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction contains a reference, in any case, else 0; RULER's `string_match_part`."""
    return float(any(reference.lower() in prediction.lower() for reference in references))


def score_of(values: Sequence[float]) -> Score:
    """The mean of values in 0 .. 1."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Score(100 * statistics.fmean(values), 100 * deviation / math.sqrt(len(values)), len(values))
