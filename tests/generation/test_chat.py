"""Chats: turns that compute their new tokens only, and limits of sampling."""

import signal

import jax
import numpy as np
import pytest

from jaxlc.cli import main_of
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation import generate_text
from jaxlc.generation.generate_text import ChatSession
from jaxlc.generation.sampling import Sampling, choose_tokens
from jaxlc.step.language_model import TrainedModel
from tests.step.synthetic import HYBRID, small_config, small_step
from tests.train import runs

chat_main = main_of("chat")


@pytest.mark.parametrize(
    "model", [pytest.param({}, marks=pytest.mark.full), HYBRID], ids=["attention", "hybrid"]
)
def test_second_turn_prefills_new_tokens_and_compiles_nothing(model, monkeypatch, tmp_path):
    config = small_config(model=model, mesh=dict(context=2))
    step = small_step(config)
    monkeypatch.setattr(generate_text, "_CHUNK_TOKENS", 8)
    result = TrainedModel(
        step=0, params=step.init().params, tokenizer=ByteTokenizer(), workdir=tmp_path,
        train_step=step,
    )  # fmt: skip
    generator, stops = generate_text.generator_of(result), generate_text.stops_for(result)
    ids = np.arange(2, 22, dtype=np.int32)

    def session():
        limits = dict(max_tokens=5, max_context=128)
        return ChatSession(result, sampling=Sampling(), chat_template="chatml", **limits)

    def fresh(prompt):
        return session().answer(prompt).tokens.tolist()

    conversation = session()
    first = conversation.answer(ids)
    (alone,) = generator([ids], max_tokens=5, stops=stops)
    assert first.tokens.tolist() == alone.tokens.tolist() and conversation.num_prefilled == 20
    more = np.concatenate([ids, first.tokens, np.arange(30, 39, dtype=np.int32)])
    expected = fresh(more)
    compiled = []

    def count(name, seconds, **_):
        compiled.append(name) if "backend_compile" in name else None

    jax.monitoring.register_event_duration_secs_listener(count)
    second = conversation.answer(more)
    assert compiled == []
    # the last token of an answer is not in the cache
    assert second.tokens.tolist() == expected and conversation.num_prefilled == 9 + 1
    # a rewritten history: from its first difference, or from the state before it
    other = np.concatenate([ids, np.arange(46, 60)]).astype(np.int32)
    rewritten = conversation.answer(other)
    assert rewritten.tokens.tolist() == fresh(other)
    assert conversation.num_prefilled == 14
    with pytest.raises(UserError, match="max_context=128"):
        conversation.answer(np.zeros(125, np.int32))


@pytest.mark.parametrize(
    "top_k, min_p, allowed", [(2, 0.0, {0, 1}), (0, 0.5, {0, 1}), (0, 0.9, {0})]
)
def test_top_k_and_min_p_choose_among_the_likeliest(top_k, min_p, allowed):
    logits_BV = np.tile(np.log(np.float32([0.4, 0.3, 0.15, 0.1, 0.05])), (64, 1))
    indices_B = np.stack([np.arange(64), np.zeros(64)]).astype(np.int32)
    arguments = logits_BV, np.uint32(0), indices_B
    sampling = Sampling(temperature=1.0, top_k=top_k, min_p=min_p)
    tokens_B, _ = choose_tokens(*arguments, sampling)
    assert {*np.asarray(tokens_B).tolist()} == allowed
    # top_p counts the probability of the tokens that top_k leaves, as in transformers
    tokens_B, _ = choose_tokens(*arguments, Sampling(temperature=1.0, top_p=0.5, top_k=2))
    assert {*np.asarray(tokens_B).tolist()} == {0}


def test_repetition_penalty_changes_logits_of_seen_tokens():
    seen_BV = np.array([[True, True, False]])
    sampling = Sampling(repetition_penalty=2.0)
    for logits_V, token, expected_V in (
        ([2.0, -2.0, 1.5], 2, [1.0, -4.0, 1.5]),
        ([-1.0, -1.0, -1.5], 2, [-2.0, -2.0, -1.5]),
        ([4.0, -2.0, 1.0], 0, [2.0, -4.0, 1.0]),
    ):
        chosen = choose_tokens(np.float32([logits_V]), 0, np.zeros((2, 1), int), sampling, seen_BV)
        log_prob = float(jax.nn.log_softmax(np.float32(expected_V))[token])
        assert [x.tolist() for x in chosen] == [[token], pytest.approx([log_prob])]
    with pytest.raises(UserError, match="top_k=3 has no effect with temperature"):
        Sampling(top_k=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.write_untrained_run(tmp_path_factory.mktemp("chat"))


def test_command_keeps_its_history_and_ends_an_answer_at_ctrl_c(run, monkeypatch, capsys):
    sessions, lines = [], iter(["one", "two", "/undo", "two", "x" * 400, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    say = ChatSession.say

    def interrupted(self, text, stream, is_ended):
        sessions.append(self)
        if text == "one":
            signal.raise_signal(signal.SIGINT)
        return say(self, text, stream, is_ended)

    monkeypatch.setattr(ChatSession, "say", interrupted)
    arguments = ["--chat_template=chatml", "--system=s", "--max_tokens=4", "--max_context=400"]
    assert chat_main(["jaxlc chat", str(run), *arguments]) == 0
    output = capsys.readouterr()
    assert "[interrupted]" in output.out and "max_context=400" in output.err
    assert len({*map(id, sessions)}) == 1 and len(sessions[0]._turns) == 2
    text = ByteTokenizer().decode(sessions[0]._turns[-1])
    assert text.startswith("<|im_start|>system\ns<|im_end|>") and text.count("user\ntwo") == 1
