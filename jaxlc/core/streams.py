"""Standard output and error of a command, which may have any encoding, a full disk, no reader, or be closed.

Imports no jax.
"""

import codecs
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

_ASCII = {"⟦": "[[", "⟧": "]]", "±": "+/-", "→": "->", "…": "..."}  # others are escaped, as in "\u2581"


def prepare() -> None:
    """Makes all streams accept all texts. A closed stream discards them."""
    for descriptor in range(3):  # otherwise the next file that is opened gets the number of a closed stream
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error("jaxlc.ascii", _encodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="jaxlc.ascii")


def _encodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    forms = (_ASCII.get(each) or each.encode("ascii", "backslashreplace").decode() for each in characters)
    return "".join(forms), error.end


def guarded(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status: 141 if the reader of its output ended, as in `jaxlc --help | head`.

    Output that cannot be written otherwise, such as to a full disk, is one sentence on stderr and status 1.
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
    """A stream that discards its text after an error, such as that of a closed terminal."""

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
    """Lets the process go on when nobody reads its output any more, as a run does, whose results are files."""
    sys.stdout, sys.stderr = map(_Outlasting, (sys.stdout, sys.stderr))


def _discard(stream: TextIO) -> None:
    """Discards what is printed from now on, and what Python prints at exit because it could not be written before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _accepts(stream: TextIO, text: str) -> bool:
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        return False
    return True
