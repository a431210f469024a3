"""Faults in runs of two processes; scripts/fault_drill.py has all of them."""

import pytest

from scripts import fault_drill
from tests import environment


@pytest.fixture(scope="module")
def drill(tmp_path_factory):
    """The directory of the drill, and a run without a fault."""
    out = tmp_path_factory.mktemp("faults") / "drill"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.for_user(JAXLC_WITHOUT_MATPLOTLIB="1").items():
            patch.setenv(name, value)
        fault_drill.prepare(out)
        yield out, fault_drill.run_undisturbed(out, 2)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fault", "victim", "line"),
    [
        ("stop", 0, "error: process 0 of 2 does not answer; "),  # the coordinator
        pytest.param("stop", 1, "error: process 1 of 2 on ", marks=pytest.mark.full),
        pytest.param("gil", 1, "error: process 1 of 2 on ", marks=pytest.mark.full),
        pytest.param("disk", 0, "error: process 0 of 2 on ", marks=pytest.mark.full),
        pytest.param(
            "network",
            1,
            "error: the network does not reach process 1 of 2 on ",
            marks=pytest.mark.full,
        ),
    ],
)
def test_run_with_a_fault_of_one_process_ends_and_resumes(drill, fault, victim, line):
    out, undisturbed = drill
    try:
        row = fault_drill.disturb(out, fault, victim, 2, undisturbed)
    except PermissionError as error:
        pytest.skip(str(error))
    assert row.is_expected and row.last_lines[0].startswith(line), row
