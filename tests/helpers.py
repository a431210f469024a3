"""Helpers that tests of several packages use."""

import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure


def wait_until(
    condition: Callable[[], object], *, timeout_seconds: float = 30, process: subprocess.Popen | None = None
) -> None:
    """Returns when `condition()` is true; fails after the timeout, or when `process` ends before."""
    deadline_seconds = time.monotonic() + timeout_seconds
    while not condition():
        if process is not None:
            assert process.poll() is None, f"the process ended early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline_seconds, f"not true after {timeout_seconds} s"
        time.sleep(0.005)


def png_size(path: Path) -> tuple[int, int]:
    """(width, height) in pixels, from the header; fails if the file is not a PNG."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def record_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list to which every matplotlib figure is added when it is saved, so that a test can read its axes."""
    saved = []
    save = Figure.savefig

    def save_and_record(self, *args, **kwargs):
        saved.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save_and_record)
    return saved
