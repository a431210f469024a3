"""What a device did during a span of time, without counting anything twice."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxlc.profile.event_classes import CLASSES, COMMUNICATION

GAP = "gaps"  # nothing is in flight


class Activity(NamedTuple):
    kind: str  # one of CLASSES
    label: str  # the instruction of a collective; else ""
    start_seconds: float
    end_seconds: float


class TimeUse(NamedTuple):
    """Seconds of one device."""

    by_class: Counter[str]  # CLASSES and GAP; they add up to the span
    exposed_by_collective: Counter[str]  # by label: time in which it is in flight and no kernel runs
    busy_by_class: Counter[str]  # time in which at least one event of the class is in flight, hidden or not


def measure(intervals: Sequence[Activity], start_seconds: float, end_seconds: float) -> TimeUse:
    """The use of the span from `start_seconds` to `end_seconds`; intervals are cut to it.

    Where several intervals overlap, the time counts for the one whose class is first in CLASSES. So communication and
    host copies get the exposed time, during which no kernel runs.
    """
    changes = []
    for number, interval in enumerate(intervals):
        start, end = max(interval.start_seconds, start_seconds), min(interval.end_seconds, end_seconds)
        if start < end:
            changes += [(start, number, True), (end, number, False)]
    changes.sort()
    use = TimeUse(Counter(), Counter(), Counter())
    active: dict[str, set[int]] = {kind: set() for kind in CLASSES}
    now = start_seconds
    for time, number, is_start in changes:
        _count(use, active, intervals, time - now)
        now = time
        (set.add if is_start else set.remove)(active[intervals[number].kind], number)
    _count(use, active, intervals, end_seconds - now)
    return use


def _count(use: TimeUse, active: dict[str, set[int]], intervals: Sequence[Activity], seconds: float) -> None:
    if not seconds:
        return
    kinds = [kind for kind in CLASSES if active[kind]]
    use.busy_by_class.update(dict.fromkeys(kinds, seconds))
    first = kinds[0] if kinds else GAP
    use.by_class[first] += seconds
    if first == COMMUNICATION:
        for label in {intervals[number].label for number in active[COMMUNICATION]}:
            use.exposed_by_collective[label] += seconds
