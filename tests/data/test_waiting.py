import time

import pytest

from jaxlc.data.waiting import WaitingTime


def slow_items(seconds: float):
    for i in range(4):
        time.sleep(seconds)
        yield i


def test_waiting_time_is_the_share_of_the_loop():
    waiting = WaitingTime()
    assert waiting.share is None and list(waiting.timed([])) == []
    for _ in waiting.timed(slow_items(0.02)):
        time.sleep(0.06)
    assert waiting.share == pytest.approx(0.25, abs=0.1)


def test_waiting_time_does_not_count_the_first_item():
    waiting = WaitingTime()
    for i in waiting.timed(slow_items(0.05)):
        if i == 0:
            break
    assert waiting.share is None
