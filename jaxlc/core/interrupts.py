"""Ctrl-C in a command of jaxlc: one sentence on stderr, and exit status 130.

Python raises KeyboardInterrupt wherever the program is, and some code turns it into another error or ignores it.
Imports no jax.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from jaxlc.core import streams

EXIT_STATUS = 128 + signal.SIGINT
_END_SECONDS = 5.0  # after Ctrl-C, for a command to end by itself
# Code that turns KeyboardInterrupt into another error: imports of extension modules, and JAX's start of its plugins.
_CONVERTING_FILES = ("<frozen importlib._bootstrap>", "/jax/_src/xla_bridge.py")

_sentence = ""  # set while a command runs
_is_requested = False
_stderr = 2  # a copy of the file descriptor, which `jaxlc.runtime.stderr` replaces for a time


def install_for_command() -> None:
    """Prepares the streams and handles Ctrl-C of a process that runs `jaxlc VERB`, or `python -m jaxlc.VERB`.

    A process in which SIGINT is ignored, such as a background job of a shell, still ignores it.
    """
    global _stderr
    if os.path.basename(sys.argv[0]) not in ("-m", "jaxlc"):  # "-m" while the packages of a module are imported
        return
    streams.prepare()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _stderr = os.dup(2)
        signal.signal(signal.SIGINT, _handle)
        sys.unraisablehook = _ignored_error


@contextlib.contextmanager
def handled(sentence: str) -> Iterator[None]:
    """While it is entered, every error that follows Ctrl-C leaves it as KeyboardInterrupt.

    Args:
      sentence: what Ctrl-C leaves behind; the message of a KeyboardInterrupt that has none.
    """
    global _sentence
    _sentence = sentence
    try:
        yield
    except BaseException as error:
        if _is_requested or isinstance(error, KeyboardInterrupt):
            message = str(error) if isinstance(error, KeyboardInterrupt) else ""
            raise KeyboardInterrupt(message or sentence) from error
        raise
    finally:
        _sentence = ""


def end(interrupt: KeyboardInterrupt) -> int:
    """Prints the message of `interrupt`, below the ^C of a terminal, and returns the exit status.

    After a signal it ends the process: threads and exit handlers of JAX may be in any state.
    """
    print("\n" * sys.stderr.isatty() + str(interrupt), file=sys.stderr, flush=True)
    if _is_requested:
        end_process(EXIT_STATUS)
    return EXIT_STATUS


def end_process(status: int) -> NoReturn:
    """Ends the process without exit handlers, while other threads may be inside a collective."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # such as a pipe whose reader has ended
            stream.flush()
    os._exit(status)


def _handle(number: int, frame: FrameType | None) -> NoReturn:
    global _is_requested
    if _is_requested or not _sentence or _is_converted(frame):
        _end_now()
    _is_requested = True
    timer = threading.Timer(_END_SECONDS, _end_now)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def _is_converted(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.endswith(_CONVERTING_FILES):
        frame = frame.f_back
    return frame is not None


def _ignored_error(unraisable: Any) -> None:
    """Called for an error that Python ignores, such as one in a finalizer."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end_now()
    sys.__unraisablehook__(unraisable)


def _end_now() -> NoReturn:
    with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
        os.write(_stderr, f"{_sentence or 'interrupted'}\n".encode())
    os._exit(EXIT_STATUS)
