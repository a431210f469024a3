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
