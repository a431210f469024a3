"""Streams of commands: an encoding without the characters, a reader that ended, a full disk, or
closed.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlc.cli import VERBS, main_of
from jaxlc.config.command_line import run_main

ROOT = Path(__file__).parents[2]
PREPARED = "import sys; from jaxlc import interrupts; from jaxlc.core import text; interrupts.prepare_streams(); "
PRINT = (
    PREPARED
    + "sys.exit(text.guarded(lambda: print('x', file=sys.stderr) or print('⟦a▁⟧ \\ud83d') or 0))"
)


def run(
    program: str, redirection: str = "", encoding: str = "utf-8"
) -> subprocess.CompletedProcess:
    """Runs a Python program in a shell that redirects its streams; `>&PIPE` is a pipe without a
    reader.
    """
    reader, pipe = os.pipe()
    os.close(reader)
    argv = [
        "bash",
        "-c",
        f'"$0" -c "$1" {redirection.replace("PIPE", str(pipe))}',
        sys.executable,
        program,
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": encoding,
        "PYTHONUNBUFFERED": "",
    }
    try:
        return subprocess.run(
            argv, capture_output=True, env=environment, encoding="utf-8", pass_fds=[pipe]
        )
    finally:
        os.close(pipe)


@pytest.mark.parametrize(
    ("redirection", "encoding", "status", "out", "error"),
    [
        ("", "utf-8", 0, "⟦a▁⟧ \\ud83d\n", "x\n"),
        ("", "ascii", 0, "[[a\\u2581]] \\ud83d\n", "x\n"),
        ("", "latin-1", 0, "[[a\\u2581]] \\ud83d\n", "x\n"),
        (">&-", "ascii", 0, "", "x\n"),
        ("<&- 2>&-", "ascii", 0, "[[a\\u2581]] \\ud83d\n", ""),
        ("<&- >&- 2>&-", "ascii", 0, "", ""),
        (
            ">/dev/full",
            "utf-8",
            1,
            "",
            "x\nerror: cannot write the output: No space left on device\n",
        ),
        (">&PIPE", "utf-8", 141, "", "x\n"),
        (">&PIPE 2>&1", "utf-8", 141, "", ""),
    ],
)
def test_command_prints_to_any_stream(redirection, encoding, status, out, error):
    done = run(PRINT, redirection, encoding)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, error)


def test_files_do_not_get_the_number_of_a_closed_stream():
    program = PREPARED + "sys.exit(open('/dev/null').fileno())"
    assert run(program, "<&- >&- 2>&-").returncode > 2


def test_library_is_imported_by_a_process_without_streams():
    program = "import jaxlc.runtime.stderr; raise SystemExit(open('/dev/null').fileno())"
    assert run(program, "<&- >&- 2>&-").returncode > 2


@pytest.mark.parametrize("redirection", [">/dev/full", ">&PIPE"])
def test_outlasting_process_goes_on_without_a_reader(redirection):
    program = PREPARED + "text.outlast(); [print('x' * 9999, flush=True)] * 2; sys.exit(7)"
    done = run(program, redirection)
    assert (done.returncode, done.stderr) == (7, "")


def test_error_of_other_files_is_raised():
    program = PREPARED + "sys.exit(text.guarded(lambda: open('/nowhere/x').read()))"
    assert "FileNotFoundError" in run(program).stderr


def test_commands_prepare_and_guard_their_streams():
    """One help text stands for all verbs: each calls `run_main`, and `jaxlc` guards the others."""
    assert (
        run("import sys; sys.argv = ['jaxlc']; import jaxlc; print('⟦')", encoding="ascii").stdout
        == "[[\n"
    )
    program = "import sys; sys.argv = ['jaxlc', 'sweep', '--help']; from jaxlc.cli import main; sys.exit(main())"
    done = run(program, ">&PIPE", encoding="ascii")
    assert (done.returncode, done.stderr) == (141, "")
    for verb in VERBS:
        main = main_of(verb)
        if getattr(main, "func", None) is not run_main:
            assert "run_main(" in inspect.getsource(main), verb


def test_texts_of_files_are_utf8_in_any_locale(tmp_path):
    path, out = tmp_path / "template.jinja", tmp_path / "log.txt"
    path.write_text("é{{ messages }}", encoding="utf-8")
    program = (
        "from pathlib import Path; from jaxlc.config.loading import read_template;"
        "from jaxlc.train.reports.progress import Progress;"
        "progress = Progress(peak_flops_per_second=None, is_primary=True); progress.log_to(Path(sys.argv[1]));"
        "progress.log(read_template(Path(sys.argv[2])));"
        "from jaxlc.evals.haystack import prose_of; assert prose_of((sys.argv[2],)).words[0][0] == chr(233);"
        "from jaxlc.train.reports import manifest; manifest._write(Path(sys.argv[3]), chr(233), {});"
        "assert manifest._read(Path(sys.argv[3]))[0].strip() == chr(233)"
    )
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(ROOT),
    }
    argv = [sys.executable, "-c", PREPARED + program, out, path, tmp_path / "config.py"]
    subprocess.run(argv, check=True, capture_output=True, env=environment)
    assert out.read_text(encoding="utf-8").endswith("é{{ messages }}\n")
