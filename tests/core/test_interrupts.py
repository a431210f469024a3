"""Ctrl-C, SIGTERM and SIGHUP, also where Python or JAX would not report them as KeyboardInterrupt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each case in a process of its own, forked after the imports.
_CASES = """
import hashlib, os, pathlib, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
from jaxlc.config.command_line import VerbFlags, run_main
from jaxlc import interrupts
sys.argv[0] = "jaxlc"
interrupts.install_for_command()
sys.path.insert(0, sys.argv[1])
pathlib.Path(sys.argv[1], "interrupted_module.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")

def press(command=None):
    signal.raise_signal(signal.SIGINT)

def converted(command):
    try:
        press()
    except BaseException:
        raise ImportError("initialization failed")

def importing(command):
    try:
        import interrupted_module
    except BaseException:
        raise ImportError("initialization failed")

class Finalized:
    __del__ = press

def finalizing(command):
    Finalized()
    time.sleep(60)

def ignored(command):
    try:
        press()
    except BaseException:
        time.sleep(60)

def own_message(command):
    try:
        press()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("1 of 3 is kept")

def terminated(command):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def hung_up(command):
    signal.raise_signal(signal.SIGHUP)

def compiling(command):  # no Python code runs in the main thread
    with interrupts.undone(lambda: print("undone", flush=True)):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def unheard(command):
    signal.raise_signal(signal.SIGHUP)
    print("it goes on", flush=True)
    return 0

class Flags(VerbFlags):
    interrupted = "what is kept"

interrupts._END_SECONDS = 0.2
for case in (press, converted, importing, finalizing, ignored, own_message, terminated, hung_up, compiling, unheard):
    if case is unheard:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup
    print(case.__name__, flush=True)
    if not os.fork():
        os._exit(run_main(case, ["jaxlc"], flags=Flags))
    print("status", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
press()
"""


def test_signal_in_a_command_prints_one_sentence(tmp_path):
    command = [sys.executable, "-c", _CASES, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    names = ("press", "converted", "importing", "finalizing", "ignored", "own_message")
    sentences = ["1 of 3 is kept" if name == "own_message" else "what is kept" for name in names]
    cases = [
        f"{name}\n{sentence}\nstatus 130\n" for name, sentence in zip(names, sentences, strict=True)
    ]
    cases += [
        f"{name}\nwhat is kept\nstatus {status}\n"
        for name, status in (("terminated", 143), ("hung_up", 129))
    ]
    cases += ["compiling\nwhat is kept\nundone\nstatus 143\n", "unheard\nit goes on\nstatus 0\n"]
    assert done.stdout == "".join(cases) + "interrupted\n"  # the last one outside of a command
    assert done.returncode == 130


@pytest.mark.parametrize(
    "program", [["-m", "jaxlc.evals"], ["-m", "jaxlc.exporting"], ["jaxlc", "generate"]]
)
def test_ctrl_c_in_the_first_imports_prints_one_sentence(tmp_path, program):
    (tmp_path / "jaxlc").write_text("from jaxlc.cli import main; main()")  # as pip writes it
    press = "import signal; signal.raise_signal(signal.SIGINT)"
    (tmp_path / "ml_collections.py").write_text(press)
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "sitecustomize.py").write_text(start)
    arguments = [str(tmp_path / program[0]) if program[0] == "jaxlc" else program[0], *program[1:]]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
