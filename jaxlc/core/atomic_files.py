"""Files that are replaced atomically, so that a process that is killed leaves the old file or none."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file next to `path` that replaces it at the end; it is deleted on failure.

    The file has the permissions of the process's umask, unlike those of `tempfile`, which only their owner can read.

    Raises:
      OSError: the file cannot be written; `filename` is set.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb+") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as errors of write() have it
            error.filename = str(path)
        raise
