"""Records of published formats as traces: which texts have a loss, what is refused, and what is
counted.
"""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.report import show
from jaxlc.data.tokens.chat_templates import TEMPLATES, ChatTemplate
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.generation.generate_text import PromptEncoder
from jaxlc.posttrain.traces import Traces, open_prompts, open_traces
from tests.data.chat_styles import (
    REASONING,
    SPECIAL_TOKENS,
    VARIABLES,
    without_markers,
    write_tokenizer,
)

END, TURN = "<end of document>", "<|im_end|>"
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
# Qwen 3 in miniature: calls of tools, and answers before the last question without their reasoning.
CALLS = "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
TOOL_REASONING = "{{ tools | tojson if tools }}" + without_markers(REASONING).replace(
    TURN + "{#", CALLS + TURN + "{#"
)


def user(text: str) -> dict:
    return dict(role="user", content=text)


def bot(text: str | None, **fields) -> dict:
    return dict(role="assistant", content=text, **fields)


def config_of(directory: Path, records: list, content: bytes = b"", suffix: str = ".jsonl", **data):
    path = directory / f"records{suffix}"
    path.write_bytes(content or "\n".join(map(json.dumps, records)).encode())
    config = defaults()
    config.model.vocab_size = 1024
    config.data.update(
        dict(sources=(), chat_template="chatml", seq_len=512, eval_fraction=1e-9) | data
    )
    config.data.cache_dir = str(directory / "cache")
    return config, str(path)


def opened(directory: Path, records: list, loss: str = "", **data) -> Traces:
    config, path = config_of(directory, records, **data)
    config.data.traces, config.posttrain.loss = path, loss
    loaded = load(config)
    return open_traces(
        loaded, load_tokenizer(loaded.data.tokenizer, end_token=loaded.data.end_token)
    )


def in_loss(traces: Traces) -> list[str]:
    return [
        traces.tokenizer.decode(x.tokens[x.in_loss], special_tokens=True)
        for x in traces.train.traces
    ]


@pytest.mark.parametrize(
    "record, expected",
    [
        (dict(prompt="q", completion="a"), ["a" + END]),
        (dict(prompt="q", completion="a", truncated=True), ["a"]),
        (dict(prompt="q", chosen="a", rejected="b"), ["a" + END, "b" + END]),
        (dict(prompt="q", completion="ab", old_log_probs=[-1, -1]), ["ab"]),
        (dict(prompt="q", completion="ab", old_log_probs=[-1, -1, -1]), ["ab" + END]),
        (dict(messages=[user("q"), bot("a")], truncated=True), ["a"]),
        (dict(messages=[user("q"), bot("a", loss=False), user("q"), bot("b")]), ["b" + TURN]),
        (
            dict(messages=[user("q"), bot("a", weight=1), user("q"), bot("b", train=0)]),
            ["a" + TURN],
        ),
        (dict(prompt=[user("q"), bot("x"), user("q")], completion=[bot("a")]), ["a" + TURN]),
        (
            dict(prompt="q", chosen=[user("q"), bot("a")], rejected=[user("q"), bot("b")]),
            ["a" + TURN, "b" + TURN],
        ),
        (
            dict(prompt=[user("q")], chosen=[user("q"), bot("a")], rejected="b"),
            ["a" + TURN, "b" + TURN],
        ),
        (
            dict(prompt=[user("q")], chosen=[bot("x"), user("y"), bot("a")], rejected=[bot("b")]),
            [f"x{TURN}a{TURN}", "b" + TURN],
        ),
        (
            dict(conversations=[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]),
            ["a" + TURN],
        ),
        (
            dict(
                conversations=[{"from": "human", "value": "q"}],
                chosen={"from": "gpt", "value": "a"},
                rejected={"from": "gpt", "value": "b"},
            ),
            ["a" + TURN, "b" + TURN],
        ),
        (dict(instruction="q", input="in", output="a", history=[["x", "y"]]), [f"y{TURN}a{TURN}"]),
        (dict(prompt="the \ud83d", completion="a\udc00"), ["a\ufffd" + END]),
        (
            dict(messages=[user("\ud83d"), bot("a\udc00")], tools='[{"name": "\\ud83d"}]'),
            ["a\ufffd" + TURN],
        ),
        ([user("q"), bot("a")], ["a" + TURN]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_record_has_its_answers_in_the_loss(tmp_path, record, expected):
    assert in_loss(opened(tmp_path, [record])) == expected


@pytest.mark.parametrize(
    "record, message",
    [
        (dict(messages=[user("q"), bot("a", loss=False)]), "all answers have no loss"),
        (
            dict(messages=[user("q") | dict(train=True), bot("a")]),
            r"messages\[0\].train is True: only answers",
        ),
        (
            dict(messages=[user("q"), bot("a", train_detail=[dict(begin_offset=0)])]),
            r"messages\[1\].train_detail",
        ),
        (
            dict(messages=[user("q"), bot("", reasoning_content="r")]),
            "renders no answer for message 1",
        ),
        (
            dict(messages=[user("q"), bot(None, function_call=dict(name="f"))]),
            "function_call.*write tool_calls",
        ),
        (
            dict(messages=[user("q"), bot("a")], rejected_response="b"),
            "rejected_response.*chosen and rejected",
        ),
        (dict(messages=[user("q"), bot("a")], images=["a.png"]), "'images': only text"),
        (dict(prompt=[user("q")], completion=[bot("a")], label=False), "'label': false marks"),
        (
            dict(chosen=[user("q"), bot("a")], rejected=[user("p"), bot("b")]),
            "prompts of chosen and rejected differ",
        ),
        (dict(prompt="q", completion="a", system="s"), "'system' has no effect on a text"),
        (dict(prompt="q", completion=""), "'completion' is an empty answer"),
        (
            dict(prompt=[user("q")], completion=[user("p"), bot("a")]),
            "'completion' are another chat",
        ),
        (
            dict(system="s", messages=[dict(role="system", content="t"), bot("a")]),
            "'system' and the first message",
        ),
    ],
    ids=str,
)
def test_record_that_cannot_be_used_is_a_bad_record(tmp_path, record, message):
    with pytest.raises(UserError, match=f"records.jsonl:1: .*{message}.*data.max_bad_records"):
        opened(tmp_path, [record])
    traces = opened(tmp_path, [record, dict(prompt="q", completion="a")], max_bad_records=1)
    assert len(traces.train.traces) == 1 and "skipped records: 1" in traces.warnings[0]


@pytest.mark.parametrize("form", ["text", "chat"])
def test_labels_of_texts_and_chats_are_read_for_kto(tmp_path, form):
    """The record of docs/post_training.md, with true and false."""
    question, answer = ("q", "a") if form == "text" else ([user("q")], [bot("a")])
    records = [dict(prompt=question, completion=answer, label=x) for x in (True, False)]
    config, path = config_of(tmp_path, records)
    config.data.traces, config.posttrain.loss = path, "kto"
    config.lora.rank, config.train.global_batch_size = 2, 2
    loaded = load(config)
    traces = open_traces(loaded, load_tokenizer("bytes"))
    assert [trace.label for trace in traces.traces] == [True, False]


def test_prompt_and_completion_are_a_chat_of_a_mixture(tmp_path):
    messages = dict(prompt=[user("q"), bot("x"), user("r")], completion=[bot("a")], system="s")
    config, path = config_of(
        tmp_path, [messages, dict(prompt="q", completion="b")] * 9, eval_fraction=0.2
    )
    config.data.mixture.pairs = dict(paths=path, chat_format="completion")
    store = open_corpus(load(config).data).sources[0].train.store
    texts = {bytes(store.tokens[begin:end].tolist()) for begin, end in store.answers}
    assert texts == {b"a<|im_end|>", b"b<|im_end|>"}


@pytest.mark.parametrize(
    "record, names",
    [
        (
            dict(messages=[user("q"), bot("a", reasoning_content="r" * 9)]),
            "reasoning_content of assistant",
        ),
        (dict(messages=[user("q"), bot("a", thinking=["s" * 9])]), "thinking of assistant"),
        (dict(messages=[user("q"), bot("a", tool_calls=[CALL])]), "tool_calls of assistant"),
        (dict(prompt="q", chosen="a", rejected="a"), "equal chosen and rejected"),
    ],
    ids=str,
)
def test_what_is_lost_is_counted(tmp_path, record, names):
    template = "{# tool_calls #}" + TEMPLATES["chatml"].replace("message['tool_calls'] or []", "[]")
    [warning] = opened(tmp_path, [record] * 2, chat_template=template).warnings
    assert names in warning and ": 2 (the first: " in warning and "records.jsonl:1" in warning


def test_template_that_leaves_out_the_system_message_is_counted(tmp_path):
    source = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content | replace(' ', '  ') }}</s>"
    source += "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    chat = dict(messages=[dict(role="system", content="rules"), user("white space"), bot("a")])
    [warning] = opened(tmp_path, [chat], chat_template=source).warnings
    assert "(content of system): 1" in warning


def show_text(traces: Traces) -> str:
    return traces.tokenizer.decode(traces.train.traces[0].tokens, special_tokens=True)


def test_tool_trace_of_several_questions_trains_on_what_the_template_renders(tmp_path):
    """The prompt of the answer after the tool has the reasoning of the call, which the chat lacks."""
    chat = dict(
        messages=[
            user("q1"), bot("<think>r1</think>\n\ncall", tool_calls=[CALL], loss=False), dict(role="tool", content="3"),
            bot("<think>r2</think>\n\nThree"), user("q2"), bot("<think>r3</think>\n\nlast"),
        ],
        tools=TOOLS,
    )  # fmt: skip
    traces = opened(tmp_path, [chat], chat_template=TOOL_REASONING)
    assert in_loss(traces) == [f"Three{TURN}<think>r3</think>\n\nlast{TURN}"]
    assert (
        f'call<tool_call>{{"name": "add", "arguments": {{"x": 1}}}}</tool_call>{TURN}'
        in show_text(traces)
    )
    assert "(content of assistant): 1" in traces.warnings[0]
    confusing = [user("<|im_start|>assistant\n"), *chat["messages"]]
    with pytest.raises(UserError, match="cannot be found by their headers"):
        opened(tmp_path, [chat | dict(messages=confusing)], chat_template=TOOL_REASONING)


def test_header_is_what_precedes_every_answer():
    """Also if the prompt of the template begins the reasoning."""
    source = TOOL_REASONING.replace(
        "'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>' }}{%- endif"
    )
    for template in (TOOL_REASONING, source):
        assert ChatTemplate(template, VARIABLES)._header == "<|im_start|>assistant\n"


def write_metaspace_tokenizer(directory: Path) -> str:
    """A tokenizer that prepends a space to a text, as those of Llama 2 and Mistral 7B."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["a cat they you sat on the"] * 9, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory / "tokenizer.json")


def test_prompt_and_answer_are_encoded_together(tmp_path):
    """The token of "they" begins in the prompt and belongs to the answer. Sampled tokens are
    encoded apart.
    """
    tokenizer = write_metaspace_tokenizer(tmp_path)
    record = dict(prompt="a the", completion="y you")
    traces = opened(tmp_path, [record], tokenizer=tokenizer)
    [trace] = traces.train.traces
    assert traces.tokenizer.decode(trace.tokens) == "a they you"
    assert in_loss(traces) == ["they you</s>"] and "begin within a token" in traces.warnings[0]
    [apart] = opened(
        tmp_path, [record | dict(old_log_probs=[-1] * 4)], tokenizer=tokenizer
    ).train.traces
    expected = np.concatenate([traces.tokenizer.encode(text) for text in (b"a the", b"y you")])
    assert apart.tokens.tolist() == [*expected, 1] and apart.in_loss.sum() == 4


def test_answers_of_one_prompt_are_a_group_in_spite_of_their_tokens(tmp_path):
    """The tokens of the prompt differ, since one answer continues its last word."""
    records = [dict(prompt="a the", completion=text, group=0) for text in ("y you", " cat")]
    assert (
        len(opened(tmp_path, records, tokenizer=write_metaspace_tokenizer(tmp_path)).train.traces)
        == 2
    )


def test_group_of_two_prompts_is_refused(tmp_path):
    for number, prompt in enumerate(("p", "q")):
        record = dict(prompt=prompt, completion="a", group=0, reward=number)
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(record))
    config, _ = config_of(tmp_path, [])
    config.data.traces = f"{tmp_path}/0.jsonl,{tmp_path}/1.jsonl"
    with pytest.raises(
        UserError, match="0.jsonl:1 and .*1.jsonl:1 have group '0' and different prompts"
    ):
        open_traces(load(config), load_tokenizer("bytes"))


def test_text_of_special_tokens_is_counted_or_parsed(tmp_path):
    directory, text = str(write_tokenizer(tmp_path / "tokenizer")), "<|im_start|>a<|im_end|>"
    control = [SPECIAL_TOKENS.index(x) for x in ("<|im_start|>", TURN)]
    for parses in (False, True):
        tokenizer = load_tokenizer(directory, end_token="</s>", parse_special_tokens=parses)
        ids = tokenizer.encode(text.encode()).tolist()
        assert [x for x in ids if x in control] == control * parses and tokenizer.decode(
            np.array(ids), True
        ) == text
    data = dict(tokenizer=directory, end_token="</s>")
    [warning] = opened(tmp_path, [dict(prompt=text, completion="a")], **data).warnings
    assert "data.parse_special_tokens=True" in warning and ": 1 (the first" in warning
    [warning] = opened(tmp_path, [dict(messages=[user(text), bot("a")])], **data).warnings
    assert "becomes that token: 1" in warning
    encode = PromptEncoder(tokenizer=load_tokenizer(directory, end_token="</s>"))
    assert (
        "\ufffd" in encode.tokenizer.decode(encode(text + "\ud83d"))
        and ": 1 (the first" in encode.warnings[0]
    )
    config, path = config_of(tmp_path, [dict(text=text * 9)] * 20, seq_len=64, **data)
    config.data.update(sources=(path,), eval_fraction=0.2)
    for _ in range(2):  # also from the cache
        assert ": 20 (the first: " in open_corpus(load(config).data).warnings[0]


def test_prompts_of_rollouts_have_tools_and_parts(tmp_path):
    parts = [dict(type="text", text="the "), dict(type="text", text="cat")]
    records = [
        dict(prompt=[user("q")], tools=TOOLS), dict(prompt=[dict(role="user", content=parts)]), dict(prompt="\ud83d"),
        dict(prompt=[user("q"), bot("It ")]), dict(prompt=3), dict(prompt=""),
    ]  # fmt: skip
    config, path = config_of(tmp_path, records, max_bad_records=2)
    config.posttrain.loss, config.attention.shared_prefixes = "grpo", True
    config.rollouts.update(source="model", prompts=path, reward="a:b", max_tokens=9)
    prompts, warnings = open_prompts(load(config), load_tokenizer("bytes"))
    texts = [prompt.text for prompt in prompts]
    assert '"name": "add"' in texts[0] and "user\nthe cat<|im_end|>" in texts[1]
    assert texts[2] == "\ufffd" and texts[3].endswith("assistant\nIt ")
    assert "skipped records: 2" in warnings[0]
    [source] = show(config).sources
    assert re.fullmatch(
        r"rollouts.prompts: 4 prompts, \d+ tokens, 0 with a loss \(0.0%\)", source.heading
    )


def test_template_that_the_tokenizer_splits_is_refused_for_traces(tmp_path):
    with pytest.raises(UserError, match="<|im_end|>, which the tokenizer .* splits"):
        opened(
            tmp_path,
            [dict(messages=[user("q"), bot("a")])],
            tokenizer=write_metaspace_tokenizer(tmp_path),
        )


@pytest.mark.parametrize(
    "content, suffix, message",
    [
        (b'{"text": null}', ".jsonl", "records.jsonl:1: the field 'text' is null"),
        (np.random.default_rng(0).bytes(9000), ".txt", "not valid UTF-8.*% of the text"),
        (b'[{"text": "a"}, 3]', ".json", "records.json:2: expected a JSON object, not an int"),
    ],
)
def test_files_without_text_are_refused(tmp_path, content, suffix, message):
    config, path = config_of(tmp_path, [], content, suffix)
    config.data.update(sources=(path,), eval_fraction=0.2)
    with pytest.raises(UserError, match=message):
        open_corpus(load(config).data)


@pytest.mark.parametrize("field, excluded", [("labels", -100), ("loss_mask", 0)])
def test_masks_beside_token_ids_are_refused(tmp_path, field, excluded):
    records = [
        dict(input_ids=[0, 1], labels=[0, 1], label=0),
        {"input_ids": [0, 1], field: [1, excluded]},
    ]
    config, path = config_of(tmp_path, records)
    config.data.mixture.ids = dict(paths=path, token_field="input_ids")
    with pytest.raises(UserError, match=f"records.jsonl:2: the field '{field}' excludes tokens"):
        open_corpus(load(config).data)


def test_json_list_is_read_where_it_is_named(tmp_path):
    chats = [[user(f"q{i}"), bot("a" * i)] for i in range(1, 9)]
    for content in (
        json.dumps(chats, indent=1),
        json.dumps([dict(messages=chat) for chat in chats]),
    ):
        traces = opened(tmp_path, [], content=content.encode(), suffix=".json")
        assert in_loss(traces)[2] == "aaa" + TURN
    config, _ = config_of(tmp_path, [])
    config.data.traces = str(tmp_path)  # has the empty records.jsonl
    with pytest.raises(UserError, match="no trace"):
        open_traces(load(config), load_tokenizer("bytes"))
    config.data.traces = "HuggingFaceFW/fineweb-edu"
    with pytest.raises(
        UserError,
        match="a data set of the hub is hub:HuggingFaceFW/fineweb-edu@REVISION/SUBSET/SPLIT",
    ):
        open_traces(load(config), load_tokenizer("bytes"))


def test_column_of_invalid_text_is_a_bad_record(tmp_path):
    texts = pyarrow.array([b"good", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(
        pyarrow.table([texts, texts], ["prompt", "completion"]), tmp_path / "a.parquet"
    )
    config, _ = config_of(tmp_path, [], max_bad_records=1)
    config.data.traces = str(tmp_path / "a.parquet")
    traces = open_traces(load(config), load_tokenizer("bytes"))
    assert in_loss(traces) == ["good" + END] and "a.parquet:2: invalid text" in traces.warnings[0]


@pytest.mark.parametrize("long, outcome", [(8, "error"), (2, "warning"), (0, "")])
def test_chats_without_a_trained_token_are_counted(tmp_path, long, outcome):
    chats = [dict(messages=[user("q" * (300 if i < long else 1)), bot("a")]) for i in range(8)]
    config, path = config_of(tmp_path, chats, seq_len=128, eval_fraction=0.2)
    config.data.mixture.chats = dict(paths=path, chat_format="messages", overlong="truncate")
    if outcome == "error":
        with pytest.raises(
            UserError, match="data.mixture.chats.*: no chat has a token in the loss, of "
        ):
            open_corpus(load(config).data)
    else:
        corpus = open_corpus(load(config).data)
        assert any("without a token in the loss: " in line for line in corpus.warnings) == (
            outcome == "warning"
        )


def test_traces_that_are_all_masked_are_refused(tmp_path):
    record = dict(tokens=[1, 2], loss_mask=[0, 1], reward=1.0, truncated=True)
    config, path = config_of(tmp_path, [record] * 2)
    config.data.traces = path
    config.posttrain.update(loss="grpo", mask_truncated=True)
    with pytest.raises(UserError, match="mask_truncated=True masks all traces"):
        open_traces(load(config), load_tokenizer("bytes"))


def test_show_prints_groups_masks_and_shared_prefixes(tmp_path):
    records = [
        dict(prompt="the cat", completion=x, group=7, reward=i)
        for i, x in enumerate((" sat", " on"))
    ]
    config, config.data.traces = config_of(tmp_path, records)
    config.posttrain.loss, config.attention.shared_prefixes = "grpo", True
    text = show(config).text()
    assert text.split("\n\n")[2:] == [
        "--- shared by 2 answers: 7 tokens, 0 with a loss (0.0%)\nthe cat",
        f"    --- {tmp_path}/records.jsonl:1, answer 1 of 2, group 7, reward 0, advantage -0.707: 6 tokens, 5 with a"
        f" loss (83.3%)\n    t⟦ sat{END}⟧",
        f"    --- {tmp_path}/records.jsonl:2, answer 2 of 2, group 7, reward 1, advantage 0.707: 5 tokens, 4 with a"
        f" loss (80.0%)\n    t⟦ on{END}⟧",
    ]
    assert "<div style='margin-left:3em'>" in show(config)._repr_html_()


def test_show_prints_deep_trees(tmp_path):
    """A shared token is in the loss if it is in that of an answer; an answer may end in a node."""
    texts = ["the cat sat", "the cat sat down", "the cat is", "the cat"]
    records = [
        dict(tokens=[*text.encode()], loss_mask=[int(i > 3) for i in range(len(text))], group=7)
        for text in texts
    ]
    config, config.data.traces = config_of(tmp_path, records)
    config.attention.shared_prefixes = 2
    texts = [part.split("\n")[-1] for part in show(config).text().split("\n\n")[2:]]
    assert texts == ["the ⟦cat ⟧", "     ⟦sat down⟧", "     ⟦is⟧"]
    headings = [part.split("\n")[0] for part in show(config).text().split("\n\n")[2:]]
    assert "shared by 4 answers; " in headings[0] and "answer 4 of 4" in headings[0]
    assert "shared by 2 answers; " in headings[1] and "; " + str(tmp_path) in headings[1]
