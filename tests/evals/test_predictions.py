"""Scores by RULER's rules, predictions that resume, and the command on a run."""

import errno
import json
import math
import os
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from matplotlib.colors import to_rgb

import jaxlc
from jaxlc.cli import main_of
from jaxlc.config.checks.stage_checks import eval_settings
from jaxlc.core.errors import UserError
from jaxlc.evals.evaluate_run import text_cases
from jaxlc.evals.figures import depth_figure, score_figure
from jaxlc.evals.haystack import Example
from jaxlc.evals.predictions import (
    Case,
    Predictions,
    ScoreRow,
    cleaned,
    comparison,
    match_all,
    match_any,
    read_scores,
    run_case,
    score_of,
    store_scores,
)
from jaxlc.generation.generate_text import PromptEncoder
from tests.train import runs

main = main_of("eval")

# (prediction, references), with the scores that NVIDIA's scorer gives: string_match_all and string_match_part of
# scripts/eval/synthetic/constants.py at c3f5e3b, computed once on these lists.
PREDICTIONS = [
    (" The numbers are 1234567 and 7654321.\n", ["1234567", "7654321"]),
    ("only ABC here", ["abc", "def", "ghi"]),
    ("nothing", ["x1", "y2"]),
    ("\x00\x07Paris\x01, France", ["paris", "The city of Paris"]),
]
NVIDIA_MATCH_ALL, NVIDIA_MATCH_PART = 45.83, 75.0


def test_scores_equal_those_of_the_published_scorer():
    texts = [cleaned(text) for text, _ in PREDICTIONS]
    for match, expected in ((match_all, NVIDIA_MATCH_ALL), (match_any, NVIDIA_MATCH_PART)):
        values = [match(text, references) for text, (_, references) in zip(texts, PREDICTIONS)]
        assert round(score_of(values).score, 2) == expected


def test_standard_error_is_that_of_the_mean():
    score = score_of([1, 0, 1, 1])
    assert score.score == 75 and math.isclose(score.standard_error, 100 * math.sqrt(0.25 / 4))
    assert math.isnan(score_of([1]).standard_error)


def _case(**changes) -> Case:
    def make(index: int) -> Example:
        return Example(
            prompt=f"question {index}", answer_prefix=" answer", references=(str(index),)
        )

    return Case(
        **dict(name="case", make=make, match=match_all, num_examples=5, new_tokens=3) | changes
    )


def _predictions(directory, step: int, batch_size: int = 1) -> Predictions:
    return Predictions(directory=directory, identity=dict(step=step), batch_size=batch_size)


def test_interrupted_evaluation_resumes_after_a_cut_line(tmp_path):
    asked = []

    def generate(examples, new_tokens):
        if len(asked) == 3:
            raise KeyboardInterrupt
        prompts = [example.text for example in examples]
        asked.extend(prompts)
        return [prompt.split()[1] if "3" not in prompt else "wrong" for prompt in prompts]

    with pytest.raises(KeyboardInterrupt):
        run_case(_case(), generate, _predictions(tmp_path, 1, batch_size=3))
    path = tmp_path / "case.jsonl"
    path.write_text(path.read_text() + '{"index": 3, "sco')
    first, asked[:] = list(asked), []
    score = run_case(_case(), generate, _predictions(tmp_path, 1))
    assert first == [f"question {i} answer" for i in range(3)] and asked == [
        f"question {i} answer" for i in (3, 4)
    ]
    assert (score.score, score.num_examples) == (80, 5)


def test_predictions_of_another_checkpoint_raise(tmp_path):
    run_case(_case(), lambda examples, _: ["a"] * len(examples), _predictions(tmp_path, 1))
    with pytest.raises(UserError, match=r"\(step 1 instead of 2\)"):
        run_case(_case(), lambda examples, _: ["a"] * len(examples), _predictions(tmp_path, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(tasks=("needles",)), "unknown task 'needles'.*needle"),
        (dict(lengths=()), "at least one task and one length"),
        (dict(depths=(1.5,)), "invalid depths"),
        (dict(depths="0,x"), "config.evals.depths: expected a list of numbers"),
        (dict(depth=0.5), "unknown setting 'depth' .*did you mean depths"),
        (
            dict(num_examples=0),
            "invalid value 0 for config.evals.num_examples: expected at least 1",
        ),
        (
            dict(num_needles=13),
            "invalid value 13 for config.evals.num_needles: expected from 1 to 12",
        ),
        (dict(seed=-1), "invalid value -1 for config.evals.seed: expected at least 0"),
        (dict(tasks=("loss",)), "the task loss needs documents"),
        (
            dict(tasks="loss", documents="a.txt", lengths=[8]),
            "expected at least 16 tokens with the task loss",
        ),
    ],
)
def test_invalid_settings_raise(values, message):
    with pytest.raises(UserError, match=message):
        eval_settings(dict(lengths=(1024,)) | values)


def test_cases_have_the_fingerprint_of_their_text(tmp_path):
    def data_of(text: str) -> dict[str, str]:
        (tmp_path / "prose.txt").write_text(text)
        settings = dict(
            tasks="needle,passkey,vt,niah_single_2",
            haystack=str(tmp_path / "prose.txt"),
            lengths=(1024,),
        )
        return {
            subject["task"]: case.data for case, subject in text_cases(eval_settings(settings), len)
        }

    before, after = data_of("a text of words"), data_of("a text of other words")
    assert before == data_of("a text of words") and {
        x for x in before if before[x] == after[x]
    } == {"passkey"}


def test_scores_of_another_model_are_not_kept(tmp_path):
    store_scores(
        tmp_path, [replace(_score(512, 80.0), model="a"), replace(_score(1024, 80.0), model="a")]
    )
    store_scores(tmp_path, [replace(_score(1024, 70.0), model="a")])
    assert [row.score for row in read_scores(tmp_path)] == [80.0, 70.0]
    store_scores(tmp_path, [replace(_score(2048, 60.0), model="b")])
    assert [row.score for row in read_scores(tmp_path)] == [60.0]


def test_files_of_close_depths_differ():
    settings = eval_settings(
        dict(tasks="needle,passkey", lengths=(1024,), depths=(0.29, 0.331, 0.334))
    )
    names = [case.name for case, _ in text_cases(settings, len)]
    assert names[:2] == ["needle-1024-29-of-1", "needle-1024-33.1-of-1"] and len(set(names)) == 6


def _score(length: int, score: float, depth: float | None = None) -> ScoreRow:
    return ScoreRow(
        task="needle", haystack="a", length=length, depth=depth, num_needles=1, score=score, standard_error=1.0,
        num_examples=5, seconds=1.0,
    )  # fmt: skip


def test_comparison_has_a_column_per_model_and_the_change():
    before = [_score(512, 80.0, 0.0), _score(512, 90.0, 1.0), _score(2048, 0.0, 0.0)]
    after = [_score(512, 70.0, 0.0), _score(512, 90.0, 1.0), _score(2048, 60.0, 0.0)]
    lines = [line.split() for line in comparison({"base": before, "run step-5": after})]
    assert lines == [
        ["length", "base", "run", "step-5", "change"],
        ["needle", "512", "%", "85.0", "80.0", "-5.0"],
        ["needle", "2,048", "%", "0.0", "60.0", "+60.0"],
    ]
    assert "change" not in comparison({"a": before, "b": before, "c": after})[0]


def test_equal_lines_of_scores_are_both_visible():
    scores = [_score(512, 80.0), _score(1024, 40.0)]
    (axes,) = score_figure({"base": scores, "run": scores}).axes
    first, second = (container.lines[0] for container in axes.containers)
    assert (
        first.get_linewidth() > 2 * second.get_linewidth()
        and first.get_zorder() <= second.get_zorder()
    )
    assert first.get_markersize() > second.get_markersize()


def test_digits_of_the_map_are_readable_on_every_color():
    """WCAG's contrast of large text, also for the grays in which every color vision sees the map."""
    (axes, _) = depth_figure([_score(2**i, 5.0 * i, 0.0) for i in range(21)], "Needle").axes
    (image,) = axes.images

    def luminance(color) -> float:
        rgb = np.array(color[:3])
        return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [
            0.2126,
            0.7152,
            0.0722,
        ]

    cells = [luminance(image.to_rgba([[5.0 * i]])[0, 0]) for i in range(21)]
    assert cells == sorted(cells)
    for cell, text in zip(cells, axes.texts, strict=True):
        dark, light = sorted([cell, luminance(to_rgb(text.get_color()))])
        assert (light + 0.05) / (dark + 0.05) > 4


def test_standard_error_of_one_example_is_null_in_the_file(tmp_path):
    row = ScoreRow(
        task="vt", haystack="a", length=8, depth=None, num_needles=None, score=50.0, standard_error=math.nan,
        num_examples=1, seconds=0.1,
    )  # fmt: skip
    store_scores(tmp_path, [row])
    assert json.loads((tmp_path / "scores.jsonl").read_text())["standard_error"] is None
    assert math.isnan(read_scores(tmp_path)[0].standard_error)
    assert "± nan" not in str(row) and f", {row.num_examples} example, " in str(row)


def test_command_that_cannot_write_prints_one_line(tmp_path, monkeypatch, capsys):
    def load(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jaxlc, "load", load)
    (tmp_path / "file").touch()
    for out, status, words in (
        ("file", 2, r"\(File exists\): use a different directory, with --out"),
        ("new", 1, "predictions are kept"),
    ):
        assert main(["eval", str(tmp_path), "--lengths=1K", f"--out={tmp_path / out}"]) == status
        assert re.fullmatch(
            f"error: cannot write to {tmp_path / out} .*{words}.*\n", capsys.readouterr().err
        )


def test_command_writes_scores_predictions_and_a_figure(tmp_path, capsys, monkeypatch):
    jax.devices()  # the simulated devices of the tests, before the command starts JAX
    runs.write_untrained_run(tmp_path / "run")
    (tmp_path / "run" / "evals" / "step-1 (copy)").mkdir(parents=True)  # a user's
    arguments = [
        "--tasks=needle,niah_single_1,passkey",
        "--lengths=1024",
        "--num_examples=2",
        "--depths=0,1",
        "--batch_size=2",
    ]
    assert main(["eval", str(tmp_path / "run"), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "2 examples" in line]) == 5
    directory = tmp_path / "run" / "evals"
    rows = [
        json.loads(line)
        for line in (directory / "step-1" / "scores.jsonl").read_text().splitlines()
    ]
    at_depths = [(task, depth) for task in ("needle", "passkey") for depth in (0.0, 1.0)]
    assert [(row["task"], row["depth"]) for row in rows] == [*at_depths, ("niah_single_1", None)]
    assert [row["haystack"] for row in rows] == ["python-docstrings"] * 2 + [""] * 2 + [
        "python-docstrings"
    ]
    assert all(
        row["num_examples"] == 2 and row["standard_error"] >= 0 and row["seconds"] >= 0
        for row in rows
    )
    assert all(
        (directory / name).stat().st_size > 5000
        for name in ("needle.png", "passkey.png", "scores.png")
    )
    assert main(["eval", str(tmp_path / "run"), "--lengths=5x"]) == 2
    assert (
        "invalid --lengths=5x: expected a list of tokens, such as 4096,32K,1M"
        in capsys.readouterr().err
    )
    assert main(["eval", str(tmp_path / "run"), "--lengths=1K", "--step=last"]) == 2
    assert "invalid --step=last: expected a list of integers" in capsys.readouterr().err
    chat = [
        "--tasks=passkey",
        "--lengths=1024",
        "--num_examples=1",
        "--depths=0",
        "--chat",
        f"--out={tmp_path / 'chat'}",
    ]
    assert main(["eval", str(tmp_path / "run"), *chat]) == 2
    assert "set --chat_template to chatml, llama3 or a Jinja file" in capsys.readouterr().err
    prompts = []
    encode = PromptEncoder.__call__
    monkeypatch.setattr(
        PromptEncoder, "__call__", lambda *text: prompts.append(encode(*text)) or prompts[-1]
    )
    assert main(["eval", str(tmp_path / "run"), *chat, "--chat_template=chatml"]) == 0
    assert any(
        bytes(prompt.astype(np.uint8)).startswith(b"<|im_start|>user\n") for prompt in prompts
    )
    (stored,) = (tmp_path / "chat").glob("step-1/*passkey*.jsonl")
    assert json.loads(stored.read_text().splitlines()[0])["template"]
    again = jaxlc.evaluate(
        tmp_path / "run",
        tasks=["needle"],
        lengths=[1024],
        num_examples=2,
        depths=[0.0, 1.0],
        batch_size=2,
    )
    assert [row.score for row in again] == [row["score"] for row in rows[:2]]
    stored = read_scores(directory / "step-1")
    assert [row.task for row in stored] == ["needle"] * 2 + ["passkey"] * 2 + [
        "niah_single_1"
    ]  # scores of other tasks are kept
