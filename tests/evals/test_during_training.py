"""config.evals: scores during training do not change it, resume after an interruption, and open or
close gates.
"""

import shutil

import pytest

from jaxlc.checkpoints.files import arrays_of, read_evaluations
from jaxlc.config import load_stages, read_config
from jaxlc.core.errors import UserError
from jaxlc.evals.predictions import read_scores
from jaxlc.generation.generator import CachedStep, Generator
from jaxlc.train import loop
from jaxlc.train.callbacks import TrainingStopped
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows
from tests.train import runs

_EVALS = dict(
    tasks=("passkey", "loss"), lengths=(512,), depths=(0.0, 1.0), num_examples=2, every_steps=1, context_limits=(64,)
)  # fmt: skip


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    return runs.write_config(tmp_path_factory.mktemp("evals"))


def _config(config_path, min_scores=(), **evals):
    """Two stages; only the first one has evaluations."""
    config = read_config(str(config_path))
    config.model.num_layers = 1
    config.train.update(eval_every_steps=0, checkpoint_every_steps=1)
    settings = _EVALS | dict(documents=config.data.sources) | evals
    config.stages = [
        dict(name="short", steps=2, evals=settings, min_scores=min_scores),
        dict(name="long", steps=1),
    ]
    return config


@pytest.fixture
def counts(monkeypatch):
    """Counts made generators, calls of them, and traced programs; call number `interrupted` is
    interrupted.
    """
    counts = dict(generators=0, calls=0, traces=0, interrupted=None)
    init, call, decode = Generator.__init__, Generator.__call__, CachedStep.run

    def count_generator(self, *args, **options):
        counts["generators"] += 1
        init(self, *args, **options)

    def count_call(self, *args, **options):
        counts["calls"] += 1
        if counts["calls"] == counts["interrupted"]:
            raise KeyboardInterrupt
        return call(self, *args, **options)

    def count_trace(self, *args):
        counts["traces"] += 1
        return decode(self, *args)

    monkeypatch.setattr(Generator, "__init__", count_generator)
    monkeypatch.setattr(Generator, "__call__", count_call)
    monkeypatch.setattr(CachedStep, "run", count_trace)
    return counts


@pytest.mark.heavy
def test_interrupted_evaluation_resumes_and_does_not_change_training(config_path, tmp_path, counts):
    plain, scored = tmp_path / "plain", tmp_path / "scored"
    config = _config(config_path)
    config.stages = [dict(name="short", steps=2), config.stages[1]]
    loop.run(config, plain)
    assert counts["generators"] == 0

    counts["interrupted"] = 10  # out of 12: 4 predictions at each of the steps 0, 1 and 2
    with pytest.raises(KeyboardInterrupt):
        loop.run(_config(config_path), scored)
    # prefill and decoding, compiled once
    assert counts == dict(generators=1, calls=10, traces=2, interrupted=10)
    path = scored / "evals" / "step-2" / "passkey-512-0.jsonl"
    before = path.read_text()
    counts |= dict(calls=0, interrupted=None)
    with pytest.raises(TrainingStopped) as stopped:
        loop.run(_config(config_path, min_scores=("passkey@512=50",)), scored)
    assert counts["calls"] == 3 and path.read_text().startswith(before)
    message = str(stopped.value)
    assert "stage short ended with the score passkey@512 0, and its limit is 50" in message
    assert f"stage long was not started; the checkpoint is {scored}/checkpoints/2" in message
    loop.run(_config(config_path, min_scores=("context_gain_64@512=-99",)), scored)

    losses = [[row["loss"] for row in runs.rows(run) if "loss" in row] for run in (plain, scored)]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    arrays = [dict(arrays_of(run / "checkpoints" / "3")) for run in (plain, scored)]
    assert all((arrays[0][name] == arrays[1][name]).all() for name in arrays[0]) and len(
        arrays[0]
    ) == len(arrays[1])

    names = ("passkey@512", "loss@512", "loss_last_256@512", "context_gain_64@512")
    for step in range(3):
        rows = {
            name: value
            for row in runs.rows(scored)
            if row["step"] == step
            for name, value in row.items()
        }
        assert {f"scores/{name}" for name in names} <= rows.keys()
        assert (
            rows["scores/passkey@512/num_examples"] == 4
            and rows["scores/loss@512/num_examples"] == 2
        )
        assert rows["scores/loss@512/standard_error"] > 0
        assert rows["scores/loss@512"] == read_scores(scored / "evals" / f"step-{step}")[0].score
    with_seconds = read_rows(scored / METRICS_FILE)
    assert all(
        row["scores/passkey@512/seconds"] >= 0
        for row in with_seconds
        if "scores/passkey@512" in row
    )
    assert read_evaluations(scored / "checkpoints")[2]["scores"].keys() == set(names)
    assert (scored / "evals" / "loss_by_position.png").exists()


@pytest.mark.parametrize(
    ("evals", "min_scores", "message"),
    [
        (
            dict(tasks=("neddle",)),
            (),
            "stage short: config.evals: unknown task 'neddle': did you mean needle",
        ),
        (dict(tasks=()), (), r"lengths=\(512,\) has no effect without config.evals.tasks"),
        (dict(depths=(2.0,)), (), "config.evals: invalid depths"),
        (
            {},
            ("passkey@1024=50",),
            "no score 'passkey@1024' in this stage: did you mean passkey@512",
        ),
        ({}, ("loss@512=3",), "no score 'loss@512' in this stage: expected one of|did you mean"),
        ({}, ("passkey@512>50",), "expected TASK@LENGTH=SCORE, such as needle@65536=80"),
    ],
)
def test_invalid_evals_and_gates_raise(config_path, evals, min_scores, message):
    with pytest.raises(UserError, match=message):
        load_stages(_config(config_path, min_scores, **evals))


def test_gate_of_the_last_stage_raises(config_path):
    config = _config(config_path)
    config.stages = [config.stages[0].changed(min_scores=("passkey@512=50",))]
    with pytest.raises(UserError, match="min_scores has no effect: no stage follows"):
        load_stages(config)


@pytest.mark.full
def test_two_processes_have_the_scores_of_one(config_path, tmp_path):
    """Only process 0 writes the predictions; when the run resumes, both use them."""
    evals = _EVALS | dict(documents=(config_path.parent / "corpus",))
    texts = {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in evals.items()
    }
    settings = dict(
        train__steps=2,
        train__eval_every_steps=0,
        train__checkpoint_every_steps=1,
        model__num_layers=1,
    )
    settings |= {f"evals__{name}": text for name, text in texts.items()}
    one, two = tmp_path / "one", tmp_path / "two"
    runs.train(config_path, one, **settings)
    for _ in range(2):
        for process in runs.start_pair(config_path, two, **settings):
            runs.finish(process)
        rows, others = runs.rows(two), runs.rows(one)
        assert [row.keys() for row in rows] == [row.keys() for row in others]
        assert all(
            row == pytest.approx(other, rel=1e-5, abs=1e-5) for row, other in zip(rows, others)
        )
        shutil.rmtree(two / "checkpoints" / "2")
