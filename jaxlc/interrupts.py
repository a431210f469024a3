"""Ctrl-C, SIGTERM and SIGHUP in a command of jaxlc: one sentence on stderr, and exit status 128 +
the signal's number.

Python raises KeyboardInterrupt wherever the program is, and some code turns it into another error
or ignores it. While the main thread is in a call that does not return, such as a compilation of
minutes, Python runs no handler: then a thread ends the process.

The standard streams of a command, which may have any encoding or be closed, are made to accept all
texts.

`call_within` bounds calls that may hang, such as calls to a file system or to another process.
Imports only the standard library, so that Ctrl-C is handled from the first imports on.
"""

import codecs
import contextlib
import functools
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def call_within(seconds: float, function: Callable[[], T]) -> T | None:
    """The result of `function`, called in a daemon thread; None if it raises or takes longer than
    `seconds`.

    A call that takes longer goes on in its thread, which does not keep the process from ending.
    """
    with contextlib.suppress(Exception):
        return in_thread(function).result(seconds)
    return None


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Calls a function in a daemon thread, without which the process can end."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:  # also SystemExit, which would end the thread silently
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(error))

    start_thread(run, "call")
    return future


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Starts a daemon thread that calls `run`. Its name is jaxlc-NAME."""
    thread = threading.Thread(target=run, name=f"jaxlc-{name}", daemon=True)
    thread.start()
    return thread


# others are escaped, as in "\u2581"
_ASCII = {"⟦": "[[", "⟧": "]]", "±": "+/-", "→": "->", "…": "..."}


def open_closed_streams() -> None:
    """Opens the standard streams that are closed: they have no text, and discard what is written.

    Python has None for them. The next file that is opened would get their number, and the messages of C++ code.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def prepare_streams() -> None:
    """Makes all streams accept all texts. A closed stream discards them."""
    open_closed_streams()
    codecs.register_error("jaxlc.ascii", _encodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="jaxlc.ascii")


def _encodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    forms = (
        _ASCII.get(each) or each.encode("ascii", "backslashreplace").decode() for each in characters
    )
    return "".join(forms), error.end


_END_SECONDS = 5.0  # after a signal, for a command to end by itself
_REPEAT_SECONDS = 1.0  # `timeout`, or the end of a terminal, may send the same signal twice
# Code that turns KeyboardInterrupt into another error: imports of extension modules, and JAX's
# start of its plugins.
_CONVERTING_FILES = ("<frozen importlib._bootstrap>", "/jax/_src/xla_bridge.py")

_sentence = ""  # set while a command runs
_requested = 0  # the number of the signal that `_handle` got
_number = signal.SIGINT  # of the last signal
_undo: list[Callable[[], None]] = []
_stderr = 2  # a copy of the file descriptor, which `jaxlc.runtime.peers` replaces for a time


def install_for_command() -> None:
    """Prepares the streams and handles Ctrl-C of a process that runs `jaxlc VERB`, or `python -m
    jaxlc.VERB`.

    A process in which SIGINT is ignored, such as a background job of a shell, still ignores it.
    """
    global _stderr
    # "-m" while the packages of a module are imported
    if os.path.basename(sys.argv[0]) not in ("-m", "jaxlc"):
        return
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _stderr = os.dup(2)
        signal.signal(signal.SIGINT, _handle)
        sys.unraisablehook = _ignored_error


@contextlib.contextmanager
def handled(sentence: str) -> Iterator[None]:
    """While it is entered, SIGTERM and SIGHUP raise KeyboardInterrupt as well, unless they are
    ignored, as by nohup; and every error that follows a signal leaves it as KeyboardInterrupt.

    Args:
      sentence: what the signal leaves behind; the message of a KeyboardInterrupt that has none.
    """
    global _sentence, _number
    _sentence, _number = sentence, signal.SIGINT
    try:
        with _handlers():
            yield
    except BaseException as error:
        if _requested or isinstance(error, KeyboardInterrupt):
            message = str(error) if isinstance(error, KeyboardInterrupt) else ""
            raise KeyboardInterrupt(message or sentence) from error
        raise
    finally:
        _sentence = ""


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """`undo` is called if a signal ends the process in the block without its exception handlers."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


def is_repeat(first_seconds: float) -> bool:
    """Whether a signal now belongs to the one at `first_seconds` of time.monotonic()."""
    return time.monotonic() - first_seconds < _REPEAT_SECONDS


def interrupt(number: int) -> NoReturn:
    """Raises KeyboardInterrupt for a signal that another handler has caught."""
    global _number
    _number = number
    raise KeyboardInterrupt


def end(interrupt: KeyboardInterrupt) -> int:
    """Prints the message of `interrupt`, below the ^C of a terminal, and returns the exit status.

    After a signal it ends the process: threads and exit handlers of JAX may be in any state.
    """
    with contextlib.suppress(OSError):  # such as a terminal that is closed
        print("\n" * sys.stderr.isatty() + str(interrupt), file=sys.stderr, flush=True)
    if _requested:
        end_process(128 + _requested)
    return 128 + _number


def end_process(status: int) -> NoReturn:
    """Ends the process without exit handlers, while other threads may be inside a collective."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # such as a pipe whose reader has ended
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    """Handlers of SIGTERM and SIGHUP, and the thread. Without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, _handle)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # the numbers of signals, from C
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    done = threading.Event()
    start_thread(functools.partial(_watch, reader, done), "signals")
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writer)
        done.set()
        for number in numbers:
            if signal.getsignal(number) is _handle:
                signal.signal(number, signal.SIG_DFL)


def _watch(reader: int, done: threading.Event) -> None:
    """Ends the process a while after a signal: the first one that `_handle` gets, or a second one
    of another handler, such as the handler of `jaxlc.train.callbacks`."""
    first_seconds = None
    while data := os.read(reader, 1):
        if (number := data[0]) not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            continue
        is_second = first_seconds is not None and not is_repeat(first_seconds)
        if (handler := signal.getsignal(number)) is _handle or (is_second and callable(handler)):
            end_late = functools.partial(_end_late, number, done)
            start_thread(end_late, "end")
        first_seconds = first_seconds or time.monotonic()
    os.close(reader)


def _end_late(number: int, done: threading.Event) -> None:
    if not done.wait(_END_SECONDS):
        _end_now(number)


def _forget_in_child() -> None:
    """A forked process, such as one that tokenizes, has the handlers and the pipe of its parent."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is _handle:
                signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def _handle(number: int, frame: FrameType | None) -> NoReturn:
    global _requested
    if _requested or not _sentence or _is_converted(frame):
        _end_now(number)
    _requested = number
    raise KeyboardInterrupt


def _is_converted(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.endswith(_CONVERTING_FILES):
        frame = frame.f_back
    return frame is not None


def _ignored_error(unraisable: Any) -> None:
    """Called for an error that Python ignores, such as one in a finalizer."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end_now(_requested or signal.SIGINT)
    sys.__unraisablehook__(unraisable)


def _end_now(number: int) -> NoReturn:
    with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
        os.write(_stderr, f"{_sentence or 'interrupted'}\n".encode())
    for undo in reversed(_undo):
        with contextlib.suppress(Exception):
            undo()
    os._exit(128 + number)
