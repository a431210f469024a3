import threading
import time

import jaxlc
from jaxlc.cli import export
from jaxlc.core import text


def test_progress_lines_appear_in_long_work_only(monkeypatch, capsys):
    with text.progress_lines("reading") as update:
        update(1, 4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(text, "SECONDS_BETWEEN_LINES", 0.05)
    lines = []
    with text.progress_lines("reading", log=lines.append) as update:
        time.sleep(0.12)
        update(1, 4)
        time.sleep(0.1)
    num_lines = len(lines)
    assert lines[0] == "reading: 0:00 so far" and lines[-1] == "reading: 25%, 0:01 left"
    with text.progress_lines("reading", is_shown=False, log=lines.append):
        time.sleep(0.1)
    assert len(lines) == num_lines <= 4


def test_export_prints_lines_while_it_lasts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(text, "SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr(jaxlc, "export", lambda **flags: time.sleep(0.12) or tmp_path)
    assert export.main(["export", "runs/x", "out", "--adapters"]) == 0
    assert "exporting: 0:00 so far" in capsys.readouterr().err


def test_time_left_starts_again_with_the_next_file(monkeypatch):
    now, lines = iter([0.0, 100.0, 101.0]), []
    monkeypatch.setattr(text.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(text, "SECONDS_BETWEEN_LINES", 0.05)
    with text.progress_lines(
        "reading", log=lambda line: (lines.append(line), done.set())
    ) as update:
        done = threading.Event()
        update(9, 10)
        update(1, 5)  # at 100 s
        done.wait(10)
        monkeypatch.setattr(text, "SECONDS_BETWEEN_LINES", 10.0)
    assert lines[0] == "reading: 20%, 0:04 left"
