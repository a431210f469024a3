"""Fixtures of several test files of the trainer."""

import time

import pytest

from tests.train import runs


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        seconds = 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.seconds)
    return Clock


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of the module compile each program once."""
    with pytest.MonkeyPatch.context() as patch:
        runs.share_programs(patch)
        yield


@pytest.fixture(scope="module")
def without_plots():
    """Runs of the module write no plots."""
    with pytest.MonkeyPatch.context() as patch:
        runs.without_plots(patch)
        yield
