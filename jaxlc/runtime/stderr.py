"""Removes lines that C++ libraries write to stderr, and imports JAX without the lines of its CUDA
plugin.

A package whose `__init__` imports JAX, and a command, import this module first.
"""

import contextlib
import functools
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxlc.interrupts import open_closed_streams, start_thread

_DRIVER_NOTES = ("Could not find cuda drivers", "before absl::InitializeLog() is called")


@contextlib.contextmanager
def without_lines(notes: Sequence[str]) -> Iterator[None]:
    """Removes lines that contain one of `notes` from stderr. A thread passes on all others as they
    are written.

    Python's own messages take no detour, so the messages of a process that ends in the meantime are
    printed. Lines of C++ code that ends the process at once, without giving the thread time, are
    lost: enter this only around calls that do not.
    """
    sys.stderr.flush()
    users = sys.stderr
    stderr_copy = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    with contextlib.ExitStack() as stack:
        if _descriptor_of(users) == 2:  # not in a notebook, which has another stream
            sys.stderr = os.fdopen(
                os.dup(stderr_copy), "w", buffering=1, encoding=users.encoding, errors=users.errors
            )
            stack.callback(sys.stderr.close)
        relay = start_thread(functools.partial(_relay, reader, stderr_copy, notes), "stderr")
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


def without_driver_notes() -> contextlib.AbstractContextManager[None]:
    """Removes the CUDA plugin's notes about a missing driver from stderr, where it is only used to
    compile.

    Its C++ code prints them several times at any log level.
    """
    return contextlib.nullcontext() if has_nvidia_driver() else without_lines(_DRIVER_NOTES)


def has_nvidia_driver() -> bool:
    paths = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia")  # WSL has only nvidia-smi
    return any(Path(path).exists() for path in paths) or shutil.which("nvidia-smi") is not None


open_closed_streams()
with without_driver_notes():
    import jax  # noqa: F401
