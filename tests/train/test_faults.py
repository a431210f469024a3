"""Faults in runs of two processes; scripts/fault_drill.py has all of them."""

import pytest

from scripts import fault_drill
from tests import environment
from tests.train.runs import ROOT


@pytest.mark.heavy
def test_run_with_a_stopped_process_ends_and_resumes(tmp_path, monkeypatch):
    """Process 0 is the coordinator: the other one must end without it."""
    for name, value in environment.of_user(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "drill"
    fault_drill.prepare(out)
    undisturbed = fault_drill.run_undisturbed(out, 2)
    for victim, line in enumerate(("error: process 0 of 2 does not answer; ", "error: process 1 of 2 on ")):
        row = fault_drill.disturb(out, "stop", victim, 2, undisturbed)
        assert row.is_expected and row.last_line.startswith(line), row
