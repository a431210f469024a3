"""A corpus that several processes tokenize in parts equals the one that a single process tokenizes."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jaxlc.config.schema import DataConfig
from jaxlc.core import processes
from jaxlc.core.errors import UserError
from jaxlc.core.text import no_progress
from jaxlc.data.texts.documents import BAD_RECORDS, Fields
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens import store as shards
from jaxlc.data.tokens.store import StorePaths, TokenStore, open_store, plan_shards, read_store
from jaxlc.data.tokens.tokenizers import load_tokenizer
from tests.data.chat_styles import CHATML, write_tokenizer

TEXT = Fields()


@pytest.fixture
def small_shards(monkeypatch):
    """Sizes of a large corpus, divided."""
    monkeypatch.setattr(shards, "MIN_BYTES", 100)
    monkeypatch.setattr(shards, "_SHARD_BYTES", 6000)
    monkeypatch.setattr(shards, "_MAX_SHARD_BYTES", 5000)


def open_files(
    directory: Path, cache: str, fields: Fields = TEXT, progress=no_progress, **changes
) -> TokenStore:
    config = DataConfig(cache_dir=str(directory / cache), tokenizing_processes=2, **changes)
    tokenizer = load_tokenizer(config.tokenizer)
    return open_store(
        list_files([str(directory / "files")]).files, config, fields, tokenizer, progress
    )


def assert_equal_stores(one: TokenStore, two: TokenStore) -> None:
    assert one.fingerprint == two.fingerprint
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.offsets, two.offsets)
    np.testing.assert_array_equal(one.split_hashes, two.split_hashes)
    assert one.notes.counts == two.notes.counts
    np.testing.assert_array_equal(one.answers, two.answers)


def write_files(files: Path) -> None:
    """Small text files, a .jsonl file of several parts with bad lines, and large files that cannot
    be cut.
    """
    files.mkdir()
    lines = [json.dumps({"text": f"née {i} " * (i % 30 + 1)}) for i in range(120)]
    lines[50] = lines[90] = "{broken"
    (files / "a.jsonl").write_text("\n".join(lines))
    for i in range(4):
        (files / f"b{i}.txt").write_bytes(b"text \xff " * (50 * i))
    (files / "c.txt").write_text("a large file " * 500)
    with gzip.open(files / "d.jsonl.gz", "wt") as out:
        out.write("\n".join(lines[:20]))


def test_parallel_store_equals_serial_store(tmp_path: Path, small_shards, monkeypatch):
    write_files(tmp_path / "files")
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_COUNTS", 0.0)
    calls = []
    parallel = open_files(
        tmp_path, "parallel", progress=lambda *call: calls.append(call), max_bad_records=2
    )
    done, totals = zip(*calls)
    assert (
        len({*totals}) == 1 and list(done) == sorted(done) and 0 == done[0] < done[-1] <= totals[0]
    )
    parts = plan_shards(list_files([str(tmp_path / "files")]).files, 6000, 5000)
    assert len(parts) >= 4 and any(
        part[0].size_bytes > 5000 and not part[0].lines for part in parts
    )
    assert not list((tmp_path / "parallel").glob("*.shards"))
    monkeypatch.setattr(shards, "MIN_BYTES", 10**9)
    assert_equal_stores(parallel, open_files(tmp_path, "serial", max_bad_records=2))
    listed = [
        next((tmp_path / name).glob("*.skipped.txt")).read_text() for name in ("parallel", "serial")
    ]
    assert listed[0] == listed[1] and [":51: " in listed[0], ":91: " in listed[0]] == [True, True]
    number, first = parallel.notes.counts[BAD_RECORDS]
    assert number == 2 and "a.jsonl:51: invalid JSON" in first


def test_shard_yields_its_size_while_it_is_tokenized(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_COUNTS", 0.0)
    write_files(tmp_path / "files")
    shard = list_files([str(tmp_path / "files" / "b*.txt")]).files
    paths = StorePaths.of(tmp_path, "shard")
    sizes = list(shards.tokenize_shard(shard, paths, TEXT, DataConfig()))
    assert (
        sizes == sorted(sizes)
        and len({*sizes}) == 3
        and sizes[-1] == sum(file.size_bytes for file in shard)
    )
    store = read_store(paths, load_tokenizer("bytes"))
    assert store.names == ("b1.txt", "b2.txt", "b3.txt")


def test_shard_without_text_is_a_store(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    shard = list_files([str(tmp_path)]).files
    paths = StorePaths.of(tmp_path, "shard")
    assert list(shards.tokenize_shard(shard, paths, TEXT, DataConfig())) == [0]
    assert read_store(paths, load_tokenizer("bytes")).num_documents == 0


def test_batch_that_takes_too_long_ends_the_process_with_its_stacks(
    tmp_path: Path, small_shards, monkeypatch
):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0]['content'] == 'q' %}" + loop + "{% endif %}"
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    ] * 40
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    run = processes.run
    monkeypatch.setattr(
        processes,
        "run",
        lambda function, *arguments, **options: run(_tokenize_in_one_second, *arguments, **options),
    )
    with pytest.raises(
        UserError, match="a process that tokenizes ended with status 1: [^|]*Timeout"
    ):
        open_files(tmp_path, "cache", fields=Fields(chat="messages"), chat_template=template)


def _tokenize_in_one_second(*arguments):
    shards._MAX_BATCH_SECONDS = 1.0
    return shards.tokenize_shard(*arguments)


def test_parallel_store_of_chats_continues_after_a_kill(tmp_path: Path, small_shards, monkeypatch):
    """The first process ends when two parts are complete; the second one starts processes for the
    others only.
    """
    (tmp_path / "files").mkdir()
    chats = [
        {
            "messages": [
                {"role": "user", "content": "q" * i},
                {"role": "assistant", "content": "née " * (i % 40 + 1)},
            ]
        }
        for i in range(60)
    ]
    (tmp_path / "files" / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", CHATML))
    arguments = dict(fields=Fields(chat="messages"), tokenizer=tokenizer)
    started = []
    run = processes.run

    def interrupted(function, calls, num_processes, **options):
        results = run(function, calls, num_processes, **options)
        for number, value in filter(None, results):
            yield number, value
            if value == sum(file.size_bytes for file in calls[number][0]):
                results.close()
                raise KeyboardInterrupt

    def counted(function, calls, num_processes, **options):
        started.extend(paths.index.name for _, paths, *_ in calls)
        return run(function, calls, num_processes, **options)

    monkeypatch.setattr(processes, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_files(tmp_path, "cache", **arguments)
    complete = {path.name for path in (tmp_path / "cache").glob("*.shards/*.index.npz")}
    assert complete
    damaged = complete.pop()  # as by a crash of the machine
    for path in (tmp_path / "cache").glob(f"*.shards/{damaged.partition('.')[0]}.tokens.npy"):
        path.write_bytes(path.read_bytes()[:-2])
    monkeypatch.setattr(processes, "run", counted)
    parallel = open_files(tmp_path, "cache", **arguments)
    assert damaged in started and not complete & set(started)
    monkeypatch.setattr(shards, "MIN_BYTES", 10**9)
    assert_equal_stores(parallel, open_files(tmp_path, "serial", **arguments))
    assert len(parallel.answers) == 60


def test_parallel_error_names_file_and_line(tmp_path: Path, small_shards):
    write_files(tmp_path / "files")
    with pytest.raises(
        UserError, match="a.jsonl:(51|91): invalid JSON .*; or skip .* with data.max_bad_records"
    ):
        open_files(tmp_path, "cache")
    with pytest.raises(
        UserError, match="a.jsonl:91: invalid JSON|2 records cannot be used, more than .*=1"
    ):
        open_files(tmp_path, "cache", max_bad_records=1)


def test_plan_of_parts_covers_every_line_once(tmp_path: Path):
    write_files(tmp_path / "files")
    files = list_files([str(tmp_path / "files")]).files
    parts = plan_shards(files, 1000, 2000)
    spans = [file.lines for part in parts for file in part if file.name == "a.jsonl"]
    content = (tmp_path / "files" / "a.jsonl").read_bytes()
    assert [begin for begin, _, _ in spans[1:]] == [end for _, end, _ in spans[:-1]]
    assert spans[0] == (0, spans[0][1], 1) and spans[-1][1] == len(content) and len(spans) > 3
    assert [content[:begin].count(b"\n") + 1 for begin, _, _ in spans] == [
        number for _, _, number in spans
    ]
    assert [file.name for part in parts for file in part if not file.lines] == [
        f.name for f in files[1:]
    ]
