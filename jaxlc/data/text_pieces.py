r"""Cuts long text into pieces that encode to the same tokens as the entire text.

`can_encode_in_pieces` accepts byte-level BPE tokenizers with a known pre-tokenization regex, and `text_pieces` cuts
between an ASCII letter and a newline, or a space and another ASCII letter. Equality follows from the stages of such a
tokenizer:

- Added tokens: none contains a letter followed by a newline or a space, or strips or tests its neighbors. No match
  crosses a cut.
- Normalization: none, or NFC, which neither composes nor reorders these characters.
- Pre-tokenization: in the known regexes, no alternative matches a letter followed by a newline or a space, and none
  looks behind. A match that ends at the letter is the same at the end of a piece, and the next one starts at the cut.
- BPE merges apply within a pre-token. No special tokens are added.
"""

import re
from collections.abc import Iterator

_PIECE_CHARACTERS = 1 << 20
_CUT = re.compile(r"[A-Za-z](?=\n| [A-Za-z])")
_LETTER_BEFORE_CUT = re.compile(r"[A-Za-z][\n ]")
# The regexes of Llama 3 (cl100k), Qwen 2 and 3, and o200k. GPT-2's is built into the ByteLevel pre-tokenizer.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_O200K_SUFFIX = rf"{_CONTRACTIONS}?"
_KNOWN_REGEXES = (
    rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}",
    rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}",
    rf"{_PREFIX}{_UPPER}*{_LOWER}+{_O200K_SUFFIX}|{_PREFIX}{_UPPER}+{_LOWER}*{_O200K_SUFFIX}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}",
)


def can_encode_in_pieces(tokenizer: dict) -> bool:
    """Whether the content of a tokenizer.json is of the kind described above."""
    model, pre_tokenizer, normalizer = (tokenizer.get(key) or {} for key in ("model", "pre_tokenizer", "normalizer"))
    splits = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and normalizer.get("type") in (None, "NFC")
        and all(_is_independent(token) for token in tokenizer.get("added_tokens", ()))
        and all(_is_known(split) for split in splits)
        # At least one stage applies a regex: ByteLevel without one returns the entire text as one pre-token.
        and any(split["type"] == "Split" or split["use_regex"] for split in splits)
    )


def text_pieces(text: str, piece_characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts `text` at the first safe position after each `piece_characters` characters."""
    begin = 0
    while cut := _CUT.search(text, begin + piece_characters):
        yield text[begin : cut.end()]
        begin = cut.end()
    yield text[begin:]


def _is_known(split: dict) -> bool:
    if split.get("type") == "ByteLevel":
        return not split["add_prefix_space"]
    return (
        split.get("type") == "Split"
        and split["pattern"].get("Regex") in _KNOWN_REGEXES
        and split["behavior"] == "Isolated"
        and not split["invert"]
    )


def _is_independent(token: dict) -> bool:
    looks_around = token["lstrip"] or token["rstrip"] or token["single_word"]
    return not looks_around and not _LETTER_BEFORE_CUT.search(token["content"])
