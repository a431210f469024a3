"""Helpers that tests of several packages use."""

import contextlib
import pwd
import random
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# limit of a process or a wait; only failures take that long, also on a slow machine that is busy
TIMEOUT_SECONDS = 600
NOTEBOOK_TIMEOUTS = dict(
    timeout=TIMEOUT_SECONDS, startup_timeout=TIMEOUT_SECONDS, iopub_timeout=TIMEOUT_SECONDS
)


def wait_until(condition: Callable[[], object], *, process: subprocess.Popen | None = None) -> None:
    """Returns when `condition()` is true; fails after the timeout, or when `process` ends before."""
    deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
    while True:
        has_ended = process is not None and process.poll() is not None  # read before the condition
        if condition():
            return
        if process is not None:
            assert not has_ended, f"the process ended early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline_seconds, f"not true after {TIMEOUT_SECONDS} s"
        time.sleep(0.005)


def free_port() -> int:
    """A free TCP port below the range from which Linux chooses ports itself.

    So no outgoing connection, and no program that binds port 0, takes it before the test uses it.
    It is random, so that tests that run at the same time have different ones.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor the list of users has a home directory."""

    def unknown(number: int):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def png_size(path: Path) -> tuple[int, int]:
    """(width, height) in pixels, from the header; fails if the file is not a PNG."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def record_figures(monkeypatch: pytest.MonkeyPatch) -> "list[Figure]":
    """A list to which every matplotlib figure is added when it is saved, so that a test can read
    its axes.
    """
    from matplotlib.figure import Figure

    saved = []
    save = Figure.savefig

    def save_and_record(self, *args, **kwargs):
        saved.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save_and_record)
    return saved
