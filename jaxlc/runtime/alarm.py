"""Works below Python: a timer of the operating system that ends this process, and lines of C++ libraries on stderr.

A thread that holds the interpreter lock stops all Python code. The timer's signal SIGALRM has its default action, which
needs no Python code, so the exit status is 142.
"""

import contextlib
import faulthandler
import io
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TextIO


@contextlib.contextmanager
def without_lines(notes: Sequence[str]) -> Iterator[None]:
    """Removes lines that contain one of `notes` from stderr. A thread passes on all others as they are written.

    Python's own messages take no detour, so those of a process that ends in the meantime are printed. Lines of C++ code
    that ends the process at once, without giving the thread time, are lost: enter this only around calls that do not.
    """
    sys.stderr.flush()
    users, stderr_copy = sys.stderr, os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    with contextlib.ExitStack() as stack:
        if _descriptor_of(users) == 2:  # not in a notebook, which has another stream
            sys.stderr = os.fdopen(os.dup(stderr_copy), "w", buffering=1, encoding=users.encoding, errors=users.errors)
            stack.callback(sys.stderr.close)
        relay = threading.Thread(target=_relay, args=(reader, stderr_copy, notes), daemon=True)
        relay.start()
        try:
            yield
        finally:
            sys.stderr = users
            os.dup2(stderr_copy, 2)  # closes the writing end of the pipe
            relay.join()


def _relay(reader: int, target: int, notes: Sequence[str]) -> None:
    """Copies the lines that contain none of `notes`, until the pipe is closed; then closes both."""
    with os.fdopen(reader, "rb") as lines, os.fdopen(target, "wb", buffering=0) as output:
        for line in lines:
            if not any(note.encode() in line for note in notes):
                with contextlib.suppress(OSError):  # nobody reads stderr
                    output.write(line)


def _descriptor_of(stream: io.TextIOBase) -> int | None:
    """The file descriptor of a stream; None if it has none, as in a notebook."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


_LEAST_SECONDS = 1.0
_lock = threading.Lock()  # of the timer, which the watched thread and the one that ends the process set
_is_ending = False


def is_available() -> bool:
    """False: the program handles SIGALRM itself."""
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def write_stacks_to(file: TextIO) -> None:
    """Lets the signal write the Python stacks of all threads to `file`, without the interpreter lock, before it ends
    the process."""
    faulthandler.register(signal.SIGALRM, file=file, all_threads=True, chain=True)


def set_limit(seconds: float) -> None:
    """Ends this process after `seconds`; infinite: never. No effect after `set_end_limit`."""
    with _lock:
        if not _is_ending:
            _set_timer(seconds)


def set_end_limit(seconds: float) -> None:
    """Ends this process after `seconds`, whatever its phases set. Called once, when its end has begun."""
    global _is_ending
    with _lock:
        _is_ending = True
        if is_available():
            _set_timer(seconds)


def remove() -> None:
    """Removes what `set_limit` and `write_stacks_to` have set."""
    set_limit(math.inf)
    faulthandler.unregister(signal.SIGALRM)


def _set_timer(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(seconds) else max(_LEAST_SECONDS, seconds))
