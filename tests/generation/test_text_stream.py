"""Text of tokens that come one by one, and stop strings."""

import numpy as np
import pytest

from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.text_stream import TextStream

DECODE = ByteTokenizer().decode


def pieces_of(text: str, stop=()) -> tuple[list[str], TextStream]:
    """What is taken after each byte, and the stream after the last one."""
    stream = TextStream(DECODE, stop)
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
    """Its first character is the end of one token, and its last one is cut by the border of two tokens."""
    taken, stream = pieces_of("text é🙂 rest", stop=["é🙂", "rest"])
    assert stream.is_stopped and stream.text == "".join(taken) == "text "
    words = ["ab", "cd", "ef"]
    stream = TextStream(lambda ids: "".join(words[i] for i in np.asarray(ids)), stop=["bcde"])
    for token in range(3):
        stream.add(token)
    assert stream.is_stopped and stream.text == "a" and stream.take(is_last=True) == "a"


def test_stop_string_in_the_last_incomplete_text_ends_it():
    """The end of the text is decoded by `finish` only."""
    stream = TextStream(DECODE, stop=["b\ufffd"])
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
    stream = TextStream(DECODE)
    for number in "ä".encode()[:1]:
        stream.add(number)
    assert stream.take(is_last=False) == ""
    stream.finish()
    assert stream.take(is_last=True) == stream.text == "\ufffd"


def test_tokens_that_decode_to_nothing_add_no_text():
    stream = TextStream(lambda ids: "".join(chr(97 + i) for i in np.asarray(ids) if i < 26))
    for token in (0, 99, 1):
        stream.add(token)
    assert stream.text == "ab"
