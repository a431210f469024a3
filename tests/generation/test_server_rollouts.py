"""Rollouts by a server, on the stand-in of scripts/stand_in_server.py."""

import asyncio
import base64
import functools
import io
import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pyarrow.parquet
import pytest

from jaxlc.cli import main_of
from jaxlc.config import Config, load, read_config
from jaxlc.core.errors import UserError
from jaxlc.core.files import locked
from jaxlc.data.tokens.encoder import Stops, stops_of
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.generation.generator import Generator
from jaxlc.generation.rollouts import PolicyRollouts, prompts_of_step
from jaxlc.generation.sampling import Sampling
from jaxlc.posttrain.agents import Agents, SamplerError, answer_once, seed_of
from jaxlc.posttrain.rollouts import write_rollouts
from jaxlc.posttrain.server import Server, open_teacher
from jaxlc.posttrain.traces import Prompt, open_prompts, open_traces
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from scripts.stand_in_server import StandIn
from tests import helpers
from tests.train.runs import finish, rows, start_pair, train, train_elsewhere, write_config

logprobs_main = main_of("logprobs")

REWARD = """
def reward(prompt, answer, record, tokens):
    return len(set(answer)) + sum(map(sum, tokens)) % 5
"""


PROMPT = Prompt(np.frombuffer(b"3 + 4", np.uint8).astype(np.int32), "3 + 4", {}, "p:1")


@pytest.fixture
def standin():
    with StandIn() as server:
        yield server


def config_of(server: StandIn, **rollouts) -> Config:
    config = read_config("agent_128k:mini")
    config.lora.rank = 4
    config.data.update(tokenizer="bytes", seq_len=1024)
    config.model.vocab_size = 257
    config.rollouts.update(source="server", server=server.url, server_max_loras=4)
    config.rollouts.update(dict(server_seconds=2.0) | rollouts)
    return load(config)


def checked(standin: StandIn, **rollouts) -> Server:
    config = config_of(standin, **rollouts)
    tokenizer = load_tokenizer("bytes")
    server = Server(url=standin.url, config=config, tokenizer=tokenizer, stops=Stops([256], []))
    asyncio.run(server.check(PROMPT.text))
    return server


def adapter_in(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 4}')
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(), ""),
        (dict(scales_log_probs=False), "--logprobs-mode=processed_logprobs"),
        (dict(token_shift=1), "another tokenizer: start it with the one of config.data.tokenizer"),
        (dict(returns_token_ids=False), "returns no token ids: use vLLM 0.33 or a later version"),
        (dict(max_model_len=1024), "max_model_len=1024: start it with --max-model-len=1025"),
        (dict(num_errors=99), "gave no answer to /tokenize in 2 s .*start it again"),
        (dict(locked="/tokenize"), "refuses /tokenize .HTTP 401.*Unauthorized.*set VLLM_API_KEY"),
        (dict(locked="/v1/completions"), "refuses /v1/completions .HTTP 401.*set VLLM_API_KEY"),
    ],
)
def test_probes_refuse_a_server_with_the_flag_to_set(standin, changed, words):
    vars(standin).update(changed)
    if words:
        with pytest.raises(UserError, match=words):
            checked(standin)
    else:
        checked(standin)


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(), ""),
        (dict(max_logprobs=2), "not give 3 .*max allowed.*start it with --max-logprobs=3"),
        (dict(candidates=lambda *_: {"97": dict(logprob=0.0)}), "start it with --max-logprobs=3"),
        (dict(token_shift=1), "another tokenizer"),
    ],
)
def test_teacher_fills_the_fields_that_files_have(standin, tmp_path, changed, words):
    """With the candidates of the server; fewer of them and another tokenizer are refused."""
    vars(standin).update(changed)
    config = read_config("agent_128k:mini")
    config.data.update(tokenizer="bytes", seq_len=64)
    config.model.vocab_size, config.posttrain.loss, config.posttrain.teacher_top_k = 257, "", 3
    config.rollouts.update(teacher_server=standin.url, answers_per_prompt=2)
    config, tokenizer = load(config), load_tokenizer("bytes")
    if words:
        with pytest.raises(UserError, match=words):
            open_teacher(config, tokenizer, PROMPT.text)
        return
    agents = Agents(config, tokenizer, [PROMPT], open_teacher(config, tokenizer, PROMPT.text))
    agents.agent, agents.reward = answer_once, lambda *_: 1.0
    sample = functools.partial(checked(standin).sample, "base", tmp_path, 7)
    records = asyncio.run(agents.rollouts([0], 1, 0, sample))
    write_rollouts(records, tmp_path / "1.parquet")
    source = (str(tmp_path / "1.parquet"),)
    for trace in open_traces(config, tokenizer, source, step=1).train.traces:
        ids, mask = trace.tokens.tolist(), trace.in_loss
        rows = [standin.candidates(ids, i, 3) for i in np.flatnonzero(mask).tolist()]
        best = [sorted(row, key=lambda x: row[x]["rank"])[:3] for row in rows]
        expected = [[row[x]["logprob"] for x in top] for row, top in zip(rows, best)]
        tokens, log_probs = (trace.recorded[f"teacher_{x}"][mask] for x in ("tokens", "log_probs"))
        np.testing.assert_array_equal(tokens, np.array(best, int))
        np.testing.assert_array_equal(log_probs, np.float32(expected))


def test_server_seconds_limits_the_whole_request(standin):
    """Not the time without a byte."""
    standin.byte_seconds = 0.2
    with pytest.raises(UserError, match=r"to /v1/models in 1 s .*the request is still running"):
        checked(standin, server_seconds=1.0)


def command_for(server: StandIn, directory: Path, *more: str) -> list[str]:
    records = [dict(prompt=f"{x} and", completion=f" {x + 1}", truncated=True) for x in range(3)]
    chat = [dict(role="user", content="2 + 2"), dict(role="assistant", content="4")]
    traces = [*records, dict(messages=chat), dict(failed="no tool", group="1")]
    (directory / "traces.jsonl").write_text("".join(json.dumps(x) + "\n" for x in traces))
    files = str(directory / "traces.jsonl"), str(directory / "out.jsonl")
    flags = "--tokenizer=bytes", "--chat_template=chatml", "--server_seconds=1"
    return ["jaxlc logprobs", server.url, *files, *flags, *more]


def test_logprobs_of_a_server_are_the_values_that_training_reads(standin, tmp_path, capsys):
    command, out = command_for(standin, tmp_path, "--top_k=3"), tmp_path / "out.jsonl"
    assert logprobs_main(command) == 0
    config = read_config("agent_128k:mini")
    config.data.update(tokenizer="bytes", seq_len=128, chat_template="chatml", traces=(str(out),))
    config.model.vocab_size, config.posttrain.loss, config.posttrain.teacher_top_k = 257, "", 3
    config.rollouts = {}
    for trace in open_traces(load(config), load_tokenizer("bytes")).train.traces:
        ids, places = trace.tokens.tolist(), np.flatnonzero(trace.in_loss).tolist()
        rows = [standin.candidates(ids, i, 3) for i in places]
        own = [row[str(ids[i])]["logprob"] for row, i in zip(rows, places)]
        best = [sorted(row, key=lambda x: row[x]["rank"])[:3] for row in rows]
        np.testing.assert_array_equal(trace.recorded["teacher_tokens"][places], np.array(best, int))
        recorded = trace.recorded["reference_log_probs"][places]
        np.testing.assert_array_equal(recorded, np.float32(own))
    # a run that is killed while it writes the second record asks for each of the others once
    whole, lines = out.read_bytes(), out.read_bytes().splitlines(keepends=True)
    partial = out.rename(tmp_path / "out.jsonl.partial")
    partial.write_bytes(lines[0] + lines[1][:9])
    standin.log.clear()
    assert logprobs_main(command) == 0 and out.read_bytes() == whole
    asked = [x["prompt"] for path, x in standin.log if path == "/v1/completions"]
    assert len(asked) == 4  # a probe and 3 records
    assert logprobs_main(command) == 0 and out.read_bytes() == whole
    assert "5 records, 5 of them in earlier runs" in capsys.readouterr().out
    with locked(out.with_suffix(".lock"), pytest.fail):
        assert logprobs_main(command) == 2 and out.read_bytes() == whole
    assert f"writes to {out}: wait for its end, or use another" in capsys.readouterr().err
    # records before an error are no output that training reads
    with (tmp_path / "traces.jsonl").open("a") as traces:
        traces.write('{"prompt": 1}\n')
    command[3] = str(tmp_path / "other.jsonl")
    assert logprobs_main(command) == 2 and not (tmp_path / "other.jsonl").exists()
    assert (tmp_path / "other.jsonl.partial").read_bytes() == whole


@pytest.mark.parametrize(
    "changed, flag, words",
    [
        (dict(token_shift=1), "--top_k=3", "has another tokenizer"),
        (dict(candidates=lambda *_: {str(x): dict(logprob=x - 300) for x in range(300)}),
         "--top_k=3", "token 299, expected a model with the vocabulary of the tokenizer"),
        (dict(max_logprobs=2), "--top_k=3", "start it with --max-logprobs=3"),
        (dict(num_errors=99), "--top_k=3", "gave no answer to /tokenize in 1 s"),
        (dict(), "--entropy=True", "--entropy has no effect with the source http"),
        (dict(), "--top_k=1", "does not give its tokenizer: set --tokenizer"),
    ],
)  # fmt: skip
def test_logprobs_refuses_a_server(standin, tmp_path, capsys, changed, flag, words):
    vars(standin).update(changed)
    command = command_for(standin, tmp_path, flag)
    if "--tokenizer" in words:
        command.remove("--tokenizer=bytes")
    assert logprobs_main(command) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(teacher_server="http://x"), "gives the candidates of config.posttrain.teacher_top_k"),
        (dict(lag=3), "--max-loras=5 or more"),
        (dict(server_data_parallel=2), "--data-parallel-size=1"),
        (dict(top_p=0.9), "top_p=0.9 changes the log-probabilities"),
        (dict(server=""), "needs config.rollouts.server"),
        (dict(max_replacements=1), "max_replacements=1 has no effect"),
    ],
)
def test_what_the_interface_does_not_tell_is_declared(standin, settings, words):
    config = read_config("agent_128k:mini")
    config.lora.rank = 4
    config.posttrain.importance_weights = True
    config.rollouts.update(source="server", server="http://x", server_max_loras=4)
    config.rollouts.update(settings)
    with pytest.raises(UserError, match=words):
        load(config)


def test_adapter_is_loaded_again_after_a_restart_of_the_server(standin, tmp_path):
    server, adapter = checked(standin), adapter_in(tmp_path / "0")
    request = "0-a", adapter, 2**31, np.arange(97, 100), 8
    asyncio.run(server.load("0-a", adapter))
    first = asyncio.run(server.sample(*request, 1))
    standin.adapters.clear()
    standin.num_errors = 2  # while it starts
    again = asyncio.run(server.sample(*request, 1))
    standin.error_status = 429  # of a proxy with a limit
    standin.num_errors = 1
    other = asyncio.run(server.sample(*request, 2))
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    assert first.log_probs.dtype == np.float32 and len(first.log_probs) == len(first.tokens)
    body = standin.log[-1][1]
    assert body["seed"] == 2**62 + 2 and body["return_token_ids"] and not body.get("stream")
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
    asyncio.run(server.load("0-a", adapter))  # loaded already
    others = adapter_in(tmp_path / "others"), adapter_in(tmp_path / "others/0")
    for name, path in (
        ("0-b", others[1]),
        ("1-b", adapter_in(tmp_path / "1")),
        ("x", adapter_in(tmp_path / "x")),
    ):
        asyncio.run(server.load(name, path))
    asyncio.run(server.unload(tmp_path, 1))  # not those of other runs
    assert standin.adapters.keys() == {"0-b", "1-b", "x"}
    standin.max_lora_rank = 2
    with pytest.raises(
        SamplerError, match="greater than max_lora_rank 2.*--max-lora-rank of at least 4"
    ):
        asyncio.run(server.load("2-b", adapter))
    standin.is_updatable = False
    with pytest.raises(SamplerError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        asyncio.run(server.load("2-b", adapter))


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("server")
    (directory / "reward.py").write_text(REWARD)
    prompts = [dict(prompt=f"{number} and {number + 1} are? ") for number in range(6)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in prompts))
    return dict(
        data__sources="", attention__shared_prefixes=True, posttrain__loss="dapo", rollouts__source="server",
        rollouts__prompts=directory / "prompts.jsonl", rollouts__reward=f"{directory / 'reward.py'}:reward",
        rollouts__max_tokens=5, rollouts__prompts_per_step=2, rollouts__answers_per_prompt=3, train__eval_every_steps=0,
        train__checkpoint_every_steps=1, optimizer__schedule_steps=5, train__steps=5, model__num_layers=1,
        lora__rank=2, rollouts__server_max_loras=4, rollouts__server_seconds=5.0,
    )  # fmt: skip


def files_of(workdir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (workdir / "rollouts").iterdir()}


@pytest.mark.full  # a heavy test kills such a run
@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("lag", [0, 2])
def test_resumed_run_asks_again_with_equal_seeds_and_versions(settings, standin, tmp_path, lag):
    """As after kills: rollouts of later steps are missing, the server has been restarted, and one
    that answers differently does not change finished files.
    """
    config, whole, parts = write_config(tmp_path), tmp_path / "whole", tmp_path / "parts"
    settings = settings | dict(rollouts__server=standin.url, rollouts__lag=lag)
    output = train(config, whole, **settings)
    assert f"rollouts   by the server {standin.url}" in output
    records = pyarrow.parquet.read_table(whole / "rollouts/5.parquet").to_pylist()
    assert len(records) == 6 and {x["policy_step"] for x in records} == {4 - lag}
    assert [row["rollouts/policy_age"] for row in rows(whole) if "rollouts/policy_age" in row] == [
        min(step, lag) for step in range(5)
    ]
    completions = [
        body for path, body in standin.log if path == "/v1/completions" and "stop" in body
    ]
    expected = {(body["model"], body["seed"]) for body in completions}
    assert len(expected) == len(completions) == 30
    last = str(4 - lag)  # earlier ones are unloaded in the background
    helpers.wait_until(lambda: {path.name for path in standin.adapters.values()} == {last})
    versions = sorted(int(path.name) for path in (whole / "adapters").iterdir())
    assert len(versions) <= lag + 3 and versions[-1] == 4
    train(config, parts, **settings | dict(train__steps=2))
    standin.adapters.clear()
    standin.log.clear()
    shutil.copy(whole / "rollouts/3.parquet", parts / "rollouts/3.parquet")
    for path in (parts / "rollouts").glob("[45].parquet"):
        path.unlink()
    train(config, parts, **settings)
    asked = {
        (x["model"], x["seed"])
        for path, x in standin.log
        if path == "/v1/completions" and "stop" in x
    }
    assert asked and asked <= expected and len(asked) == 12
    assert files_of(parts) == files_of(whole) and rows(parts) == rows(whole)


@pytest.mark.full
def test_agent_gets_the_same_tokens_from_the_own_sampler_and_the_server(standin, tmp_path):
    """The stand-in answers by the model of the own sampler."""
    config = read_config("agent_128k:mini")
    config.mesh.context = config.runtime.simulated_devices = 1
    config.lora.rank, config.posttrain.importance_weights = 4, True
    config.rollouts.update(prompts_per_step=2, answers_per_prompt=3)
    own = load(config)
    config.rollouts.update(source="server", server=standin.url, server_max_loras=4)
    config = load(config)
    step = build_step(own, make_mesh(own.mesh, jax.devices()[:1]))
    tokenizer = load_tokenizer(own.data.tokenizer, end_token=own.data.end_token)
    prompts, _ = open_prompts(own, tokenizer)
    params = step.init(None).params
    source = SimpleNamespace(
        prompts=prompts, eval_prompts=(), tokenizer=tokenizer, workdir=tmp_path
    )
    PolicyRollouts(step, source)(params, 1, tmp_path / "1.jsonl")
    expected = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    stops = stops_of(own, tokenizer, None)
    generator, lock = Generator(step, params, tokenizer), threading.Lock()

    def answer(body):
        seed, index = divmod(body["seed"], 2**31)
        sampling = Sampling(temperature=body["temperature"], seed=seed, scales_log_probs=True)
        with lock:
            (result,) = generator(
                [np.array(body["prompt"])], max_tokens=body["max_tokens"], sampling=sampling,
                stops=Stops(body["stop_token_ids"], []), indices=[index],
            )  # fmt: skip
        log_probs = result.log_probs.tolist()
        return result.tokens.tolist(), log_probs, result.text, result.finish_reason

    standin.answer = answer
    server = Server(url=standin.url, config=config, tokenizer=tokenizer, stops=stops)
    numbers = prompts_of_step(config, len(prompts), 1)
    sample = functools.partial(server.sample, "base", tmp_path, seed_of(config, 1, 0))
    agents = Agents(config, tokenizer, prompts)
    records = asyncio.run(agents.rollouts(numbers, 1, 0, sample))
    assert len(records) == len(expected) >= 6
    for ours, theirs in zip(records, expected):
        np.testing.assert_allclose(
            ours.pop("sampled_log_probs"), theirs.pop("sampled_log_probs"), rtol=1e-4
        )
        assert ours == theirs


@pytest.mark.full
@pytest.mark.parametrize("source", ["model", "server"])
def test_two_processes_have_the_rollouts_of_one_and_fail_together(source, standin, tmp_path):
    """An agent of several turns; in the second run its reward fails."""
    settings = dict(train__steps=2, rollouts__prompts_per_step=2, rollouts__answers_per_prompt=4)
    if source == "server":
        settings |= dict(rollouts__source="server", rollouts__server=standin.url)
        settings |= dict(rollouts__server_max_loras=3, rollouts__lag=1, lora__rank=2)
        settings |= dict(
            data__tokenizer="bytes", model__vocab_size=257, posttrain__importance_weights=True
        )
    one, two = tmp_path / "one", tmp_path / "two"
    train_elsewhere("agent_128k:mini", one, **settings)
    for run in start_pair("agent_128k:mini", two, **settings):
        finish(run)
    assert files_of(two) == files_of(one) and len(files_of(one)) == 2
    losses = [[row["loss"] for row in rows(run) if "loss" in row] for run in (one, two)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    peer_failed = r"error: process 0 of 2 on \S+ failed: "
    (tmp_path / "reward.py").write_text("def reward(*args):\n    raise ValueError('no judge')\n")
    if source == "server":  # process 0 cannot write the tensors of an adapter
        adapters = tmp_path / "adapters"
        adapters.mkdir()
        (adapters / "0.partial").touch()
        more = settings | dict(rollouts__server_directory=adapters)
        pair = start_pair("agent_128k:mini", tmp_path / "unwritten", **more)
        assert "cannot write to" in finish(pair[0], 2)
        output, _ = pair[1].communicate(timeout=helpers.TIMEOUT_SECONDS)
        assert pair[1].returncode and re.search(peer_failed + "cannot write to", output)
    settings |= dict(rollouts__reward=f"{tmp_path}/reward.py:reward", rollouts__max_failed=0)
    pair = start_pair("agent_128k:mini", tmp_path / "bad", **settings)
    assert "no judge" in finish(pair[0], 2)
    # its status may be that of JAX, which ends a process after process 0
    output, _ = pair[1].communicate(timeout=helpers.TIMEOUT_SECONDS)
    assert pair[1].returncode and re.search(peer_failed + ".*no judge", output)


@pytest.mark.full
@pytest.mark.usefixtures("shared_programs")
def test_experts_of_the_server_are_replayed(settings, standin, tmp_path):
    """With other experts of the same tokens, training gets other log-probabilities."""
    experts = dict(num_experts=8, experts_per_token=2, ffn_dim=8)
    more = {f"model__experts__{name}": size for name, size in experts.items()}
    more |= dict(lora__projections="query,key,value")
    more |= dict(rollouts__server=standin.url, posttrain__replay_routing=True, train__steps=2)
    config, columns, differences = write_config(tmp_path), [], []
    for num_experts in (8, 7):
        standin.experts, run = (1, num_experts, 2), tmp_path / str(num_experts)
        train(config, run, **settings | more)
        records = pyarrow.parquet.read_table(run / "rollouts/1.parquet").to_pylist()
        for record in records:
            recorded = np.load(io.BytesIO(record.pop("routed_experts")))
            expected = np.load(io.BytesIO(base64.b64decode(standin.routed(record["tokens"]))))
            np.testing.assert_array_equal(recorded, expected)
        columns.append(records)
        differences.append([x["sampler_difference"] for x in rows(run) if "loss" in x][0])
    assert columns[0] == columns[1] and abs(differences[0] - differences[1]) > 1e-4
    standin.experts = None
    message = train(config, tmp_path / "none", status=2, **settings | more)
    assert "--enable-return-routed-experts" in message


@pytest.mark.full
@pytest.mark.usefixtures("shared_programs")
def test_heldout_answers_without_a_reward_end_the_run(settings, standin, tmp_path):
    """They are of the weights after the step, which the server gets first."""
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "reward.py").write_text("def reward(*args):\n    raise ValueError('no judge')\n")
    more = dict(rollouts__server=standin.url, rollouts__eval_prompts=tmp_path / "eval.jsonl")
    more |= dict(train__eval_every_steps=2, rollouts__reward=f"{tmp_path}/reward.py:reward")
    message = train(write_config(tmp_path), tmp_path / "run", status=2, **settings | more)
    assert "3 of 3 answers have no reward" in message and "no judge" in message
    kept = tmp_path / "run/rollouts/0.heldout.unrewarded.parquet"
    records = pyarrow.parquet.read_table(kept).to_pylist()
    assert [x["policy_step"] for x in records] == [0, 0, 0]


@pytest.mark.usefixtures("shared_programs")
def test_lost_server_ends_the_run_with_a_sentence(settings, tmp_path):
    with StandIn() as server:
        url = server.url
    settings = settings | dict(rollouts__server=url, rollouts__server_seconds=1.0)
    message = train(write_config(tmp_path), tmp_path / "run", status=2, **settings)
    assert f"the server {url} gave no answer to /v1/models in 1 s" in message
