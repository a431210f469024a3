import subprocess
import sys

import nbclient
import nbformat
import pytest

from jaxlc.train.reports.progress import NotebookDisplay
from tests import helpers


class Handle:
    """In place of IPython: counts the displays, and keeps the contents of the updates."""

    def __init__(self):
        self.num_displays, self.contents = 0, []

    def display(self, content, **options):
        self.num_displays += 1
        self.contents.append(content)
        return self

    def update(self, content, **options):
        self.contents.append(content)

    @property
    def html(self) -> str:
        return self.contents[-1]["text/html"]


@pytest.fixture
def handle(monkeypatch):
    handle = Handle()
    monkeypatch.setattr("IPython.display.display", handle.display)
    return handle


def test_display_many_texts_updates_one_output(handle, clock):
    display = NotebookDisplay()
    display.log("mesh <2>")
    for step in range(1, 5):
        clock.seconds += 1.0
        display.step(f"step {step}/4", step / 4)
    assert "mesh &lt;2&gt;" in handle.html
    assert "step 4/4" in handle.html
    assert "step 3/4" not in handle.html
    assert "width:100.0%" in handle.html
    assert handle.num_displays == 1


def test_display_limits_the_rate_of_step_updates(handle, clock):
    display = NotebookDisplay()
    for step in range(100):
        clock.seconds += 0.01
        display.step(f"step {step}", 0.5)
    assert 4 <= len(handle.contents) <= 5
    display.close()
    assert "step 99" in handle.html


def test_display_keeps_a_number_of_lines(handle, clock):
    """Each update has all of them."""
    display = NotebookDisplay()
    for number in range(3000):
        display.log(f"line {number}")
    assert handle.contents[-1]["text/plain"].split("\n") == [f"line {i}" for i in range(2000, 3000)]


def test_display_log_keeps_the_last_step_above(handle):
    display = NotebookDisplay()
    display.step("step 4/4", 1.0)
    display.log("held-out loss")
    display.close()
    assert handle.contents[-1]["text/plain"] == "step 4/4\nheld-out loss"
    assert "width:" not in handle.html.replace("overflow-x", "")


def test_display_activity_is_shown_until_it_ends_or_fails(handle, clock):
    display = NotebookDisplay()
    with pytest.raises(ZeroDivisionError), display.activity("reading") as set_progress:
        assert "reading ..." in handle.html
        clock.seconds += 1.0
        set_progress(1, 4)
        assert "width:25.0%" in handle.html
        raise ZeroDivisionError
    assert "reading" not in handle.html


def test_display_without_text_makes_no_output(handle):
    NotebookDisplay().close()
    assert handle.num_displays == 0


CELL = """
from jaxlc.train.reports.progress import Progress
with Progress(peak_flops_per_second=None, is_primary=True) as progress:
    with progress.compiling("the training step"), progress.progress_bar("waiting"):
        progress.log("a line")
    progress.start_stage("", 40, flops_per_step=1e9)
    for step in range(1, 41):
        progress.update(step=step, loss=2.5, tokens_per_second=100.0, step_seconds=0.5)
    progress.log("the end")
"""


def test_progress_in_kernel_is_one_output_with_final_state():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata.kernelspec = dict(name="python3", display_name="Python 3", language="python")
    nbclient.NotebookClient(notebook, **helpers.NOTEBOOK_TIMEOUTS).execute()
    (output,) = notebook.cells[0].outputs
    lines = output.data["text/plain"].splitlines()
    assert lines[0] == "a line"
    assert lines[1].startswith("compiled the training step in ")
    assert lines[2].startswith("step 40/40  loss 2.5000 ")
    assert lines[3:] == ["the end"]
    assert "step 40/40" in output.data["text/html"]
    assert "..." not in output.data["text/html"]


def test_progress_outside_a_kernel_prints_lines():
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        capture_output=True,
        text=True,
        timeout=helpers.TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert {"a line", "the end"} <= set(done.stdout.splitlines())
