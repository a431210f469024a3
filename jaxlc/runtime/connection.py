"""Connections between the processes of a run: lines of JSON over TCP."""

import contextlib
import errno
import json
import os
import socket
import time
from typing import Any, NamedTuple

Message = dict[str, Any]  # a key names its kind: hello, welcome, go, failed, lost or bye

_MAX_LINE_BYTES = 65_536
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Member(NamedTuple):
    """A process of a run, as it introduces itself."""

    process_id: int
    num_processes: int
    host: str
    jax_version: str

    @property
    def name(self) -> str:
        return f"process {self.process_id} of {self.num_processes} on {self.host}"


class Connection:
    """A TCP connection that carries lines of JSON."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(True)
        self.socket = connected
        self.member: Member | None = None  # who is on the other side
        self.unreachable = ""  # why the network does not reach the other side, after the end of the connection
        self._buffer = b""

    def send(self, **message: Any) -> None:
        """Sends a message. A broken connection is noticed later, in `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; waits for data. None: the connection is closed.

        Raises:
          ValueError: the data are not ours.
          TimeoutError: no data before the timeout of the socket.
        """
        try:
            data = self.socket.recv(_MAX_LINE_BYTES)
        except OSError as error:
            if error.errno in _UNREACHABLE:
                self.unreachable = os.strerror(error.errno)
            elif isinstance(error, TimeoutError):
                raise
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [json.loads(line.decode(errors="replace")) for line in lines]
        if len(self._buffer) > _MAX_LINE_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message of jaxlc")
        return messages

    def wait_for_end(self, seconds: float) -> None:
        """Waits at most `seconds` until the other side has closed the connection. Messages are lost."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # also of a timeout
            while (left := end - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(_MAX_LINE_BYTES):
                    return

    def close(self) -> None:
        self.socket.close()
