import io
import time

import pytest
from rich.console import Console

from jaxlc.cli import flags
from jaxlc.core import text as progress_lines
from jaxlc.core.text import duration_text
from jaxlc.runtime import watchdog
from jaxlc.train.reports.progress import Progress, flops_text

ROW = dict(loss=2.5, tokens_per_second=4321.0, step_seconds=0.5, grad_norm=1.0, learning_rate=1e-3)


def make_progress(
    total_steps=130, *, is_primary=True, is_terminal=False, peak=None
) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=is_terminal, width=160, highlight=False, soft_wrap=True
    )
    progress = Progress(peak_flops_per_second=peak, is_primary=is_primary, console=console)
    progress.start_stage("", total_steps, flops_per_step=2e9)
    return progress, out


def test_update_without_terminal_prints_one_line(clock):
    progress, out = make_progress()
    with progress:
        progress.update(step=10, **ROW)
    assert out.getvalue() == (
        "step 10/130  loss 2.5000  4,321 tokens/s  4 GFLOP/s (model, causal)  1:00 left\n"
    )


def test_update_with_known_peak_prints_utilization(clock):
    progress, out = make_progress(peak=16e9)
    progress.update(step=10, **ROW)
    assert "4 GFLOP/s (model, causal, 25.0% of the bf16 peak)" in out.getvalue()
    progress.update(step=130, **ROW, flops_per_second_documents=1e9)
    assert "1 GFLOP/s (model, documents, 6.2% of the bf16 peak)" in out.getvalue()


def test_update_without_terminal_prints_every_row(clock):
    progress, out = make_progress(total_steps=40)
    with progress:
        for step in (1, 2, 40):
            clock.seconds += 0.3
            progress.update(step=step, **ROW)
    shown = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert shown == [1, 2, 40]


def test_compilation_without_terminal_prints_lines_while_it_lasts(capsys, monkeypatch):
    """A run, and a plan of two programs."""
    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 0.05)
    progress, out = make_progress()
    with progress, progress.compiling("the step"):
        time.sleep(0.12)
    lines = out.getvalue().splitlines()
    assert (
        lines[:2] == ["compiling the step ...", "compiling the step: 0:00 so far"]
        and "compiled" in lines[-1]
    )
    with flags.progress() as starting:
        for name in ("one", "two"):
            starting(name)
            time.sleep(0.12)
    lines = capsys.readouterr().err.splitlines()
    ends = [lines.index(f"compiling {name}: 0:00 so far") for name in ("one", "two")]
    assert lines.index("compiling one ...") < ends[0] < lines.index("compiling two ...") < ends[1]


def test_progress_to_pipe_prints_plain_text(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with Progress(peak_flops_per_second=None, is_primary=True) as progress:
        with progress.compiling("the step"), progress.progress_bar("reading") as count:
            count(1, 2)
        progress.log("[bold]not markup[/bold] " + 200 * "x")
        progress.start_stage("", 2, flops_per_step=1e9)
        progress.update(step=2, **ROW)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == "compiling the step ..."
    assert lines[1].startswith("compiled the step in ")
    assert lines[2] == "[bold]not markup[/bold] " + 200 * "x"
    assert lines[3].startswith("step 2/2 ")
    assert len(lines) == 4


def test_progress_bar_without_terminal_prints_lines_of_long_work(monkeypatch):
    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 0.02)
    progress, out = make_progress()
    with progress, progress.progress_bar("evaluating") as update:
        update(1, 2)
        time.sleep(0.05)
    assert out.getvalue().startswith("evaluating: 50%, 0:00 left\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_log_file_has_lines_of_every_start_and_the_error(clock, tmp_path, is_terminal):
    path = tmp_path / "log.txt"
    for number in (1, 2):
        with (
            pytest.raises(ZeroDivisionError),
            make_progress(is_terminal=is_terminal)[0] as progress,
        ):
            progress.log("before\nthe file")
            progress.log("caf\udce9.txt")  # the name of a file that is not UTF-8
            progress.log_to(path)
            with progress.compiling("the step"):
                pass
            for step in (10, 11):
                progress.update(step=step, **ROW)
            raise ZeroDivisionError(f"run {number}")
    other = make_progress(is_primary=False)[0]
    other.log_to(path)
    other.update(step=12, **ROW)
    assert not other._unwritten, "the lines of a long run stay in memory"
    text = path.read_text()
    assert text.count(" START ") == 2 and text.count("\nbefore\nthe file\n") == 2
    assert (
        text.count(" compiled the step in ")
        == text.count(" step 10/130 ")
        == text.count(" step 11/130 ")
        == 2
    )
    assert (
        "\x1b" not in text
        and text.count(" caf\\udce9.txt\n") == 2
        and text.endswith(" ZeroDivisionError: run 2\n")
    )


def test_log_that_cannot_be_written_ends_with_one_warning(tmp_path):
    progress, out = make_progress()
    progress.log_to(tmp_path / "missing" / "log.txt")
    progress.log("one")
    progress.log("two")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("warning: cannot write to ") and lines[0].endswith(
        "; the log ends here"
    )
    assert lines[1:] == ["one", "two"] and not progress._unwritten


def test_compiling_prints_seconds(clock):
    progress, out = make_progress()
    with progress, progress.compiling("the training step"):
        clock.seconds += 12.34
    assert "compiled the training step in 12.3 s" in out.getvalue()


def test_progress_in_terminal_shows_live_line():
    progress, out = make_progress(is_terminal=True)
    with progress:
        with progress.compiling("the training step"):
            progress._bars.refresh()
        progress.log("above the line")
        progress.update(step=10, **ROW)
        with progress.progress_bar("evaluating"), progress.progress_bar("reading"):
            progress._bars.refresh()
    text = out.getvalue()
    assert "\x1b[" in text
    for part in (
        "compiling the training step",
        "above the line",
        "step 10/130",
        "evaluating",
        "reading",
    ):
        assert part in text
    assert "compiling the training step ..." not in text  # the spinner shows it


@pytest.mark.parametrize("section", ["compiling", "progress_bar"])
def test_progress_with_error_raises_and_removes_bar(section):
    progress, out = make_progress(is_terminal=True)
    with progress, pytest.raises(ZeroDivisionError), getattr(progress, section)("something"):
        raise ZeroDivisionError
    assert progress._bars.tasks == []
    assert "compiled" not in out.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_on_other_processes_prints_nothing(is_terminal):
    progress, out = make_progress(is_primary=False, is_terminal=is_terminal)
    with progress:
        progress.log("hello")
        with progress.compiling("the training step"):
            pass
        progress.update(step=130, **ROW)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.43e9, "5.43 GFLOP/s"),
        (2e6, "0.002 GFLOP/s"),
        (6.71e14, "671 TFLOP/s"),
        (3.2e16, "32 PFLOP/s"),
    ],
)
def testflops_text(value, text):
    assert flops_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3 * 3600 + 62, "3:01:02")]
)
def test_duration_text(seconds, text):
    assert duration_text(seconds) == text


def test_waiting_share_is_the_share_of_the_loop_after_the_first_step(clock, monkeypatch):
    waited = dict(data=3.0)
    monkeypatch.setattr(watchdog, "phase_seconds", lambda: waited)
    progress, _ = make_progress()
    assert progress.waiting_share is None
    clock.seconds += 10
    progress.first_step_ended(time.perf_counter())
    clock.seconds += 8
    waited["data"] += 2
    assert progress.waiting_share == pytest.approx(0.25)
