"""Post-training by command: log-probabilities of traces, a run on them, and its resume."""

import asyncio
import base64
import functools
import hashlib
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pyarrow.parquet
import pytest

import jaxlc
from jaxlc.checkpoints.files import read_meta
from jaxlc.cli import main_of
from jaxlc.config import defaults, with_settings
from jaxlc.config.rollouts_schema import RolloutsConfig
from jaxlc.core.errors import UserError
from jaxlc.generation.generator import Generation
from jaxlc.generation.rollouts import PolicyRollouts
from jaxlc.posttrain.agents import Answer, rewards_of
from jaxlc.posttrain.rollouts import _call, code_fingerprint
from jaxlc.posttrain.traces import open_prompts, open_traces
from jaxlc.train.reports.metrics import METRICS_FILE
from jaxlc.train.reports.run_report import LOADS_FILE
from scripts import kill_drill
from scripts.stand_in_server import StandIn
from tests.step.synthetic import make_batch
from tests.train.runs import (
    finish,
    rows,
    save_step_0,
    start_pair,
    step_of,
    train,
    wait_until,
    write_config,
    write_untrained_run,
)  # fmt: skip

logprobs_main = main_of("logprobs")

pytestmark = pytest.mark.usefixtures("shared_programs")
PROMPTS = [f"{number} and {number + 1} are? " for number in range(6)]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces with the log-probabilities of an untrained run, which were computed in two runs of the
    command.
    """
    directory = tmp_path_factory.mktemp("traces")
    records = [
        dict(prompt=prompt, completion=str(i), reward=i % 2, group=prompt)
        for prompt in PROMPTS
        for i in range(3)
    ]
    source, out = directory / "traces.jsonl", directory / "scored.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["jaxlc logprobs", str(write_untrained_run(directory / "run")), str(source), str(out)]
    assert logprobs_main([*command, "--field=old_log_probs", "--entropy"]) == 0
    content = out.read_text()
    out.unlink()  # as after a kill, in the middle of a line
    out.with_name("scored.jsonl.partial").write_text(content[: len(content) * 2 // 3])
    assert logprobs_main([*command, "--field=old_log_probs", "--entropy"]) == 0
    assert out.read_text() == content
    return out


def test_files_of_others_are_not_changed(scored, tmp_path, capsys):
    traces, other = scored.parent / "traces.jsonl", tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a"}\n{"prompt": "no end of line"}')
    for out, words in (
        (traces, "OUT is the file of the traces"),
        (other, "according to other.header.json"),
    ):
        content = out.read_text()
        assert (
            logprobs_main(["jaxlc logprobs", str(scored.parent / "run"), str(traces), str(out)])
            == 2
        )
        assert words in capsys.readouterr().err and out.read_text() == content


def test_values_of_another_model_or_of_other_settings_are_not_resumed(scored, tmp_path, capsys):
    """The content decides: the same model and traces in other places resume."""
    run, traces = tmp_path / "run", tmp_path / "traces.jsonl"
    shutil.copytree(scored.parent / "run", run)
    shutil.copy(scored.parent / "traces.jsonl", traces)
    command, others = (
        ["logprobs", str(run), str(traces), str(scored)],
        ["--field=old_log_probs", "--entropy"],
    )
    assert logprobs_main([*command, *others]) == 0
    assert "18 records, 18 of them in earlier runs" in capsys.readouterr().out
    content = scored.read_text()
    assert logprobs_main([*command, *others, "--temperature=0.5", "--chat_template=chatml"]) == 2
    error = capsys.readouterr().err
    assert "temperature 1.0 instead of 0.5" in error and "chat_template None instead of" in error
    traces.write_text(traces.read_text().replace('"reward": 1', '"reward": 2'))
    assert (
        logprobs_main([*command, *others]) == 2
        and "according to scored.header.json (traces " in capsys.readouterr().err
    )
    shutil.rmtree(run)
    write_untrained_run(run, seed=1)
    shutil.copy(scored.parent / "traces.jsonl", traces)
    assert (
        logprobs_main([*command, *others]) == 2
        and "according to scored.header.json (model " in capsys.readouterr().err
    )
    assert scored.read_text() == content


def test_full_disk_keeps_the_records_that_are_done(scored, tmp_path, capsys):
    out = tmp_path / "scored.jsonl"
    command = ["logprobs", *map(str, (scored.parent / "run", scored.parent / "traces.jsonl", out))]
    command += ["--field=old_log_probs", "--entropy"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (scored.stat().st_size // 2, limits[1]))
    try:
        assert logprobs_main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "(File too large): finished records are kept, and the same" in capsys.readouterr().err
    assert logprobs_main(command) == 0 and ", 0 of them" not in capsys.readouterr().out
    assert out.read_text() == scored.read_text()


def test_log_probs_equal_those_of_the_model(scored):
    model = jaxlc.load(scored.parent / "run").model
    record = json.loads(scored.read_text().splitlines()[0])
    losses = model.token_losses(record["prompt"] + record["completion"])
    np.testing.assert_allclose(
        record["old_log_probs"][:-1], -losses[-len(record["completion"]) :], rtol=1e-5
    )
    assert all(0 < entropy <= np.log(257) for entropy in record["entropies"])


def test_teacher_candidates_are_those_of_the_model(scored, tmp_path):
    """A student that equals its teacher has the loss 0, in base64 arrays of JSON."""
    run, out = scored.parent / "run", tmp_path / "teacher.jsonl"
    command = ["jaxlc logprobs", str(run), str(scored.parent / "traces.jsonl"), str(out)]
    assert logprobs_main([*command, "--top_k=5"]) == 0
    trained = jaxlc.load(run)
    posttrain, data = (
        replace(trained.config.posttrain, teacher_top_k=5),
        replace(trained.config.data, traces=(str(out),), sources=(), eval_fraction=0.0),
    )
    config = replace(trained.config, posttrain=posttrain, data=data)
    traces = open_traces(config, trained.tokenizer)
    trace = traces.train.traces[0]
    logits = trained.model.logits(trace.tokens)[:-1]
    best = np.argsort(-logits, axis=1)[:, :5]
    expected = np.where(trace.in_loss[1:, None], best, -1)
    np.testing.assert_array_equal(trace.recorded["teacher_tokens"][1:], expected)
    step = replace(trained.train_step, config=config)
    batch = jax.tree.map(lambda x: x[0], make_batch(step, [traces.train[0]]))
    losses = jax.jit(step.objective.token_losses)(trained.params, batch)
    assert np.abs(np.asarray(losses)).max() < 1e-5


@pytest.mark.full
def test_resumed_run_on_traces_equals_an_undisturbed_one(scored, tmp_path):
    settings = dict(
        data__traces=scored, data__sources="", attention__shared_prefixes=True, train__eval_sequences=1,
        train__eval_every_steps=0, posttrain__loss="grpo", posttrain__old_log_probs="record",
        posttrain__clip_low=0.9, posttrain__clip_high=9, train__checkpoint_every_steps=2,
    )  # fmt: skip
    config = write_config(tmp_path)
    train(config, tmp_path / "whole", train__steps=4, **settings)
    train(config, tmp_path / "parts", train__steps=2, optimizer__schedule_steps=4, **settings)
    train(config, tmp_path / "parts", train__steps=4, **settings)
    whole, parts = (rows(tmp_path / name) for name in ("whole", "parts"))
    # without the evaluation at the stop
    assert whole == [row for row in parts if row["step"] != 2 or "loss" in row]
    assert all({"ratio", "clipped"} <= set(row) for row in whole if "loss" in row)
    assert len({row["loss"] for row in whole if "loss" in row}) == 4


@pytest.mark.heavy  # tests/step/test_reference_model.py has the host memory of JAX 0.12
@pytest.mark.parametrize("loss", ["grpo", pytest.param("dpo", marks=pytest.mark.full)])
def test_reference_model_equals_recorded_log_probs(scored, tmp_path, loss):
    """The reference has other weights than the policy, whose seed is another."""
    untrained, source, recorded = (
        shutil.copytree(scored.parent / "run", tmp_path / "run"),
        tmp_path / "traces.jsonl",
        tmp_path / "recorded.jsonl",
    )
    if loss == "dpo":
        records = [
            dict(prompt=prompt, chosen=f"{i} yes", rejected="no")
            for i, prompt in enumerate(PROMPTS)
        ]
    else:
        records = [
            json.loads(line) for line in (scored.parent / "traces.jsonl").read_text().splitlines()
        ]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert (
        logprobs_main(
            ["jaxlc logprobs", str(untrained), str(source), str(recorded), "--temperature=0.8"]
        )
        == 0
    )
    settings = dict(
        data__sources="", attention__shared_prefixes=True, train__eval_sequences=1, train__eval_every_steps=0,
        train__steps=2, train__seed=5, posttrain__loss=loss, posttrain__temperature=0.8,
    )  # fmt: skip
    sizes = dict(num_layers=2, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32)
    settings |= {f"model__{name}": size for name, size in sizes.items()}
    settings |= dict(posttrain__kl=0.5) if loss == "grpo" else {}
    config = write_config(tmp_path)
    train(config, tmp_path / "record", data__traces=recorded, **settings)
    model = dict(posttrain__reference="model", posttrain__reference_model=untrained)
    output = train(config, tmp_path / "model", data__traces=source, **settings, **model)
    assert f"reference  {untrained}, 0.00 GiB per device" in output
    measured = "kl" if loss == "grpo" else "margin"
    expected, actual = (
        [
            (row["loss"], row["grad_norm"], row[measured])
            for row in rows(tmp_path / name)
            if "loss" in row
        ]
        for name in ("record", "model")
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-5)
    assert len(expected) == 2 and all(abs(row[2]) > 1e-3 for row in expected)
    shutil.rmtree(untrained)
    write_untrained_run(untrained, seed=1)
    more = settings | model | dict(train__steps=4, data__traces=source)
    output = train(config, tmp_path / "model", status=2, **more)
    assert f"the weights of the reference model {untrained} have changed since the" in output


REWARD = """
def reward(prompt, answer, record):
    return len(set(answer)) + record["bonus"]
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Of a run whose policy makes rollouts."""
    directory = tmp_path_factory.mktemp("settings")
    (directory / "reward.py").write_text(REWARD)
    prompts = [dict(prompt=prompt, bonus=0.5) for prompt in PROMPTS]
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    )
    return dict(
        data__sources="", attention__shared_prefixes=True, posttrain__loss="dapo", rollouts__source="model",
        rollouts__prompts=directory / "prompts.jsonl", rollouts__reward=f"{directory / 'reward.py'}:reward",
        rollouts__max_tokens=5, rollouts__prompts_per_step=2, rollouts__answers_per_prompt=3, train__eval_every_steps=0,
        train__checkpoint_every_steps=1, optimizer__schedule_steps=4, train__steps=4, model__num_layers=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The same settings, and the undisturbed workdir of the run."""
    directory = tmp_path_factory.mktemp("rollouts")
    config = write_config(directory)
    output = train(config, directory / "whole", **settings)
    return dict(config=config, settings=settings, workdir=directory / "whole", output=output)


def files_of(workdir: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (workdir / "rollouts").iterdir()}


def test_rollouts_of_the_policy_are_traces_with_rewards(rollouts):
    files = files_of(rollouts["workdir"])
    assert sorted(files) == ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]
    records = [json.loads(line) for line in files["2.jsonl"].splitlines()]
    assert len(records) == 6 and len({record["group"] for record in records}) == 2
    assert all(record["reward"] == len(set(record["text"]["answer"])) + 0.5 for record in records)
    last = rows(rollouts["workdir"])[-1]
    assert (
        last["rollouts/reward"] > 0
        and 0 < last["rollouts/answer_tokens"] <= 5
        and last["rollouts/policy_age"] == 0
    )


def test_rollouts_stop_at_what_ends_answers_of_generate(rollouts, tmp_path, monkeypatch):
    """Also for prompts of text: tokens of the original model, and the end of a turn of
    data.chat_template.
    """
    run = jaxlc.load(write_untrained_run(tmp_path / "run"))
    settings = {name.replace("__", "."): str(value) for name, value in rollouts["settings"].items()}
    settings = {name: value for name, value in settings.items() if name.startswith("rollouts.")}
    config = with_settings(
        run.config, settings | {"data.chat_template": "chatml", "posttrain.loss": "dapo"}
    )
    prompts, _ = open_prompts(config, run.tokenizer)
    (run.workdir / "pretrained").mkdir()
    (run.workdir / "pretrained" / "config.json").write_text(
        '{"text_config": {"eos_token_id": [7, 9]}}'
    )
    maker = PolicyRollouts(
        replace(run.train_step, config=config),
        SimpleNamespace(
            prompts=prompts, eval_prompts=(), tokenizer=run.tokenizer, workdir=run.workdir
        ),
    )
    asked = {}
    monkeypatch.setattr(
        maker, "_generator", Mock(side_effect=lambda *_, **settings: asked.update(settings) or [])
    )
    with pytest.raises(ValueError, match="zip"):
        maker(run.params, 1, tmp_path / "1.jsonl")
    assert asked["stops"] == ([256, 7, 9], ["<|im_end|>"])


def test_groups_without_advantage_are_replaced_up_to_the_limit(tmp_path, monkeypatch):
    """By the answers to other prompts, which a run that resumes chooses again."""
    run = jaxlc.load(write_untrained_run(tmp_path / "run"))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps(dict(prompt=prompt)) + "\n" for prompt in PROMPTS)
    )
    settings = {"posttrain.loss": "dapo", "data.sources": "", "rollouts.source": "model"}
    settings |= {"rollouts.prompts": tmp_path / "prompts.jsonl", "rollouts.prompts_per_step": 3}
    settings |= {"rollouts.max_replacements": 2, "rollouts.reward": f"{tmp_path}/reward.py:reward"}
    settings |= {"rollouts.answers_per_prompt": 2, "rollouts.max_tokens": 4}
    (tmp_path / "reward.py").write_text(
        "def reward(prompt, answer, record):\n    return float(answer) * (prompt[0] in '0245')\n"
    )
    config = with_settings(run.config, {name: str(x) for name, x in settings.items()})
    prompts, _ = open_prompts(config, run.tokenizer)
    maker = PolicyRollouts(
        replace(run.train_step, config=config),
        SimpleNamespace(
            prompts=prompts, eval_prompts=(), tokenizer=run.tokenizer, workdir=run.workdir
        ),
    )
    seeds = []

    def generate(prompts, sampling, **_):
        seeds.append(sampling.seed)
        return [
            Generation(
                text=str(i % 2), tokens=np.array([65]), log_probs=np.zeros(1), num_prompt_tokens=1,
                finish_reason="stop",
            )
            for i, _ in enumerate(prompts)
        ]  # fmt: skip

    monkeypatch.setattr(maker, "_generator", Mock(side_effect=generate))
    asked = []
    for step in (1, 2, 3, 4, 1):
        seeds.clear()
        path = tmp_path / f"{step}.jsonl"
        path.unlink(missing_ok=True)
        maker(run.params, step, path)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        asked.append([record["text"]["prompt"][0] for record in records[::2]])
        useful = [record for record in records if record["reward"] > 0]
        assert len(asked[-1]) <= 5 and len(useful) == len({*asked[-1]} & {*"0245"}) <= 3
        assert len(useful) == 3 or len(asked[-1]) == 5
        assert len(set(seeds)) == len(seeds)  # of one attempt each
    assert asked[0] == asked[-1]
    assert all(len(set(prompts)) == len(prompts) for prompts in asked)
    assert any(len(prompts) > 3 for prompts in asked)


def test_start_report_has_the_memory_of_rollouts(rollouts):
    longest = max(map(len, PROMPTS)) + 5
    assert (
        f"rollouts   6 sequences of up to {longest} tokens; beside the training state"
        in rollouts["output"]
    )


def test_sampler_and_trainer_agree(rollouts):
    """Log-probabilities of the KV cache, at the sampling temperature, against those of the training
    forward.
    """
    losses = [row for row in rows(rollouts["workdir"]) if "loss" in row]
    assert len(losses) == 4
    for row in losses:
        assert (
            abs(row["sampler_minus_trainer"]) <= row["sampler_difference"] < 1e-4
            and row["ratio"] == 1
        )


def test_checkpoint_records_the_rollouts_it_used(rollouts, tmp_path):
    """A resume with other files of steps that are trained is refused; files may have been removed."""
    settings = {
        name: x for name, x in rollouts["settings"].items() if not name.startswith("rollouts__")
    }
    settings |= dict(rollouts__source="files", train__checkpoint_every_steps=2)
    directory = tmp_path / "rollouts"
    directory.mkdir()
    for name, text in files_of(rollouts["workdir"]).items():
        records = [json.loads(line) | dict(policy_step=0) for line in text.splitlines()]
        for record in records[:1]:
            del record["sampled_log_probs"]  # then the difference is unknown
        (directory / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    train(rollouts["config"], tmp_path, **settings | dict(train__steps=3))
    third = rows(tmp_path)[-1]
    assert third["rollouts/policy_age"] == 2
    assert all("sampler_difference" not in row for row in rows(tmp_path))
    assert read_meta(tmp_path / "checkpoints", 2)["rollouts"].keys() == {"1", "2"}
    digest = hashlib.sha256((directory / "3.jsonl").read_bytes()).hexdigest()
    meta = read_meta(tmp_path / "checkpoints", 3)
    assert meta["rollouts"] == {"3": digest} and meta["rows"][-1] == third
    kept = (directory / "3.jsonl").read_text()
    (directory / "3.jsonl").write_text(kept.replace('"reward": ', '"reward": 1'))
    message = train(rollouts["config"], tmp_path, status=2, **settings)
    assert "the checkpoint was trained on other rollouts of step 3" in message
    (directory / "3.jsonl").unlink()
    more = dict(train__steps=5, rollouts__wait_seconds=0.3)
    message = train(rollouts["config"], tmp_path, status=2, **settings | more)
    assert rows(tmp_path)[-1]["step"] == 4 and "no rollouts of step 5 after" in message


def test_failing_reward_ends_the_run_and_keeps_the_answers(rollouts, tmp_path):
    """After the evaluation before the first step, on other prompts."""
    (tmp_path / "reward.py").write_text("def reward(*args):\n    return args[2]['quality']\n")
    prompts = [dict(prompt=prompt, quality=i) for i, prompt in enumerate(("a", "b"))]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    settings = rollouts["settings"] | dict(rollouts__reward=f"{tmp_path}/reward.py:reward")
    settings |= dict(rollouts__eval_prompts=tmp_path / "eval.jsonl", train__eval_every_steps=2)
    message = train(rollouts["config"], tmp_path / "run", status=2, **settings)
    assert "config.rollouts.reward failed" in message and "the answers are in" in message
    [row] = rows(tmp_path / "run")
    assert row["heldout_reward/mean"] == row["heldout_reward/deviation"] == 0.5
    assert row["step"] == 0 and 0 < row["heldout_reward/answer_tokens"] <= 5
    lines = (tmp_path / "run/rollouts/0.heldout.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["text"]["prompt"] for record in records] == ["a"] * 3 + ["b"] * 3
    assert {record["policy_step"] for record in records} == {0}
    lines = (tmp_path / "run/rollouts/1.unrewarded.jsonl").read_text().splitlines()
    assert len(lines) == 6 and all(json.loads(line)["text"]["answer"] is not None for line in lines)


@pytest.mark.full
def test_rollouts_of_experts_are_replayed_and_scored(rollouts, tmp_path):
    """From the files of the policy, from those of another program, and from `jaxlc logprobs`, whose
    router chooses the same experts as the sampler's.
    """
    experts = dict(num_experts=8, experts_per_token=2, ffn_dim=8)
    experts = {f"model__experts__{name}": size for name, size in experts.items()}
    settings = rollouts["settings"] | experts | dict(posttrain__replay_routing=True)
    workdir, config = tmp_path / "run", rollouts["config"]
    evaluated = dict(rollouts__eval_prompts=settings["rollouts__prompts"])
    for steps in (1, 2):
        train(config, workdir, **settings | evaluated | dict(train__steps=steps))
    names = ["1.heldout.parquet", "1.parquet", "2.heldout.parquet", "2.parquet"]
    assert sorted(x.name for x in (workdir / "rollouts").iterdir()) == names
    assert [row["step"] for row in rows(workdir) if "heldout_reward/mean" in row] == [1, 2]
    losses = [row for row in rows(workdir) if "loss" in row]
    assert len(losses) == 2 and all(row["sampler_difference"] < 1e-4 for row in losses)
    assert {row.get("rollouts/experts_differ", 0) for row in rows(workdir)} == {0}
    settings = {name: x for name, x in settings.items() if not name.startswith("rollouts__")}
    files = dict(rollouts__source="files", rollouts__directory=workdir / "rollouts")
    train(config, tmp_path / "files", **settings | files | dict(train__steps=2))
    assert [row for row in rows(tmp_path / "files") if "loss" in row] == losses
    reports = [tmp_path / "files" / name for name in (LOADS_FILE, "decoded_rollouts/2.jsonl")]
    texts = [path.read_text() for path in reports]
    reports[0].write_text(texts[0].splitlines(keepends=True)[0])
    reports[1].unlink()  # a run that was killed after its last checkpoint
    train(config, tmp_path / "files", **settings | files | dict(train__steps=2))
    assert [path.read_text() for path in reports] == texts
    source, scored = workdir / "rollouts/2.parquet", tmp_path / "scored.jsonl"
    command = ["jaxlc logprobs", str(workdir), str(source), str(scored), "--step=1", "--experts"]
    assert logprobs_main(command) == 0
    records = [json.loads(line) for line in scored.read_text().splitlines()]
    sampled = pyarrow.parquet.read_table(source)["routed_experts"].to_pylist()
    assert [base64.b64decode(record["routed_experts"]) for record in records] == sampled
    train(config, tmp_path / "traces", data__traces=scored, **settings | dict(train__steps=1))


ANSWERS = [Answer("a", "b", ["c", "b"], [[1, 2]], "stop"), Answer("a", "d", ["d"], [[3]], "length")]


async def _length(prompt, answer, record, tokens, reason):
    return len(tokens[0]) + record["bonus"] + (reason == "length")


@pytest.mark.parametrize(
    "reward, expected",
    [
        (lambda *_: time.sleep(10), "took longer than config.rollouts.reward_seconds=0.1"),
        (lambda *_: float("nan"), "returned nan: expected 1 finite number"),
        (lambda *_: "no number", "failed: could not convert string to float"),
        (lambda group, record: [1], "returned [1]: expected 2 finite number"),
        (lambda group, record: [len(x.turns) for x in group], [2, 1]),
        (lambda x, y, record, turns: len(turns) + record["bonus"], [2.5, 1.5]),
        (_length, [2.5, 2.5]),
    ],
)
def test_reward_is_called_by_answer_or_group_and_never_0_after_a_failure(reward, expected):
    calls = []

    @functools.wraps(reward)
    def counted(*args, **fields):
        calls.append(args)
        return reward(*args, **fields)

    settings = RolloutsConfig(reward_seconds=0.1, reward_retries=2)
    rewards = asyncio.run(rewards_of(counted, ANSWERS, dict(bonus=0.5), settings))
    if isinstance(expected, list):
        assert rewards == expected
    else:
        num_calls = 1 if "group" in inspect.signature(reward).parameters else 2
        assert all(expected in x for x in rewards) and len(calls) == 3 * num_calls


def kill_once(config: Path, settings: dict, out: Path, kill: kill_drill.Kill, **more) -> None:
    """benchmarks/2026-11-28-kill-drill-rollouts.txt has ten kills for each source."""
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in settings.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kill_drill, "plan_kills", lambda *_: [kill])
        lines = []
        arguments = [f"--config={config}", *flags]
        equal = kill_drill.drill(arguments, out, num_kills=1, seed=0, log=lines.append, **more)
    assert equal, lines


@pytest.mark.full
@pytest.mark.parametrize("source", ["model", "files"])
def test_run_killed_before_rollouts_equals_the_undisturbed_run(rollouts, tmp_path, source):
    settings, undisturbed = rollouts["settings"], rollouts["workdir"]
    if source == "files":
        settings = {name: x for name, x in settings.items() if not name.startswith("rollouts__")}
        settings["rollouts__source"] = "files"
    files = undisturbed / "rollouts" if source == "files" else None
    kill, more = kill_drill.Kill(2, "rollouts"), dict(undisturbed=undisturbed, rollouts=files)
    kill_once(rollouts["config"], settings, tmp_path, kill, **more)


@pytest.mark.heavy
def test_killed_run_on_a_server_that_restarts_equals_the_undisturbed_run(settings, tmp_path):
    settings = settings | dict(rollouts__source="server", rollouts__server_max_loras=4)
    settings |= dict(rollouts__lag=2, lora__rank=2)
    config, whole = write_config(tmp_path), tmp_path / "whole"
    with StandIn() as server:
        train(config, whole, rollouts__server=server.url, **settings)
    kill = kill_drill.Kill(1, "rollouts", 3)
    kill_once(config, settings, tmp_path, kill, undisturbed=whole, with_server=True)


@pytest.mark.full  # tests/train/test_resume.py signals one of two processes that train
def test_signal_to_one_of_two_processes_that_wait_for_rollouts_stops_both(rollouts, tmp_path):
    settings = {
        name: x for name, x in rollouts["settings"].items() if not name.startswith("rollouts__")
    }
    settings |= dict(rollouts__source="files", train__checkpoint_every_steps=0)
    directory = tmp_path / "rollouts"
    directory.mkdir()
    (directory / "1.jsonl").write_text(files_of(rollouts["workdir"])["1.jsonl"])
    pair = start_pair(rollouts["config"], tmp_path, **settings)
    wait_until(lambda: step_of(tmp_path) == 1, pair[0])
    time.sleep(2)
    pair[1].send_signal(signal.SIGTERM)
    outputs = [finish(run, 128 + signal.SIGTERM) for run in pair]
    assert "stopped after step 1" in outputs[0] and (tmp_path / "checkpoints/1").is_dir()


@pytest.mark.full  # the heavy tests of killed runs resume too
@pytest.mark.parametrize("kept", ["rollouts of step 3", "none"])
def test_resumed_run_with_rollouts_equals_an_undisturbed_one(rollouts, tmp_path, kept):
    """A kill after the checkpoint of step 2, before its rows of metrics were written, and before or
    after the rollouts of step 3 were."""
    settings = rollouts["settings"] | dict(train__steps=2)
    train(rollouts["config"], tmp_path, **settings)
    metrics = tmp_path / METRICS_FILE
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-2]))
    if kept == "rollouts of step 3":
        (tmp_path / "rollouts/3.jsonl").write_text(files_of(rollouts["workdir"])["3.jsonl"])
    train(rollouts["config"], tmp_path, **rollouts["settings"])
    assert files_of(tmp_path) == files_of(rollouts["workdir"])
    assert rows(tmp_path) == rows(rollouts["workdir"])


def test_run_resumed_with_other_prompts_says_so(rollouts, tmp_path):
    """Also with other prompts for evaluation, other fields that rewards depend on, or another
    reward in the same file.
    """
    workdir = shutil.copytree(rollouts["workdir"], tmp_path / "run")
    prompts = tmp_path / "prompts.jsonl"
    lines = Path(rollouts["settings"]["rollouts__prompts"]).read_text()
    prompts.write_text(lines.replace("0.5", "0.25"))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(dict(prompt=PROMPTS[0], bonus=0.5)) + "\n")
    (tmp_path / "reward.py").write_text(f"{REWARD}\n# changed\n")
    outputs = [
        train(rollouts["config"], workdir, **rollouts["settings"] | changes)
        for changes in (
            {},
            dict(rollouts__prompts=other, rollouts__prompts_per_step=1),
            dict(rollouts__prompts=prompts),
            dict(rollouts__eval_prompts=prompts),
            dict(rollouts__reward=f"{tmp_path / 'reward.py'}:reward"),
        )
    ]
    changed = ["training continues with different seq" in x for x in outputs]
    assert changed == [False, True, True, True, True]


def test_code_of_rewards_is_in_a_file_or_a_module(tmp_path, monkeypatch):
    file = tmp_path / "rewarding.py"
    monkeypatch.syspath_prepend(tmp_path)
    found = set()
    for text in (REWARD, f"{REWARD}\n# changed\n"):
        file.write_text(text)
        codes = {code_fingerprint(f"{file}:reward"), code_fingerprint("rewarding:reward")}
        assert len(codes) == 1
        found |= codes
    assert len(found) == 2 and "" not in found
    assert code_fingerprint("") == code_fingerprint("missing.module:reward") == ""


def test_rollouts_of_another_program_train_the_same_and_weights_are_exported(rollouts, tmp_path):
    """The command gets the directory of each export, again after a resume; a failure is one
    sentence.
    """
    directory = rollouts["workdir"] / "rollouts"
    settings = {
        name: x for name, x in rollouts["settings"].items() if not name.startswith("rollouts__")
    }
    settings |= dict(
        rollouts__source="files", rollouts__directory=directory, rollouts__export_every_steps=4
    )
    train(
        rollouts["config"],
        tmp_path / "run",
        rollouts__export_command=f"cp -r -t {tmp_path}",
        **settings,
    )
    assert rows(tmp_path / "run") == rows(rollouts["workdir"])
    assert (tmp_path / "4" / "model.safetensors").is_file()
    texts = (tmp_path / "run" / "decoded_rollouts" / "2.jsonl").read_text()
    other_pairs, policy_pairs = (
        [(record["reward"], record["text"]) for record in map(json.loads, lines.splitlines())]
        for lines in (texts, files_of(rollouts["workdir"])["2.jsonl"])
    )
    assert other_pairs == policy_pairs
    settings |= dict(rollouts__export_command="ls /no-such-directory", train__steps=5)
    message = train(rollouts["config"], tmp_path / "run", status=2, **settings)
    assert (
        "the export of rollouts failed: ls /no-such-directory" in message
        and "No such file" in message
    )


def test_export_command_does_not_get_ctrl_c_of_the_terminal():
    """The terminal sends it to the process group of the run, which saves a checkpoint first."""
    is_other_group = f"import os; assert os.getpgrp() != {os.getpgrp()}"
    _call([sys.executable, "-c", is_other_group])


@pytest.mark.full  # a heavy test has two processes
def test_signal_while_training_waits_for_rollouts_saves_a_checkpoint(rollouts, tmp_path):
    settings = {
        name: x for name, x in rollouts["settings"].items() if not name.startswith("rollouts__")
    }
    settings |= dict(rollouts__source="files", train__checkpoint_every_steps=0)
    files, directory = files_of(rollouts["workdir"]), tmp_path / "rollouts"
    directory.mkdir()
    for name in ("1.jsonl", "2.jsonl"):
        (directory / name).write_text(files[name])

    def stop_after_step_2() -> None:
        metrics = tmp_path / "metrics.jsonl"
        while not (metrics.is_file() and '"step": 2' in metrics.read_text()):
            time.sleep(0.1)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_after_step_2, daemon=True).start()
    message = train(rollouts["config"], tmp_path, status=128 + signal.SIGTERM, **settings)
    assert "stopped after step 2" in message and (tmp_path / "checkpoints/2").is_dir()
    for name, text in files.items():
        (directory / name).write_text(text)
    train(rollouts["config"], tmp_path, **settings)
    assert rows(tmp_path) == rows(rollouts["workdir"])


def test_loaded_run_with_rollouts_has_rewards_and_no_evaluation(rollouts):
    run = jaxlc.load(rollouts["workdir"])
    assert (
        run.reward_figure().axes[0].get_ylabel() == "reward"
        and run.paths["reward_figure"].is_file()
    )
    with pytest.raises(UserError, match="the run made rollouts"):
        run.evaluate()


def test_loaded_run_with_traces_evaluates_them(tmp_path):
    """Without context gain, whose pieces cut documents apart from their prefixes. Tokens of both
    answers count twice.
    """
    record = dict(prompt="a" * 90, chosen="b" * 9, rejected="b" * 4 + "c" * 5)
    traces = tmp_path / "traces.jsonl"
    traces.write_text(
        "".join(
            json.dumps(record | dict(prompt=f"{i} {record['prompt']}")) + "\n" for i in range(20)
        )
    )
    config = defaults()
    config.model.update(
        vocab_size=257,
        num_layers=1,
        model_dim=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_dim=32,
    )
    config.data.update(sources=(), traces=str(traces), seq_len=1024, eval_fraction=0.3)
    config.attention.shared_prefixes = 2
    save_step_0(config, tmp_path / "run")
    evaluation = jaxlc.load(tmp_path / "run").evaluate()
    assert evaluation.sums.weight.sum() % 20 == 0 and abs(evaluation.loss - np.log(257)) < 0.5
    assert evaluation.context_gain is None
