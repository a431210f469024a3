import importlib.machinery
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import load_tokenizer, tokenizer_file


def write_tokenizer(path: Path, *special_tokens: str) -> str:
    """Writes a word-level tokenizer.json with a length limit, as published ones have."""
    vocabulary = {"[UNK]": 0, "long": 1, "context": 2, "<": 3, ">": 4, "/": 5, "s": 6}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()]
    )
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    return str(path)


class FakeHub:
    """Stands in for the package huggingface_hub; it has the model org/tiny."""

    __spec__ = importlib.machinery.ModuleSpec("huggingface_hub", None)

    def __init__(self, directory: Path):
        self.directory, self.requests = directory, []

    def snapshot_download(self, repo_id: str, allow_patterns: list[str]) -> str:
        if repo_id != "org/tiny":
            raise ConnectionError("Cannot reach the hub:\n offline")
        self.requests.append(allow_patterns)
        return str(self.directory)


def test_byte_tokenizer_round_trip_is_exact():
    tokenizer = load_tokenizer("bytes")
    text = "née 中".encode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text)
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id, tokenizer.name) == (
        257,
        256,
        "bytes",
    )
    assert tokenizer.decode(np.append(ids, 256)) == "née 中"


def test_tokenizer_json_encodes_without_limit_or_special(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", "<pad>", "</s>"))
    ids = tokenizer.encode(b"long long context \xff long")
    # all tokens, although the file truncates at 3
    assert ids.dtype == np.int32 and ids.tolist() == [1, 1, 2, 0, 1]
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (9, 8)
    assert tokenizer.decode(np.array([1, 2, 8])) == "long context"
    assert tokenizer.encode(b"long </s>").tolist() == [1, 3, 5, 6, 4]  # text, not a special token


def test_tokenizer_fingerprint_depends_on_content(tmp_path: Path):
    one, two = (
        load_tokenizer(write_tokenizer(tmp_path / name, "</s>"))
        for name in ("one.json", "two.json")
    )
    other = load_tokenizer(write_tokenizer(tmp_path / "other.json", "</s>", "<pad>"))
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_tokenizer_directory_and_hub_id_are_read(tmp_path: Path, monkeypatch):
    expected = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", "<pad>", "</s>"))
    assert load_tokenizer(str(tmp_path)).fingerprint == expected.fingerprint
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("org/tiny")
    assert (tokenizer.name, tokenizer.fingerprint) == ("org/tiny", expected.fingerprint)
    assert hub.requests == [["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]]
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json"), "org/tiny"):
        assert tokenizer_file(name) == tmp_path / "tokenizer.json"
    with pytest.raises(
        UserError, match=r"cannot download data.tokenizer 'org/other': the hub cannot .* directory"
    ):
        load_tokenizer("org/other")
    # not a hub id
    with pytest.raises(UserError, match=r"cannot read data.tokenizer 'no/such.json'"):
        load_tokenizer("no/such.json")


def test_tokenizer_end_token_can_be_named(tmp_path: Path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "<pad>", "</s>", "<|im_end|>")
    default, same, other, word = (
        load_tokenizer(path, end_token=token) for token in ("", "</s>", "<|im_end|>", "long")
    )
    assert [t.end_of_document_id for t in (default, same, other, word)] == [8, 8, 9, 1]
    # so that a corpus that is tokenized already is used
    assert default.fingerprint == same.fingerprint
    assert len({t.fingerprint for t in (default, other, word)}) == 3
    with pytest.raises(
        UserError, match=r"'<\|im_edn\|>' for config.data.end_token: .*did you mean <\|im_end\|>\?"
    ):
        load_tokenizer(path, end_token="<|im_edn|>")
    with pytest.raises(UserError, match=r"'lnog' for config.data.end_token: .*did you mean long\?"):
        load_tokenizer(path, end_token="lnog")
    with pytest.raises(
        UserError, match="which has its own end-of-document token .*: remove end_token"
    ):
        load_tokenizer("bytes", end_token="</s>")


@pytest.mark.parametrize("eos_token", ["<stop>", {"content": "<stop>", "special": True}])
def test_tokenizer_end_token_of_tokenizer_config_is_used(tmp_path: Path, eos_token):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    write_tokenizer(tmp_path / "tokenizer.json", "<pad>", "<stop>")
    assert load_tokenizer(str(tmp_path)).end_of_document_id == 8
    write_tokenizer(tmp_path / "tokenizer.json", "<stop>", "</s>")
    assert load_tokenizer(str(tmp_path)).end_of_document_id == 8  # a usual name comes first
    for garbage in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(garbage)
        with pytest.raises(
            UserError,
            match=r"tokenizer_config.json (contains|\().*; download it again or remove it",
        ):
            load_tokenizer(str(tmp_path))


def test_tokenizer_unusable_file_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"cannot read data.tokenizer '/no/such.json' \(No such file"
    ):
        load_tokenizer("/no/such.json")
    with pytest.raises(
        UserError,
        match=r"cannot read .*/tokenizer.json' .*a Hugging Face directory with one, or a hub id",
    ):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").touch()
    written = f'AutoTokenizer.from_pretrained("{tmp_path}").save_pretrained("{tmp_path}")'
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(UserError, match=re.escape(written)):
            load_tokenizer(str(name))
    (tmp_path / "tokenizer_config.json").rename(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"a model of bytes has none: use its run, or --config"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "broken.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="broken.json' is not a valid tokenizer.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    endless = write_tokenizer(tmp_path / "endless.json", "<pad>")
    with pytest.raises(
        UserError, match=r"no end-of-document token: its special tokens are .*end_token to one"
    ):
        load_tokenizer(endless)
    load_tokenizer(endless, end_token="<pad>")
    load_tokenizer(write_tokenizer(tmp_path / "ended.json", "<pad>", "</s>"))
