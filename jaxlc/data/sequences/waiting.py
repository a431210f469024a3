"""How long training waits for data."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class WaitingTime:
    """Measures the share of the time of a loop in which it waits for the next item of its iterable.

    The first item is not counted: it is built while the program starts. With asynchronous dispatch the devices still
    compute while the loop waits, so the share is an upper bound of the time in which they are idle for lack of data.
    """

    def __init__(self) -> None:
        self._waiting_seconds = self._total_seconds = 0.0

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items and measures."""
        iterator = iter(items)
        try:
            item = next(iterator)
        except StopIteration:
            return
        while True:
            start = time.perf_counter()
            yield item
            asked = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._waiting_seconds += time.perf_counter() - asked
            self._total_seconds += time.perf_counter() - start

    @property
    def share(self) -> float | None:
        """Waiting time divided by the time of the loop, 0 to 1; None before the second item."""
        return self._waiting_seconds / self._total_seconds if self._total_seconds else None
