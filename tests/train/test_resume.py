"""Runs that are killed or stopped resume without loss, also on another mesh and from damaged
checkpoints.
"""

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import jaxlc
from jaxlc.config import load, read_config
from jaxlc.train.reports.metrics import MetricsLog
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory) -> list[dict]:
    """The metrics rows of a run that was not interrupted."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    runs.train(config, workdir)
    return runs.rows(workdir)


@pytest.fixture(scope="module")
def halfway(config, tmp_path_factory) -> Path:
    """A workdir whose run was killed when it had the checkpoints of steps 4 and 8."""
    workdir = tmp_path_factory.mktemp("halfway")
    run = runs.start(runs.write_slow_config(config), workdir)
    runs.wait_until(lambda: (workdir / "checkpoints" / "8").exists(), run)
    run.kill()
    run.communicate()
    return workdir


def test_uninterrupted_run_logs_every_step(uninterrupted):
    assert [row["step"] for row in uninterrupted if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in uninterrupted if "eval_loss" in row] == [0, 6, 12]
    assert set(uninterrupted[1]) == {"step", "loss", "grad_norm", "learning_rate"}


def test_run_killed_between_checkpoints_resumes_bitwise(config, uninterrupted, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    # of an earlier start, perhaps with other settings
    samples = [workdir / "samples" / f"{step}.jsonl" for step in (4, 13)]
    exports = [workdir / name / str(step) for name in ("exported", "adapters") for step in (4, 13)]
    other = workdir / "adapters" / "13.tar"  # not written by a run
    for path in (*samples, *exports, other):
        path.parent.mkdir(exist_ok=True)
        path.touch() if path.suffix else path.mkdir()
    output = runs.train(config, workdir)
    assert [path.exists() for path in (*samples, *exports)] == [True, False] * 3 and other.exists()
    assert re.search(r"resuming from step (8|12) ", output), output
    assert runs.rows(workdir) == uninterrupted  # bitwise: floats survive JSON
    log = (workdir / "log.txt").read_text()
    assert log.count(" START ") == 2 and "\nmodel      tiny with random weights, " in log
    assert "resuming from step" in log
    assert read_config(str(workdir / "resolved_config.py")).train.steps == 12
    assert not (workdir / "resolved_config-1.py").exists()


@pytest.fixture
def signal_after(monkeypatch):
    """A function that raises signals in this process after the row of a step is written, while the
    next step runs.
    """
    write = MetricsLog.write

    def set_signals(after_step: int, *numbers: signal.Signals) -> None:
        def write_and_raise(self, *, step, **values):
            write(self, step=step, **values)
            for number in numbers if step == after_step and "loss" in values else ():
                signal.raise_signal(number)

        monkeypatch.setattr(MetricsLog, "write", write_and_raise)

    return set_signals


def test_run_stopped_by_ctrl_c_then_sigterm_resumes_bitwise(
    config, uninterrupted, tmp_path, signal_after, capfd
):
    def stop(number: signal.Signals, after_step: int) -> str:
        """Stops a run, which saves the step that follows the next one, and returns its output."""
        signal_after(after_step, number)
        output = runs.train(config, tmp_path, status=128 + number, train__checkpoint_every_steps=0)
        saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
        assert saved == runs.step_of(tmp_path) == after_step + 2
        assert (
            f"stopped after step {saved}, saved a checkpoint; run the same command again to resume"
            in output
        )
        return output

    stop(signal.SIGINT, after_step=1)
    message = (
        "Ctrl-C: saving a checkpoint after this step; press Ctrl-C again to stop now without saving"
    )
    assert message in capfd.readouterr().err
    assert "resuming from step 3 " in stop(signal.SIGTERM, after_step=5)
    signal_after(0)
    assert "resuming from step 7 " in runs.train(config, tmp_path, train__checkpoint_every_steps=0)
    assert runs.rows(tmp_path) == uninterrupted


def test_second_ctrl_c_ends_the_run_at_once(config, tmp_path, signal_after):
    signal_after(10, signal.SIGINT, signal.SIGINT)
    output = runs.train(config, tmp_path, status=130)
    assert runs.step_of(tmp_path) == 10
    assert re.search(
        r"interrupted; the latest checkpoint in .* is of step [48]; run the same command", output
    ), output


def _assert_same_losses(got: list[dict], expected: list[dict], tolerance: float) -> None:
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    for mine, theirs in zip(got, expected):
        np.testing.assert_allclose(
            mine.get("loss", mine.get("eval_loss")),
            theirs.get("loss", theirs.get("eval_loss")),
            rtol=tolerance,
        )


@pytest.mark.parametrize(
    "mesh",
    [
        dict(mesh__fsdp=2, mesh__tensor=1, mesh__context=2, runtime__simulated_devices=4),
        # The tokens of a sequence in another order.
        pytest.param(dict(attention__document_sharding=False), marks=pytest.mark.full),
    ],
    ids=["half of the devices", "zigzag"],
)
@pytest.mark.heavy
def test_run_resumed_on_another_mesh_has_equal_losses(
    config, uninterrupted, halfway, tmp_path, mesh
):
    """The same next sequences and losses."""
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    runs.train_elsewhere(config, workdir, **mesh)
    _assert_same_losses(runs.rows(workdir), uninterrupted, 1e-5)


def test_run_resumed_with_another_length_says_that_sequences_differ(config, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    output = runs.train(config, workdir, data__seq_len=144)
    assert "training continues with different sequences" in output
    steps = int(re.findall(r"resuming from step (\d+)", output)[0])
    loaded = load(read_config(str(config)))
    num_tokens = loaded.train.global_batch_size * (steps * loaded.data.seq_len + (12 - steps) * 144)
    assert f"trained         12 steps, {num_tokens:,} tokens" in output


@pytest.mark.full
def test_run_resumed_by_two_processes_has_equal_losses(config, uninterrupted, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    primary, other = runs.start_pair(config, workdir)
    runs.finish(primary)
    # Only process 0 prints. Gloo prints from several C++ threads, so its lines may be interleaved.
    output = runs.finish(other)
    assert not re.search(r"mesh|compil|loss|resuming|checkpoint", output), output
    _assert_same_losses(runs.rows(workdir), uninterrupted, 1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param((signal.SIGTERM, signal.SIGTERM), id="sigterm", marks=pytest.mark.full),
        pytest.param((signal.SIGINT, None), id="ctrl_c", marks=pytest.mark.full),
        pytest.param((signal.SIGHUP, None), id="hang_up"),
    ],
)
def test_run_of_two_processes_stopped_by_signal_has_equal_losses(
    config, uninterrupted, tmp_path, signals
):
    """A signal to one process stops both after the same step; the other one exits as after SIGTERM.

    The context axis spans the processes: ranks 0 and 1 of four in one, 2 and 3 in the other. Each
    reads its shards of the initial weights from a Hugging Face directory. One process resumes.
    """
    runs.save_step_0(read_config(str(config)), tmp_path / "initial")
    weights = jaxlc.export(tmp_path / "initial", tmp_path / "weights", dtype="fp32")
    settings = dict(model__init_from=weights, data__tokenizer="bytes")
    pair = runs.start_pair(runs.write_slow_config(config), tmp_path, **settings)
    runs.wait_until(lambda: runs.step_of(tmp_path) >= 3, pair[0])
    for run, number in zip(pair, signals):
        if number is not None:
            run.send_signal(number)
    for run, number in zip(pair, signals):
        output = runs.finish(run, status=128 + (number or signal.SIGTERM))
        assert output.count("bytes read by this process") <= 1
    saved = runs.step_of(tmp_path)
    assert 3 <= saved < 12 and (tmp_path / "checkpoints" / str(saved)).exists()
    assert f"resuming from step {saved} " in runs.train(config, tmp_path, **settings)
    _assert_same_losses(runs.rows(tmp_path), uninterrupted, 1e-6)


def test_run_with_damaged_checkpoint_resumes_from_older_one(
    config, uninterrupted, halfway, tmp_path
):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    *_, older, latest = sorted(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    )
    newest = workdir / "checkpoints" / str(latest)
    runs.damage(newest)
    output = runs.train(config, workdir)
    assert (
        f"checkpoint {newest} cannot be read" in output and f"resuming from step {older} " in output
    ), output
    assert runs.rows(workdir) == uninterrupted


def test_run_already_trained_says_how_to_continue(config, halfway, tmp_path):
    workdir = shutil.copytree(halfway, tmp_path / "copy")
    output = runs.train(config, workdir, train__steps=8)
    assert re.search(
        r"is already trained to step (8|12): continue with --config.train.steps=(16|24)", output
    ), output


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (dict(model__ffn_dim=128), "config.model.ffn_dim=64, and this config has 128"),
        (dict(optimizer__name="muon"), "config.optimizer.name=adamw, and this config has muon"),
        (
            dict(precision__compute="fp16"),
            "config.precision.compute=auto, and this config has fp16",
        ),
    ],
)
def test_run_with_checkpoint_of_other_settings_raises_before_it_compiles_or_writes(
    config, halfway, monkeypatch, settings, problem
):
    monkeypatch.setattr("jaxlc.step.step.TrainStep.compile", lambda _: pytest.fail("compiled"))
    (halfway / "run.lock").unlink(missing_ok=True)  # of the killed run
    before = {path: path.stat().st_mtime_ns for path in halfway.rglob("*")}
    output = runs.train(config, halfway, status=2, **settings)
    assert output.rstrip().endswith("; use a different --workdir")
    assert re.search(f"^error: checkpoint .* has {problem}", output, re.M), output
    assert {path: path.stat().st_mtime_ns for path in halfway.rglob("*")} == before


@pytest.mark.parametrize("nonfinite, status", [("stop", 1), ("skip", 0)])
def test_run_with_nonfinite_loss_stops_or_skips(config, tmp_path, nonfinite, status):
    """A learning rate of 1e20 makes the loss overflow."""
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
    if nonfinite == "stop":  # the next case follows this advice
        assert "continue past such steps with --config.train.nonfinite=skip" in output
        assert re.search(r"the last good checkpoint is step \d", output), output
