"""`jaxlc.train.run` and `jaxlc.load` in Python: the result, custom batches, callbacks."""

import json
import shutil

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.cli import main_of
from jaxlc.config import load, read_config, with_settings
from jaxlc.config.flops import document_pairs
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.step.language_model import padded_length
from jaxlc.step.step import TrainStep
from jaxlc.train.reports.metrics import PendingMetrics
from jaxlc.train.result import _on_mesh
from tests.step.synthetic import small_config, small_step
from tests.tolerances import FLOAT32_PARITY
from tests.train import runs

profile_main = main_of("profile")

pytestmark = pytest.mark.usefixtures("shared_programs")
TEXT = "seven 3 eleven 14 and some other words of a text that is not in the corpus " * 3
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = read_config(str(runs.write_config(tmp_path_factory.mktemp("run"))))
    config.model.num_layers = 1
    config.train.update(steps=STEPS, checkpoint_every_steps=2, eval_every_steps=2)
    config.profile.steps = "3:5"
    return config


class _Recorder(jaxlc.train.Callback):
    """Records events; stops training at an event of the step `stop_after`."""

    def __init__(self, stop_after: int | None = None, event: str = "step"):
        self.events, self.stop_after = [], (event, stop_after)

    def on_start(self, run):
        self.events.append(("start", run.first_step))

    def on_step(self, step, metrics):
        assert metrics["loss"] > 0 and metrics["grad_norm"] > 0
        self._add("step", step)

    def on_log(self, row):
        self.events.append(("log", row["step"]))

    def on_evaluation(self, step, evaluation):
        assert evaluation.loss > 0
        self._add("evaluation", step)

    def on_checkpoint(self, step, path):
        assert path.name == str(step)
        self.events.append(("checkpoint", step))

    def on_end(self, result):
        self.events.append(("end", result.step))

    def _add(self, *event):
        self.events.append(event)
        if event == self.stop_after:
            raise jaxlc.train.StopTraining


@pytest.fixture(scope="module")
def recorder():
    return _Recorder()


@pytest.fixture(scope="module")
def result(config, recorder, tmp_path_factory):
    return jaxlc.train.run(config, tmp_path_factory.mktemp("work") / "w", callbacks=[recorder])


def test_callbacks_receive_every_event_in_order(result, recorder):
    def events_at(step):
        events = [("step", step), ("log", step)]
        return [("checkpoint", step), *events, ("evaluation", step)] if step % 2 == 0 else events

    expected = [event for step in range(1, STEPS + 1) for event in events_at(step)]
    assert recorder.events == [("start", 0), ("evaluation", 0), *expected, ("end", STEPS)]


def test_result_has_history_as_columns_and_paths(result):
    history = result.history
    assert len({len(column) for column in history.values()}) == 1
    steps, losses = history.column("loss")
    assert steps.tolist() == [1, 2, 3, 4] and losses[-1] < losses[0]
    assert history.column("eval_loss")[0].tolist() == [0, 2, 4]
    assert all(path.exists() for path in result.paths.values())
    assert {
        "metrics",
        "loss_figure",
        "optimizer_figure",
        "loss_by_position_figure",
    } <= result.paths.keys()
    assert repr(result).startswith("Result(step 4 of 4, held-out loss ") and "\n" not in repr(
        history
    )
    assert (
        "held-out loss" in result._repr_html_() and "rows of metrics.jsonl" in history._repr_html_()
    )


def test_rate_of_a_step_counts_pairs_of_its_documents(config, result):
    config, history = load(config), result.history
    train, batch_size = open_corpus(config.data).train, config.train.global_batch_size
    flops = (history["flops_per_second_documents"] * history["step_seconds"])[
        np.isfinite(history["loss"])
    ]
    for step in range(STEPS):
        sequences = [train[step * batch_size + i]["segment_ids"] for i in range(batch_size)]
        pairs = sum(
            document_pairs(config.model, np.bincount(segment_ids)[1:]) for segment_ids in sequences
        )
        assert flops[step] == pytest.approx(config.step_flops(pairs).total, rel=1e-6)
    assert min(flops) < config.flops_per_step


def test_traced_steps_are_compared_by_class(result, tmp_path, capsys):
    """Of simulated CPU devices; the GPUs of the estimate are any with the run's number of devices."""
    arguments = ["jaxlc profile", str(result.workdir / "profile"), "--topology=h100:1x8"]
    assert profile_main([*arguments, f"--json={tmp_path / 'comparison.json'}"]) == 0
    page = capsys.readouterr().out
    assert "mean of 2 steps and 8 devices" in page and "no estimate" not in page
    values = json.loads((tmp_path / "comparison.json").read_text())
    seconds = {row["name"]: row["measured_seconds"] for row in values["classes"]}
    assert all(seconds[name] > 0 for name in ("attention", "matrix products", "other kernels"))
    assert (
        sum(seconds.values()) == pytest.approx(values["step_seconds"])
        and values["communication_seconds"] > 0
    )
    # A ring of 4: per layer three sends of K/V forward and backward, and four of dK/dV.
    assert sum(row["runs_per_step"] for row in values["ring_steps"]) >= 9
    assert all(
        row["measured_seconds"] > 0 and row["estimated_seconds"] > 0 for row in values["ring_steps"]
    )
    assert values["unknown_seconds"] < 0.05 * values["step_seconds"]
    assert 0 < values["estimated_pairs_share"] < 1  # sequences have several documents
    assert profile_main([*arguments[:2], "--topology=h100:1x4"]) == 2
    assert "had 8" in capsys.readouterr().err


def test_result_evaluates_again_with_the_same_loss(result):
    assert result.evaluate().loss == result.evaluation.loss


def test_result_returns_figures(result):
    assert result.loss_figure().axes and result.loss_by_position_figure().axes
    with pytest.raises(UserError, match="the run has no rollouts"):
        result.reward_figure()


@pytest.mark.parametrize("name", ["loss_figure", "loss_by_position_figure"])
def test_result_figure_without_matplotlib_raises(result, monkeypatch, name):
    monkeypatch.setattr("jaxlc.core.errors.is_installed", lambda package: False)
    with pytest.raises(UserError, match="needs the package matplotlib"):
        getattr(result, name)()


def test_token_losses_equal_log_softmax_of_logits(result):
    """Text of 225 tokens, longer than data.seq_len = 128."""
    model, ids = result.model, result.tokenizer.encode(TEXT.encode())
    logits_TV, losses_t = model.logits(TEXT), model.token_losses(TEXT)
    assert (
        logits_TV.shape == (len(ids), 257) and losses_t.shape == (len(ids) - 1,) and len(ids) > 128
    )
    expected_t = -np.asarray(jax.nn.log_softmax(logits_TV))[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(losses_t, expected_t, rtol=FLOAT32_PARITY, atol=1e-5)
    assert model.loss(TEXT) == pytest.approx(expected_t.mean(), rel=1e-5)


def test_logits_are_causal_and_independent_of_padding_and_batch(result):
    model, ids = result.model, result.tokenizer.encode(TEXT.encode())[:150].reshape(3, 50)
    logits_BTV = model.logits(ids)
    for sequence, logits_TV in zip(ids, logits_BTV):
        np.testing.assert_allclose(
            model.logits(sequence[:30]), logits_TV[:30], rtol=1e-4, atol=1e-5
        )
    positions_Bn = np.array([[3, 49], [0, 7], [20, 20]])
    chosen_BnV = np.asarray(jax.nn.log_softmax(logits_BTV))[np.arange(3)[:, None], positions_Bn]
    candidates_Bn = np.stack([chosen_BnV[:, 0].argmax(-1), chosen_BnV[:, 1].argmin(-1)], axis=1)
    log_probs_Bn, is_best_Bn, *_ = model.scores(ids, positions_Bn, candidates_Bn)
    expected_Bn = np.take_along_axis(chosen_BnV, candidates_Bn[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(log_probs_Bn, expected_Bn, rtol=1e-4, atol=1e-5)
    assert is_best_Bn.tolist() == [[True, False]] * 3
    # it is padding
    with pytest.raises(UserError, match="invalid positions: position 50, expected 0 to 49"):
        model.scores(ids, positions_Bn + 1, candidates_Bn)
    with pytest.raises(UserError, match="invalid candidates: token -1, expected 0 to 256"):
        model.scores(ids, positions_Bn, np.full_like(candidates_Bn, -1))
    for positions in ([3, -1], -1, slice(-9, None)):
        chosen = model.logits(ids, positions=positions)
        np.testing.assert_allclose(chosen, logits_BTV[:, positions], rtol=1e-4, atol=1e-5)


def test_hidden_states_times_tied_head_are_the_logits(result):
    hidden_TD, head_DV = (
        result.model.hidden_states(TEXT),
        np.asarray(result.params["embedding"])[:257].T,
    )
    np.testing.assert_allclose(
        np.asarray(hidden_TD) @ head_DV, result.model.logits(TEXT), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 257], "token 257, expected 0 to 256"),
        ([-1], "token -1, expected"),
        ([0.5], "expected a text, or int"),
        ([1], "expected at least 2 tokens"),
    ],
)
def test_model_with_invalid_tokens_raises(result, monkeypatch, tokens, message):
    monkeypatch.setattr(type(result.model), "_functions", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match=message):
        result.model.loss(tokens)


def test_logits_of_too_many_tokens_name_the_alternatives(result):
    with pytest.raises(UserError, match="take 9 GiB: pass positions=, such as slice"):
        result.model.logits(np.zeros(9_400_000, np.int32))


@pytest.mark.parametrize("mesh", [None, dict(context=2), dict(data=2)], ids=str)
def test_load_on_any_mesh_gives_the_same_model(result, mesh):
    loaded = jaxlc.load(result.workdir, mesh=mesh)
    assert loaded.step == STEPS and loaded.mesh.size == (8 if mesh is None else 2)
    np.testing.assert_allclose(
        loaded.model.token_losses(TEXT), result.model.token_losses(TEXT), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(loaded.history["step"], result.history["step"])
    if mesh == dict(data=2):
        assert loaded.evaluate().loss == pytest.approx(result.evaluation.loss, rel=1e-5)


def test_run_with_copies_of_nodes_is_loaded_on_a_mesh_without_nodes(config):
    run = with_settings(load(config), {"memory.node_copy_devices": 4})
    for mesh in ({}, dict(context=2), dict(data=8)):
        assert _on_mesh(run, mesh).memory.node_copy_devices == 0


def test_load_uses_neither_processes_nor_paths_of_the_machines_of_the_run(tmp_path):
    processes = dict(num_processes=2, process_id=0, coordinator_address="127.0.0.1:9999")
    runtime = dict(simulated_devices=2, compilation_cache_dir="/dev/null/xla", **processes)
    runs.save_step_0(small_config(mesh=dict(context=2), runtime=runtime), tmp_path)
    loaded = jaxlc.load(tmp_path, mesh={})
    runtime = loaded.config.runtime
    assert loaded.mesh.size == 1 and runtime.num_processes == 0
    assert runtime.compilation_cache_dir == "auto"


def test_load_of_earlier_step_has_its_parameters_and_history(result):
    loaded = jaxlc.load(result.workdir, step=2, mesh={})
    assert loaded.history["step"].max() == 2 and loaded.evaluation is None
    assert loaded.model.loss(TEXT) != result.model.loss(TEXT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(step=3), r"no checkpoint of step 3 in .*; existing steps: 2, 4"),
        (
            dict(mesh=dict(contxt=2)),
            "unknown mesh axis 'contxt': expected data, fsdp, context, tensor",
        ),
        (
            dict(mesh=dict(context=16)),
            r"the mesh has 16 devices, and the number of available devices is 8: use .* --mesh=context=1 .*"
            r" --simulated_devices=16 \(in Python, at the start, jaxlc.start\(simulated_devices=16\)\)",
        ),
        (
            dict(mesh=dict(context=3)),
            r"does not split over the mesh .*context=3.* such as --mesh=context=2 \(in Python mesh=dict\(",
        ),
    ],
)
def test_load_with_invalid_arguments_names_the_choices(result, arguments, message):
    with pytest.raises(UserError, match=message):
        jaxlc.load(result.workdir, **arguments)


def test_load_with_another_model_says_to_pass_that_of_the_run(result):
    class Bigram:
        def init(self, key):
            return {"table": jax.random.normal(key, (257, 257))}

        def apply(self, params, batch, mesh):
            return params["table"][batch.tokens]

    with pytest.raises(
        UserError, match="has other parameters than this model: pass model= as in the run"
    ):
        jaxlc.load(result.workdir, model=Bigram())


def test_load_without_checkpoints_raises(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in .*pass the workdir of a run"):
        jaxlc.load(tmp_path)


def test_load_with_damaged_checkpoint_names_other_checkpoints(result, tmp_path):
    shutil.copytree(result.workdir, tmp_path / "w")
    runs.damage(tmp_path / "w" / "checkpoints" / "4")
    with pytest.raises(UserError, match="step 4 in .* cannot be read .*; other checkpoints: 2"):
        jaxlc.load(tmp_path / "w")


def _corpus_batches(config, first: int = 0):
    """The sequences of the corpus as custom batches."""
    frozen = load(config)
    train = open_corpus(frozen.data).train
    for step in range(first, 100):
        sequences = [train[2 * step + b] for b in range(2)]
        yield {name: np.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}


@pytest.fixture
def dispatched_and_fetched(monkeypatch):
    """The steps in the order in which they are dispatched ("add") and their metrics fetched
    ("fetch").
    """
    events = []
    for name in ("add", "fetch"):
        original = getattr(PendingMetrics, name)

        def recorded(self, step, *arguments, name=name, original=original):
            events.append((name, step))
            return original(self, step, *arguments)

        monkeypatch.setattr(PendingMetrics, name, recorded)
    return events


def test_metrics_are_fetched_after_the_next_step_is_dispatched(
    config, result, tmp_path, dispatched_and_fetched
):
    """But before an evaluation or a checkpoint; the rows are those of a run with callbacks, which
    get them earlier.
    """
    late = config.copy_and_resolve_references()
    late.train.update(eval_every_steps=3, checkpoint_every_steps=0)
    rows = jaxlc.train.run(late, tmp_path / "w").history.column("loss")
    np.testing.assert_array_equal(rows, result.history.column("loss"))
    assert dispatched_and_fetched == [
        ("add", 1), ("add", 2), ("fetch", 1), ("add", 3), ("fetch", 2), ("fetch", 3), ("add", 4), ("fetch", 4)
    ]  # fmt: skip


def test_step_is_compiled_before_the_state_is_made(config, tmp_path, monkeypatch):
    def fails(_step):
        raise UserError("the compiler failed")

    monkeypatch.setattr(TrainStep, "compile", fails)
    monkeypatch.setattr(
        TrainStep, "init", lambda *_: pytest.fail("the state is made before the step is compiled")
    )
    with pytest.raises(UserError, match="the compiler failed"):
        jaxlc.train.run(config, tmp_path / "w")


def test_custom_batches_of_same_sequences_give_same_losses(config, result, tmp_path, capsys):
    """Resumes once: the batches of the steps already done are skipped."""
    half = config.copy_and_resolve_references()
    half.optimizer.schedule = "constant"
    whole = jaxlc.train.run(half, tmp_path / "whole", batches=_corpus_batches(config))
    batches = list(_corpus_batches(config))[:2]
    first = jaxlc.train.run(half, tmp_path / "w", batches=batches, eval_batches=batches[:1])
    assert "batches ended after step 2 of config.train.steps=" in capsys.readouterr().out
    assert first.step == 2 and first.exit_status == 0 and first.evaluation.num_sequences == 2
    assert first.evaluate().num_sequences == 2
    with pytest.raises(UserError, match="the run had its own batches, which are not stored"):
        jaxlc.load(tmp_path / "w").evaluate()
    shifted = (
        {**batch, "positions": batch["positions"] + 1_000_003} for batch in _corpus_batches(config)
    )
    second = jaxlc.train.run(half, tmp_path / "w", batches=shifted)  # positions are relative
    with pytest.raises(UserError, match="no held-out sequences: pass eval_batches"):
        second.evaluate()
    assert second.step == STEPS and second.evaluation is None
    np.testing.assert_array_equal(second.history.column("loss")[1], whole.history.column("loss")[1])
    with pytest.raises(UserError, match="batches ended before step 5"):
        half.train.steps = 6
        jaxlc.train.run(half, tmp_path / "w", batches=batches)


@pytest.mark.parametrize(
    "event, step, log_every_steps", [("step", 3, 1), ("step", 2, 10), ("evaluation", 2, 1)]
)
def test_stop_training_logs_evaluates_and_saves(config, tmp_path, event, step, log_every_steps):
    """The last step is logged also if the metrics that stopped the run were fetched for an
    evaluation. An evaluation ends the run at its own step.
    """
    config = config.copy_and_resolve_references()
    config.train.log_every_steps = log_every_steps
    recorder = _Recorder(stop_after=step, event=event)
    stopped = jaxlc.train.run(config, tmp_path / "w", callbacks=[recorder])
    assert stopped.step == step and stopped.exit_status == 0 and stopped.evaluation is not None
    assert {("step", step), ("log", step), ("checkpoint", step)} <= set(recorder.events)
    assert recorder.events[-2:] == [("evaluation", step), ("end", step)]


class _HuggingFace(jaxlc.train.Callback):
    def on_step_end(self, args, state, control):
        pass


class _WithoutMetrics(jaxlc.train.Callback):
    def on_step(self, step):
        pass


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (print, r"invalid callback .*on_start, "),
        (
            _HuggingFace(),
            r"_HuggingFace\.on_step_end is never called \(did you mean on_step\?\): .*on_start, .* and on_end",
        ),
        (
            _WithoutMetrics(),
            r"_WithoutMetrics\.on_step cannot be called as on_step\(step, metrics\)",
        ),
    ],
)
def test_callback_that_would_not_be_called_is_refused(config, tmp_path, callback, words):
    with pytest.raises(UserError, match=words):
        jaxlc.train.run(config, tmp_path / "w", callbacks=[callback])


def test_batches_are_checked_before_the_step_is_compiled(config, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainStep, "compile", lambda _step: pytest.fail("compiled"))
    for batches, words in [
        ([{"tokens": np.ones((1, 7), np.int32)}], "batch 0: tokens is int32"),
        ([], "is empty"),
    ]:
        with pytest.raises(UserError, match=words):
            jaxlc.train.run(config, tmp_path / "w", batches=iter(batches))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(config="quickstart"),
            r"config='quickstart' of run\(\): expected ConfigDict \| Config",
        ),
        (
            dict(callbacks=jaxlc.train.Callback()),
            r"callbacks=.* of run\(\): expected Iterable\[Callback\]",
        ),
        (dict(eval_batches=[]), "eval_batches without batches: pass both"),
    ],
    ids=["config", "callbacks", "eval_batches"],
)
def test_run_with_invalid_arguments_raises(config, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        jaxlc.train.run(**dict(config=config, workdir=tmp_path / "w") | arguments)


@pytest.mark.parametrize("num_tokens", [1, 7, 100, 1000, 12345, 1_000_000])
def test_padded_length_is_a_multiple_at_most_a_quarter_longer(num_tokens):
    step = small_step(small_config(mesh=dict(context=2, tensor=2)))
    length = padded_length(num_tokens, step.config, step.mesh)
    assert length % 4 == 0 and num_tokens <= length <= 1.25 * num_tokens + 4
