"""`jaxlc checkpoint ls | verify | rm`."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxlc.checkpoints.files import EVALUATIONS_FILE, LOCK_FILE, problem_of
from jaxlc.cli import main_of
from jaxlc.core.files import locked
from tests.checkpoints import test_checkpoint as checkpoints

main = main_of("checkpoint")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The command sets it."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    checkpoints.Run(workdir / "checkpoints").save(10, 20)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def run(*arguments: str | Path) -> int:
    return main(["jaxlc checkpoint", *map(str, arguments)])


def test_problem_of_valid_checkpoint_is_none(saved):
    assert problem_of(saved / "checkpoints" / "10") is None


@pytest.mark.parametrize("damage", checkpoints.DAMAGES)
def test_problem_of_damaged_checkpoint_is_found(workdir, damage):
    directory = workdir / "checkpoints"
    damage(checkpoints.Run(directory), 20)
    assert problem_of(directory / "20") is not None


def test_verify_names_the_damaged_checkpoint(workdir, capsys):
    checkpoints.flip_a_bit(checkpoints.Run(workdir / "checkpoints"), 20)
    assert run("verify", workdir) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 10: valid" and second.startswith("step 20: ")
    assert run("verify", workdir, "--steps=10") == 0


def test_list_shows_checkpoints_and_what_killed_runs_left(workdir, capsys):
    (workdir / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    assert run("ls", workdir) == 0
    head, first, second, left = capsys.readouterr().out.splitlines()
    assert (
        head.split()[:3] == ["step", "stage", "GiB"]
        and first.startswith("  10 ")
        and second.startswith("  20 ")
    )
    assert left.startswith("30.orbax-checkpoint-tmp: incomplete")


@pytest.mark.parametrize(
    "part", ["state", "checksums", "meta", "state/_METADATA", "state/manifest.ocdbt"]
)
def test_list_shows_what_a_checkpoint_lacks(workdir, capsys, part):
    path = workdir / "checkpoints" / "20" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (workdir / "checkpoints" / EVALUATIONS_FILE).write_text(
        '{"10": {"eval_loss": 2.5}, "20": {"eval_loss": null}}'
    )
    assert run("ls", workdir) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("2.5000") and "Error" in second, second


def test_remove_deletes_the_named_checkpoints_only(workdir, capsys):
    directory = workdir / "checkpoints"
    (directory / "30.orbax-checkpoint-tmp").mkdir()
    assert run("rm", workdir, "--steps=20") == 0
    assert sorted(path.name for path in directory.iterdir()) == ["10", "30.orbax-checkpoint-tmp"]
    assert run("rm", workdir, "--incomplete") == 0
    assert sorted(path.name for path in directory.iterdir()) == ["10"]
    assert run("rm", workdir, "--steps=10") == 2
    assert "these are all checkpoints of the run" in capsys.readouterr().err
    assert (checkpoints.Run(directory).restore()[0].step == jnp.int32(10)).all()


def test_remove_keeps_all_if_those_that_remain_are_damaged(workdir, capsys):
    checkpoints.flip_a_bit(checkpoints.Run(workdir / "checkpoints"), 20)
    assert run("rm", workdir, "--steps=10") == 2
    error = capsys.readouterr().err
    assert (
        "no checkpoint that would be kept is valid (step 20: " in error
        and ": keep another" in error
    )
    assert problem_of(workdir / "checkpoints" / "10") is None


def test_remove_while_a_run_trains_raises(workdir, capsys):
    with locked(workdir / LOCK_FILE, pytest.fail):
        imports = "from jaxlc.cli import main_of"
        code = f"{imports}; main_of('checkpoint')(['', 'rm', {str(workdir)!r}, '--steps=20'])"
        removal = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "stop it first" in removal.stderr
    assert (workdir / "checkpoints" / "20").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["lst", "RUN"], "invalid ACTION=lst: expected one of 'ls', 'verify', 'rm'"),
        (["ls", "RUN", "--steps=10"], "--steps has no effect on ls"),
        (["verify", "RUN", "--incomplete"], "--incomplete has no effect on verify"),
        (["rm", "RUN"], "nothing to delete"),
        (["rm", "RUN", "--steps=15"], "no checkpoint of step 15"),
        (["verify", "RUN/checkpoints"], "no checkpoint in"),
    ],
)
def test_invalid_arguments_raise(saved, capsys, arguments, message):
    assert run(*(argument.replace("RUN", str(saved)) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
