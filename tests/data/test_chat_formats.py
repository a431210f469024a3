"""Chats of records in the formats of published data sets: what they become, and what is refused."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import normalizers

from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.texts.documents import CHAT_FIELDS, Chat, Fields, Notes, read_chat, read_documents
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.chat_templates import ChatTemplate, load_chat_template
from tests.data.chat_styles import (
    CHATML,
    HEADERS,
    OPENAI_CHAT,
    TRANSFORMERS_CHAT,
    VARIABLES,
    write_tokenizer,
)

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def read(record: dict, chat_format: str = "messages") -> Chat:
    field = CHAT_FIELDS[chat_format]
    return read_chat(record.get(field), record, chat_format, field, "a.jsonl:1")


def test_openai_record_becomes_that_of_transformers():
    chat = read(OPENAI_CHAT)
    assert chat == Chat(**TRANSFORMERS_CHAT)
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": None}]}
    (message,) = read({"messages": [flat]}).messages
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    "chat_format, record, expected",
    [
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                    {"from": "tool", "value": "t"},
                ],
                "system": "s",
            },
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "t")],
        ),
        (
            "alpaca",
            {"instruction": "q", "input": "", "output": "a"},
            [("user", "q"), ("assistant", "a")],
        ),
        (
            "alpaca",
            {"instruction": "q", "input": "in", "output": "a", "system": "s"},
            [("system", "s"), ("user", "q\n\nin"), ("assistant", "a")],
        ),
    ],
)
def test_other_formats_become_messages(chat_format: str, record: dict, expected: list):
    assert [(m["role"], m["content"]) for m in read(record, chat_format).messages] == expected


@pytest.mark.parametrize(
    "chat_format, record, message",
    [
        (
            "messages",
            {"messages": []},
            "'messages' is an empty list, expected a list of messages with role and content",
        ),
        (
            "messages",
            {"messages": [USER, "a"]},
            r"messages\[1\] is a str, expected a message with role",
        ),
        (
            "messages",
            {"messages": [USER, {"role": None}]},
            r"messages\[1\] is a dictionary with the fields \['role'\]",
        ),
        (
            "messages",
            {"messages": [{"from": "human", "value": "q"}]},
            "expected .*; set chat_format=sharegpt for such",
        ),
        (
            "messages",
            {"messages": "q", "output": "a"},
            "is a str, expected .*; set chat_format=alpaca for such",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": None}]},
            r"messages\[0\].content is null, expected text$",
        ),
        (
            "messages",
            {"messages": [{**ANSWER, "content": None}]},
            "content is null, expected text or tool_calls",
        ),
        (
            "messages",
            {"messages": [{**USER, "content": None, "tool_calls": [CALL]}]},
            "content is null",
        ),
        (
            "messages",
            {"messages": [{**USER, "content": 3}]},
            "content is an int, expected text or a list of parts",
        ),
        (
            "messages",
            {
                "messages": [
                    {**USER, "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}
                ]
            },
            r"messages\[0\].content\[1\] is a part of the type 'image_url'",
        ),
        (
            "messages",
            {"messages": [USER, {**ANSWER, "content": ""}]},
            r"messages\[1\] is an empty answer",
        ),
        (
            "messages",
            {"messages": [USER, {**ANSWER, "weight": 0.5}]},
            r"messages\[1\].weight is 0.5: expected 0 or 1",
        ),
        (
            "messages",
            {"messages": [{**ANSWER, "tool_calls": "add()"}]},
            "tool_calls is a str, expected a list of calls",
        ),
        (
            "messages",
            {"messages": [{**ANSWER, "tool_calls": [{"id": "x"}]}]},
            "a dict without the name of a function",
        ),
        (
            "messages",
            {"messages": [{**ANSWER, "tool_calls": [{"name": "add", "arguments": "a=1"}]}]},
            "the arguments of 'add' are not a JSON object",
        ),
        (
            "messages",
            {"messages": [USER, ANSWER], "tools": "add(a)"},
            "'tools' is not a list of JSON objects",
        ),
        (
            "sharegpt",
            {"conversations": [USER, ANSWER]},
            "expected a turn with from and value; set chat_format=messages",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "alien", "value": "x"}]},
            "from is 'alien', expected one of system, hum",
        ),
        ("alpaca", {"instruction": "q"}, "the field 'output' is null, expected text"),
        ("alpaca", {"instruction": "q", "output": ""}, "output is an empty answer"),
    ],
)
def test_chat_that_cannot_be_trained_on_is_refused(chat_format: str, record: dict, message: str):
    with pytest.raises(BadRecord, match=f"^a.jsonl:1: .*{message}"):
        read(record, chat_format)


def test_templates_refuse_what_they_would_leave_out():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    chatml, llama3 = (load_chat_template(name, None) for name in ("chatml", "llama3"))
    plain = ChatTemplate(HEADERS, VARIABLES)
    alien, result = {"role": "alien", "content": "x"}, {"role": "tool", "content": "3"}
    for template, messages, tools, problem in (
        (
            chatml,
            [alien, ANSWER],
            None,
            "message 0 has the unknown role 'alien', expected one of system, .* or a role",
        ),
        (
            plain,
            [USER, call, result, ANSWER],
            None,
            "does not render tool_calls; set data.chat_template",
        ),
        (plain, [USER, ANSWER], [{"name": "add"}], "does not render tools; set data.chat_template"),
        (
            llama3,
            read({"messages": [USER, {**call, "tool_calls": [CALL, CALL]}]}).messages,
            None,
            "text or one call",
        ),
    ):
        with pytest.raises(BadRecord, match=f"^x: .*{problem}"):
            template.render(Chat(messages, tools), "x")
    named = ChatTemplate("{# 'alien' #}" + HEADERS, VARIABLES)  # as the error advises
    assert "alien" in named.render(Chat([alien, ANSWER]), "x").text
    several = chatml.render(
        read({"messages": [USER, {**call, "tool_calls": [CALL, CALL]}, result, result]}), "x"
    )
    assert (
        several.text.count("<tool_call>") == 2
        and several.text.count("<|im_start|>user\n<tool_response>") == 1
    )


@pytest.mark.parametrize("marker", [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_answer_that_renders_as_nothing_is_refused(marker: tuple[str, str]):
    text = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}BEGIN{{ m.content | trim }}END{% else %}"
    text += (
        "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = ChatTemplate(text.replace("BEGIN", marker[0]).replace("END", marker[1]), {})
    blank = {"role": "assistant", "content": " "}
    assert len(template.render(Chat([USER, ANSWER, USER, ANSWER]), "x").answers) == 2
    with pytest.raises(BadRecord, match="renders no answer for message 3"):
        template.render(Chat([USER, ANSWER, USER, blank]), "x")


def test_columns_of_parquet_equal_json_lines(tmp_path: Path):
    """In columns, each dictionary has the fields of all others, null where it has none."""
    arguments = [{"city": "Ulm"}, {"day": 3}]
    chats = [
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": x}}]}]
        for x in arguments
    ]
    tools = [[{"function": {"name": "f", "parameters": x}}] for x in arguments]
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": chats, "tools": tools, "id": [1, 2]}), tmp_path / "a.parquet"
    )
    lines = [json.dumps({"messages": chat, "tools": tool}) for chat, tool in zip(chats, tools)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    columns = {"instruction": ["q"], "input": ["in"], "output": ["a"], "system": ["s"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "b.parquet")

    def read_file(name: str, fields: Fields) -> list[Chat | None]:
        files = list_files([str(tmp_path / name)]).files
        return [document.chat for document in read_documents(files[0], fields, Notes())]

    messages = Fields(chat="messages")
    assert read_file("a.parquet", messages) == read_file("a.jsonl", messages)
    (alpaca,) = read_file(
        "b.parquet", Fields.from_config(SourceConfig(name="b", chat_format="alpaca"))
    )
    assert alpaca is not None and [m["content"] for m in alpaca.messages] == ["s", "q\n\nin", "a"]


def test_answer_without_tokens_is_a_bad_record(tmp_path: Path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML, normalizers.Replace("\u200b", ""))
    template = tmp_path / "bare.jinja"
    generation = "{% generation %}{{ m.content }}{% endgeneration %}"
    answer_or_question = (
        "{% if m.role == 'user' %}{{ m.content }}{% else %}" + generation + "{% endif %}"
    )
    template.write_text("{% for m in messages %}" + answer_or_question + "{% endfor %}")
    lines = [
        {"conversations": [{"from": "human", "value": "q" * i}, {"from": "gpt", "value": "a"}]}
        for i in range(1, 30)
    ]
    lines[3]["conversations"][1]["value"] = "\u200b"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = DataConfig(
        mixture=(
            SourceConfig(name="a", paths=(str(tmp_path / "a.jsonl"),), chat_format="sharegpt"),
        ),
        tokenizer=str(tokenizer),
        chat_template=str(template),
        seq_len=64,
        cache_dir=str(tmp_path / "cache"),
        eval_fraction=0.2,
    )
    with pytest.raises(UserError, match="a.jsonl:4: the tokenizer gives no token for an answer"):
        open_corpus(config)
