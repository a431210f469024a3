"""Text of tokens that come one by one, and stop strings."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxlc.data.tokens.tokenizers import ByteTokenizer, load_tokenizer
from jaxlc.generation.sampling import TextStream
from tests.data.chat_styles import SPECIAL_TOKENS, write_tokenizer

BYTES = ByteTokenizer()


class Letters(ByteTokenizer):
    """Ids up to 25 are letters; the others decode to nothing."""

    def decode(self, ids, special_tokens=False):
        return "".join(chr(97 + i) for i in np.asarray(ids) if i < 26)


def llama2_tokenizer(directory):
    """Words that start with a space, bytes of other characters, and </s>, decoded as by Llama 2."""
    tokens = [
        "<unk>",
        "</s>",
        "▁",
        "▁the",
        "▁cat",
        "▁sat",
        "s",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip,
    ])  # fmt: skip
    tokenizer.add_special_tokens(["</s>"])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="</s>")))
    return load_tokenizer(str(directory))


def ids_of(tokenizer, *tokens) -> np.ndarray:
    vocabulary = tokenizers.Tokenizer.from_file(str(tokenizer.file)).get_vocab()
    return np.array([vocabulary[token] for token in tokens], np.int32)


def streamed(tokenizer, new, stop=(), prompt=(), stop_ids=()) -> TextStream:
    """The stream after all tokens, or after a stop; what is taken token by token is its text."""
    stream, taken = TextStream(tokenizer, stop, prompt), ""
    for token in new:
        stream.add(int(token), is_hidden=int(token) in stop_ids)
        taken += stream.take(is_last=False)
        if stream.is_stopped:
            break
    stream.finish()
    assert taken + stream.take(is_last=True) == stream.text
    return stream


def pieces_of(text: str, stop=()) -> tuple[list[str], TextStream]:
    """What is taken after each byte, and the stream after the last one."""
    stream = TextStream(BYTES, stop)
    taken = []
    for number in text.encode():
        stream.add(number)
        taken.append(stream.take(is_last=False))
        if stream.is_stopped:
            return taken, stream
    stream.finish()
    return [*taken, stream.take(is_last=True)], stream


@pytest.mark.parametrize("text", ["plain", "né 漢字 🙂 end", ""])
def test_pieces_add_up_to_the_text_without_cut_characters(text):
    taken, stream = pieces_of(text)
    assert "".join(taken) == stream.text == text
    assert "\ufffd" not in "".join(taken)


def test_text_ends_before_the_first_stop_string():
    taken, stream = pieces_of("one two three", stop=["two", "wo t"])
    assert stream.is_stopped and stream.text == "".join(taken) == "one "


def test_stop_string_across_tokens_and_characters_ends_the_text():
    """Its first character is the end of one token, and its last one is cut by the border of two
    tokens.
    """
    taken, stream = pieces_of("text é🙂 rest", stop=["é🙂", "rest"])
    assert stream.is_stopped and stream.text == "".join(taken) == "text "


def test_stop_string_in_the_last_incomplete_text_ends_it():
    """The end of the text is decoded by `finish` only."""
    stream = TextStream(BYTES, stop=["b\ufffd"])
    for number in b"ab\xc3":
        stream.add(number)
    assert stream.take(is_last=False) == "a"
    stream.finish()
    assert stream.is_stopped and stream.take(is_last=True) == "" and stream.text == "a"


def test_start_of_a_stop_string_is_held_until_it_is_refuted():
    taken, stream = pieces_of("a\n\nb\nc", stop=["\n\n\n"])
    assert taken == ["a", "", "", "\n\nb", "", "\nc", ""]
    assert not stream.is_stopped


def test_incomplete_character_at_the_end_is_replaced():
    stream = TextStream(BYTES)
    for number in "ä".encode()[:1]:
        stream.add(number)
    assert stream.take(is_last=False) == ""
    stream.finish()
    assert stream.take(is_last=True) == stream.text == "\ufffd"


@pytest.mark.parametrize(("text", "num_prompt_bytes"), [("🙂 b", 1), ("🙂 b", 3), ("aé", 2)])
def test_character_that_a_prompt_begins_is_in_the_text(text, num_prompt_bytes):
    """Also if the prompt has no other character."""
    ids = list(text.encode())
    stream = streamed(BYTES, ids[num_prompt_bytes:], prompt=ids[:num_prompt_bytes])
    assert stream.text == text.removeprefix("a")


def test_tokens_that_decode_to_nothing_add_no_text():
    assert streamed(Letters(), (0, 99, 1)).text == "ab"


SMILE = ("<0xF0>", "<0x9F>", "<0x99>", "<0x82>")
PROMPTS = [
    (),
    ("▁the",),
    ("</s>",),
    ("▁the", *["</s>"] * 20),
    ("▁",),
    ("▁the", *SMILE * 5),
    ("<0xEF>", "<0xBF>", "<0xBD>"),
]


@pytest.mark.parametrize("prompt", PROMPTS, ids="".join)
@pytest.mark.parametrize(
    "new", [("▁cat", "s", "▁sat"), ("▁", "▁cat"), ("<0xC3>", "<0xA9>", "</s>", "s")], ids="".join
)
def test_text_is_that_of_prompt_and_new_tokens_without_that_of_the_prompt(prompt, new, tmp_path):
    """So the first space stays."""
    tokenizer = llama2_tokenizer(tmp_path)
    before, ids = ids_of(tokenizer, *prompt), ids_of(tokenizer, *new)
    whole, start = tokenizer.decode(np.concatenate([before, ids])), tokenizer.decode(before)
    assert whole == start + streamed(tokenizer, ids, prompt=before).text


@pytest.mark.parametrize("split", range(1, 4))
@pytest.mark.parametrize("start", [("▁the",), ("▁the", *SMILE * 5), SMILE], ids="".join)
def test_character_that_the_prompt_starts_is_completed(start, split, tmp_path):
    tokenizer = llama2_tokenizer(tmp_path)
    new = ids_of(tokenizer, *SMILE[split:], "<0xC3>", "<0xA9>", "▁cat")
    assert (
        streamed(tokenizer, new, prompt=ids_of(tokenizer, *start, *SMILE[:split])).text == "🙂é cat"
    )
    prompt, new = (list("a🙂".encode()[: split + 1]), list("🙂b".encode()[split:]))
    assert streamed(BYTES, new, prompt=prompt).text == "🙂b"


def test_stop_string_with_the_first_space_stops(tmp_path):
    tokenizer = llama2_tokenizer(tmp_path)
    prompt, new = ids_of(tokenizer, "▁the", "▁cat"), ids_of(tokenizer, "▁cat", "s", "▁sat")
    stream = streamed(tokenizer, new, [" cat"], prompt)  # the prompt ends with it, too
    assert stream.is_stopped and stream.text == "" and stream._tokens[-1] == new[0]
    assert streamed(tokenizer, new, ["ts the", "s sat"], prompt).text == " cat"


@pytest.mark.parametrize(("stop", "text"), [
    ("<|im_end|>", "ab"), ("b<|im_end|>", "a"), ("<|im_end|>c", "ab"), ("<|im_end|><|eot_id|>", "abc"), ("c", "ab"),
])  # fmt: skip
def test_stop_string_with_special_tokens_stops_and_is_not_in_the_text(stop, text, tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)), end_token="</s>")
    end, eot = (SPECIAL_TOKENS.index(name) for name in ("<|im_end|>", "<|eot_id|>"))
    a, b, c = ids_of(tokenizer, "a", "b", "c")
    stream = streamed(tokenizer, (a, b, end, c, end, eot, a), [stop])
    assert stream.is_stopped and stream.text == text
    assert streamed(tokenizer, (a, b, end, c), ["b<|im_end|>"], stop_ids=[end]).text == "a"
    assert streamed(tokenizer, (a, b, end, c)).text == "abc"


def test_bytes_of_an_incomplete_character_at_the_end_leave_the_text_before_them(tmp_path):
    tokenizer = llama2_tokenizer(tmp_path)
    assert (
        streamed(tokenizer, ids_of(tokenizer, "▁cat", "<0xC3>", "<0xA9>", "<0xF0>")).text
        == "caté\ufffd"
    )
