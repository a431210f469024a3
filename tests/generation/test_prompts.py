"""Prompts: tokens at the start of a text, and the chat template, with answers that continue after
its header.
"""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens.chat_templates import ChatTemplate, fitting_template, without_generation_tags
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.generation.generate_text import PromptEncoder
from tests.data.chat_styles import (
    CHATML,
    HEADERS,
    SPECIAL_TOKENS,
    VARIABLES,
    cases,
    write_tokenizer,
)

TEXTS = ("", "Which number?", "A text.\n" * 40)


def add_bos_processor(directory) -> None:
    """Adds a post-processor that puts <s> before a text, as those of Llama."""
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    bos = VARIABLES["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(path)


@pytest.mark.parametrize(
    ("has_processor", "values", "has_start"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, dict(add_bos_token=False), True),
        (False, dict(add_bos_token=True), False),
    ],
)
def test_start_ids_follow_the_tokenizer_files(tmp_path, has_processor, values, has_start):
    directory = write_tokenizer(tmp_path)
    if has_processor:
        add_bos_processor(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    tokenizer = load_tokenizer(str(directory), end_token="</s>")
    start = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(
        VARIABLES["bos_token"]
    )
    assert tokenizer.start_ids.tolist() == [start] * has_start
    text = tokenizer.encode(b"ab cd").tolist()
    assert PromptEncoder(tokenizer=tokenizer)("ab", " cd").tolist() == [start] * has_start + text


def test_chat_prompt_ends_with_prefix_and_fits_its_overhead(tmp_path):
    for name, template in (("a", CHATML), ("b", HEADERS)):
        tokenizer = load_tokenizer(
            str(write_tokenizer(tmp_path / name, template)), end_token="</s>"
        )
        encode = PromptEncoder(tokenizer=tokenizer, template=fitting_template("", tokenizer))
        for text in TEXTS:
            ids = encode(text, " The answer is")
            plain = tokenizer.encode(f"{text} The answer is".encode())
            assert 0 < len(ids) - len(plain) <= encode.counter()("")
            assert tokenizer.decode(ids).endswith(
                "assistant\n The answer is" if name == "a" else "The answer is"
            )
    tokenizer = load_tokenizer("bytes")
    encode = PromptEncoder(tokenizer=tokenizer, template=fitting_template("chatml", tokenizer))
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n It"
    np.testing.assert_array_equal(encode("Hello", " It"), list(expected.encode()))


@pytest.mark.parametrize("case", cases())
def test_template_without_tags_renders_the_same_text(case):
    template, chat = cases()[case]
    template = "{#- {% generation %} is a comment #}\n" + template
    without = without_generation_tags(template)
    assert "generation %}" not in without.partition("#}")[2]
    arguments = Chat(chat["messages"], chat.get("tools")), "chat"
    expected = ChatTemplate(template, VARIABLES).render(*arguments).text
    assert ChatTemplate(without, VARIABLES).render(*arguments).text == expected


def write_tokenizer_without(directory, *tokens):
    path = write_tokenizer(directory) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] not in tokens]
    for token in tokens:
        content["model"]["vocab"][f"unused{content['model']['vocab'].pop(token)}"] = (
            SPECIAL_TOKENS.index(token)
        )
    path.write_text(json.dumps(content))
    return load_tokenizer(str(directory), end_token="</s>")


def test_template_that_does_not_fit_the_tokenizer_names_those_that_fit(tmp_path):
    tokenizer = write_tokenizer_without(tmp_path / "a", "<|im_start|>", "<|im_end|>")
    message = (
        r"'chatml' has <\|im_start\|> and <\|im_end\|>, which the tokenizer '.*' splits into several tokens: set"
        " --config.data.chat_template to llama3 or a Jinja file whose markers are tokens of this tokenizer"
    )
    with pytest.raises(UserError, match=message):
        fitting_template("chatml", tokenizer)
    assert fitting_template("llama3", tokenizer).end_of_turn == "<|eot_id|>"
    with pytest.raises(
        UserError, match=r"has no chat template.*: set --flag to llama3 or a Jinja file"
    ):
        fitting_template("", tokenizer, flag="--flag")
    # Headers may be text, and the end of the turn may not.
    assert fitting_template(CHATML.replace("<|im_end|>", "</s>"), tokenizer).end_of_turn == "</s>"
    with pytest.raises(UserError, match=r"has <\|im_end\|>, which"):
        fitting_template(CHATML, tokenizer)
    neither = write_tokenizer_without(tmp_path / "b", "<|im_end|>", "<|eot_id|>")
    with pytest.raises(
        UserError,
        match=r"has <\|eot_id\|>, which .*: set --config.data.chat_template to a Jinja file",
    ):
        fitting_template("llama3", neither)


def test_chats_of_a_template_that_does_not_fit_are_refused_before_they_are_tokenized(tmp_path):
    (tmp_path / "chats.jsonl").write_text("no chat")
    write_tokenizer_without(tmp_path / "a", "<|im_end|>")
    source = SourceConfig(
        name="chats", paths=(str(tmp_path / "chats.jsonl"),), chat_field="messages"
    )
    config = DataConfig(
        mixture=(source,), tokenizer=str(tmp_path / "a"), end_token="</s>", chat_template="chatml"
    )
    with pytest.raises(UserError, match=r"has <\|im_end\|>, which"):
        open_corpus(config)
