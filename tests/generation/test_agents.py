"""Agents: the tokens of their turns and contexts, failures, and the batches of the own sampler."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlc.config import Config, load, read_config
from jaxlc.core.errors import UserError
from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens.chat_templates import MarkedText
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.generation.rollouts import PolicyRollouts, _Rounds
from jaxlc.posttrain.agents import Agents, Client, Turn, answer_once, in_background, write_rewarded
from jaxlc.posttrain.rollouts import write_rollouts
from jaxlc.posttrain.traces import Prompt, open_traces
from jaxlc.posttrain.trees import groups_of
from tests.data.chat_styles import STYLES, write_tokenizer

QUESTION = dict(role="user", content="3 + 4 + 1")
PROMPT = Prompt(np.array([2, 14, 15], np.int32), "3 + 4 + 1", dict(numbers=[3, 4, 1]), "p:1")


def mini(**rollouts) -> Config:
    config = read_config("agent_128k:mini")
    config.data.seq_len = 2048
    config.rollouts.update(answers_per_prompt=2, **rollouts)
    return load(config)


def agents_of(config: Config, **changed) -> Agents:
    tokenizer = load_tokenizer(config.data.tokenizer, end_token=config.data.end_token)
    return Agents(config, tokenizer, [PROMPT, PROMPT._replace(where="p:2")])


class Scripted:
    """A sampler with fixed answers for each agent, in turn."""

    def __init__(self, *answers: str, with_experts: bool = False, num_agents: int = 2):
        self.answers, self.with_experts, self.num_agents = answers, with_experts, num_agents
        self.requests, self.ended = [], []

    async def sample(self, ids: np.ndarray, most: int, index: int) -> Turn:
        await asyncio.sleep(0)
        self.requests.append((ids, index))
        number = index // self.num_agents
        text = self.answers[number]
        # 0 is not in the text, so rendering the text again gives other tokens
        tokens = np.array([0, *self.encoder.plain(text, ""), 3], np.int32)
        log_probs = -np.arange(1.0, len(tokens) + 1) - number
        experts = np.full((len(ids) + len(tokens) - 1, 1, 1), number)
        return Turn(tokens, log_probs, text, "stop", experts if self.with_experts else None)


def rollouts_of(agents: Agents, sampler: Scripted, numbers=(0,)) -> list[dict]:
    sampler.encoder = agents.encoder
    sampler.num_agents = 2 * len(numbers)
    return asyncio.run(agents.rollouts(numbers, 5, 4, sampler.sample, sampler.ended.append))


def test_heldout_reward_counts_an_answer_once_however_many_contexts_it_has(tmp_path, monkeypatch):
    context = dict(tokens=[1, 2], loss_mask=[0, 1], sampled_log_probs=[-1.0], group="1-0")
    records = [
        context | dict(policy_step=1, trajectory=name, reward=float(name), truncated=name == "0")
        for name in "110"
    ]
    records.append(dict(group="1-0", trajectory="2", failed="no reward"))
    monkeypatch.setattr(PolicyRollouts, "_answers", lambda *args: records)
    maker = object.__new__(PolicyRollouts)
    maker._config, maker._prompts = mini(max_failed=0.5), ()
    maker._source = SimpleNamespace(prompts=(), tokenizer=load_tokenizer("bytes"))
    means = maker.heldout({}, 1, tmp_path / "1.heldout.jsonl")
    expected = dict(mean=0.5, deviation=0.5, answer_tokens=1.0, truncated=1 / 3)
    assert means == pytest.approx(expected)


def test_turns_continue_the_tokens_and_a_summary_starts_a_context(tmp_path):
    """The calculator of the recipe: a call, its result, a call, a summary, and the sum."""
    config = mini()
    agents, sampler = agents_of(config), Scripted("<tool_call>", "2 <tool_call>", "8")
    records = rollouts_of(agents, sampler)
    assert sampler.ended == [0, 1] and [x["trajectory"] for x in records] == ["0", "0", "1", "1"]
    first, second = records[:2]
    decode = agents.encoder.tokenizer.decode
    sampled = [np.array(x["tokens"])[np.array(x["loss_mask"], bool)] for x in (first, second)]
    assert [decode(x).split() for x in sampled] == [["<tool_call>", "2", "<tool_call>"], ["8"]]
    assert first["sampled_log_probs"] == [-1, -2, -3, -2, -3, -4, -5]
    assert records[1]["sampled_log_probs"] == [-3, -4, -5]
    requests = [ids for ids, index in sampler.requests if index % 2 == 0]
    for ids, record in zip(requests, (first, first, second)):  # each prompt is a prefix
        np.testing.assert_array_equal(ids, record["tokens"][: len(ids)])
    assert first["tokens"][: len(requests[1])] == requests[1].tolist()
    assert {x["reward"] for x in records} == {1.0}
    assert {(x["group"], x["policy_step"], x["truncated"]) for x in records} == {("5-0", 4, False)}
    path = tmp_path / "5.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    traces = open_traces(config, agents.encoder.tokenizer, (str(path),), step=5)
    assert traces.rewards["reward"] == 1.0 and traces.rewards["policy_age"] == 0
    assert len(list(groups_of(traces.train.traces))) == 0  # equal rewards have no advantage


@pytest.mark.parametrize("style", ["chatml", "headers", "brackets", "reasoning"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_continued_tokens_are_those_of_the_template(style, is_cut, tmp_path):
    """Also where a template renders an earlier answer without its reasoning: its tokens stay. An
    answer that was cut gets the end of its turn.
    """
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)), end_token="</s>")
    encoder = Encoder(tokenizer, STYLES[style])
    messages, answer = [dict(role="user", content="ab")], "cd"
    answer = " " * (style == "brackets") + answer  # the template has a space before it
    prompt, _ = encoder.prompt(Chat(messages), "")
    end = "" if is_cut else encoder.template.end_of_turn
    ((ids, _),) = encoder.encode([MarkedText(answer + end, "")])
    before = np.concatenate([prompt, ids])
    new = [dict(role="user", content="ef")]
    continued = encoder.continued(before, Chat(new), "")
    np.testing.assert_array_equal(continued[: len(before)], before)
    whole = [*messages, dict(role="assistant", content=answer.strip()), *new]
    expected, _ = encoder.prompt(Chat(whole), "")
    if style != "reasoning":
        np.testing.assert_array_equal(continued, expected)
    else:
        assert tokenizer.decode(continued, special_tokens=True).endswith(
            tokenizer.decode(expected, special_tokens=True).partition(answer)[2]
        )


def test_branches_of_a_context_share_its_tokens_and_experts():
    sampler = Scripted("1", "2", "3", "4", with_experts=True, num_agents=1)
    sampler.encoder = agents_of(mini()).encoder
    client = Client(PROMPT, sampler.encoder, mini(), sampler.sample, iter(range(4)))

    async def agent():
        trajectory = client.trajectory()
        first = await trajectory.ask([QUESTION])
        for text in ("5", "6"):
            await trajectory.ask([QUESTION, first.message, dict(role="user", content=text)])
        await trajectory.sample([*trajectory.contexts[0].tokens, 9])
        return trajectory

    contexts = asyncio.run(agent()).contexts
    assert len(contexts) == 2
    left, right = (x.tokens[x.sampled].tolist() for x in contexts)
    assert left[:3] == right[:3] == [0, 15, 3] and left != right
    lengths = [len(x.tokens) - 1 for x in contexts]
    assert [len(x.experts) for x in contexts] == lengths and sum(left[-1:]) == 3
    num_first = int(np.flatnonzero(contexts[0].sampled)[2])
    assert all((x.experts[:num_first] == 0).all() and x.experts[num_first:].all() for x in contexts)


def test_context_that_fills_the_sequence_gets_no_turn():
    config = mini()
    client = Client(PROMPT, agents_of(config).encoder, config, None, iter([]))
    turn = asyncio.run(client.trajectory().sample(np.zeros(2049, np.int32)))
    assert turn.reason == "context" and not len(turn.tokens)


async def _fails(client, record):
    trajectory = client.trajectory()
    await trajectory.sample(client.prompt.ids)
    if client.prompt.where == "p:1":
        raise RuntimeError("no tool")
    return [trajectory]


def _reward(prompt, answer, record, turns, state=[0]):  # noqa: B006
    state[0] += 1
    if state[0] in (1, 2):
        raise RuntimeError("no judge")
    return float(state[0])


def test_failures_are_dropped_and_counted_and_too_many_end_the_run(tmp_path):
    """Two agents fail, and one reward fails twice; none of them is 0."""
    config = mini(max_failed=0.75, reward_retries=1)
    agents = agents_of(config)
    agents.agent, agents.reward = _fails, _reward
    records = rollouts_of(agents, Scripted("1"), (0, 1))
    assert [x.get("failed", "") for x in records] == [
        *["config.rollouts.agent failed: no tool"] * 2, "config.rollouts.reward failed: no judge", ""
    ]  # fmt: skip
    assert [x.get("reward") for x in records] == [None, None, None, 3.0]
    write_rewarded(records, config, tmp_path / "5.jsonl")
    with pytest.raises(
        UserError, match=r"3 of 4 answers have no reward, .*max_failed=0.5; .*no tool"
    ):
        write_rewarded(records, mini(max_failed=0.5), tmp_path / "5.jsonl")
    with pytest.raises(UserError, match="3 of 4 answers"):  # the last one has more contexts
        write_rewarded(records + records[3:] * 4, mini(max_failed=0.5), tmp_path / "6.jsonl")
    kept = tmp_path / "5.unrewarded.jsonl"
    assert len(kept.read_text().splitlines()) == 4
    assert kept.read_text() == (tmp_path / "5.jsonl").read_text()
    # the first record has no reward, and one has no tokens
    lost = dict(failed="no server", text=records[0]["text"], group="5-0", policy_step=4)
    write_rollouts([lost, *records], tmp_path / "5.parquet")
    for path, num_failed in ((kept, 3), (tmp_path / "5.parquet", 4)):
        traces = open_traces(config, agents.encoder.tokenizer, (str(path),), step=5)
        assert traces.rewards["failed"] == num_failed and traces.rewards["reward"] == 3.0


def test_answers_to_a_prompt_that_a_step_has_twice_are_trajectories_of_their_own(tmp_path):
    """As at the border of two epochs of prompts, in whose step a prompt may be the last and the first."""
    agents, path = agents_of(mini(agent="")), tmp_path / "5.jsonl"
    rewards = iter([0.0, 1.0, 2.0, 3.0])
    agents.reward = lambda *_: next(rewards)
    records = rollouts_of(agents, Scripted("1"), (0, 0))
    assert sorted(x["reward"] for x in records) == [0.0, 1.0, 2.0, 3.0]
    write_rollouts(records, path)
    traces = open_traces(mini(), agents.encoder.tokenizer, (str(path),), step=5)
    assert (traces.rewards["reward"], traces.rewards["reward_max"]) == (1.5, 3.0)


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_agent_that_exits_has_failed_and_others_go_on(error):
    """Also in a task of its own; and a reward that does the same."""

    async def leaves():
        raise error("no tool")

    async def agent(client, record):
        if client.prompt.where == "p:1":
            await asyncio.gather(leaves())
        return await answer_once(client, record)

    agents, sampler = agents_of(mini(agent="", reward_retries=0)), Scripted("1")
    agents.agent, sampler.encoder, sampler.num_agents = agent, agents.encoder, 4
    result = in_background(agents.rollouts((0, 1), 5, 4, sampler.sample))
    failed = [x.get("failed", "") for x in result.result(timeout=20)]
    assert ["agent failed: " in x for x in failed] == [True, True, False, False]
    assert failed[0].endswith(("no tool", "CancelledError"))
    agents.agent, agents.reward = answer_once, lambda *_: leaves()
    result = in_background(agents.rollouts((0, 1), 5, 4, sampler.sample))
    assert all("reward failed: " in x["failed"] for x in result.result(timeout=20))


def test_batch_has_the_requests_of_all_agents_that_run():
    """An agent that waits for a tool keeps the others waiting; one that has ended does not."""
    rounds, batches = _Rounds(3), []

    async def agent(number: int):
        for turn in range(number + 1):
            if number == 2:
                await asyncio.sleep(0.05)
            await rounds.sample(np.zeros(1, np.int32), 1, 3 * turn + number)
        rounds.end(number)

    async def run():
        await asyncio.gather(*map(agent, (2, 0, 1)))
        return []

    result = in_background(run())
    result.add_done_callback(lambda _: rounds.batches.put([]))
    while batch := rounds.next():
        batches.append([index for _, _, index in batch])
        rounds.answer([None] * len(batch))
    assert result.result() == [] and batches == [
        [0, 1, 2], [4, 5], [8]
    ]  # fmt: skip


def test_agent_that_is_not_asynchronous_is_refused(tmp_path):
    (tmp_path / "agent.py").write_text("def agent(client, record): ...")
    with pytest.raises(UserError, match="is not asynchronous"):
        agents_of(mini(agent=f"{tmp_path}/agent.py:agent"))
