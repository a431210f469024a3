"""Post-training by command: log-probabilities of traces, a run on them, and its resume."""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxlc
from jaxlc import logprobs
from tests.train.runs import rows, train, write_config, write_untrained_run

PROMPTS = [f"{number} and {number + 1} are? " for number in range(6)]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces with the log-probabilities of an untrained run, which were computed in two runs of the command."""
    directory = tmp_path_factory.mktemp("traces")
    records = [
        dict(prompt=prompt, completion=str(i), reward=i % 2, group=prompt) for prompt in PROMPTS for i in range(3)
    ]
    source, out = directory / "traces.jsonl", directory / "scored.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["jaxlc logprobs", str(write_untrained_run(directory / "run")), str(source), str(out)]
    assert logprobs.main([*command, "--field=old_log_probs", "--entropy"]) == 0
    content = out.read_text()
    out.write_text(content[: len(content) * 2 // 3])  # as after a kill, in the middle of a line
    assert logprobs.main([*command, "--field=old_log_probs", "--entropy"]) == 0
    assert out.read_text() == content
    return out


def test_log_probs_equal_those_of_the_model(scored):
    model = jaxlc.load(scored.parent / "run").model
    record = json.loads(scored.read_text().splitlines()[0])
    losses = model.token_losses(record["prompt"] + record["completion"])
    np.testing.assert_allclose(record["old_log_probs"], -losses[-len(record["completion"]) :], rtol=1e-5)
    assert all(0 < entropy <= np.log(257) for entropy in record["entropies"])


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
    assert whole == [row for row in parts if row["step"] != 2 or "loss" in row]  # without the evaluation at the stop
    assert all({"ratio", "clipped"} <= set(row) for row in whole if "loss" in row)
    assert len({row["loss"] for row in whole if "loss" in row}) == 4


REWARD = """
def reward(prompt, answer, record):
    return len(set(answer)) + record["bonus"]
"""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Settings of a run whose policy makes rollouts, and its undisturbed workdir."""
    directory = tmp_path_factory.mktemp("rollouts")
    (directory / "reward.py").write_text(REWARD)
    prompts = [dict(prompt=prompt, bonus=0.5) for prompt in PROMPTS]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    settings = dict(
        data__sources="", attention__shared_prefixes=True, posttrain__loss="dapo", rollouts__source="model",
        rollouts__prompts=directory / "prompts.jsonl", rollouts__reward=f"{directory / 'reward.py'}:reward",
        rollouts__max_tokens=5, rollouts__prompts_per_step=2, rollouts__answers_per_prompt=3, train__eval_every_steps=0,
        train__checkpoint_every_steps=1, optimizer__schedule_steps=4, train__steps=4,
    )  # fmt: skip
    config = write_config(directory)
    train(config, directory / "whole", **settings)
    return dict(config=config, settings=settings, workdir=directory / "whole")


def files_of(workdir: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (workdir / "rollouts").iterdir()}


def test_rollouts_of_the_policy_are_traces_with_rewards(rollouts):
    files = files_of(rollouts["workdir"])
    assert sorted(files) == ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]
    records = [json.loads(line) for line in files["2.jsonl"].splitlines()]
    assert len(records) == 6 and len({record["group"] for record in records}) == 2
    assert all(record["reward"] == len(set(record["text"]["answer"])) + 0.5 for record in records)
    last = rows(rollouts["workdir"])[-1]
    assert last["rollouts/reward"] > 0 and 0 < last["rollouts/answer_tokens"] <= 5


@pytest.mark.parametrize("kept", ["rollouts of step 3", pytest.param("none", marks=pytest.mark.full)])
def test_resumed_run_with_rollouts_equals_an_undisturbed_one(rollouts, tmp_path, kept):
    """A kill after step 2, before or after the rollouts of step 3 were written."""
    settings = rollouts["settings"] | dict(train__steps=2)
    train(rollouts["config"], tmp_path, **settings)
    if kept == "rollouts of step 3":
        (tmp_path / "rollouts/3.jsonl").write_text(files_of(rollouts["workdir"])["3.jsonl"])
    train(rollouts["config"], tmp_path, **rollouts["settings"])
    assert files_of(tmp_path) == files_of(rollouts["workdir"])
    assert rows(tmp_path) == rows(rollouts["workdir"])


def test_rollouts_of_another_program_train_the_same(rollouts, tmp_path):
    settings = {name: x for name, x in rollouts["settings"].items() if not name.startswith("rollouts__")}
    directory = rollouts["workdir"] / "rollouts"
    train(rollouts["config"], tmp_path, rollouts__source="files", rollouts__directory=directory, **settings)
    assert rows(tmp_path) == rows(rollouts["workdir"])
    message = train(
        rollouts["config"], tmp_path, status=2, rollouts__source="files", rollouts__directory=directory,
        rollouts__wait_seconds=0.3, **settings | dict(train__steps=5),
    )  # fmt: skip
    assert "no rollouts of step 5 after" in message
