"""A corpus that several processes tokenize in parts equals the one that a single process tokenizes."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jaxlc.config.data_schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.texts.documents import Fields
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens import parallel_tokenizing
from jaxlc.data.tokens.parallel_tokenizing import plan_parts
from jaxlc.data.tokens.store import TokenStore, open_store
from jaxlc.data.tokens.tokenized_pieces import Counts, Piece, TokenizedPiece
from jaxlc.data.tokens.tokenizers import load_tokenizer
from tests.data.chat_styles import CHATML, write_tokenizer

TEXT = Fields()


@pytest.fixture
def small_parts(monkeypatch):
    """Sizes of a large corpus, divided."""
    monkeypatch.setattr(parallel_tokenizing, "MIN_BYTES", 100)
    monkeypatch.setattr(parallel_tokenizing, "_PART_BYTES", 3000)
    monkeypatch.setattr(parallel_tokenizing, "_MAX_WORKER_BYTES", 5000)


def open_files(directory: Path, cache: str, fields: Fields = TEXT, progress=None, **changes) -> TokenStore:
    config = DataConfig(cache_dir=str(directory / cache), tokenizing_processes=2, **changes)
    tokenizer = load_tokenizer(config.tokenizer)
    return open_store(list_files([str(directory / "files")]).files, config, fields, tokenizer, progress)


def assert_equal_stores(one: TokenStore, two: TokenStore) -> None:
    assert one.fingerprint == two.fingerprint
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.offsets, two.offsets)
    np.testing.assert_array_equal(one.split_hashes, two.split_hashes)
    assert (one.invalid_utf8, one.num_bad_records) == (two.invalid_utf8, two.num_bad_records)
    assert one.first_bad_record == two.first_bad_record
    np.testing.assert_array_equal(one.answers, two.answers)


def write_files(files: Path) -> None:
    """Small text files, a .jsonl file of several parts with bad lines, and large files that cannot be cut."""
    files.mkdir()
    lines = [json.dumps({"text": f"née {i} " * (i % 30 + 1)}) for i in range(120)]
    lines[50] = lines[90] = "{broken"
    (files / "a.jsonl").write_text("\n".join(lines))
    for i in range(4):
        (files / f"b{i}.txt").write_bytes(b"text \xff " * (50 * i))
    (files / "c.txt").write_text("a large file " * 500)
    with gzip.open(files / "d.jsonl.gz", "wt") as out:
        out.write("\n".join(lines[:20]))


def test_parallel_store_equals_serial_store(tmp_path: Path, small_parts, monkeypatch):
    write_files(tmp_path / "files")
    monkeypatch.setattr(parallel_tokenizing, "_SECONDS_BETWEEN_COUNTS", 0.0)
    calls = []
    parallel = open_files(tmp_path, "parallel", progress=lambda *call: calls.append(call), max_bad_records=2)
    done, totals = zip(*calls)
    assert len({*totals}) == 1 and list(done) == sorted(done) and 0 == done[0] < done[-1] <= totals[0]
    parts = plan_parts(list_files([str(tmp_path / "files")]).files, 3000, 5000)
    assert len(parts) >= 6 and any(part.is_inline for part in parts)
    assert not list((tmp_path / "parallel").glob("*.parts"))
    monkeypatch.setattr(parallel_tokenizing, "MIN_BYTES", 10**9)
    assert_equal_stores(parallel, open_files(tmp_path, "serial", max_bad_records=2))
    listed = [next((tmp_path / name).glob("*.skipped.txt")).read_text() for name in ("parallel", "serial")]
    assert listed[0] == listed[1] and [":51: " in listed[0], ":91: " in listed[0]] == [True, True]
    assert parallel.num_bad_records == 2 and "a.jsonl:51: invalid JSON" in parallel.first_bad_record


def test_count_of_a_part_grows_while_it_is_tokenized(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(parallel_tokenizing, "_SECONDS_BETWEEN_COUNTS", 0.0)
    path, size = tmp_path / "1.npz", 100
    pieces = [TokenizedPiece(Piece(b"x" * size, "d", Counts(0, 0), is_last=False), np.zeros(1), None)] * 3
    (tmp_path / "1.count").write_text("")  # as while the other process writes it
    counts = [parallel_tokenizing._count(path)]
    counts += [parallel_tokenizing._count(path) for _ in parallel_tokenizing._counted(iter(pieces), path)]
    assert counts == [0, size, 2 * size, 3 * size] and parallel_tokenizing._count(tmp_path / "2.npz") == 0


def test_parallel_store_of_chats_continues_after_a_kill(tmp_path: Path, small_parts, monkeypatch):
    """The first process ends when two parts are complete; the second one starts processes for the others only."""
    (tmp_path / "files").mkdir()
    chats = [
        {"messages": [{"role": "user", "content": "q" * i}, {"role": "assistant", "content": "née " * (i % 40 + 1)}]}
        for i in range(60)
    ]
    (tmp_path / "files" / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", CHATML))
    arguments = dict(fields=Fields(chat="messages"), tokenizer=tokenizer)
    started = []
    start = parallel_tokenizing._start

    def counted_start(*part):
        started.append(part[1].name)
        if len(started) == 3:
            raise KeyboardInterrupt
        return start(*part)

    monkeypatch.setattr(parallel_tokenizing, "_start", counted_start)
    with pytest.raises(KeyboardInterrupt):
        open_files(tmp_path, "cache", **arguments)
    complete = {path.name for path in (tmp_path / "cache").glob("*.parts/*.npz")}
    assert complete  # the third process starts only after one of the first two has ended
    del started[:3]
    monkeypatch.setattr(parallel_tokenizing, "_start", lambda *part: [started.append(part[1].name), start(*part)][1])
    parallel = open_files(tmp_path, "cache", **arguments)
    assert started and not complete & set(started)
    monkeypatch.setattr(parallel_tokenizing, "MIN_BYTES", 10**9)
    assert_equal_stores(parallel, open_files(tmp_path, "serial", **arguments))
    assert len(parallel.answers) == 60


def test_parallel_error_names_file_and_line(tmp_path: Path, small_parts):
    write_files(tmp_path / "files")
    with pytest.raises(UserError, match="a.jsonl:51: invalid JSON .*; or skip such records with data.max_bad_records"):
        open_files(tmp_path, "cache")
    with pytest.raises(UserError, match="a.jsonl:91: invalid JSON|2 records cannot be used, more than .*=1"):
        open_files(tmp_path, "cache", max_bad_records=1)


def test_plan_of_parts_covers_every_line_once(tmp_path: Path):
    write_files(tmp_path / "files")
    files = list_files([str(tmp_path / "files")]).files
    parts = plan_parts(files, 1000, 2000)
    spans = [file.lines for part in parts for file in part.files if file.name == "a.jsonl"]
    content = (tmp_path / "files" / "a.jsonl").read_bytes()
    assert [begin for begin, _, _ in spans[1:]] == [end for _, end, _ in spans[:-1]]
    assert spans[0] == (0, spans[0][1], 1) and spans[-1][1] == len(content) and len(spans) > 3
    assert [content[:begin].count(b"\n") + 1 for begin, _, _ in spans] == [number for _, _, number in spans]
    assert [file.name for part in parts for file in part.files if not file.lines] == [f.name for f in files[1:]]
