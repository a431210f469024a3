"""One run at a time in a workdir, and a full disk."""

import errno
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from jaxlc.checkpoints import files as checkpoint_files
from jaxlc.checkpoints.save import Checkpoints, Storage
from jaxlc.core.errors import UserError, WriteError
from jaxlc.core.files import locked
from jaxlc.train import stage
from jaxlc.train.stage import LOCK_FILE, open_workdir
from tests.train import runs


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(stage, "LOCK_SECONDS", 0.0)


def test_open_workdir_twice_raises_and_after_a_failure_works(tmp_path):
    lines = []
    for _ in range(2):
        with pytest.raises(KeyError), open_workdir(tmp_path, pytest.fail) as path:
            assert path == tmp_path
            with pytest.raises(
                UserError, match=f"process {os.getpid()} on .* trains in {tmp_path}: wait"
            ):
                open_workdir(tmp_path, lines.append).__enter__()
            raise KeyError
    assert len(lines) == 2 and "waiting up to 0 s for process" in lines[0]
    assert not (tmp_path / LOCK_FILE).exists()


def test_train_beside_another_run_is_refused(tmp_path):
    config = runs.write_config(tmp_path)
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run" / LOCK_FILE, pytest.fail):
        output = runs.train(config, tmp_path / "run", status=2)
    assert output.splitlines()[-1].startswith(f"error: process {os.getpid()} on "), output
    assert "compil" not in output


@pytest.mark.heavy
def test_two_processes_beside_another_run_end(tmp_path):
    config = runs.write_config(tmp_path)
    config.write_text(
        config.read_text() + "\nfrom jaxlc.train import stage\nstage.LOCK_SECONDS = 1.0\n"
    )
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run" / LOCK_FILE, pytest.fail):
        primary, other = runs.start_pair(config, tmp_path / "run")
        assert f"error: process {os.getpid()} on " in runs.finish(primary, status=2)
        assert "process 0 of 2" in runs.finish(other, status=1)


_FULL = "RESOURCE_EXHAUSTED: Error writing to local file: [OS error 28: No space left on device]"


@pytest.mark.parametrize("steps", [(2, 10), ()])
def test_full_disk_names_the_step_and_deletes_the_incomplete_checkpoint(tmp_path, steps):
    with pytest.raises(UserError) as error, open_workdir(tmp_path, pytest.fail) as path:
        for name in (*map(str, steps), "12.orbax-checkpoint-tmp"):
            (path / "checkpoints" / name).mkdir()
        raise ValueError(_FULL)
    kept = "checkpoint of step 10 is complete" if steps else "there is no checkpoint yet"
    assert f"cannot write to {tmp_path} (No space left on device): " in str(error.value)
    assert kept in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == sorted(
        map(str, steps)
    )


def test_full_disk_after_an_evaluation_names_the_complete_checkpoint(tmp_path, monkeypatch):
    """Its own step may not be saved, since that is done in the background."""
    monkeypatch.setattr(Storage, "has", lambda *_: True)
    full = Mock(side_effect=OSError(28, "No space left on device", str(tmp_path / "checkpoints/x")))
    monkeypatch.setattr(checkpoint_files, "replacing", full)
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    words = "checkpoints .No space.*the checkpoint of step 2 is complete; free space, then run"
    with pytest.raises(UserError, match=words), open_workdir(tmp_path, pytest.fail) as path:
        checkpoints = Checkpoints(path / "checkpoints", keep=1, warn=pytest.fail)
        checkpoints.add_evaluation(4, eval_loss=1.0)
    full.side_effect = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(UserError, match="evaluations.json .*denied.*to evaluate step 4 and to"):
        checkpoints.add_evaluation(4, eval_loss=1.0)


@pytest.mark.parametrize(
    ("error", "name", "problem"),
    [
        (
            errno.ENOENT,
            "x.jsonl",
            r"cannot use .*x.jsonl \(No such file .*\): there is no checkpoint",
        ),
        (errno.EROFS, None, r"cannot use .* \(Read-only file system\): .* repair .*, then run"),
        (errno.ENOENT, "../own.txt", None),
        (errno.EROFS, "../own.txt", None),
        (errno.ENOENT, None, None),
    ],
)
def test_lost_workdir_ends_a_run_with_one_line(tmp_path, error, name, problem):
    """Not an error of another file, such as one of a callback."""
    workdir = tmp_path / "run"
    path = name and os.path.normpath(workdir / name)
    with (
        pytest.raises((OSError, WriteError), match=problem) as raised,
        open_workdir(workdir, pytest.fail),
    ):
        raise OSError(error, os.strerror(error), path)
    assert isinstance(raised.value, WriteError) == (problem is not None)


_TINY_DISK = """
import subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", sys.argv[1]], check=True)
print("MOUNTED", flush=True)
import jax, jax.numpy as jnp
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.train.stage import open_workdir
try:
    with open_workdir(sys.argv[1], print) as path:
        checkpoints = Checkpoints(path / "checkpoints", keep=2, warn=print)
        for step in range(1, 9):
            params = {f"w{i}": jax.random.normal(jax.random.key(i), (200, 64)) for i in range(8)}
            state = dict(params=params, step=jnp.int32(step))
            checkpoints.save(step, state, dict(next_row=step, config=dict(model=dict(vocab_size=61))))
        checkpoints.close()
except ValueError as error:
    print(f"error: {error}")
"""


def test_full_disk_prints_no_traceback_of_the_threads_that_save(tmp_path):
    """A real one, where the user may mount one."""
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        _TINY_DISK,
        str(tmp_path),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(runs.ROOT),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no command unshare")
    if "MOUNTED" not in done.stdout:
        pytest.skip("mount is not permitted")
    assert "Traceback" not in done.stderr and "ERROR" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[1:] == [
        f"error: cannot write to {tmp_path} (No space left on device): the checkpoint of step 1 is complete;"
        " free space, then run the same command again to resume"
    ]
