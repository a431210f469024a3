"""Encoding long text in pieces: which tokenizers allow it, and equality with encoding the entire text."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from jaxlc.data import text_pieces as text_pieces_module
from jaxlc.data.text_pieces import can_encode_in_pieces, text_pieces
from jaxlc.data.tokenizers import load_tokenizer

SOURCES = [path.read_text() for path in Path(text_pieces_module.__file__).parent.glob("*.py")]
GPT2, CL100K, QWEN2, O200K = None, *text_pieces_module._KNOWN_REGEXES
# Characters that pre-tokenization regexes and NFC treat specially; \u0301 is a combining accent, \u017f a long s.
ALPHABET = "abzAZ'stré\u0301\u017f中  \t\r\n\n\n.,!/09½\u00a0\u2028<"


def make_tokenizer(regex: str | None, normalizer=None) -> Tokenizer:
    """A small byte-level BPE tokenizer, trained on this package; None is the regex of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    split = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SOURCES, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts) -> list[int]:
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]


def content(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize(
    "regex, normalizer",
    [(GPT2, None), (CL100K, None), (QWEN2, normalizers.NFC()), (O200K, None)],
    ids=["gpt2", "cl100k", "qwen2_nfc", "o200k"],
)
def test_text_pieces_encode_to_same_tokens(regex, normalizer):
    tokenizer = make_tokenizer(regex, normalizer)
    assert can_encode_in_pieces(content(tokenizer))
    rng = random.Random(0)
    texts = [*SOURCES, *("".join(rng.choices(ALPHABET, k=200)) for _ in range(300))]
    num_pieces = 0
    for text in texts:
        pieces = list(text_pieces(text, piece_characters=8))
        assert "".join(pieces) == text
        assert encode(tokenizer, pieces) == encode(tokenizer, [text])
        num_pieces += len(pieces)
    assert num_pieces > 1000
    anywhere = [text[begin : begin + 8] for text in texts for begin in range(0, len(text), 8)]
    assert encode(tokenizer, anywhere) != encode(tokenizer, texts)  # the position of a cut matters


def test_text_pieces_are_cut_at_safe_positions():
    assert list(text_pieces("abc def g", 1)) == ["abc", " def", " g"]
    assert list(text_pieces("abc  def. g", 1)) == ["abc  def. g"]
    assert list(text_pieces("ab\n\n1\nc\nd", 1)) == ["ab", "\n\n1\nc", "\nd"]
    assert list(text_pieces("", 1)) == [""]


def with_added_token(content_of_token: str, **options) -> dict:
    tokenizer = make_tokenizer(GPT2)
    tokenizer.add_tokens([tokenizers.AddedToken(content_of_token, **options)])
    return content(tokenizer)


def with_pre_tokenizer(pre_tokenizer) -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    return content(tokenizer)


@pytest.mark.parametrize(
    "make_content",
    [
        lambda: with_added_token("end\nof"),
        lambda: with_added_token("end "),
        lambda: with_added_token("word", rstrip=True),
        lambda: with_added_token("word", single_word=True),
        lambda: content(make_tokenizer(GPT2, normalizers.NFKC())),
        lambda: content(make_tokenizer(GPT2, normalizers.Strip())),
        lambda: with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        lambda: with_pre_tokenizer(pre_tokenizers.Split(Regex(r"\w+\n"), "isolated")),
        lambda: with_pre_tokenizer(pre_tokenizers.Split(Regex(CL100K), "removed")),
        lambda: with_pre_tokenizer(pre_tokenizers.Metaspace()),
        lambda: with_pre_tokenizer(pre_tokenizers.Sequence([])),
        lambda: content(Tokenizer(models.BPE())),
        lambda: content(Tokenizer(models.BPE(dropout=0.1))),
        lambda: content(Tokenizer(models.Unigram())),
    ],
)
def test_can_encode_in_pieces_other_tokenizer_is_refused(make_content):
    assert not can_encode_in_pieces(make_content())


def test_can_encode_in_pieces_accepts_independent_added_token():
    assert can_encode_in_pieces(with_added_token("<think>"))
    assert can_encode_in_pieces(with_added_token("    "))


def test_tokenizer_encodes_long_text_in_pieces(tmp_path, monkeypatch):
    make_tokenizer(CL100K).save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(str(tmp_path / "tokenizer.json")), "\n".join(SOURCES)
    entire = tokenizer.encode(text.encode())
    lengths = []
    monkeypatch.setattr("jaxlc.data.tokenizers.text_pieces", lambda text: text_pieces(text, 1000))
    monkeypatch.setattr(
        tokenizer, "_encode", lambda text, call=tokenizer._encode: lengths.append(len(text)) or call(text)
    )
    assert tokenizer.encode(text.encode()).tolist() == entire.tolist()
    assert len(lengths) > 10 and max(lengths) < 2000
    assert tokenizer.encode(b"").tolist() == []
