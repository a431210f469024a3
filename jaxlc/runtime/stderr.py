"""Removes lines that C++ libraries write to stderr."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def without_lines(notes: Sequence[str]) -> Iterator[None]:
    """Removes lines that contain one of `notes` from stderr. All other lines are printed when the context ends.

    For short calls only: the lines of a process that crashes in the meantime are lost.
    """
    sys.stderr.flush()
    real_stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real_stderr, 2)
            os.close(real_stderr)
            captured.seek(0)
            lines = captured.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if not any(note in line for note in notes)))
