"""Runs with stages: boundaries, gates, resets, and kills."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxlc.checkpoints.files import arrays_of, committed_steps, read_evaluations
from jaxlc.config import load_stages, read_config
from jaxlc.core.errors import UserError
from jaxlc.train import loop
from jaxlc.train.callbacks import TrainingStopped
from jaxlc.train.reports.plots import loss_figure
from jaxlc.train.stage import StageRun
from scripts import kill_drill
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")

_STAGES = """
    config.train.update(eval_every_steps=2, checkpoint_every_steps=2)
    config.stages = [
        dict(name="short", steps=4, max_eval_loss=9.0),
        dict(
            name="long",
            steps=3,
            optimizer_state="reset",
            data=dict(seq_len=256),
            model=dict(rope_theta=8e6),
            mesh=dict(fsdp=4, context=2, tensor=1),
            train=dict(global_batch_size=4, eval_sequences=4),
        ),
    ]
    return config
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory) -> Path:
    path = runs.write_config(tmp_path_factory.mktemp("stages"))
    path.write_text(path.read_text().replace("    return config\n", _STAGES.removeprefix("\n")))
    return path


@pytest.fixture(scope="module")
def undisturbed(config_path, tmp_path_factory) -> Path:
    """The workdir of a run of both stages."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    result = loop.run(read_config(str(config_path)), workdir)
    assert (result.step, result.config.data.seq_len, result.config.model.rope.theta) == (
        7,
        256,
        8e6,
    )
    return workdir


def _run(config_path: Path, workdir: Path, limit: float = 9.0, **mesh: int) -> None:
    """Runs the stages with a limit of the gate and, if given, all on another mesh."""
    config = read_config(str(config_path))
    short, long = config.stages
    if mesh:
        config.mesh.update(mesh)
        long = long.changed(mesh=mesh)
    config.stages = [short.changed(max_eval_loss=limit), long]
    loop.run(config, workdir)


def test_metrics_of_run_name_the_stage(undisturbed):
    rows = runs.rows(undisturbed)
    assert [(row["step"], row["stage"]) for row in rows if "loss" in row] == [
        *((step, "short") for step in range(1, 5)), *((step, "long") for step in range(5, 8))
    ]  # fmt: skip
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 2, 4, 6, 7]
    texts = [text.get_text() for text in loss_figure(rows).axes[0].texts]
    assert texts == ["short", "long"]


def test_reset_of_optimizer_restarts_its_count(undisturbed):
    """The schedule of the second stage is its own: the learning rates of both warm-ups are equal."""
    arrays = dict(arrays_of(undisturbed / "checkpoints" / "7"))
    counts = {name: int(array) for name, array in arrays.items() if name.endswith("/count")}
    assert set(counts.values()) == {3} and int(arrays["step"]) == 7
    rates = [row["learning_rate"] for row in runs.rows(undisturbed) if "loss" in row]
    assert rates[:3] == rates[4:]


def test_checkpoint_at_the_end_of_a_stage_is_kept(undisturbed):
    assert committed_steps(undisturbed / "checkpoints") == [4, 6, 7]


def test_gate_stops_before_the_next_stage(config_path, undisturbed, tmp_path):
    """Also when the run is started again, which changes nothing. A larger limit continues bitwise
    equal.

    Also if the checkpoint at the end of the stage is damaged: the run resumes in that stage, after
    compiling the next.
    """
    workdir = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(TrainingStopped) as stopped:
            _run(config_path, workdir, limit=0.1)
        message = str(stopped.value)
        assert "limit is max_eval_loss=0.1: stage long was not started" in message
        assert (
            str(workdir / "checkpoints" / "4") in message
            and "--config.stages.short.max_eval_loss=" in message
        )
        assert runs.rows(workdir) == [
            row for row in runs.rows(undisturbed) if row["stage"] == "short"
        ]
    runs.damage(workdir / "checkpoints" / "4")
    _run(config_path, workdir)
    assert kill_drill.differences(undisturbed, workdir, 7) == []


def test_run_killed_before_the_evaluation_at_the_end_of_a_stage_evaluates_it_first(
    config_path, undisturbed, tmp_path, monkeypatch
):
    """On the mesh of the stage that ended; its gate reads the loss."""
    evaluate = StageRun.evaluate

    def kill(run, position):
        if position.step == 4:
            raise SystemExit
        return evaluate(run, position)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(StageRun, "evaluate", kill)
        _run(config_path, tmp_path)
    assert committed_steps(tmp_path / "checkpoints") == [2, 4]
    _run(config_path, tmp_path)
    assert kill_drill.differences(undisturbed, tmp_path, 7) == []
    assert read_evaluations(tmp_path / "checkpoints") == read_evaluations(
        undisturbed / "checkpoints"
    )


@pytest.mark.full
def test_run_resumed_on_another_mesh_crosses_the_boundary(config_path, undisturbed, tmp_path):
    """The losses are equal within the rounding of sums in another order."""
    workdir = shutil.copytree(undisturbed, tmp_path / "copy")
    for step in ("6", "7"):
        shutil.rmtree(workdir / "checkpoints" / step)
    _run(config_path, workdir, fsdp=2, context=4, tensor=1)
    losses, others = (
        [row["loss"] for row in runs.rows(run) if "loss" in row] for run in (undisturbed, workdir)
    )
    assert losses != others and losses[:4] == others[:4]
    np.testing.assert_allclose(others, losses, rtol=1e-5)


def test_checkpoint_of_other_stages_raises(config_path, undisturbed, tmp_path):
    config = read_config(str(config_path))
    config.stages = [config.stages[0].changed(steps=6), config.stages[1]]
    message = "step 7 belongs to stage long, which starts after step 4, and in this config to stage long, which"
    with pytest.raises(UserError, match=message):
        loop.run(config, shutil.copytree(undisturbed, tmp_path / "copy"))


@pytest.mark.heavy
def test_killed_run_equals_the_undisturbed_run(config_path, undisturbed, tmp_path):
    """Kills inside a save and at the boundary; test_resume.py has a kill after a step.

    A changed row and a changed array are detected.
    """
    lines = []
    arguments = [f"--config={config_path}"]
    equal = kill_drill.drill(
        arguments, tmp_path, num_kills=2, seed=3, log=lines.append, undisturbed=undisturbed
    )
    assert equal and len(lines) == 5, lines
    places = {
        kill.place
        for kill in kill_drill.plan_kills(load_stages(read_config(str(config_path))), 2, 3)
    }
    assert places == {"save", "border"}
    metrics = tmp_path / "killed" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[-2]["loss"] += 1e-7
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert not list(checkpoints.glob("*tmp*"))
    shutil.rmtree(checkpoints / "7")
    shutil.copytree(checkpoints / "6", checkpoints / "7")
    metrics_problem, *array_problems = kill_drill.differences(undisturbed, tmp_path / "killed", 7)
    assert "metrics differ" in metrics_problem and any(
        "embedding" in problem for problem in array_problems
    )


@pytest.mark.full
def test_two_processes_cross_the_boundary_with_equal_losses(config_path, undisturbed, tmp_path):
    for run in runs.start_pair(config_path, tmp_path):
        runs.finish(run)
    losses, others = (
        [row["loss"] for row in runs.rows(run) if "loss" in row] for run in (undisturbed, tmp_path)
    )
    np.testing.assert_allclose(others, losses, rtol=1e-5)
