"""Chats: rendering, the tokens of answers, and loss weights in packed sequences."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.texts.documents import Chat
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.tokens.chat_templates import ChatTemplate, load_chat_template
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import load_tokenizer
from tests.data.chat_styles import (
    CHATML,
    CHATS,
    HEADERS,
    TOOL_CHAT,
    VARIABLES,
    cases,
    without_markers,
    write_tokenizer,
)

CASES = cases()


def render(template: str, chat: dict):
    return ChatTemplate(template, VARIABLES).render(
        Chat(chat["messages"], chat.get("tools")), "chats.jsonl:1"
    )


@pytest.mark.parametrize("case", CASES)
def test_answers_without_markers_equal_those_with_markers(case: str):
    """Without markers, answers are found by rendering the prompt of each one."""
    template, chat = CASES[case]
    marked, unmarked = render(template, chat), render(without_markers(template), chat)
    assert unmarked.text == marked.text
    answers = [marked.text[begin:end] for begin, end in marked.answers]
    assert len(answers) == sum(message["role"] == "assistant" for message in chat["messages"])
    assert [unmarked.text[begin:end] for begin, end in unmarked.answers] == answers


def test_chat_template_renders_tools_and_calls():
    rendered = render(CHATML, TOOL_CHAT)
    assert '"description": "Adds — numbers"' in rendered.text.partition("<|im_end|>")[0]
    first, second = (rendered.text[begin:end] for begin, end in rendered.answers)
    assert first.startswith("I call a tool.\n<tool_call>\n{") and first.endswith(
        "</tool_call><|im_end|>"
    )
    assert '"b": [2, "née"]' in first and second == "It is 3.<|im_end|>"


def test_encoded_answers_decode_to_the_text(tmp_path: Path):
    for name in ("bytes", str(write_tokenizer(tmp_path))):
        tokenizer = load_tokenizer(name)
        rendered = [render(CHATML, chat) for chat in CHATS]
        for chat, (ids, spans) in zip(rendered, Encoder(tokenizer).encode(rendered)):
            assert len(spans) == len(chat.answers)
            for (begin, end), (first, last) in zip(spans, chat.answers):
                answer = (
                    chat.text[first:last]
                    if name == "bytes"
                    else chat.text[first:last].removesuffix("<|im_end|>")
                )
                assert tokenizer.decode(ids[begin:end]) == answer


@pytest.mark.parametrize(
    "messages, template, message",
    [
        (
            [{"role": "user", "content": "x"}],
            CHATML,
            "no message has the role 'assistant', only 'user', so",
        ),
        ([{"role": "assistant", "content": "\ufdd0"}], CHATML, "noncharacter"),
        (
            [{"role": "assistant"}],
            "{{ messages[0].content.text + 1 }}",
            "raises an error for the messages",
        ),
        (
            [{"role": "assistant", "content": "x"}],
            "{{ raise_exception('no system') }}",
            r"raises an error for the messages .*no system",
        ),
        (
            [{"role": "assistant", "content": "x"}],
            "{% generation %}{% endgeneration %}",
            "renders no answer",
        ),
        (
            [{"role": "assistant", "content": "x"}],
            "{{ '' if messages else 'prompt' }}",
            "renders no answer",
        ),
    ],
)
def test_chat_that_cannot_be_rendered_is_a_bad_record(messages, template: str, message: str):
    with pytest.raises(BadRecord, match=f"^chats.jsonl:1: .*({message})"):
        render(template, {"messages": messages})


def test_chat_template_is_found_next_to_the_tokenizer(tmp_path: Path):
    directory = write_tokenizer(tmp_path / "a", template=CHATML)
    file = directory / "tokenizer.json"
    expected = render(CHATML, CHATS[0])
    assert (
        load_chat_template("", file).render(Chat(CHATS[0]["messages"]), expected.where) == expected
    )
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "rag", "template": "{{ x }}"},
    ]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert (
        load_chat_template("", file).render(Chat(CHATS[0]["messages"]), expected.where) == expected
    )
    (directory / "chat_template.jinja").write_text(CHATML.replace("<|im_start|>", "<s>"))
    assert (
        load_chat_template("", file)
        .render(Chat(CHATS[0]["messages"]), expected.where)
        .text.startswith("<s>user\n")
    )
    assert (
        load_chat_template("chatml", None).render(Chat(CHATS[0]["messages"]), expected.where).text
        == expected.text
    )
    llama3 = load_chat_template("llama3", file).render(Chat(CHATS[0]["messages"]), expected.where)
    assert llama3 == render(HEADERS, CHATS[0])
    with pytest.raises(UserError, match="data.tokenizer has no chat template.*data.chat_template"):
        load_chat_template("", None)
    with pytest.raises(
        UserError, match="cannot read the chat template .*: set --config.data.chat_template"
    ):
        load_chat_template(str(tmp_path / "none.jinja"), None)
    with pytest.raises(UserError, match="is not a valid Jinja template"):
        ChatTemplate("{% if %}", {})


def open_chats(tmp_path: Path, lengths: list[int], seq_len: int, **fields):
    """Chats of two answers each; the first is one letter, the second has the given length."""
    lines = []
    for number, length in enumerate(lengths):
        question = {"role": "user", "content": f"question {number}"}
        answers = [{"role": "assistant", "content": text} for text in ("a", "b" * length)]
        lines.append(json.dumps({"messages": [question, answers[0], question, answers[1]]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    source = SourceConfig(
        name="chats", paths=(str(tmp_path / "chats.jsonl"),), chat_field="messages", **fields
    )
    config = DataConfig(
        mixture=(source,),
        seq_len=seq_len,
        cache_dir=str(tmp_path / "cache"),
        eval_fraction=0.1,
        chat_template="chatml",
    )
    return open_corpus(config)


def weighted_texts(sequence: dict[str, np.ndarray]) -> list[str]:
    """The runs of targets with a weight."""
    is_weighted = np.concatenate([[False], sequence["loss_weights"] > 0, [False]])
    borders = np.flatnonzero(np.diff(is_weighted.astype(int)))
    return [
        "".join(map(chr, sequence["targets"][a:b])) for a, b in zip(borders[::2], borders[1::2])
    ]


def test_packed_chats_train_on_answers_only(tmp_path: Path):
    lengths = [3, 9, 30, 5, 60, 2, 14, 8, 21, 33] * 2
    train = open_chats(tmp_path, lengths, 512).sources[0].train
    texts = [text for i in range(train.num_sequences) for text in weighted_texts(train[i])]
    used = [lengths[d] for d in train.document_ids]
    assert sorted(texts) == sorted(
        ["a<|im_end|>"] * len(used) + ["b" * n + "<|im_end|>" for n in used]
    )
    weights = np.concatenate([train[i]["loss_weights"] for i in range(train.num_sequences)])
    assert set(weights.tolist()) == {0, 1}
    assert (np.diff(train[0]["segment_ids"][train[0]["segment_ids"] > 0]) >= 0).all()


def test_answer_weights_have_equal_sums(tmp_path: Path):
    corpus = open_chats(tmp_path, [3, 9, 30, 5] * 5, 512, answer_weights="answer")
    train, sums = corpus.sources[0].train, []
    for i in range(train.num_sequences):
        weights = train[i]["loss_weights"]
        borders = np.flatnonzero(np.diff(np.concatenate([[0], weights > 0, [0]])))
        sums += [weights[a:b].sum() for a, b in zip(borders[::2], borders[1::2])]
    answers = train.store.answers
    np.testing.assert_allclose(sums, np.diff(answers).mean(), rtol=1e-5)


def test_overlong_chats_are_dropped_truncated_or_cut(tmp_path: Path):
    lengths = [10] * 10 + [400] * 10
    dropped = open_chats(tmp_path, lengths, 256)
    assert any(
        "documents longer than data.seq_len=256: 10 of 20; they are dropped" in w
        for w in dropped.warnings
    )
    train = dropped.sources[0].train
    assert np.diff(train.store.offsets)[train.document_ids].max() <= 256
    truncated = open_chats(tmp_path, lengths, 256, overlong="truncate").sources[0].train
    sequences = map(truncated.__getitem__, range(50))
    long = next(sequence for sequence in sequences if set(sequence["segment_ids"]) == {1})
    first, second = weighted_texts(long)
    assert first == "a<|im_end|>" and set(second) == {"b"} and long["loss_weights"][-1] == 1
    cut = open_chats(tmp_path, lengths, 256, overlong="cut").sources[0].train
    texts = [text for i in range(cut.num_sequences) for text in weighted_texts(cut[i])]
    num_b = sum(text.count("b") for text in texts)
    assert num_b == sum(lengths[d] for d in cut.document_ids)


def test_chats_fingerprint_depends_on_tokens_and_losses(tmp_path: Path):
    corpus = open_chats(tmp_path, [3] * 20, 256)
    other = tmp_path / "other.jinja"
    other.write_text(CHATML)
    config = DataConfig(
        mixture=(
            SourceConfig(
                name="chats", paths=(str(tmp_path / "chats.jsonl"),), chat_field="messages"
            ),
        ),
        seq_len=256,
        cache_dir=str(tmp_path / "cache"),
        eval_fraction=0.1,
        chat_template=str(other),
    )
    assert open_corpus(config).sources[0].train.store is not corpus.sources[0].train.store
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2
    assert (
        len(
            {
                open_corpus(c).fingerprint
                for c in (config, dataclasses.replace(config, chat_template="chatml"))
            }
        )
        == 1
    )
    path = tmp_path / "chats.jsonl"
    path.write_text(
        path.read_text().replace('"role": "assistant"', '"role": "assistant", "loss": false', 1)
    )
    changed = open_corpus(config)
    tokens, before = (x.sources[0].train.store.tokens for x in (changed, corpus))
    np.testing.assert_array_equal(tokens, before)
    assert changed.fingerprint != corpus.fingerprint


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
QUESTION_AND_ANSWER = Chat([dict(role="user", content="q"), dict(role="assistant", content="a")])


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ messages[0].content * 100000000 }}", "more than 67,108,864"),
        ("{{ 'a' * 100000000 }}", "more than 67,108,864"),
        ("{% for i in range(9000) %}{{ 'a' * 9000 }}{% endfor %}", "more than 67,108,864"),
        ("{% for i in range(10 * 100000) %}{% endfor %}", "Range too big"),
        ("{{ (1000000000000000000000 ** 100000) ** 1000 }}", "a number is too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not a valid Jinja template"),
        ("{{ " + "1" * 5000 + " }}", "not a valid Jinja template"),
        ("{{ a }}" * 50_000, "more than 262,144 characters"),
    ],
)
def test_template_that_exceeds_a_limit_is_an_error(source, message):
    with pytest.raises(UserError, match=message):
        ChatTemplate(source, {}).render(QUESTION_AND_ANSWER, "f:1")


@pytest.mark.parametrize(
    "content, message", [("\ufdd0", "f:1: .*noncharacter"), ("error", "f:1: .*\\(E\\)")]
)
def test_render_raises_bad_record_for_a_chat_that_cannot_be_rendered(content, message):
    chat = Chat([dict(role="user", content=content), *QUESTION_AND_ANSWER.messages[1:]])
    if_error = "{% if messages[0].content == 'error' %}{{ raise_exception('E') }}{% endif %}"
    with pytest.raises(BadRecord, match=message):
        ChatTemplate(if_error + PLAIN, {}).render(chat, "f:1")
