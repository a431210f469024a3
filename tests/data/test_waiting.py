import time

import pytest

from jaxlc.data.sequences.loader import WaitingTime


class Clock:
    """A clock that only the test advances."""

    seconds = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    return clock


def slow_items(clock: Clock, seconds: float):
    for i in range(4):
        clock.seconds += seconds
        yield i


def test_waiting_time_is_the_share_of_the_loop(clock):
    waiting = WaitingTime()
    assert waiting.share is None and list(waiting.timed([])) == []
    for _ in waiting.timed(slow_items(clock, 0.02)):
        clock.seconds += 0.06
    assert waiting.share == pytest.approx(0.25)


def test_waiting_time_does_not_count_the_first_item(clock):
    waiting = WaitingTime()
    for i in waiting.timed(slow_items(clock, 0.05)):
        if i == 0:
            break
    assert waiting.share is None
