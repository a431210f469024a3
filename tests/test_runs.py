"""`jaxlc runs`."""

import importlib.metadata
import json
from pathlib import Path

import pytest

import jaxlc
from jaxlc.config import defaults, load_stages
from jaxlc.runs import main
from jaxlc.train.reports.config_copy import keep_config, read_manifest
from jaxlc.train.reports.manifest import make_manifest
from tests.helpers import png_size


def write_run(workdir: Path, learning_rate: float, losses: list[float]) -> None:
    workdir.mkdir(parents=True)
    config = defaults()
    config.optimizer.learning_rate = learning_rate
    assert keep_config(workdir, load_stages(config)) is None
    rows = [dict(step=step, loss=loss, tokens_per_second=1e4) for step, loss in enumerate(losses, 1)]
    rows.append(dict(step=len(losses), eval_loss=losses[-1] + 0.5))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_compares_losses_and_settings(tmp_path, capsys):
    write_run(tmp_path / "a", 1e-3, [3.0, 2.0])
    write_run(tmp_path / "more" / "b", 2e-3, [3.0, 1.5, 1.25])
    assert main(["jaxlc runs", str(tmp_path)]) == 0
    head, first, second, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "step", "loss"]
    assert first.split()[:5] == ["a", "2", "2.0000", "2.5000", "10,000"]
    assert second.split()[:5] == ["more/b", "3", "1.2500", "1.7500", "10,000"]
    assert [line.split() for line in rest[1:3]] == [
        ["setting", "a", "more/b"],
        ["optimizer.learning_rate", "0.001", "0.002"],
    ]
    assert png_size(tmp_path / "runs.png")[0] > 800


def test_manifest_keeps_the_identifier_of_the_run(tmp_path):
    write_run(tmp_path / "a", 1e-3, [3.0])
    before = read_manifest(tmp_path / "a")
    assert keep_config(tmp_path / "a", load_stages(defaults())).startswith("settings changed since the last start")
    after = read_manifest(tmp_path / "a")
    assert after["run_id"] == before["run_id"] and after["packages"]["jax"] == before["packages"]["jax"]
    assert len(after["commit"].rstrip("+")) in (0, 40) and after["num_processes"] == 1


def test_manifest_of_a_source_tree_that_is_not_installed(monkeypatch):
    def version_of_installed(name: str) -> str:
        if name == "jaxlc":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version_of_installed)
    assert make_manifest({})["packages"]["jaxlc"] == jaxlc.__version__


def test_runs_in_a_directory_without_runs_raises(tmp_path, capsys):
    assert main(["jaxlc runs", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err


def test_runs_of_an_earlier_version_are_listed(tmp_path, capsys):
    """Without a manifest and without a config."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(dict(step=1, loss=2.0)) + "\n")
    assert main(["jaxlc runs", str(tmp_path)]) == 0
    assert "2.0000" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "garbage", "MANIFEST = {"])
def test_manifest_that_cannot_be_read_is_empty(tmp_path, text):
    (tmp_path / "resolved_config.py").write_text(text)
    assert read_manifest(tmp_path) == {}
