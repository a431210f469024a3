"""Text to token ids: plain bytes, or any Hugging Face `tokenizer.json`."""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxlc.core import extras
from jaxlc.core.errors import UserError

# What published models call the token that ends a document, the surest name first.
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
    """`encode` adds no special token of its own; the token store ends each document with `end_of_document_id`."""

    name: str  # as in config.data.tokenizer
    fingerprint: str  # equal where the same text gives the same ids
    vocab_size: int  # every id is below it
    end_of_document_id: int

    def encode(self, text: bytes) -> np.ndarray:
        """UTF-8 text to int32 ids [tokens]; called from several threads."""

    def decode(self, ids: np.ndarray) -> str:
        """Ids [tokens] to text, special tokens left out, what is no text replaced."""


def load_tokenizer(name: str) -> Tokenizer:
    """`name` is "bytes", or the path of a tokenizer.json.

    Raises:
      UserError: no such file, not a tokenizer, or a tokenizer without a token that ends a document.
    """
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, 256 ends a document."""

    name = fingerprint = "bytes"
    vocab_size = 257
    end_of_document_id = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the package `tokenizers`."""

    def __init__(self, name: str):
        extras.require("tokenizers", f"data.tokenizer {name!r}")
        import tokenizers

        path = Path(name).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"data.tokenizer {name!r} cannot be read ({error.strerror});"
                ' give "bytes" or the path of a tokenizer.json'
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises bare Exception for whatever it cannot parse
            raise UserError(
                f'data.tokenizer {name!r} is not a tokenizer.json ({error}); give "bytes" or the path of one'
            ) from error
        self._tokenizer.no_truncation()  # files often carry the length limit of the model they were made for
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # a document that spells "</s>" does not end there
        self.name = name
        self.fingerprint = hashlib.sha256(content).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # ids may have gaps
        self.end_of_document_id = self._find_end_of_document()

    def encode(self, text: bytes) -> np.ndarray:
        try:
            encoding = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        except Exception as error:  # the package raises nothing more particular
            raise UserError(f"data.tokenizer {self.name!r} cannot encode the corpus ({error}); give another") from None
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
