"""Loss by position, of the last tokens, and the gain of full context, against float64 in NumPy."""

import contextlib
import json
import math
import os
import shutil

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.cli import main_of
from jaxlc.config import EvalsConfig
from jaxlc.config.checks.stage_checks import eval_settings
from jaxlc.core.errors import UserError
from jaxlc.core.files import locked
from jaxlc.data.tokens.encoder import Stops
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.evals.document_loss import (
    DocumentLosses,
    DocumentSums,
    loss_rows,
    read_cut_documents,
    stored_losses,
)
from jaxlc.evals.evaluate_run import EvaluatedModel
from jaxlc.evals.predictions import read_scores
from jaxlc.generation.generate_text import PromptEncoder
from jaxlc.train import result as loaded_run
from tests.train import runs

main = main_of("eval")

LENGTH, LIMIT, LAST = 512, 128, 256


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    jax.devices()  # the simulated devices of the tests, before a function starts JAX
    return runs.write_untrained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Five long documents and a short one in a .jsonl file, and a longer text file."""
    directory = tmp_path_factory.mktemp("texts")
    documents = [
        " ".join(f"{word} {(i * word) % 17}" for word in range(140 if i != 2 else 9))
        for i in range(6)
    ]
    (directory / "a.jsonl").write_text(
        "".join(json.dumps(dict(text=text)) + "\n" for text in documents)
    )
    (directory / "b.txt").write_text("another text " * 100)
    return directory


def _settings(texts, **changes):
    return dict(
        tasks=["loss"], lengths=[LENGTH], documents=[texts], context_limits=[LIMIT, 4096], batch_size=4
    ) | changes  # fmt: skip


def _losses_in_numpy(model, ids) -> np.ndarray:
    """float64, from the logits of the model."""
    logits_TV = model.logits(ids)[:-1].astype(np.float64)
    log_sums_T = np.log(
        np.exp(logits_TV - logits_TV.max(-1, keepdims=True)).sum(-1)
    ) + logits_TV.max(-1)
    return log_sums_T - logits_TV[np.arange(len(ids) - 1), ids[1:]]


def test_losses_equal_float64_and_those_on_four_context_ranks(run, texts, tmp_path):
    result = jaxlc.load(run, mesh=dict(context=1))
    rows = jaxlc.evaluate(result, **_settings(texts), out=tmp_path / "1")
    assert [row.task for row in rows] == ["loss", f"loss_last_{LAST}", f"context_gain_{LIMIT}"]
    ids = [
        document.ids
        for document in read_cut_documents(
            EvalsConfig(documents=(str(texts),)), LENGTH, load_tokenizer("bytes")
        )  # fmt: skip
    ]
    assert len(ids) == 6  # the short document is not used
    full = np.array([_losses_in_numpy(result.model, document) for document in ids])
    limited = np.array(
        [_losses_in_numpy(result.model, document[-LAST - LIMIT :])[-LAST:] for document in ids]
    )
    gains = (limited - full[:, -LAST:]).mean(1)
    np.testing.assert_allclose(
        [row.score for row in rows], [full.mean(), full[:, -LAST:].mean(), gains.mean()], atol=2e-6
    )
    assert rows[2].standard_error == pytest.approx(gains.std(ddof=1) / math.sqrt(6), abs=1e-6)
    assert all(
        row.num_examples == 6 and row.unit == "nats" and row.low <= row.score <= row.high
        for row in rows
    )

    (losses,) = stored_losses(tmp_path / "1" / "step-1")
    columns = losses.by_position.by_position("loss")
    bins = zip(columns["first_position"], columns["last_position"], strict=True)
    np.testing.assert_allclose(
        columns["loss"], [full[:, a : b + 1].mean() for a, b in bins], atol=5e-6
    )

    split = jaxlc.evaluate(run, **_settings(texts), out=tmp_path / "4", mesh=dict(context=4))
    np.testing.assert_allclose([row.score for row in split], [row.score for row in rows], atol=2e-6)


def test_interrupted_evaluation_computes_the_missing_documents(run, texts, tmp_path, monkeypatch):
    result = jaxlc.load(run, mesh=dict(context=1))
    settings = _settings(texts, context_limits=[], batch_size=2)

    def evaluate_again(_) -> None:
        with pytest.raises(
            UserError, match=f"process {os.getpid()} on .* writes to .*/step-1: wait"
        ):
            jaxlc.evaluate(result, **settings, out=tmp_path)

    complete = jaxlc.evaluate(result, **settings, out=tmp_path, report=evaluate_again)
    path = tmp_path / "step-1" / f"loss-{LENGTH}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # the header and four documents; the fifth is cut off
    path.write_text("".join(lines[:5]) + lines[5][:40])
    calls, token_losses = [], result.model.token_losses
    monkeypatch.setattr(
        result.model, "token_losses", lambda ids: calls.append(len(ids)) or token_losses(ids)
    )
    resumed = jaxlc.evaluate(result, **settings, out=tmp_path)
    assert calls == [2] and [row.score for row in resumed] == [row.score for row in complete]
    assert path.read_text() == "".join(lines)
    with pytest.raises(UserError, match=r"settings \(documents"):
        jaxlc.evaluate(result, **settings | dict(num_examples=3), out=tmp_path)


def test_training_waits_for_another_evaluation_of_the_step(run, texts, tmp_path):
    result = jaxlc.load(run, mesh=dict(context=1))
    said = []
    with contextlib.ExitStack() as other:

        def log(line: str) -> None:
            said.append(line)
            other.close()

        other.enter_context(locked(tmp_path / "evaluation.lock", pytest.fail))
        model = EvaluatedModel(
            model=result.model,
            encode=PromptEncoder(tokenizer=result.tokenizer),
            generator=pytest.fail,
            stops=Stops([], []),
            directory=tmp_path,
            log=log,
        )
        settings = _settings(texts, context_limits=[], num_examples=1)
        assert model.evaluate(eval_settings(settings), report=lambda _: None)
    assert len(said) == 1 and f"waiting for process {os.getpid()} on " in said[0]


def test_results_belong_to_the_content_of_model_and_documents(run, texts, tmp_path):
    """Not to a path: a copy of the run resumes, and other parameters in the same directory do not."""
    (tmp_path / "a.txt").write_text("some text " * 100)
    settings = _settings(tmp_path / "a.txt", lengths=[64], context_limits=[]) | dict(
        mesh=dict(context=1)
    )
    copy, out = shutil.copytree(run, tmp_path / "run"), tmp_path / "out"
    rows = jaxlc.evaluate(run, **settings, out=out)
    assert [row.score for row in jaxlc.evaluate(copy, **settings, out=out)] == [
        row.score for row in rows
    ]
    (tmp_path / "a.txt").write_text("more text " * 100)
    with pytest.raises(UserError, match=r"another model, data or settings \(documents"):
        jaxlc.evaluate(run, **settings, out=out)
    (tmp_path / "a.txt").write_text("some text " * 100)
    shutil.rmtree(copy)
    runs.write_untrained_run(copy, seed=1)
    with pytest.raises(UserError, match=r"another model, data or settings \(model"):
        jaxlc.evaluate(copy, **settings, out=out)
    (out / "step-1" / "loss-64.jsonl").rename(out / "step-1" / "loss-128.jsonl")
    assert jaxlc.evaluate(copy, **settings, out=out)[0].score != rows[0].score
    assert [losses.length for losses in stored_losses(out / "step-1")] == [64]


def test_gain_is_paired_by_document():
    """Losses differ much between documents, and the gain hardly: its interval is narrow."""
    rng = np.random.default_rng(0)
    last = rng.normal(3, 1, 40)
    sums = DocumentSums(
        edges=np.array([0, 99]), weight=np.full((40, 1), 99.0), loss=99 * last[:, None]
    )
    losses = DocumentLosses(
        length=100, by_position=sums, last=last, limited={16: last + rng.normal(0.1, 0.01, 40)}
    )  # fmt: skip
    loss, last_tokens, gain = loss_rows(losses, "texts", seconds=1.0)
    assert loss.high - loss.low > 0.4 and last_tokens.score == pytest.approx(loss.score)
    assert gain.high - gain.low < 0.02 and gain.low < 0.1 < gain.high
    assert gain.standard_error == pytest.approx((gain.high - gain.low) / 4, rel=0.2)


def test_command_overlays_checkpoints_and_names_missing_documents(run, texts, tmp_path, capsys):
    arguments = [
        "--lengths=512",
        f"--documents={texts}",
        "--context_limits=128",
        "--num_examples=5",
    ]
    out = tmp_path / "out"
    status = main(
        ["eval", str(run), str(run), "--tasks=loss", *arguments, "--step=1", f"--out={out}"]
    )
    printed = capsys.readouterr().out.splitlines()
    assert status == 0 and len([line for line in printed if "5 documents" in line]) == 6
    assert printed[-1] == f"figure {out}/loss_by_position.png"
    labels = [f"{i}-{run.name} step-1" for i in (1, 2)]
    assert all(label in printed for label in labels) and all(
        label in printed[-6] for label in labels
    )
    assert printed[-5].split()[:3] == ["loss", "512", "nats"] and printed[-5].endswith("+0.0000")
    assert (out / "loss_by_position.png").stat().st_size > 5000
    assert [len(read_scores(out / f"{i}-{run.name}" / "step-1")) for i in (1, 2)] == [3, 3]
    assert main(["eval", str(run), "--tasks=loss", "--lengths=4096", f"--documents={texts}"]) == 2
    assert main(["eval", str(run), "--tasks=loss", "--lengths=512"]) == 2
    errors = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith("warning: 4,096")
    ]
    assert (
        "has 4,096 tokens: use a smaller length" in errors[0]
        and "the task loss needs documents" in errors[1]
    )


def test_length_too_small_for_a_task_is_refused_before_the_model_is_loaded(
    run, monkeypatch, capsys
):
    monkeypatch.setattr(loaded_run, "load", lambda *_, **__: pytest.fail("loaded"))
    assert main(["eval", str(run), "--lengths=10"]) == 2
    assert "error: invalid length 10 for the task needle" in capsys.readouterr().err
    with pytest.raises(UserError, match="invalid length 10 for the task needle"):
        jaxlc.evaluate(run, lengths=[10])
    with pytest.raises(UserError, match="expected greater than 0 and at most 1"):
        jaxlc.generate(run, "a", top_p=2.0, temperature=1.0)
