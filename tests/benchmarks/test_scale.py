"""The simulation of many processes runs, with a few."""

from benchmarks import scale
from benchmarks.scale import __main__ as program
from benchmarks.scale import checkpoint_files
from tests.helpers import free_port


def test_coordinator_of_processes_answers_all(capsys):
    """Process 0 has one connection per process; every part of a start is measured."""
    rows = program.json_lines(f"{scale.__name__}.coordinator", "12", str(free_port()), "1")
    assert [row["part"] for row in rows[:3]] == [
        "rendezvous",
        "connect to JAX's service",
        "barrier",
    ]
    assert rows[0]["open_files"] == 11 and rows[-1]["part"] == "all processes read phases"
    program.print_rows(rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows) + 1


def test_checkpoint_files_are_extrapolated(monkeypatch):
    monkeypatch.setattr(
        checkpoint_files,
        "count_files",
        lambda count, port: {"shared": (3 + 2 * count, 1024 * count)},
    )
    (row,) = checkpoint_files.rows(0, (1, 2, 4), 1024)
    assert row["1,024, extrapolated"] == "2,051 files, 1,024.0 KiB"
