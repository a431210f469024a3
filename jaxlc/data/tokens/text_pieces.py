r"""Cuts long text into pieces that encode to the same tokens as the entire text.

`safe_cuts` gives the positions at which text may be cut for a tokenizer: between a letter or digit, and a newline,
punctuation or a space before another letter. It accepts two kinds of BPE tokenizers. Equality follows from their
stages.

Added tokens: none matches across a cut, strips whitespace, or tests its neighbors. Special ones are text here.

Byte-level BPE with a known pre-tokenization regex (GPT-2, Llama 3, Qwen, o200k, Tekken, SmolLM):

- Normalization: none, or NFC, which neither composes nor reorders the characters on both sides of a cut.
- Pre-tokenization: in the known regexes, no alternative matches a letter or digit followed by one of the other
  characters, and none looks behind. A match that ends at the cut is the same at the end of a piece, and the next match
  starts at the cut.
- BPE merges apply within a pre-token.

BPE as in SentencePiece, where "▁" replaces each space (Llama 2, Mistral, Gemma):

- No token of the vocabulary contains the characters on both sides of a cut one after the other, so no merge crosses it.
  Merges on its two sides do not depend on each other, because BPE applies them by rank.
- If the normalizer prepends "▁" to the text, it also prepends it to each piece, where it replaces the space at the cut.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator

_PIECE_CHARACTERS = 1 << 16
_UNDERSCORE = "▁"  # U+2581, which SentencePiece writes for a space
_PUNCTUATION = ".,;:!?。，、！？"  # without apostrophes, with which contractions start
# The regexes of Llama 3 (cl100k), Qwen 2 and 3, o200k, and Tekken. GPT-2's is built into the ByteLevel pre-tokenizer.
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
    rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}",
)


def safe_cuts(tokenizer: dict) -> re.Pattern[str] | None:
    """The cuts of a tokenizer, from the content of its tokenizer.json; None if it is of neither kind described above.

    A piece ends where a match begins, and the next piece begins where the match ends. Special tokens must be disabled,
    as `encode_special_tokens` of the package does.
    """
    model, pre_tokenizer, normalizer = (tokenizer.get(key) or {} for key in ("model", "pre_tokenizer", "normalizer"))
    stages = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if normalizer.get("type") in (None, "NFC") and _cuts_at_regex(stages):
        cuts = _cut_pattern("\n" + _PUNCTUATION)
    else:
        cuts = _sentencepiece_cuts(model, stages, normalizer)
    is_safe = cuts and all(_is_independent(token, cuts) for token in tokenizer.get("added_tokens", ()))
    return cuts if is_safe else None


def text_pieces(
    blocks: Iterable[str], cuts: re.Pattern[str], piece_characters: int = _PIECE_CHARACTERS
) -> Iterator[str]:
    """Cuts the text "".join(blocks) at the first safe position after each `piece_characters` characters.

    Memory: one piece and one block.
    """
    buffer = ""
    for block in blocks:
        num_searched = len(buffer) - 2  # a match tests up to two characters
        buffer += block
        begin = 0
        while cut := cuts.search(buffer, max(begin + piece_characters, num_searched)):
            yield buffer[begin : cut.start()]
            begin = cut.end()
        buffer = buffer[begin:]
    yield buffer


def _cuts_at_regex(stages: list[dict]) -> bool:
    """Whether all stages of a pre-tokenizer are known. One of them applies a regex: ByteLevel without one returns the
    entire text as one pre-token."""
    has_regex = any(stage.get("type") == "Split" or stage.get("use_regex") for stage in stages)
    return has_regex and all(_is_known(stage) for stage in stages)


def _is_known(stage: dict) -> bool:
    if stage.get("type") == "ByteLevel":
        return not stage["add_prefix_space"]
    if stage.get("type") == "Digits":
        return True
    return (
        stage.get("type") == "Split"
        and stage["pattern"].get("Regex") in _KNOWN_REGEXES
        and stage["behavior"] == "Isolated"
        and not stage["invert"]
    )


def _sentencepiece_cuts(model: dict, stages: list[dict], normalizer: dict) -> re.Pattern[str] | None:
    normalizers = normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _UNDERSCORE}
    prepend = {"type": "Prepend", "prepend": _UNDERSCORE}
    no_effect = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    scheme = None  # the scheme of a Metaspace pre-tokenizer
    if len(stages) == 1 and stages[0].get("type") == "Metaspace" and stages[0]["replacement"] == _UNDERSCORE:
        scheme = stages[0]["prepend_scheme"]
        is_known = normalizers in ([], [{}])
    else:
        is_known = stages in ([{}], [no_effect]) and normalizers in ([replace], [prepend, replace], [replace, prepend])
    depends_on_ends = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not is_known or depends_on_ends or model.get("ignore_merges"):
        return None
    crossed = re.compile(rf"[{_letters()}]([\n{_UNDERSCORE}{re.escape(_PUNCTUATION)}])")
    unsafe = {character for token in model["vocab"] for character in crossed.findall(token)}
    if _UNDERSCORE in unsafe or _UNDERSCORE not in model["vocab"]:
        return None
    if prepend in normalizers:  # also to a piece, where it replaces the space
        return _prepending_cuts()
    if scheme not in (None, "never"):  # prepended to a piece that does not start with a space
        return _cut_pattern("")
    return _cut_pattern("".join(c for c in "\n" + _PUNCTUATION if c in model["vocab"] and c not in unsafe))


def _cut_pattern(characters: str) -> re.Pattern[str]:
    """Matches, with length 0, between a letter or digit and one of `characters`, or a space before another one."""
    following = [f" [{_letters()}]", *map(re.escape, characters)]
    return re.compile(rf"(?<=[{_letters()}])(?={'|'.join(following)})")


def _prepending_cuts() -> re.Pattern[str]:
    """Matches the space between two letters or digits."""
    return re.compile(rf"(?<=[{_letters()}]) (?=[{_letters()}])")


@functools.cache
def _letters() -> str:
    """The letters and digits that Unicode 3.2 has and that are still ones, as ranges of a regex character class. The
    regex engine of a tokenizer may have another version of Unicode; its classes contain these characters as well."""
    kinds = ("Lu", "Ll", "Lo", "Nd")
    letters = [
        code
        for code in range(0x10000)
        if unicodedata.ucd_3_2_0.category(chr(code)) in kinds and unicodedata.category(chr(code)) in kinds
    ]
    runs = itertools.groupby(enumerate(letters), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ends)


def _is_independent(token: dict, cuts: re.Pattern[str]) -> bool:
    """Whether an added token matches the same places of the text and of its pieces."""
    depends_on_neighbors = token["lstrip"] or token["rstrip"] or token["single_word"]
    crosses_cut = re.search(rf"[{_letters()}][\n {_UNDERSCORE}{re.escape(_PUNCTUATION)}]", token["content"])
    # The "▁" of a piece is prepended to its text before the first added token, which must not be empty.
    is_first = cuts.pattern == _prepending_cuts().pattern and re.match(f"[{_letters()}]", token["content"])
    return not crosses_cut and (token["special"] or not (depends_on_neighbors or is_first))
