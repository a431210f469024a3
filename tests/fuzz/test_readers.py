"""Changed files end in one UserError, or are read: no other error, no long time, no file outside
the directory.
"""

import os
from pathlib import Path

import pytest

from tests.fuzz.cases import Outcome, run_case, run_cases
from tests.fuzz.readers import READERS

_NUM_CASES = int(os.environ.get("JAXLC_FUZZ_CASES", "25"))
_FOUND = Path(__file__).parent / "found"  # READER/NAME: files that once ended in another error


@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_end_in_one_error(name):
    assert run_cases(READERS[name], _NUM_CASES).num_cases


@pytest.mark.parametrize(
    "path", sorted(_FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_found_file_ends_in_one_error(path):
    outcome = Outcome()
    run_case(READERS[path.parent.name], path.read_bytes(), outcome)
    assert outcome.num_errors == 1
