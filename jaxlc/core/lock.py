"""A lock between processes, on one host or on a file system that they share."""

import errno
import fcntl
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxlc.core import interrupts

_SECONDS_BETWEEN_ATTEMPTS = 0.2
_STALE = (errno.ESTALE, errno.ENOENT)  # NFS errors: another machine has deleted the file
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


class LockHeld(Exception):
    """Another process holds the lock; the message names it."""


@contextmanager
def locked(
    path: Path,
    on_wait: Callable[[str], None],
    *,
    timeout_seconds: float = math.inf,
    on_unsupported: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Holds an advisory lock on the file `path`, which exists only while a process holds it or waits for it.

    The kernel releases the lock when its process ends, also if it is killed, so a file without a process is no
    obstacle. On a file system without locks, processes do not wait.

    Args:
      on_wait: called once with the name of the process that holds the lock, if this process has to wait.
      timeout_seconds: the longest wait.
      on_unsupported: called if the file system has no locks.
    Raises:
      LockHeld: another process still holds the lock after `timeout_seconds`.
      OSError: the file cannot be made.
    """

    def delete() -> None:
        path.unlink(missing_ok=True)

    with _acquired(path, on_wait, timeout_seconds, on_unsupported) as file, interrupts.undone(delete):
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
            yield
        finally:
            delete()  # before it is released: see _is_current


def _acquired(
    path: Path, on_wait: Callable[[str], None], timeout_seconds: float, on_unsupported: Callable[[], None]
) -> BinaryIO:
    """Returns the file with its lock; see `locked`."""
    has_waited, deadline = False, time.monotonic() + timeout_seconds
    while True:
        file = open(path, "ab+")  # noqa: SIM115 the caller closes it, which releases the lock
        try:
            while not _try_lock(file, on_unsupported):
                if not has_waited:
                    on_wait(_holder(file))
                    has_waited = True
                if time.monotonic() >= deadline:
                    with file:
                        raise LockHeld(_holder(file))
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            if _is_current(file, path):
                return file
        except OSError as error:
            if error.errno not in _STALE:
                raise
        file.close()


def _try_lock(file: BinaryIO, on_unsupported: Callable[[], None]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        on_unsupported()
    return True


def _holder(file: BinaryIO) -> str:
    """The name that the process with the lock has written to the file."""
    file.seek(0)
    return file.read().decode(errors="replace") or "another process"


def _is_current(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names `file`: another process may have deleted it just before it released its lock.

    Raises:
      OSError: with an error number of _STALE, if it does not.
    """
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
