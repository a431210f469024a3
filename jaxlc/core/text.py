"""Text for users: counts and sizes, suggestions for misspelled names, tables, progress lines,
standard output, and HTML for `_repr_html_`. Imports no jax.

Standard output and error of a command may have a full disk, or no reader; for their encoding see
`jaxlc.interrupts`.

HTML has inline styles only, since notebook front ends remove <style> elements and block external
resources. Text takes the color of the page and backgrounds are transparent, so that the result is
readable in light and dark themes.
"""

import contextlib
import difflib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any, TextIO


def count_text(number: int, noun: str, plural_ending: str = "s") -> str:
    """A count with its noun: "1 GPU", "1,024 GPUs", or "2 processes" with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else plural_ending}"


def first_of(names: Sequence[object], limit: int = 8) -> str:
    """The first names, "a, b and 2 more"."""
    num_more = len(names) - limit
    return ", ".join(map(str, names[:limit])) + (f" and {num_more} more" if num_more > 0 else "")


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two decimals, without the unit."""
    return f"{num_bytes / 2**30:,.2f}"


def duration_text(seconds: float) -> str:
    """Minutes and seconds, "1:07", from an hour on with hours: "2:01:07"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in `known` that is most similar to `name`; None if no similarity is at least
    `cutoff` (0 to 1).
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest name, or the list of the known names if none is near."""
    known = list(known)
    nearest = nearest_name(name, known)
    if nearest is not None:
        return f"did you mean {nearest}?"
    return f"expected one of {', '.join(sorted(known))}"


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ " (did you mean NAME?)" with the nearest name, or "" if none is near: for the end of a
    message.
    """
    nearest = nearest_name(name, known, cutoff)
    return "" if nearest is None else f" (did you mean {nearest}?)"


def aligned(rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """One line per row, with columns of equal width.

    Args:
      align: one letter per column, l or r; "": the first column to the left, the others to the right.
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table)]
    align = align or "l" + "r" * (len(widths) - 1)
    pad = {"l": str.ljust, "r": str.rjust}
    padded = (
        [pad[letter](cell, width) for cell, letter, width in zip(row, align, widths)]
        for row in table
    )
    return ["  ".join(row).rstrip() for row in padded]


SECONDS_BETWEEN_LINES = 10.0
Log = Callable[[str], None]  # prints one line
Update = Callable[[int, int], None]  # called with the amount done and in total


def no_progress(done: int, total: int) -> None:
    """An `Update` that shows nothing."""


def print_to_stderr(line: str) -> None:
    """Prints a line, in a terminal instead of a progress bar, which is then drawn below it."""
    print(f"{_CLEAR * _is_terminal()}{line}", file=sys.stderr, flush=True)


_CLEAR = "\r\x1b[K"  # the line of a terminal
_SECONDS_BETWEEN_BARS = 0.5
_bar = threading.Lock()  # a terminal has one progress bar at a time


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def progress_lines(
    what: str, *, is_shown: bool = True, log: Log = print_to_stderr
) -> Iterator[Update]:
    """Prints "WHAT: 38%, 1:07 left" every 10 seconds while it is entered; nothing for work that is
    shorter. In a terminal it is a bar, of the outermost of such contexts.

    A thread prints, so that a single long call has lines too: "WHAT: 0:20 so far". If the total is
    0, it is unknown: "WHAT: 1,200 done, 0:20 so far".

    Args:
      is_shown: False: no lines, such as in all processes but one.
      log: called in the thread with each line; by default they go to stderr.
    """
    is_bar = log is print_to_stderr and _is_terminal()
    if not is_shown or (is_bar and not _bar.acquire(blocking=False)):
        yield no_progress
        return
    start_seconds = time.monotonic()
    is_over = threading.Event()
    progress = [0, 0]

    def update(done: int, total: int) -> None:
        nonlocal start_seconds
        if done < progress[0]:  # the next file, whose time left does not depend on the first one
            start_seconds = time.monotonic()
        progress[:] = done, total

    def report() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_BARS if is_bar else SECONDS_BETWEEN_LINES):
            done, total = progress
            seconds = time.monotonic() - start_seconds
            text = f"{f'{done:,} done, ' if done else ''}{duration_text(seconds)} so far"
            if done and total:
                left = duration_text(seconds * (total - done) / done)
                text = f"{done / total:.0%}, {left} left"
            if is_bar:
                bar = f"[{'#' * (20 * done // max(total, 1)):<20.20}] {what}: {text}"
                width = shutil.get_terminal_size().columns - 1
                print(f"{_CLEAR}{bar:.{width}}", end="", file=sys.stderr, flush=True)
            else:
                log(f"{what}: {text}")

    thread = threading.Thread(target=report, name="jaxlc-progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        is_over.set()
        thread.join()
        if is_bar:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            _bar.release()


def guarded(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status: 141 if the reader of its output ended, as in `jaxlc --help | head`.

    Output that cannot be written otherwise, such as to a full disk, is one sentence on stderr and
    status 1.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            if not _accepts(stream, ""):
                _discard(stream)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if _accepts(sys.stdout, "\n"):  # the text of the error is not in the buffer any more
            raise
        _discard(sys.stdout)
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


class _Outlasting:
    """A stream that discards its text after an error, such as a closed terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except OSError:
            _discard(self._stream)


def outlast() -> None:
    """Lets the process go on when nobody reads its output any more, as a run does, whose results
    are files.
    """
    sys.stdout, sys.stderr = map(_Outlasting, (sys.stdout, sys.stderr))


def _discard(stream: TextIO) -> None:
    """Discards what is printed from now on, and what Python prints at exit because it could not be
    written before.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _accepts(stream: TextIO, text: str) -> bool:
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        return False
    return True


def table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    align: str = "",
) -> str:
    """The table that a terminal shows, in a fixed-width font.

    Args:
      header: one heading per column; empty: no heading row.
      rows: cells; None is an empty one, and other objects are converted with `str`.
      align: one letter per column, l or r; "": all left.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in (header, *rows) if row]
    lines = aligned(cells, align or "l" * len(cells[0]))
    return preformatted("\n".join([caption, *lines] if caption else lines))


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    """A collapsible block. `body` is HTML; `summary` is text and is escaped."""
    opened = " open" if is_open else ""
    return f"<details{opened}><summary style='cursor:pointer'>{escape(summary)}</summary>\n{body}\n</details>"


def paragraph(text: str, *, before: str = "") -> str:
    """Escaped text, after the HTML in `before`; newlines become line breaks."""
    return f"<div style='color:currentColor;margin:4px 0'>{before}{escape(text).replace(chr(10), '<br>')}</div>"


def preformatted(text: str) -> str:
    """Escaped text in a fixed-width font, with its spaces and newlines."""
    style = "background:transparent;color:currentColor;font-size:12px;line-height:1.35;margin:4px 0;white-space:pre"
    return f"<pre style='{style};overflow-x:auto'>{escape(text)}</pre>"
