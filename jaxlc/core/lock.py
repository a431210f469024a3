"""A lock between processes, on one host or on a file system that they share."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_SECONDS_BETWEEN_ATTEMPTS = 0.2
_STALE = (errno.ESTALE, errno.ENOENT)  # NFS errors: another machine has deleted the file
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


@contextmanager
def locked(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds an advisory lock on the file `path`, which exists only while a process holds it or waits for it.

    The kernel releases the lock when its process ends, also if it is killed, so a file without a process is no
    obstacle. On a file system without locks, processes do not wait.

    Args:
      on_wait: called once with the name of the process that holds the lock, if this process has to wait.
    Raises:
      OSError: the file cannot be made.
    """
    with _acquired(path, on_wait) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before it is released: see _is_current


def _acquired(path: Path, on_wait: Callable[[str], None]) -> BinaryIO:
    """Returns the file with its lock."""
    has_waited = False
    while True:
        file = open(path, "ab+")  # noqa: SIM115 the caller closes it, which releases the lock
        try:
            while not _try_lock(file):
                if not has_waited:
                    file.seek(0)
                    on_wait(file.read().decode(errors="replace") or "another process")
                    has_waited = True
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            if _is_current(file, path):
                return file
        except OSError as error:
            if error.errno not in _STALE:
                raise
        file.close()


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _is_current(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names `file`: another process may have deleted it just before it released its lock.

    Raises:
      OSError: with an error number of _STALE, if it does not.
    """
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
