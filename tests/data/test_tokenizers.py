from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxlc.core.errors import UserError
from jaxlc.data.tokenizers import load_tokenizer


def write_tokenizer(path: Path, *special_tokens: str) -> str:
    """Writes a word-level tokenizer.json with a length limit, as published ones have."""
    vocabulary = {"[UNK]": 0, "long": 1, "context": 2, "<": 3, ">": 4, "/": 5, "s": 6}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    return str(path)


def test_byte_tokenizer_round_trip_is_exact():
    tokenizer = load_tokenizer("bytes")
    text = "née 中".encode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text)
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id, tokenizer.name) == (257, 256, "bytes")
    assert tokenizer.decode(np.append(ids, 256)) == "née 中"


def test_tokenizer_json_encodes_without_limit_or_special(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", "<pad>", "</s>"))
    ids = tokenizer.encode(b"long long context \xff long")
    assert ids.dtype == np.int32 and ids.tolist() == [1, 1, 2, 0, 1]  # all tokens, although the file truncates at 3
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (9, 8)
    assert tokenizer.decode(np.array([1, 2, 8])) == "long context"
    assert tokenizer.encode(b"long </s>").tolist() == [1, 3, 5, 6, 4]  # text, not a special token


def test_tokenizer_fingerprint_depends_on_content(tmp_path: Path):
    one, two = (load_tokenizer(write_tokenizer(tmp_path / name, "</s>")) for name in ("one.json", "two.json"))
    other = load_tokenizer(write_tokenizer(tmp_path / "other.json", "</s>", "<pad>"))
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_tokenizer_unusable_file_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read data.tokenizer '/no/such.json' \(No such file"):
        load_tokenizer("/no/such.json")
    with pytest.raises(UserError, match="cannot read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "broken.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="broken.json' is not a valid tokenizer.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(UserError, match=r"no end-of-document token: its special tokens are \['<pad>'\]"):
        load_tokenizer(write_tokenizer(tmp_path / "endless.json", "<pad>"))
