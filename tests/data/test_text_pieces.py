"""Encoding long text in pieces: which tokenizers allow it, and equality with encoding the entire
text.
"""

import json
import random
import re
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from jaxlc.data.tokens import tokenizers as text_pieces_module
from jaxlc.data.tokens.tokenizers import load_tokenizer, safe_cuts, text_pieces

SOURCES = [path.read_text() for path in Path(text_pieces_module.__file__).parent.glob("*.py")]
GPT2, CL100K, QWEN2, O200K, TEKKEN = None, *text_pieces_module._KNOWN_REGEXES
# Characters and added tokens that stages treat specially; \u0301 is a combining accent, \u017f a long s, \u1112 and
# \u1161 compose to one syllable.
ALPHABET = [
    *"abzAZ'stré\u0301\u017f中文\u1112\u1161да  \t\r\n\n\n.,!/09½\u00a0\u2028▁。、<",
    "\n\n",
    "▁▁",
    "<tag>",
    "<unk>",
]
REPLACE = normalizers.Replace(" ", "▁")


def make_tokenizer(regex: str | None, normalizer=None, *first_stages) -> Tokenizer:
    """A small byte-level BPE tokenizer, trained on this package; None is the regex of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    splits = [*first_stages, *([pre_tokenizers.Split(Regex(regex), "isolated")] if regex else [])]
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
    )
    tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SOURCES, trainer)
    return tokenizer


def make_sentencepiece(normalizer, pre_tokenizer) -> Tokenizer:
    """A small BPE tokenizer as SentencePiece makes them, with byte fallback. Its tokens cross no
    word and no line, but they contain letters before punctuation."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split("\n", "isolated")]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special_tokens = ["<unk>", "<|endoftext|>", *byte_tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special_tokens, show_progress=False
    )
    tokenizer.train_from_iterator([*SOURCES, "\n\n\n"], trainer)
    stored = content(tokenizer)
    stored["added_tokens"] = [
        token for token in stored["added_tokens"] if token["content"] not in byte_tokens
    ]
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_tokens(
        [tokenizers.AddedToken(token, normalized=False) for token in ("\n\n", "▁▁", "<tag>")]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts) -> list[int]:
    tokenizer.encode_special_tokens = True
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]


def content(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())


def random_texts(num_texts: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(ALPHABET, k=200)) for _ in range(num_texts)]


def metaspace(prepend_scheme: str, split: bool):
    return pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=split)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_tokenizer(GPT2),
        lambda: make_tokenizer(CL100K),
        lambda: make_tokenizer(QWEN2, normalizers.NFC()),
        lambda: make_tokenizer(O200K),
        lambda: make_tokenizer(TEKKEN),
        lambda: make_tokenizer(GPT2, None, pre_tokenizers.Digits(individual_digits=True)),
        lambda: make_sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), REPLACE]), None),
        lambda: make_sentencepiece(REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")),
        lambda: make_sentencepiece(None, metaspace("first", False)),
        lambda: make_sentencepiece(None, metaspace("always", True)),
        lambda: make_sentencepiece(None, metaspace("never", False)),
    ],
    ids=[
        "gpt2",
        "cl100k",
        "qwen2_nfc",
        "o200k",
        "tekken",
        "smollm",
        "llama2",
        "gemma",
        "metaspace_first",
        "metaspace_always",
        "metaspace_never",
    ],
)
def test_text_pieces_encode_to_same_tokens(make):
    tokenizer = make()
    cuts = safe_cuts(content(tokenizer))
    texts = [*SOURCES, *random_texts(300)]
    num_pieces = 0
    for text in texts:
        pieces = list(text_pieces([text], cuts, piece_characters=8))
        assert encode(tokenizer, pieces) == encode(tokenizer, [text])
        num_pieces += len(pieces)
    assert num_pieces > 1000
    anywhere = [text[begin : begin + 8] for text in texts for begin in range(0, len(text), 8)]
    assert encode(tokenizer, anywhere) != encode(tokenizer, texts)  # the position of a cut matters


def test_text_pieces_do_not_depend_on_blocks():
    cuts, rng = safe_cuts(content(make_tokenizer(CL100K))), random.Random(0)
    for text in [*SOURCES, *random_texts(20)]:
        pieces = list(text_pieces([text], cuts, 8))
        assert "".join(pieces) == text
        ends = sorted(rng.choices(range(len(text)), k=30))
        blocks = [text[begin:end] for begin, end in zip([0, *ends], [*ends, None], strict=True)]
        assert list(text_pieces(blocks, cuts, 8)) == pieces


def test_text_pieces_are_cut_at_safe_positions():
    cuts = safe_cuts(content(make_tokenizer(CL100K)))
    assert list(text_pieces(["abc def g"], cuts, 1)) == ["abc", " def", " g"]
    assert list(text_pieces(["abc  def. 'g's"], cuts, 1)) == ["abc  def", ". 'g's"]
    assert list(text_pieces(["ab\n\n1\nc-\nд中"], cuts, 1)) == ["ab", "\n\n1", "\nc-\nд中"]
    assert list(text_pieces([""], cuts, 1)) == [""]
    prepending = safe_cuts(
        content(make_sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), REPLACE]), None))
    )
    assert list(text_pieces(["abc def g  h\ni. j "], prepending, 1)) == [
        "abc",
        "def",
        "g  h\ni. j ",
    ]


def test_safe_cuts_exclude_characters_within_tokens():
    tokenizer = make_sentencepiece(REPLACE, None)
    assert any(re.search("[a-z][.]", token) for token in tokenizer.get_vocab())
    cuts = safe_cuts(content(tokenizer))
    assert cuts.search("a\nb") and not cuts.search("a.b")
    crossed = content(tokenizer)
    crossed["model"]["vocab"]["a▁b"] = 10_000
    assert safe_cuts(crossed) is None


def with_added_token(content_of_token: str, **options) -> dict:
    tokenizer = make_tokenizer(GPT2)
    tokenizer.add_tokens([tokenizers.AddedToken(content_of_token, **options)])
    return content(tokenizer)


def with_pre_tokenizer(pre_tokenizer) -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    return content(tokenizer)


def with_model(**options) -> dict:
    sentencepiece = content(make_sentencepiece(REPLACE, None))
    sentencepiece["model"] |= options
    return sentencepiece


def with_prepended(content_of_token: str) -> dict:
    tokenizer = make_sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), REPLACE]), None)
    tokenizer.add_tokens([content_of_token])
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
        lambda: with_pre_tokenizer(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ),
        lambda: with_pre_tokenizer(pre_tokenizers.Split(Regex(r"\w+\n"), "isolated")),
        lambda: with_pre_tokenizer(pre_tokenizers.Split(Regex(CL100K), "removed")),
        lambda: with_pre_tokenizer(pre_tokenizers.Metaspace()),
        lambda: with_pre_tokenizer(pre_tokenizers.Sequence([])),
        lambda: with_pre_tokenizer(pre_tokenizers.Digits()),
        lambda: content(make_sentencepiece(normalizers.NFKC(), metaspace("always", True))),
        lambda: content(make_sentencepiece(None, None)),
        lambda: content(make_sentencepiece(normalizers.Replace(" ", "_"), None)),
        lambda: with_model(continuing_subword_prefix="##"),
        lambda: with_model(end_of_word_suffix="</w>"),
        lambda: with_model(ignore_merges=True),
        lambda: with_prepended("word"),
        lambda: content(Tokenizer(models.BPE())),
        lambda: content(Tokenizer(models.BPE(dropout=0.1))),
        lambda: content(Tokenizer(models.Unigram())),
    ],
)
def test_safe_cuts_other_tokenizer_is_refused(make_content):
    assert safe_cuts(make_content()) is None


def test_safe_cuts_accepts_independent_added_token():
    assert safe_cuts(with_added_token("<think>"))
    assert safe_cuts(with_added_token("    "))
    # special tokens in text do not match
    assert safe_cuts(with_added_token("word", special=True, rstrip=True))


def test_tokenizer_encodes_long_text_in_pieces(tmp_path, monkeypatch):
    make_tokenizer(CL100K).save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(str(tmp_path / "tokenizer.json")), "\n".join(SOURCES)
    monkeypatch.setattr(
        "jaxlc.data.tokens.tokenizers.text_pieces", lambda *args: text_pieces(*args, 1000)
    )
    blocks = [text[begin : begin + 700].encode() for begin in range(0, len(text), 700)]
    pieces = list(tokenizer.pieces(blocks))
    assert len(pieces) > 10 and max(map(len, pieces)) < 2000
    ids = [i for ids in tokenizer.encode_pieces(pieces) for i in ids]
    assert ids == tokenizer.encode(text.encode()).tolist()
    assert ids == tokenizer.encode_pieces([text])[0].tolist()
    assert tokenizer.encode(b"").tolist() == []
