"""Renders a chat template in a process of its own, with limits, since it is a program that somebody else has written.

The process (`chat_environment`) ends with its standard input, so also if this one is killed. It limits its own memory,
and for each chat its CPU time, which is independent of the load of the machine: whether a record is bad must be equal
on all machines. A limit in seconds ends it if it does not answer nevertheless.
"""

import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_CPU_SECONDS = 3.0  # to compile the template, and of a chat
_CHARACTERS_PER_CPU_SECOND = 2e6  # more time for long chats; Jinja renders more than 100e6
_SECONDS_PER_CPU_SECOND = 20.0  # on a busy machine
_MAX_DATA_BYTES = 2 << 30  # memory of the process
_MAX_TEXT_CHARACTERS = 64 << 20  # of a rendering
_MAX_ERROR_BYTES = 4000
_MAX_HEADER_BYTES = 100
_READ_BYTES = 1 << 20
_MAX_ASKED_BYTES = 32 << 10  # of questions that are written in advance: a pipe of Linux has 64 KiB


class TemplateError(Exception):
    """The template does not compile."""


class RenderError(Exception):
    """The template raises an error, or needs more time or memory than it may use."""


class TemplateProcess:
    """A template that is rendered in another process, which is started at the first rendering. It is thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, str], begin: str, end: str):
        """
        Args:
          variables: of the template, such as bos_token.
          begin, end: markers of the tag `generation`; see `chat_environment.environment`.
        """
        self._first = dict(
            source=source, variables=dict(variables), begin=begin, end=end, cpu_seconds=_CPU_SECONDS,
            max_data_bytes=_MAX_DATA_BYTES, max_text_characters=_MAX_TEXT_CHARACTERS, max_error_bytes=_MAX_ERROR_BYTES,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._asked: collections.deque[bytes] = collections.deque()  # written, and not yet answered

    def ask(self, chats: Sequence[tuple[str, Sequence[tuple[int, bool]]]]) -> None:
        """Begins the renderings of the chats of the next calls of `render`, in their order, as far as a pipe has room.

        The process works on them in the meantime, and one system call writes them all.

        Args:
          chats: the arguments of these calls.
        Raises:
          TemplateError: see there.
        """
        with self._lock:
            child = self._running()
            if self._asked:  # another thread waits for their answers
                return
            num_bytes = 0
            for chat, renderings in chats:
                question = _question(chat, renderings)
                num_bytes += len(question)
                if num_bytes > _MAX_ASKED_BYTES:
                    break
                self._asked.append(question)
            child.write(b"".join(self._asked))

    def render(self, chat: str, renderings: Sequence[tuple[int, bool]]) -> Iterator[str]:
        """The texts of several renderings of a chat.

        Args:
          chat: the messages and the tools, as JSON.
          renderings: how many of the messages, and `add_generation_prompt`, of each.
        Yields:
          The texts. The iterator must be exhausted or closed before the next call.
        Raises:
          TemplateError, RenderError: see there.
        """
        cpu_seconds, question = _cpu_seconds(chat, renderings), _question(chat, renderings)
        with self._lock:
            if self._asked and self._asked[0] != question and self._child is not None:
                self._child.end()  # its next answers are those of chats that nobody has waited for
            child = self._running()
            if self._asked:
                self._asked.popleft()
            else:
                child.write(question)
            waiting = iter(renderings)
            try:
                for _ in waiting:
                    yield child.answer(cpu_seconds, " for the messages")
            except GeneratorExit:  # the caller needs no more of them; the next chat needs the next ones
                with contextlib.suppress(RenderError):
                    for _ in waiting:
                        child.answer(cpu_seconds)
                raise

    def _running(self) -> "_Child":
        # A process that was forked must not use, nor end, the child of its parent.
        if self._child is None or not self._child.is_usable:
            self._child = _Child()
            self._asked.clear()
            weakref.finalize(self, self._child.end)
            self._child.write(json.dumps(self._first).encode() + b"\n")
            try:
                self._child.answer(_CPU_SECONDS)
            except RenderError as error:
                self._child.end()
                raise TemplateError(str(error)) from None
        return self._child


def _cpu_seconds(chat: str, renderings: Sequence[tuple[int, bool]]) -> float:
    return _CPU_SECONDS + len(chat) * len(renderings) / _CHARACTERS_PER_CPU_SECOND


def _question(chat: str, renderings: Sequence[tuple[int, bool]]) -> bytes:
    listed = ", ".join(f"[{number}, {str(has_prompt).lower()}]" for number, has_prompt in renderings)
    seconds = _cpu_seconds(chat, renderings)
    question = f'{{"renderings": [{listed}], "cpu_seconds": {seconds}, "chat": {chat}}}\n'
    return question.encode(errors="surrogatepass")


class _Child:
    def __init__(self) -> None:
        # -P: the modules of that directory are not importable by their file names.
        command = [sys.executable, "-P", str(Path(__file__).with_name("chat_environment.py"))]
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._owner = os.getpid()
        self._buffer = bytearray()

    @property
    def is_usable(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        if self._owner != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def write(self, data: bytes) -> None:
        """Writes a line; the child reads it, since it has answered all earlier ones."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._stdin.write(view) :]
        except BrokenPipeError:
            pass  # `answer` has the reason

    def answer(self, cpu_seconds: float, what: str = "") -> str:
        """The next answer.

        Args:
          what: the template raises an error for, in the message.
        Raises:
          RenderError: it is an error, or there is none.
        """
        deadline = time.monotonic() + _SECONDS_PER_CPU_SECOND * cpu_seconds
        while (end := self._buffer.find(b"\n")) < 0:
            self._read(deadline, cpu_seconds, _MAX_HEADER_BYTES)
        kind, num_bytes = self._buffer[:end].split()
        end_of_text = end + 1 + int(num_bytes)
        while len(self._buffer) < end_of_text:
            self._read(deadline, cpu_seconds, max_bytes=4 * _MAX_TEXT_CHARACTERS + _READ_BYTES)
        text = self._buffer[end + 1 : end_of_text].decode(errors="surrogatepass")
        del self._buffer[:end_of_text]
        if kind == b"error":
            raise RenderError(f"raises an error{what} ({text})")
        return text

    def _read(self, deadline: float, cpu_seconds: float, max_bytes: int) -> None:
        is_ready = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
        part = os.read(self._stdout.fileno(), _READ_BYTES) if is_ready else b""
        if not part or len(self._buffer) > max_bytes:
            self._fail(cpu_seconds, is_late=not is_ready)
        self._buffer += part

    def _fail(self, cpu_seconds: float, is_late: bool) -> NoReturn:
        self.end()
        if is_late or self._process.returncode == -signal.SIGPROF:
            raise RenderError(f"needs more than {cpu_seconds:.0f} s of CPU time")
        raise RenderError("ends the process that renders it")
