import gzip
import json
import os
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sources import list_files, read_documents, split_hash


def documents_of(*sources: str, text_field: str = "text") -> dict[str, bytes]:
    config = DataConfig(sources=tuple(map(str, sources)), text_field=text_field)
    read = [document for file in list_files(config) for document in read_documents(file, text_field)]
    assert len({document.name for document in read}) == len(read)
    return {document.name: document.text for document in read}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One file of each kind, among files that are no documents."""
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "sub" / "__pycache__").mkdir()
    for name in ("a.txt", "sub/b.py", "sub/c.md", "sub/d.rst"):
        (tmp_path / name).write_bytes(f"text of {name} \xff".encode("latin-1"))
    for name in ("photo.jpg", "sub/.git/e.txt", "sub/__pycache__/f.py"):
        (tmp_path / name).write_text("not a document")
    (tmp_path / "empty.txt").touch()
    lines = [json.dumps({"id": 1, "text": "née"}), "", json.dumps({"text": ""}), json.dumps({"text": "lone \ud800"})]
    (tmp_path / "g.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "h.jsonl.gz", "wt") as out:
        out.write('{"text": "zipped"}\n')
    table = pyarrow.table({"text": [f"record {i}" for i in range(600)], "id": list(range(600))})
    pyarrow.parquet.write_table(table, tmp_path / "i.parquet")
    return tmp_path


def test_every_format(corpus: Path):
    documents = documents_of(corpus)
    texts = {name: f"text of {name} \xff".encode("latin-1") for name in ("a.txt", "sub/b.py", "sub/c.md", "sub/d.rst")}
    lines = {"g.jsonl:1": "née".encode(), "g.jsonl:4": b"lone ?", "h.jsonl.gz:1": b"zipped"}
    records = {f"i.parquet:{i + 1}": f"record {i}".encode() for i in range(600)}
    assert documents == texts | lines | records
    assert list(documents) == sorted(documents, key=lambda name: (name.partition(":")[0], len(name), name))


def test_files_globs_and_overlaps(corpus: Path):
    assert list(documents_of(corpus / "a.txt")) == ["a.txt"]
    assert list(documents_of(f"{corpus}/**/*.md")) == ["sub/c.md"]
    assert list(documents_of(f"{corpus}/sub/*")) == ["b.py", "c.md", "d.rst"]
    overlapping = (corpus / "sub", corpus / "sub" / "b.py", f"{corpus}/sub/*.py")
    assert list(documents_of(*overlapping)) == ["b.py", "c.md", "d.rst"]


def test_text_field(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "long"}\n')
    assert documents_of(tmp_path, text_field="body") == {"a.jsonl:1": b"long"}


def test_python_stdlib():
    files = {file.name: file for file in list_files(DataConfig())}
    assert len(files) > 500 and list(files) == sorted(files)
    assert files["json/decoder.py"].path == Path(sysconfig.get_paths()["stdlib"], "json", "decoder.py").resolve()
    assert all(name.endswith(".py") and "site-packages" not in name for name in files)


def test_split_hash_depends_on_the_name_alone():
    assert split_hash("json/decoder.py") == 0.2311742724437984  # frozen: a change would move documents across the split
    hashes = [split_hash(f"document {i}") for i in range(2000)]
    assert min(hashes) >= 0 and max(hashes) < 1
    assert sum(value < 0.25 for value in hashes) == pytest.approx(500, abs=60)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": 7}\n', r"a.jsonl:2 has no text in the field 'text' .*data.text_field"),
        ("a.jsonl", b'{"body": "x"}\n', r"its fields are \['body'\]"),
        ("a.jsonl", b'["text"]\n', r"a.jsonl:1 has no text"),
        ("a.jsonl", b"{text}\n", r"line 1 of .*a.jsonl' is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"line 1 of .*a.jsonl' is not JSON"),
        ("a.jsonl.gz", b"not gzip", r"cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "cut"}\n' * 99, mtime=0)[:-12], r"cannot read .*a.jsonl.gz"),
        ("a.parquet", b"not parquet", r"a.parquet' is not a Parquet file"),
        ("a.bin", b"", r"holds no file that ends in .txt"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        documents_of(tmp_path)


def test_parquet_without_the_field_or_with_nulls(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet:2 has no text"):
        documents_of(tmp_path)
    with pytest.raises(UserError, match=r"no text in the field 'body' \(its fields are \['text'\]\)"):
        documents_of(tmp_path, text_field="body")


def test_parquet_without_pyarrow(corpus: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"jaxlc\[data\]"):
        documents_of(corpus / "i.parquet")


def test_missing_sources(tmp_path: Path):
    with pytest.raises(UserError, match=r"'/no/such/place', which does not exist"):
        documents_of("/no/such/place")
    with pytest.raises(UserError, match=r"\*.txt' holds no file"):
        documents_of(f"{tmp_path}/*.txt")
    os.symlink(tmp_path / "gone", tmp_path / "link.txt")
    with pytest.raises(UserError, match=r"cannot read .*link.txt"):
        documents_of(tmp_path)
