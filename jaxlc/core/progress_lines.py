"""Lines about the progress of long work, where there is no live display. Imports no jax."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxlc.core.counts import duration_text

SECONDS_BETWEEN_LINES = 10.0
Update = Callable[[int, int], None]  # called with the amount done and in total


def no_progress(done: int, total: int) -> None:
    """An `Update` that shows nothing."""


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_lines(
    what: str, *, is_shown: bool = True, log: Callable[[str], None] = print_to_stderr
) -> Iterator[Update]:
    """Prints "WHAT: 38%, 1:07 left" every 10 seconds while it is entered; nothing for work that is shorter.

    A thread prints, so that a single long call has lines too: "WHAT: 0:20 so far".

    Args:
      is_shown: False: no lines, such as in all processes but one.
      log: called in the thread with each line.
    """
    if not is_shown:
        yield no_progress
        return
    start_seconds, is_over = time.monotonic(), threading.Event()
    progress = [0, 0]

    def update(done: int, total: int) -> None:
        nonlocal start_seconds
        if done < progress[0]:  # the next file, whose time left does not depend on the first one
            start_seconds = time.monotonic()
        progress[:] = done, total

    def report() -> None:
        while not is_over.wait(SECONDS_BETWEEN_LINES):
            done, total = progress
            seconds = time.monotonic() - start_seconds
            left = f"{done / total:.0%}, {duration_text(seconds * (total - done) / done)} left" if done else ""
            log(f"{what}: {left or f'{duration_text(seconds)} so far'}")

    thread = threading.Thread(target=report, name="jaxlc-progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        is_over.set()
        thread.join()
