from pathlib import Path

from jaxlc.core.paths import displayed


def test_displayed_path_is_relative_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert displayed(tmp_path / "runs" / "a") == Path("runs/a")
    assert displayed(tmp_path.parent / "b") == tmp_path.parent / "b"
    assert displayed(Path("runs")) == Path("runs")
