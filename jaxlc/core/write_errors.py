"""Errors of writing files, as errors that users can fix."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxlc.core.errors import DiskFullError, UserError, reason_of

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: a limit of the shell or of the file system


def make_writable(directory: Path, advice: str) -> None:
    """Creates `directory` if it does not exist, and checks that it is writable.

    Args:
      advice: the end of the error.
    Raises:
      UserError: it cannot be created, or is not writable.
    """
    with write_errors_explained(directory, advice):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


@contextmanager
def write_errors_explained(place: Path | str, advice: str) -> Iterator[None]:
    """Raises an OSError of the block as a UserError: "cannot write to PLACE (REASON): ADVICE"."""
    try:
        yield
    except OSError as error:
        kind = UserError if full_disk_reason(error) is None else DiskFullError
        raise kind(f"cannot write to {place} ({reason_of(error)}): {advice}") from error


def full_disk_reason(error: BaseException | None) -> str | None:
    """The message of the operating system if a full disk, a quota or a limit has caused an error; None: neither.

    TensorStore raises a ValueError with that message.
    """
    while error is not None:
        for reason in map(os.strerror, _FULL):
            if reason in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def full_disk_explained(directory: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Raises an error that a full disk has caused as a DiskFullError with one sentence.

    Args:
      directory: to which the block writes; an error that names its file is about the directory of that file.
      kept: returns the end of the sentence: what is not lost, and how to continue.
    """
    try:
        yield
    except Exception as error:
        reason = full_disk_reason(error)
        if reason is None or isinstance(error, UserError):
            raise
        name = getattr(error, "filename", None)
        place = Path(name).parent if name else directory
        raise DiskFullError(f"cannot write to {place} ({reason}): {kept()}") from error
