"""Nothing is lost: killed, told to stop, resumed elsewhere, or resumed from a damaged checkpoint."""

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.train import runs


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory) -> list[dict]:
    """The rows of a run that nothing happened to."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    runs.train(config, workdir)
    assert (workdir / "loss.png").stat().st_size > 5000
    assert (workdir / "loss_by_position.png").stat().st_size > 5000
    return runs.rows(workdir)


@pytest.fixture(scope="module")
def halfway(config, tmp_path_factory) -> Path:
    """A workdir whose run was killed when it had two checkpoints, of steps 4 and 8."""
    workdir = tmp_path_factory.mktemp("halfway")
    run = runs.start(config, workdir)
    runs.wait_until(lambda: (workdir / "checkpoints" / "8").exists(), run)
    run.kill()
    run.communicate()
    return workdir


def test_the_log_of_a_whole_run(uninterrupted):
    assert [row["step"] for row in uninterrupted if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in uninterrupted if "eval_loss" in row] == [0, 6, 12]
    assert set(uninterrupted[1]) == {"step", "loss", "grad_norm", "learning_rate"}


def test_killed_in_mid_run(config, uninterrupted, tmp_path):
    run = runs.start(config, tmp_path)
    runs.wait_until(lambda: (tmp_path / "checkpoints" / "4").exists(), run)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    output = runs.train(config, tmp_path)
    assert re.search(r"resuming from step (4|8|12) ", output), output
    assert runs.rows(tmp_path) == uninterrupted  # bitwise: floats survive JSON


@pytest.mark.heavy
def test_killed_while_a_checkpoint_is_written(config, uninterrupted, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    run = runs.start(config, tmp_path)
    runs.wait_until(lambda: list(checkpoints.glob("*tmp*")), run)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    runs.train(config, tmp_path)
    assert runs.rows(tmp_path) == uninterrupted
    assert not list(checkpoints.glob("*tmp*"))


def test_sigterm_saves_and_exits(config, uninterrupted, tmp_path):
    run = runs.start(config, tmp_path, train__checkpoint_every_steps=0)
    runs.wait_until(lambda: runs.step_of(tmp_path) >= 1, run)
    run.send_signal(signal.SIGTERM)
    runs.finish(run, status=128 + signal.SIGTERM)
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == [runs.step_of(tmp_path)]
    assert f"resuming from step {saved[0]} " in runs.train(config, tmp_path, train__checkpoint_every_steps=0)
    assert runs.rows(tmp_path) == uninterrupted


def _assert_same_losses(got: list[dict], wanted: list[dict], tolerance: float) -> None:
    assert [row["step"] for row in got] == [row["step"] for row in wanted]
    for mine, theirs in zip(got, wanted):
        np.testing.assert_allclose(
            mine.get("loss", mine.get("eval_loss")), theirs.get("loss", theirs.get("eval_loss")), rtol=tolerance
        )


@pytest.mark.parametrize(
    "mesh",
    [
        dict(mesh__fsdp=2, mesh__context=4, mesh__tensor=1),
        dict(mesh__context=3, mesh__tensor=2, runtime__simulated_devices=6, data__seq_len=132),
    ],
    ids=["fsdp", "other_length"],
)
@pytest.mark.heavy
def test_resumed_on_another_mesh(config, uninterrupted, halfway, tmp_path, mesh):
    """The same next rows, and the same losses; where rows have another length, it says so."""
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    output = runs.train(config, workdir, **mesh)
    if "data__seq_len" in mesh:
        assert "training goes on with other rows" in output
    else:
        _assert_same_losses(runs.rows(workdir), uninterrupted, 1e-5)


def test_resumed_by_two_processes(config, uninterrupted, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    primary, other = runs.start_pair(config, workdir)
    runs.finish(primary)
    # Only process 0 prints. Gloo's own lines come from several C++ threads at once, and may be torn.
    output = runs.finish(other)
    assert not re.search(r"mesh|compil|loss|resuming|checkpoint", output), output
    _assert_same_losses(runs.rows(workdir), uninterrupted, 1e-5)


@pytest.mark.heavy
def test_two_processes_from_the_start(config, uninterrupted, tmp_path):
    """Context lies across the processes: rank 0 and 1 of four in one, 2 and 3 in the other."""
    for run in runs.start_pair(config, tmp_path):
        runs.finish(run)
    _assert_same_losses(runs.rows(tmp_path), uninterrupted, 1e-6)


@pytest.mark.heavy
def test_sigterm_to_both_processes(config, tmp_path):
    pair = runs.start_pair(config, tmp_path, train__steps=400, train__eval_every_steps=0)
    runs.wait_until(lambda: runs.step_of(tmp_path) >= 3, pair[0])
    for run in pair:
        run.send_signal(signal.SIGTERM)
    for run in pair:
        runs.finish(run, status=128 + signal.SIGTERM)
    assert (tmp_path / "checkpoints" / str(runs.step_of(tmp_path))).exists()


def test_a_damaged_checkpoint_is_passed_over(config, uninterrupted, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    saved = [int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    newest = workdir / "checkpoints" / str(max(saved))
    for file in (newest / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    output = runs.train(config, workdir)
    assert f"checkpoint {newest} cannot be read" in output and f"resuming from step {min(saved)} " in output, output
    assert runs.rows(workdir) == uninterrupted


def test_a_finished_run_says_so(config, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    output = runs.train(config, workdir, train__steps=8)
    assert re.search(r"is already trained to step (8|12); train on with --config.train.steps=(16|24)", output), output


def test_another_models_workdir_is_refused(config, halfway):
    output = runs.train(config, halfway, status=2, model__ffn_dim=128)
    assert re.search(r"^error: checkpoint .* is of another model: ffn_dim is 64 there and 128", output, re.M), output


@pytest.mark.parametrize("nonfinite, status", [("stop", 1), ("skip", 0)])
def test_a_loss_that_is_not_finite(config, tmp_path, nonfinite, status):
    """A learning rate that no model survives."""
    output = runs.train(
        config,
        tmp_path,
        status,
        train__nonfinite=nonfinite,
        train__steps=6,
        train__checkpoint_every_steps=1,
        optimizer__learning_rate=1e20,
        optimizer__max_grad_norm=0,
        optimizer__warmup_steps=0,
    )
    assert re.search(r"step [1-6] has loss \S+ and gradient norm (nan|inf)", output), output
    if nonfinite == "stop":
        assert re.search(r"the last good checkpoint is step \d", output), output
