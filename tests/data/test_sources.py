import gzip
import json
import os
import random
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxlc.core.errors import UserError
from jaxlc.data.texts import documents as documents_module
from jaxlc.data.texts.documents import Fields, Notes, read_documents
from jaxlc.data.texts.sources import list_files, split_hash


def documents_of(*sources: str, text_field: str = "text") -> dict[str, bytes]:
    files, _ = list_files([str(source) for source in sources])
    read = [
        (d.name, b"".join(d.blocks))
        for file in files
        for d in read_documents(file, Fields(text_field), Notes())
    ]
    assert len({name for name, _ in read}) == len(read)
    return dict(read)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One file of each type, and files that are not documents."""
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "sub" / "__pycache__").mkdir()
    for name in ("a.txt", "sub/b.py", "sub/c.md", "sub/d.rst"):
        (tmp_path / name).write_bytes(f"text of {name} \xff".encode("latin-1"))
    for name in ("photo.jpg", "sub/.git/e.txt", "sub/__pycache__/f.py"):
        (tmp_path / name).write_text("not a document")
    (tmp_path / "empty.txt").touch()
    lines = [
        json.dumps({"id": 1, "text": "née"}),
        "",
        json.dumps({"text": ""}),
        json.dumps({"text": "lone \ud800"}),
    ]
    (tmp_path / "g.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "h.jsonl.gz", "wt") as out:
        out.write('{"text": "zipped"}\n')
    table = pyarrow.table({"text": [f"record {i}" for i in range(600)], "id": list(range(600))})
    pyarrow.parquet.write_table(table, tmp_path / "i.parquet")
    return tmp_path


def test_read_documents_every_format_is_read(corpus: Path):
    documents = documents_of(corpus)
    texts = {
        name: f"text of {name} \xff".encode("latin-1")
        for name in ("a.txt", "sub/b.py", "sub/c.md", "sub/d.rst")
    }
    lines = {
        "g.jsonl:1": "née".encode(),
        "g.jsonl:4": b"lone \xef\xbf\xbd",
        "h.jsonl.gz:1": b"zipped",
    }
    records = {f"i.parquet:{i + 1}": f"record {i}".encode() for i in range(600)}
    assert documents == texts | lines | records
    assert list(documents) == sorted(
        documents, key=lambda name: (name.partition(":")[0], len(name), name)
    )


def test_read_documents_blocks_decode_one_by_one(tmp_path: Path, monkeypatch):
    """Also invalid UTF-8: a sequence that is cut, too long, or starts in the middle."""
    rng = random.Random(0)
    parts = [
        *map(str.encode, "aé中𝄞"),
        b"\xff",
        b"\x80",
        b"\xc3",
        b"\xe4\xb8",
        b"\xf0\x9d\x84",
        "\ufffd".encode(),
    ]
    for block_bytes in (1, 2, 3, 5, 64):
        monkeypatch.setattr(documents_module, "_BLOCK_BYTES", block_bytes)
        text = b"".join(rng.choices(parts, k=400))
        (tmp_path / "a.txt").write_bytes(text)
        blocks = [
            block
            for d in read_documents(list_files([str(tmp_path)]).files[0], Fields(), Notes())
            for block in d.blocks
        ]
        assert b"".join(blocks) == text and len(blocks) > 5 and all(blocks)
        assert "".join(block.decode(errors="replace") for block in blocks) == text.decode(
            errors="replace"
        )


def test_list_files_overlapping_sources_list_files_once(corpus: Path):
    assert list(documents_of(corpus / "a.txt")) == ["a.txt"]
    assert list(documents_of(f"{corpus}/**/*.md")) == ["sub/c.md"]
    assert list(documents_of(f"{corpus}/sub/*")) == ["b.py", "c.md", "d.rst"]
    overlapping = (corpus / "sub", corpus / "sub" / "b.py", f"{corpus}/sub/*.py")
    assert list(documents_of(*overlapping)) == ["b.py", "c.md", "d.rst"]
    assert list_files([str(source) for source in overlapping]).num_duplicates == 2
    assert list_files([str(corpus)]).num_duplicates == 0


def test_read_documents_text_field_is_used(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "long"}\n')
    assert documents_of(tmp_path, text_field="body") == {"a.jsonl:1": b"long"}


def test_list_files_python_stdlib_lists_library():
    files = {file.name: file for file in list_files(["python-stdlib"]).files}
    assert len(files) > 500 and list(files) == sorted(files)
    assert (
        files["json/decoder.py"].path
        == Path(sysconfig.get_paths()["stdlib"], "json", "decoder.py").resolve()
    )
    assert all(name.endswith(".py") and "site-packages" not in name for name in files)


def test_split_hash_is_stable_and_uniform():
    # must not change: documents would move across the split
    assert split_hash("json/decoder.py") == 0.2311742724437984
    hashes = [split_hash(f"document {i}") for i in range(2000)]
    assert min(hashes) >= 0 and max(hashes) < 1
    assert sum(value < 0.25 for value in hashes) == pytest.approx(500, abs=60)


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "a.jsonl",
            b'{"text": "fine"}\n{"text": 7}\n',
            r"a.jsonl:2: the field 'text' is an int, expected text; fix .*data.text_field",
        ),
        (
            "a.jsonl",
            b'{"text": null}\n',
            r"/a.jsonl:1: the field 'text' is null, expected text; fix or remove this record",
        ),
        (
            "a.jsonl",
            b'{"body": "x"}\n',
            r"a.jsonl:1: no field 'text' \(the fields are \['body'\]\); set data.text_field",
        ),
        (
            "a.jsonl",
            b'{"messages": []}\n',
            r"no field 'text' .* holds the document, or for chats chat_format of a source in",
        ),
        (
            "a.jsonl",
            b'["text"]\n',
            r"a.jsonl:1: expected a JSON object, not a list; fix or remove this record",
        ),
        ("a.jsonl", b"{text}\n", r"/a.jsonl:1: invalid JSON \(.*\); fix or remove this line"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"/a.jsonl:1: invalid JSON"),
        (
            "a.jsonl.gz",
            b"not gzip",
            r"cannot read .*a.jsonl.gz' \(.*\); fix it or remove it from data.sources",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "cut"}\n' * 99, mtime=0)[:-12],
            r"cannot read .*a.jsonl.gz",
        ),
        (
            "a.parquet",
            b"not parquet",
            r"cannot read .*a.parquet' \(Parquet .*; fix it or remove it from data.sources",
        ),
        ("a.bin", b"", r"contains no file with a supported suffix \(.txt"),
    ],
)
def test_read_documents_invalid_file_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        documents_of(tmp_path)
    assert "\n" not in str(error.value)


def test_read_documents_parquet_without_text_is_refused(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet:2: the field 'text' is null"):
        documents_of(tmp_path)
    with pytest.raises(
        UserError, match=r"a.parquet:1: no field 'body' \(the fields are \['text'\]\)"
    ):
        documents_of(tmp_path, text_field="body")


def test_read_documents_without_pyarrow_says_install(corpus: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"\.\[data\]"):
        documents_of(corpus / "i.parquet")


def test_list_files_missing_source_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"'/no/such/place' does not exist; use"):
        documents_of("/no/such/place")
    with pytest.raises(UserError, match="'~no-such-user/place' does not exist"):
        documents_of("~no-such-user/place")
    with pytest.raises(UserError, match=r"\*.txt' contains no file"):
        documents_of(f"{tmp_path}/*.txt")
    os.symlink(tmp_path / "gone", tmp_path / "link.txt")
    with pytest.raises(UserError, match=r"cannot read .*link.txt"):
        documents_of(tmp_path)
