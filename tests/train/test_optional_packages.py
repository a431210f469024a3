"""A run without the optional packages: it trains, and says what it skipped."""

import json

from jaxlc.core import errors
from jaxlc.train.reports import metrics, run_report


def test_metrics_without_tensorboardx_writes_jsonl_only(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "is_installed", lambda package: False)
    log = metrics.open_metrics(tmp_path, resume_step=None, is_primary=True)
    log.write(step=1, loss=2.0)
    log.close()
    assert json.loads((tmp_path / metrics.METRICS_FILE).read_text()) == {"step": 1, "loss": 2.0}
    assert not (tmp_path / metrics.TENSORBOARD_DIRECTORY).exists()


def test_plots_without_matplotlib_are_skipped_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "is_installed", lambda package: False)
    lines = run_report.write_plots(tmp_path, [], evaluation=None)
    assert lines == [
        f"plots           skipped, matplotlib is not installed: {errors.install_hint('matplotlib')}"
    ]
    assert list(tmp_path.iterdir()) == []
