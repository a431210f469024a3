"""Faults in runs of two processes; scripts/fault_drill.py has all of them."""

import pytest

from scripts import fault_drill
from tests import environment
from tests.train.runs import ROOT


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("victim", "line"),
    [
        (0, "error: process 0 of 2 does not answer; "),
        pytest.param(1, "error: process 1 of 2 on ", marks=pytest.mark.full),
    ],
)
def test_run_with_a_stopped_process_ends_and_resumes(tmp_path, monkeypatch, victim, line):
    """Process 0 is the coordinator: the other one must end without it."""
    for name, value in environment.of_user(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "drill"
    fault_drill.prepare(out)
    undisturbed = fault_drill.run_undisturbed(out, 2)
    row = fault_drill.disturb(out, "stop", victim, 2, undisturbed)
    assert row.is_expected and row.last_line.startswith(line), row
