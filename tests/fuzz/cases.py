"""Runs a reader on changed files."""

import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from jaxlc.core.errors import UserError
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.fuzz.readers import Reader

MAX_SECONDS = 10.0


class _File(bytes):
    """A file whose description by hypothesis is short."""

    def __repr__(self) -> str:
        return f"{self[:500]!r} ({len(self)} bytes)"


@dataclass
class Outcome:
    num_cases: int = 0
    num_errors: int = 0  # cases that end with a UserError
    max_seconds: float = 0.0
    slowest: bytes = field(default=b"", repr=False)
    growth_mib: float = 0.0  # of the peak memory of the process, after the valid files were read


def run_case(reader: Reader, changed: bytes, outcome: Outcome) -> None:
    """Reads the changed file.

    Raises:
      AssertionError: the error has several lines, or reading took too long.
      Exception: the reader raised another error than UserError.
    """
    with tempfile.TemporaryDirectory() as directory:
        reader.write(Path(directory), changed)
        outcome.num_cases += 1
        start = time.monotonic()
        try:
            reader.read(Path(directory))
        except UserError as error:
            outcome.num_errors += 1
            assert "\n" not in str(error), "an error of one line"
        seconds = time.monotonic() - start
        if seconds > outcome.max_seconds:
            outcome.max_seconds, outcome.slowest = seconds, changed
        assert seconds < MAX_SECONDS


def run_cases(reader: Reader, num_cases: int) -> Outcome:
    """Reads `num_cases` changed files; raises as `run_case`."""
    content = reader.files()[reader.changed_file]
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as directory:
        reader.write(Path(directory))
        reader.read(Path(directory))
    before = _peak_mib()

    @settings(
        max_examples=max(1, round(reader.share * num_cases)), derandomize=True, deadline=None, database=None,
        phases=[Phase.generate], report_multiple_bugs=False,  # shrinking large files takes long
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given((changed_json if reader.is_json else changed_bytes)(content).map(_File))
    def check(changed: _File) -> None:
        run_case(reader, changed, outcome)

    check()
    outcome.growth_mib = _peak_mib() - before
    return outcome


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )
