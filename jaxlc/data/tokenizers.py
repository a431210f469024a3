"""Tokenizers: plain bytes, or any Hugging Face `tokenizer.json`."""

import hashlib
import json
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxlc.core import extras
from jaxlc.core.errors import UserError, reason_of
from jaxlc.data.text_pieces import can_encode_in_pieces, text_pieces

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


class Tokenizer(Protocol):
    """`encode` adds no special tokens; the token store appends `end_of_document_id` to each document."""

    name: str  # the value of config.data.tokenizer
    fingerprint: str  # equal for two tokenizers if the same text gives the same IDs
    vocab_size: int  # every ID is smaller
    end_of_document_id: int

    def encode(self, text: bytes) -> np.ndarray:
        """Converts UTF-8 text to int32 IDs [tokens]. Called from several threads."""

    def decode(self, ids: np.ndarray) -> str:
        """Converts IDs [tokens] to text: without special tokens, invalid UTF-8 replaced with U+FFFD."""


def load_tokenizer(name: str) -> Tokenizer:
    """Loads a tokenizer; `name` is "bytes" or the path of a tokenizer.json.

    Raises:
      UserError: the file cannot be read, is not a tokenizer, or has no end-of-document token.
    """
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


class ByteTokenizer:
    """IDs 0..255 are the bytes of the text, 256 is the end-of-document token."""

    name = fingerprint = "bytes"
    vocab_size = 257
    end_of_document_id = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, loaded with the package `tokenizers`."""

    def __init__(self, name: str):
        extras.require("tokenizers", f"data.tokenizer {name!r}")
        import tokenizers

        path = Path(os.path.expanduser(name))
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"cannot read data.tokenizer {name!r} ({error.strerror or error});"
                ' use "bytes" or the path of a tokenizer.json'
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exception if it cannot parse the content
            raise UserError(
                f"data.tokenizer {name!r} is not a valid tokenizer.json ({reason_of(error)});"
                ' use "bytes" or the path of a tokenizer.json'
            ) from error
        self._tokenizer.no_truncation()  # many files contain the length limit of their model
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the text "</s>" in a document is not a special token
        self.name = name
        self.fingerprint = hashlib.sha256(content).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # IDs may have gaps
        self._encodes_in_pieces = can_encode_in_pieces(json.loads(self._tokenizer.to_str()))
        self.end_of_document_id = self._find_end_of_document()

    def encode(self, text: bytes) -> np.ndarray:
        # The package needs about 180 bytes of memory per byte of text, so a long document is encoded in pieces.
        decoded = text.decode(errors="replace")
        pieces = text_pieces(decoded) if self._encodes_in_pieces else [decoded]
        return np.concatenate([self._encode(piece) for piece in pieces])

    def _encode(self, text: str) -> np.ndarray:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises plain Exception
            raise UserError(
                f"data.tokenizer {self.name!r} cannot encode the corpus ({reason_of(error)}); use a different tokenizer"
            ) from None
        return np.asarray(encoding.ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def _find_end_of_document(self) -> int:
        special = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        for token in _END_OF_DOCUMENT:
            if token in special:
                return special[token]
        raise UserError(
            f"data.tokenizer {self.name!r} has no end-of-document token: its special tokens are"
            f" {sorted(special)[:8]}; add one of {', '.join(_END_OF_DOCUMENT)} to them"
        )
