"""Fixtures of several test files of the trainer."""

import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        seconds = 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.seconds)
    return Clock
