"""Checks that all processes have the same file system at the workdir: write, read, rename, lock, free space."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import LockHeld, locked, make_writable

# A client of a network file system may see a new file of another machine late: by default after 60 s at most in NFS
# (acdirmax), but a directory that it has never read is read at once.
_VISIBLE_SECONDS = 10.0
_POLL_SECONDS = 0.1


def check_directory(
    workdir: Path, token: str, process_id: int, num_processes: int, wait: Callable[[str], None]
) -> tuple[dict[str, str], int]:
    """Every process calls it; returns what failed -> why, and the free bytes.

    Each process writes a file, reads and renames it, and looks at that of the next process; process 0 locks a file, and
    the others try to. All files are removed.

    Args:
      token: the same in all processes, and unique.
      wait: a barrier of all processes, with a name.
    """
    directory, problems = workdir / f".preflight-{token}", dict[str, str]()
    try:
        make_writable(directory, "")
        free_bytes = shutil.disk_usage(directory).free
    except UserError as error:
        reason = error.__cause__ if error.__cause__ is not None else error
        problems["write"], free_bytes = reason_of(reason), 2**62
    own, other = directory / f"{process_id}", (process_id + 1) % num_processes
    with _noted(problems, "write"):
        own.write_text(f"{token} {process_id}")
    wait("preflight written")
    with _noted(problems, "read"):
        _check_content(directory / f"{other}", f"{token} {other}", other)
    wait("preflight read")
    with _noted(problems, "rename"):
        own.rename(directory / f"{process_id}.renamed")
    wait("preflight renamed")
    if not problems:
        with _noted(problems, "rename"):
            _check_content(directory / f"{other}.renamed", f"{token} {other}", other)
    _check_lock(directory / "lock", process_id, problems, wait)
    with contextlib.suppress(OSError):  # process 0 removes the rest
        (directory / f"{process_id}.renamed").unlink()
    wait("preflight removed")
    if process_id == 0 or "read" in problems:
        shutil.rmtree(directory, ignore_errors=True)
    return problems, free_bytes


@contextlib.contextmanager
def _noted(problems: dict[str, str], name: str) -> Iterator[None]:
    """Notes an error of the block, unless an earlier check has failed, from which it follows."""
    try:
        yield
    except OSError as error:
        if not problems:
            problems[name] = reason_of(error)


def _check_content(path: Path, expected: str, process_id: int) -> None:
    """Raises OSError if the file of another process is not there, or has other content."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    content = ""
    while content != expected:
        with contextlib.suppress(FileNotFoundError):
            content = path.read_text()
        if content != expected and time.monotonic() >= deadline:
            what = "has other content" if content else "is not there"
            raise OSError(f"the file of process {process_id} {what} after {_VISIBLE_SECONDS:.0f} s")
        if content != expected:
            time.sleep(_POLL_SECONDS)


def _check_lock(path: Path, process_id: int, problems: dict[str, str], wait: Callable[[str], None]) -> None:
    """Process 0 holds a lock, which the other processes must not get."""
    unsupported: list[str] = []

    def on_unsupported() -> None:
        unsupported.append("the file system has no locks")

    def hold() -> contextlib.AbstractContextManager[None]:
        return locked(path, lambda holder: None, timeout_seconds=0, on_unsupported=on_unsupported)

    with contextlib.ExitStack() as held:
        if process_id == 0:
            with _noted(problems, "lock"):
                try:
                    held.enter_context(hold())
                except LockHeld:
                    raise OSError("process 0 does not get a lock that nobody holds") from None
        wait("preflight locked")
        if process_id != 0:
            with _noted(problems, "lock"), contextlib.suppress(LockHeld), hold():
                if not unsupported:
                    raise OSError("it gets a lock that process 0 holds")
        wait("preflight unlocked")
    if unsupported and not problems:
        problems["lock"] = unsupported[0]
