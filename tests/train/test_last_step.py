"""The state of a step is saved before anything that may fail, and an evaluation that is missing
comes first.
"""

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.checkpoints.files import Evaluations, committed_steps, read_evaluations
from jaxlc.config import load_stages, read_config
from jaxlc.core.errors import UserError
from jaxlc.evals.evaluate_run import NamedScore
from jaxlc.train import stage, stage_setup
from jaxlc.train.callbacks import Callbacks
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.reports.metrics import MetricsLog
from jaxlc.train.stage import StageRun
from jaxlc.train.stage_setup import PreparedStage
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")
STEPS = 24


class Bigram:
    """A model that compiles fast."""

    def init(self, key):
        return {"table": jax.random.normal(key, (64, 64))}

    def apply(self, params, batch, mesh):
        return params["table"][batch.tokens]


MODEL = Bigram()


class Killed(BaseException):
    """Ends a run like a kill."""


class FakeScorer:
    def check(self):
        pass

    def __call__(self, *_):
        return [NamedScore("needle@64", 50.0, 1.0, 4, 0.1)]


class Recorder(jaxlc.train.Callback):
    pass


def train(workdir, steps=STEPS, callbacks=(), eval_batches=None, **settings):
    config = jaxlc.config.defaults()
    config.model.vocab_size = config.data.seq_len = 64
    config.mesh.data, config.optimizer.learning_rate, config.optimizer.schedule = 8, 0.1, "constant"
    config.runtime.straggler_every_steps = config.evals.every_steps = 2
    config.evals.tasks = ("needle",)
    config.train.update(steps=steps, global_batch_size=8, eval_sequences=8)
    config.train.update(dict(checkpoint_every_steps=2, eval_every_steps=2) | settings)
    tokens = np.random.default_rng(0).integers(64, size=(STEPS, 8, 64), dtype=np.int32)
    batches = [{"tokens": batch} for batch in tokens]
    eval_batches = eval_batches or batches[:1]
    return jaxlc.train.run(
        config,
        workdir,
        model=MODEL,
        batches=batches,
        eval_batches=eval_batches,
        callbacks=callbacks,
    )


def saved_steps(workdir) -> list[int]:
    return committed_steps(workdir / "checkpoints")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Without measurements of devices; every evaluation has a score."""
    monkeypatch.setattr("jaxlc.train.stragglers.Stragglers.measure", lambda *_: {})
    monkeypatch.setattr(PreparedStage, "scorer", FakeScorer())


def fail(monkeypatch, owner, name: str, step: int, error: BaseException, event: str = "") -> None:
    """`owner.name` raises if it is called for `step`, and for the callback `event`."""
    original = getattr(owner, name)

    def failing(*arguments, **keywords):
        numbers = [
            keywords.get("step"),
            *(getattr(x, "step", x) for x in arguments if not isinstance(x, dict)),
        ]
        numbers += [x.get("step") for x in arguments if isinstance(x, dict)]
        if step in numbers and event in ("", *(x for x in arguments if isinstance(x, str))):
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, failing)


def test_run_that_fails_after_every_second_step_ends_like_an_undisturbed_one(tmp_path, monkeypatch):
    """Each start fails in another place after its second step, which is saved; the next start
    continues from there.
    """
    places = [
        (MetricsLog, "write"), (Callbacks, "__call__", "on_step"), (Callbacks, "__call__", "on_log"),
        (Callbacks, "__call__", "on_checkpoint"), (StageRun, "evaluate"), (Evaluations, "add"),
        (Callbacks, "__call__", "on_evaluation"), (StageRun, "score"), (StageRun, "compare_processes"),
        (stage, "write_report"), (Callbacks, "__call__", "on_end"),
    ]  # fmt: skip
    errors = [RuntimeError("it fails"), Killed("it fails")]
    workdir, last = tmp_path / "disturbed", 2 * len(places)
    for number, (owner, name, *event) in enumerate(places, start=1):
        step = min(2 * number, last - 2)
        with (
            monkeypatch.context() as patch,
            pytest.raises((RuntimeError, Killed), match="it fails"),
        ):
            fail(patch, owner, name, step, errors[number % 2], *event)
            train(workdir, steps=last - 2, callbacks=[Recorder()])
        assert saved_steps(workdir)[-1] == step, name
    train(workdir, steps=last)
    train(tmp_path / "whole", steps=last)
    assert runs.rows(workdir) == runs.rows(tmp_path / "whole")
    first, second = (
        read_evaluations(path / "checkpoints") for path in (workdir, tmp_path / "whole")
    )
    assert first == second and first[last] == dict(
        eval_loss=first[last]["eval_loss"], scores={"needle@64": 50.0}
    )


@pytest.mark.parametrize(
    "losses, kept", [((3, 1, 2), [4, 6]), ((1, 1, 1), [2, 6]), ((np.nan, 5, np.nan), [4, 6])]
)
def test_best_checkpoint_is_kept_although_its_evaluation_was_interrupted(
    tmp_path, monkeypatch, losses, kept
):
    """keep_best_checkpoints=1: the kill comes between save and evaluation. Of equal losses the
    first is the best; one that is not finite is none."""
    monkeypatch.setattr(Evaluation, "loss", property(lambda self: values[0]))
    values = [0.0]
    for step, loss in zip((2, 4, 6), losses):
        values[0] = float(loss)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            fail(patch, StageRun, "evaluate", step, Killed())
            train(tmp_path, steps=6, keep_checkpoints=1, keep_best_checkpoints=1)
        assert step in saved_steps(tmp_path)
        # the missing evaluation is first
        with monkeypatch.context() as patch, pytest.raises(Killed):
            fail(patch, StageRun, "score", step, Killed())
            train(tmp_path, steps=6, keep_checkpoints=1, keep_best_checkpoints=1)
    train(tmp_path, steps=6, keep_checkpoints=1, keep_best_checkpoints=1)
    assert saved_steps(tmp_path) == kept


def test_held_out_batches_without_targets_are_refused(tmp_path):
    batches = [
        {"tokens": np.ones((8, 64), np.int32), "loss_weights": np.zeros((8, 64), np.float32)}
    ]
    with pytest.raises(
        UserError, match="no token of the 8 held-out sequences has a loss: use other held-out data"
    ):
        train(tmp_path / "new", eval_batches=batches)
    assert not (tmp_path / "new").exists()


def test_different_settings_of_a_process_are_named(monkeypatch):
    def stages(**optimizer):
        config = read_config("quickstart")
        config.optimizer.update(optimizer)
        config.data.cache_dir = f"/disk{len(optimizer)}"  # may differ
        return load_stages(config)

    texts: list[str] = []
    monkeypatch.setattr(
        stage_setup, "text_of_process_0", lambda _, text: texts.append(text) or texts[0]
    )
    stage_setup.check_equal_settings(stages(learning_rate=1e-3))
    stage_setup.check_equal_settings(stages(learning_rate=1e-3, warmup_steps=10))
    words = r"process 0 has config.optimizer.learning_rate=0.002, where process 0 has 0.001: start"
    with pytest.raises(UserError, match=words):
        stage_setup.check_equal_settings(stages(learning_rate=2e-3))
