"""Tokenizers: plain bytes, or any Hugging Face `tokenizer.json`; long text in pieces that encode to the same tokens.

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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.config import DataConfig
from jaxlc.config.models import hub
from jaxlc.config.models.pretrained import TOKENIZER_FILE, read_json
from jaxlc.config.values import invalid_value
from jaxlc.core import UserError, errors, nearest_name, reason_of
from jaxlc.core.files import MAX_JSON_BYTES, local_path, parse_json, read_limited, sha256_of

_PIECE_CHARACTERS = 1 << 16
_UNDERSCORE = "▁"  # U+2581, which SentencePiece writes for a space
_PUNCTUATION = ".,;:!?。，、！？"  # without apostrophes, with which contractions start
# The regexes of Llama 3 (cl100k), Qwen 2 and 3, o200k, and Tekken. GPT-2's is built into the
# ByteLevel pre-tokenizer.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
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
    """The cuts of a tokenizer, from the content of its tokenizer.json; None if it is of neither
    kind described above.

    A piece ends where a match begins, and the next piece begins where the match ends. Special
    tokens must be disabled, as `encode_special_tokens` of the package does.
    """
    model, pre_tokenizer, normalizer = (
        tokenizer.get(key) or {} for key in ("model", "pre_tokenizer", "normalizer")
    )
    stages = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    # ByteLevel without a regex returns the entire text as one pre-token.
    has_regex = any(stage.get("type") == "Split" or stage.get("use_regex") for stage in stages)
    is_known = has_regex and all(_is_known(stage) for stage in stages)
    if is_known and normalizer.get("type") in (None, "NFC"):
        cuts = _cut_pattern("\n" + _PUNCTUATION)
    else:
        cuts = _sentencepiece_cuts(model, stages, normalizer)
    is_safe = cuts and all(
        _is_independent(token, cuts) for token in tokenizer.get("added_tokens", ())
    )
    return cuts if is_safe else None


def text_pieces(
    blocks: Iterable[str], cuts: re.Pattern[str], piece_characters: int = _PIECE_CHARACTERS
) -> Iterator[str]:
    """Cuts the text "".join(blocks) at the first safe position after each `piece_characters`
    characters.

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


def _is_known(stage: dict) -> bool:
    kind = stage.get("type")
    if kind == "ByteLevel":
        return not stage["add_prefix_space"]
    return kind == "Digits" or (
        kind == "Split"
        and stage["pattern"].get("Regex") in _KNOWN_REGEXES
        and stage["behavior"] == "Isolated"
        and not stage["invert"]
    )


def _sentencepiece_cuts(
    model: dict, stages: list[dict], normalizer: dict
) -> re.Pattern[str] | None:
    normalizers = normalizer.get("normalizers", [normalizer])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _UNDERSCORE}
    prepend = {"type": "Prepend", "prepend": _UNDERSCORE}
    no_effect = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    scheme = None  # the scheme of a Metaspace pre-tokenizer
    match stages:
        case [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}]:
            is_known = normalizers in ([], [{}])
        case _:
            is_known = stages in ([{}], [no_effect]) and normalizers in (
                [replace],
                [prepend, replace],
                [replace, prepend],
            )
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
    return _cut_pattern(
        "".join(c for c in "\n" + _PUNCTUATION if c in model["vocab"] and c not in unsafe)
    )


def _cut_pattern(characters: str) -> re.Pattern[str]:
    """Matches, with length 0, between a letter or digit and one of `characters`, or a space before
    another one.
    """
    following = [f" [{_letters()}]", *map(re.escape, characters)]
    return re.compile(rf"(?<=[{_letters()}])(?={'|'.join(following)})")


def _prepending_cuts() -> re.Pattern[str]:
    """Matches the space between two letters or digits."""
    return re.compile(rf"(?<=[{_letters()}]) (?=[{_letters()}])")


@functools.cache
def _letters() -> str:
    """The letters and digits that Unicode 3.2 has and that are still ones, as ranges of a regex
    character class. The regex engine of a tokenizer may have another version of Unicode; its
    classes contain these characters as well."""
    kinds = {"Lu", "Ll", "Lo", "Nd"}
    letters = [
        code
        for code in range(0x10000)
        if {x.category(chr(code)) for x in (unicodedata, unicodedata.ucd_3_2_0)} <= kinds
    ]
    runs = itertools.groupby(enumerate(letters), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ends)


def _is_independent(token: dict, cuts: re.Pattern[str]) -> bool:
    """Whether an added token matches the same places of the text and of its pieces."""
    depends_on_neighbors = token["lstrip"] or token["rstrip"] or token["single_word"]
    crosses_cut = re.search(
        rf"[{_letters()}][\n {_UNDERSCORE}{re.escape(_PUNCTUATION)}]", token["content"]
    )
    # The "▁" of a piece is prepended to its text before the first added token, which must not be
    # empty.
    is_first = cuts.pattern == _prepending_cuts().pattern and re.match(
        f"[{_letters()}]", token["content"]
    )
    return not crosses_cut and (token["special"] or not (depends_on_neighbors or is_first))


# Names of the end-of-document token in published models, in order of preference.
_END_OF_DOCUMENT = (
    "<|end_of_text|>",  # Llama 3
    "<|endoftext|>",  # GPT-2, Qwen, Phi
    "</s>",  # Llama 2, Mistral
    "<eos>",  # Gemma
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "[EOS]",
    "<|eos|>",
)
_MAX_VOCAB_SIZE = 1 << 22
AUTO = "auto"  # of data.start_token
_TEMPLATE = "TemplateProcessing"  # the part of a tokenizer.json that puts tokens around texts
_END_OF_BYTES = b"<end of document>"  # the text of token 256 of ByteTokenizer
_EXPECTED = 'use "bytes", a tokenizer.json, a Hugging Face directory with one, or a hub id ORGANIZATION/NAME'


class ByteTokenizer:
    """IDs 0..255 are the bytes of the text, 256 is the end-of-document token.

    `encode` of a tokenizer adds no special tokens; the token store appends `end_of_document_id` to
    each document.
    """

    name = "bytes"  # the value of config.data.tokenizer
    fingerprint = "bytes"  # equal for two tokenizers if the same documents give the same IDs
    vocab_size = 257  # every ID is smaller
    end_of_document_id = 256
    # Why long text is not cut into pieces, for a warning; empty if it is cut.
    no_pieces_reason = ""
    file: Path | None = None  # its tokenizer.json; None: it has no file
    # int32, before each document and each prompt of plain text; `encode` adds none
    start_ids = np.empty(0, np.int32)
    own_start_ids = start_ids  # that transformers puts there

    def encode(self, text: bytes) -> np.ndarray:
        """Converts UTF-8 text to int32 IDs [tokens]."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def pieces(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Cuts a document, given in blocks as `documents.Document` has them, into pieces whose IDs,
        one after the other, equal those of the entire text."""
        return iter(blocks)

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        """Converts pieces to int32 IDs [tokens] each, in parallel."""
        return [self.encode(piece) for piece in pieces]

    def has_special_text(self, text: str) -> bool:
        """Whether a text contains that of a special token, which `encode` converts as text."""
        return False

    def encode_with_offsets(
        self, texts: Sequence[str], special_tokens: bool
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Converts texts.

        Args:
          special_tokens: the text of a special token means this token, as in rendered chats.
        Returns:
          For each text, int32 IDs [tokens], and the begin and end of each token in its characters, int [tokens, 2].
        """
        return [(self.encode(text.encode(errors="replace")), _byte_offsets(text)) for text in texts]

    def decode(self, ids: np.ndarray, special_tokens: bool = False) -> str:
        """Converts IDs [tokens] to text, with or without special tokens; invalid UTF-8 is replaced
        with U+FFFD.
        """
        end = _END_OF_BYTES if special_tokens else b""
        return b"".join(bytes([i]) if i < 256 else end for i in np.asarray(ids).tolist()).decode(
            errors="replace"
        )


def _byte_offsets(text: str) -> np.ndarray:
    """The begin and end in characters of the character of each byte, int [bytes, 2]."""
    num_bytes = [len(character.encode(errors="replace")) for character in text]
    begins = np.repeat(np.arange(len(text)), num_bytes)
    return np.stack([begins, begins + 1], axis=1)


class HuggingFaceTokenizer:
    """A tokenizer.json, loaded with the package `tokenizers`; attributes and methods are those of
    `ByteTokenizer`.
    """

    def __init__(self, data: DataConfig):
        """The tokenizer of data.tokenizer. Its end-of-document token is data.end_token; empty: the
        first of the usual names that is a special token, or the eos_token of tokenizer_config.json
        in the same directory.
        """
        self.name = name = data.tokenizer
        errors.require("tokenizers", f"data.tokenizer {name!r}")
        import tokenizers

        self.file = path = tokenizer_file(name)
        content = _read(path, name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except (
            Exception
        ) as error:  # the package raises plain Exception if it cannot parse the content
            raise UserError(
                f"data.tokenizer {name!r} is not a valid tokenizer.json ({reason_of(error)}); {_EXPECTED}"
            ) from error
        self._tokenizer.no_truncation()  # many files contain the length limit of their model
        self._tokenizer.no_padding()
        # By default, the text "</s>" in a document is not a special token.
        self._tokenizer.encode_special_tokens = not data.parse_special_tokens
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # IDs may have gaps
        if self.vocab_size > _MAX_VOCAB_SIZE:  # the package would list the gaps
            raise UserError(
                f"data.tokenizer {name!r} has the token ID {self.vocab_size - 1}; {_EXPECTED}"
            )
        self._cuts = (
            None if data.parse_special_tokens else safe_cuts(parse_json(self._tokenizer.to_str()))
        )
        self.no_pieces_reason = (
            "" if self._cuts else "is not known to give the same tokens for text in pieces"
        )
        special = self._special_tokens()
        named = named_tokens(read_tokenizer_config(path.parent))
        usual = (token for token in _END_OF_DOCUMENT if token in special)
        usual = next(usual, named.get("eos_token", ""))
        if not (data.end_token or usual):
            raise UserError(
                f"data.tokenizer {name!r} has no end-of-document token: its special tokens are"
                f" {special[:8]}; add one of {', '.join(_END_OF_DOCUMENT)} to them, or set"
                " --config.data.end_token to one of its tokens"
            )
        self.end_of_document_id = self._token_id("data.end_token", data.end_token or usual)
        self.fingerprint = sha256_of(content)
        if data.end_token not in ("", usual) or data.parse_special_tokens:
            self._add_to_fingerprint(
                self.end_of_document_id, *["special tokens"] * data.parse_special_tokens
            )
        self.start_ids = self.own_start_ids
        if (start := data.start_token) != AUTO:
            ids = [self._token_id("data.start_token", start)] if start else []
            self.start_ids = np.array(ids, np.int32)
        if self.start_ids.size:
            self._add_to_fingerprint(self.start_ids.tolist())

    def _add_to_fingerprint(self, *identity: Any) -> None:
        self.fingerprint = sha256_of(repr((self.fingerprint, *identity)))

    def encode(self, text: bytes) -> np.ndarray:
        return np.concatenate(self.encode_pieces(list(self.pieces([text]))))

    def pieces(self, blocks: Iterable[bytes]) -> Iterator[str]:
        decoded = (block.decode(errors="replace") for block in blocks)
        return iter(["".join(decoded)]) if self._cuts is None else text_pieces(decoded, self._cuts)

    def encode_pieces(self, pieces: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        except Exception as error:  # the package raises plain Exception
            raise UserError(
                f"data.tokenizer {self.name!r} cannot encode the corpus ({reason_of(error)}); use a different tokenizer"
            ) from None
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def has_special_text(self, text: str) -> bool:
        return self._tokenizer.encode_special_tokens and self._special_text.search(text) is not None

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, filter(None, self._special_tokens()))) or r"(?!)")

    def encode_with_offsets(
        self, texts: Sequence[str], special_tokens: bool
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        tokenizer = self._with_special_tokens if special_tokens else self._tokenizer
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64))
            for encoding in encodings
        ]

    @functools.cached_property
    def _with_special_tokens(self):
        """Encodes the text of special tokens as these tokens."""
        return type(self._tokenizer).from_str(self._tokenizer.to_str())

    @functools.cached_property
    def own_start_ids(self) -> np.ndarray:
        """Those of the post-processor; transformers 5 ignores add_bos_token if there is a
        tokenizer.json.
        """
        try:
            encoding = self._tokenizer.encode("a", add_special_tokens=True)
        except Exception:  # plain, for a letter that is not in the vocabulary
            return np.empty(0, np.int32)
        return np.array(encoding.ids[: (*encoding.special_tokens_mask, 0).index(0)], np.int32)

    def decode(self, ids: np.ndarray, special_tokens: bool = False) -> str:
        return self._tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=not special_tokens
        )

    def _token_id(self, setting: str, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            added = sorted(
                token.content for token in self._tokenizer.get_added_tokens_decoder().values()
            )
            expected = f"a token of {self.name}, such as {', '.join(map(repr, self._special_tokens()[:4]))}"
            names = added if nearest_name(token, added) else self._tokenizer.get_vocab()
            raise UserError(invalid_value(setting, token, expected, names))
        return number

    def _special_tokens(self) -> list[str]:
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        return sorted(token.content for token in tokens if token.special)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str, **settings: Any) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      name: "bytes", the path of a tokenizer.json or of a Hugging Face directory, or a hub id.
      settings: others of the section data, such as end_token.
    Raises:
      UserError: as `tokenizer_of`.
    """
    return tokenizer_of(DataConfig(tokenizer=name, **settings))


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a config.

    Raises:
      UserError: the file cannot be read or downloaded, is not a tokenizer, or has no such end-of-document token.
    """
    if data.tokenizer != "bytes":
        return HuggingFaceTokenizer(data)
    for setting in ("end_token", "start_token"):
        token = vars(data)[setting]
        if token not in ("", AUTO):
            raise UserError(
                f"config.data.{setting}={token!r} is for Hugging Face tokenizers, and config.data.tokenizer is 'bytes',"
                f" which has its own end-of-document token and no start token: remove {setting}"
            )
    return ByteTokenizer()


def with_start(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The IDs of a text with the start IDs of the tokenizer before them, unless they are there."""
    start_ids = tokenizer.start_ids
    if np.array_equal(ids[: len(start_ids)], start_ids):
        return ids
    return np.concatenate([start_ids, ids])


def starting_with(start_ids: np.ndarray, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json, changed so that transformers puts these IDs before a text."""
    old = content.get("post_processor") or {}
    processors = [dict(x) for x in old.get("processors", [old]) if x]
    if not any(x["type"] == _TEMPLATE for x in processors):
        parts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
        processors.append(dict(type=_TEMPLATE, single=parts[:1], pair=parts, special_tokens={}))
    texts = {token["id"]: token["content"] for token in content.get("added_tokens", ())}
    names = {i: texts.get(i, f"token {i}") for i in start_ids.tolist()}
    start = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names.values()]
    known = {name: dict(id=name, ids=[i], tokens=[name]) for i, name in names.items()}
    for processor in processors:
        if processor["type"] == _TEMPLATE:
            for name in ("single", "pair"):
                rest = itertools.dropwhile(lambda part: "Sequence" not in part, processor[name])
                processor[name] = [*start, *rest]
            processor["special_tokens"] = processor["special_tokens"] | known
    return content | dict(post_processor=dict(type="Sequence", processors=processors))


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that `name` means, a path or a hub id; a file at a path may not exist.

    Raises:
      UserError: a tokenizer of the hub cannot be downloaded.
    """
    path = local_path(name)
    if not path.exists() and hub.is_model_id(name) and not name.endswith(".json"):
        path = hub.download(name, "data.tokenizer", hub.TOKENIZER_FILES)
    return path / TOKENIZER_FILE if path.is_dir() else path


def _read(path: Path, name: str) -> bytes:
    try:
        return read_limited(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        advice = _EXPECTED
        others = ("config.json", "tokenizer_config.json", "tokenizer.model")
        found = [x for x in others if (path.parent / x).is_file()]
        if path.name == TOKENIZER_FILE and found:
            source = name if hub.is_model_id(name) else path.parent
            line = f'AutoTokenizer.from_pretrained("{source}").save_pretrained("{path.parent}")'
            advice = f"write it with transformers: {line}"
            if found == ["config.json"]:
                advice += (
                    "; a model of bytes has none: use its run, or --config.data.tokenizer=bytes"
                )
        raise UserError(
            f"cannot read data.tokenizer {str(path)!r} ({reason_of(error)}); {advice}"
        ) from error


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, empty if there is none.

    Raises:
      UserError: it cannot be read, or is no JSON object.
    """
    path = directory / "tokenizer_config.json"
    return read_json(path, "download it again or remove it") if path.exists() else {}


def named_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names: bos_token and others."""
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in tokenizer_config.items()
        if name.endswith("_token")
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}
