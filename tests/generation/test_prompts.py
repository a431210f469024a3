"""Prompts: tokens at the start of a text, and the chat template, with answers that continue after its header."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.generation.prompts import prompt_encoder
from tests.data.chat_styles import CHATML, HEADERS, VARIABLES, write_tokenizer

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
    start = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(VARIABLES["bos_token"])
    assert tokenizer.start_ids.tolist() == [start] * has_start
    text = tokenizer.encode(b"ab cd").tolist()
    encode_for_pretrained, encode_for_run = (
        prompt_encoder(tokenizer, is_pretrained=value, chat_template=None) for value in (True, False)
    )
    assert (
        encode_for_pretrained("ab", " cd").tolist() == [start] * has_start + text
        and encode_for_run("ab", " cd").tolist() == text
    )


def test_chat_prompt_ends_with_prefix_and_fits_its_overhead(tmp_path):
    for name, template in (("a", CHATML), ("b", HEADERS)):
        tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / name, template)), end_token="</s>")
        encode = prompt_encoder(tokenizer, is_pretrained=True, chat_template="")
        for text in TEXTS:
            ids = encode(text, " The answer is")
            plain = tokenizer.encode(f"{text} The answer is".encode())
            assert 0 < len(ids) - len(plain) <= encode.overhead_tokens
            assert tokenizer.decode(ids).endswith("assistant\n The answer is" if name == "a" else "The answer is")
    encode = prompt_encoder(load_tokenizer("bytes"), is_pretrained=False, chat_template="chatml")
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n It"
    np.testing.assert_array_equal(encode("Hello", " It"), list(expected.encode()))


def test_chat_without_template_raises():
    with pytest.raises(UserError, match="no chat template"):
        prompt_encoder(load_tokenizer("bytes"), is_pretrained=False, chat_template="")
