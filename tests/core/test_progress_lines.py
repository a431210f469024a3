import os
import threading
import time

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


def test_progress_of_unknown_total_has_the_number_done(monkeypatch):
    monkeypatch.setattr(text, "SECONDS_BETWEEN_LINES", 0.02)
    lines, is_printed = [], threading.Event()
    log = lambda line: (lines.append(line), is_printed.set())  # noqa: E731
    with text.progress_lines("scoring", log=log) as update:
        update(1200, 0)
        is_printed.wait(10)
    assert lines[0] == "scoring: 1,200 done, 0:00 so far"


def test_progress_in_terminal_is_one_bar_that_is_removed(monkeypatch, capsys):
    is_drawn = threading.Event()
    monkeypatch.setattr(text, "_is_terminal", lambda: True)
    monkeypatch.setattr(text, "_SECONDS_BETWEEN_BARS", 0.02)
    size = os.terminal_size((100, 24))
    # pytest asks for the width as well, with a fallback.
    monkeypatch.setattr(text.shutil, "get_terminal_size", lambda *_, **__: is_drawn.set() or size)
    with text.progress_lines("reading") as update, text.progress_lines("compiling"):
        update(1, 4)
        is_drawn.wait(10)
        text.print_to_stderr("a line")
    out = capsys.readouterr().err
    first, *_, last = out.split("\r\x1b[K")[1:]
    assert first == "[#####               ] reading: 25%, 0:00 left" and last == ""
    assert "a line\n" in out and "compiling" not in out
    with text.progress_lines("exporting"):  # the terminal is free again
        is_drawn.clear()
        is_drawn.wait(10)
    assert "exporting" in capsys.readouterr().err


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
