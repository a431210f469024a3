"""Scale and interval of estimated times from published runs, with sources held back. Pure
statistics, no compilation.

The rules are in published_folds.toml, which was written before the first fit.
"""

import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_FOLDS = Path(__file__).parent / "published_folds.toml"


class Residual(NamedTuple):
    """One published run."""

    source: str
    log_ratio: float  # logarithm of published over estimated time
    # runs that a user would compare: the same model on the same GPUs; "" compares with none
    group: str = ""
    seq_len: int = 0


class Fit(NamedTuple):
    """The published time is expected to be `scale` x the estimate, within a factor of
    exp(+-spread).
    """

    log_scale: float
    spread: float


class Fold(NamedTuple):
    """Runs of one source, predicted from all other sources."""

    source: str
    fit: Fit
    errors: tuple[float, ...]  # log(published time / scaled estimate) of each run

    @property
    def num_covered(self) -> int:
        return sum(abs(error) <= self.fit.spread for error in self.errors)


def level() -> float:
    """The share of held-back runs that the interval is made to cover."""
    return tomllib.loads(_FOLDS.read_text())["level"]


def folds(residuals: Sequence[Residual], key: str = "folds") -> tuple[Fold, ...]:
    """Holds back each source in turn.

    Args:
      key: of the sources in published_folds.toml; "measured": models on one GPU.
    Raises:
      ValueError: the sources are not those of published_folds.toml.
    """
    sources = tomllib.loads(_FOLDS.read_text())[key]
    if set(sources) != {residual.source for residual in residuals}:
        raise ValueError(f"the runs have other sources than {_FOLDS.name}")
    result = []
    for source in sources:
        fitted = fit([residual for residual in residuals if residual.source != source])
        held_back = [
            residual.log_ratio - fitted.log_scale
            for residual in residuals
            if residual.source == source
        ]
        result.append(Fold(source, fitted, tuple(held_back)))
    return tuple(result)


def fit(residuals: Sequence[Residual]) -> Fit:
    """Scale and spread. The spread is measured on sources that were held back in turn from the fit
    of the scale.

    It is the larger of the quantiles with equal weight for each source and with equal weight for
    each run.
    """
    errors = []
    for source in _sources(residuals):
        others = _median([residual for residual in residuals if residual.source != source])
        errors += [(source, abs(x.log_ratio - others)) for x in residuals if x.source == source]
    by_source, by_run = (
        conformal_quantile(errors, is_by_run=is_by_run) for is_by_run in (False, True)
    )
    return Fit(_median(residuals), max(by_source, by_run))


def paired_errors(
    residuals: Sequence[Residual], max_length_ratio: float
) -> list[tuple[str, float]]:
    """(source, absolute error) of the log ratio between two runs of a group, with lengths up to
    this factor apart.
    """
    errors = []
    for one, other in itertools.combinations(residuals, 2):
        is_same = one.group and (one.source, one.group) == (other.source, other.group)
        if is_same and max(one.seq_len, other.seq_len) <= max_length_ratio * min(
            one.seq_len, other.seq_len
        ):
            errors.append((one.source, abs(one.log_ratio - other.log_ratio)))
    return errors


def coverage(results: Iterable[Fold]) -> tuple[int, int]:
    """Held-back runs within their interval, and all of them."""
    results = tuple(results)
    return sum(fold.num_covered for fold in results), sum(len(fold.errors) for fold in results)


def coverage_by_source(results: Sequence[Fold]) -> float:
    """Mean over the sources of the share of their runs within the interval."""
    return sum(fold.num_covered / len(fold.errors) for fold in results) / len(results)


def conformal_quantile(errors: Sequence[tuple[str, float]], *, is_by_run: bool = False) -> float:
    """The smallest error that is not exceeded by ceil((n + 1) x level) / n of the weight of n
    sources.

    Args:
      errors: (source, absolute error).
      is_by_run: each error has weight 1. Otherwise the errors of a source share its weight of 1.
    """
    num_sources = len(_sources(errors))
    share = min(1.0, math.ceil((num_sources + 1) * level()) / num_sources)
    weighted = sorted((value, 1.0) for _, value in errors) if is_by_run else _weighted(errors)
    return _weighted_quantile(weighted, share)


def _median(residuals: Sequence[Residual]) -> float:
    return _weighted_quantile(_weighted([residual[:2] for residual in residuals]), 0.5)


def _weighted(values: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    """(value, weight) in ascending order; each source has weight 1."""
    counts: Mapping[str, int] = {
        source: sum(x == source for x, _ in values) for source, _ in values
    }
    return sorted((value, 1 / counts[source]) for source, value in values)


def _weighted_quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    total = sum(weight for _, weight in values)
    reached = 0.0
    for value, weight in values:
        reached += weight
        if reached >= share * total - 1e-9:
            return value
    return values[-1][0]


def _sources(values: Sequence[tuple]) -> list[str]:
    return list(dict.fromkeys(value[0] for value in values))
