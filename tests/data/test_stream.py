"""Streams: every document once, in any format and order of access; resumed, bounded, and refused by name."""

import contextlib
import errno
import gzip
import json
import os
import random
import re
import threading
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError
from jaxlc.data import data_sources, open_corpus, stream
from jaxlc.data.stream import Stream
from jaxlc.data.texts.documents import Fields

S = 128  # sequence length
MIB = 1 / 1024  # of data.stream_cache_gib: chunks of at least 32 KiB
WITHOUT_STREAM = dict(data__stream=False, data__stream_cache_gib=defaults().data.stream_cache_gib)


def documents(name: str, num: int, seed: int = 0) -> list[str]:
    rng = random.Random(f"{name} {seed}")
    return [f"{name} {i} " + "text " * rng.randint(1, 20) for i in range(num)]


def lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in texts)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[str]]:
    """The documents of the files in the directory `files`: lines, row groups, compressed lines."""
    texts = {
        "a.jsonl": documents("a", 900),
        "b b/b.ndjson": documents("b", 300),
        "c.parquet": documents("c", 1500),
        "d.JSONL.GZ": documents("d", 200),
    }
    (tmp_path / "files/b b").mkdir(parents=True)
    for name, docs in texts.items():
        path = tmp_path / "files" / name
        if name == "c.parquet":
            table = pyarrow.table(dict(text=docs, number=list(range(len(docs)))))
            pyarrow.parquet.write_table(table, path, row_group_size=100)
        else:
            content = lines(docs)
            path.write_bytes(gzip.compress(content) if name.endswith(".GZ") else content)
    return texts


def settings(tmp_path: Path, *sources: str, **changes):
    config = defaults()
    config.model.vocab_size = 257
    config.train.eval_sequences = 0
    config.data.sources = sources or (str(tmp_path / "files"),)
    config.data.update(stream=True, seq_len=S, stream_cache_gib=MIB, seed=3)
    config.data.cache_dir = str(tmp_path / "cache")
    for path, value in changes.items():
        section, _, name = path.partition("__")
        config[section][name] = value
    return config


def opened(tmp_path: Path, *sources: str, **changes) -> Stream:
    source = data_sources.open(load(settings(tmp_path, *sources, **changes)))
    assert isinstance(source, Stream)
    return source


def num_sequences(source: Stream) -> int:
    """The sequences of an epoch; all chunks are made."""
    for i in range(10**6):
        source.train.at(i)
        if len(counts := source.train.counts(10**9)) == len(source.train.chunks):
            return sum(counts)
    raise AssertionError


def texts_of(source: Stream, sequences: range) -> Counter[str]:
    """The documents in sequences, which have no cut ones."""
    found: Counter[str] = Counter()
    for i in sequences:
        sequence = source.train[i]
        for number in range(1, sequence["segment_ids"].max() + 1):
            ids = sequence["tokens"][sequence["segment_ids"] == number]
            assert ids[-1] == source.tokenizer.end_of_document_id
            found[source.tokenizer.decode(ids[:-1])] += 1
    return found


def test_epoch_has_every_document_of_every_format_once(files, tmp_path):
    source = opened(tmp_path)
    expected = Counter(text for docs in files.values() for text in docs)
    n = num_sequences(source)
    assert len(source.train.chunks) == 5
    assert max(expected.values()) == 1
    assert texts_of(source, range(n)) == expected == texts_of(source, range(n, 2 * n))
    source.close()


def test_chunks_have_another_order_with_another_seed(files, tmp_path):
    orders = [opened(tmp_path, data__seed=seed).train.chunks for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[2]))


def test_url_of_a_file_system_has_the_documents_of_the_directory(files, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "files"), "/bucket", recursive=True)
    n = num_sequences(source := opened(tmp_path, "memory://bucket"))
    assert texts_of(source, range(n)) == Counter(sum(files.values(), []))
    n = num_sequences(source := opened(tmp_path, "memory://bucket/*.parquet"))
    assert texts_of(source, range(n)) == Counter(files["c.parquet"])
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("seed", range(6))
def test_ranges_of_a_file_have_every_line_once(tmp_path, seed):
    """Lines that are empty or longer than a range, and a last one without its end."""
    rng = random.Random(seed)
    content = b"\n".join(b"x" * rng.choice((0, 1, 9, 10, 11, 40)) for _ in range(60))
    (tmp_path / "file.jsonl").write_bytes(content)
    parts = stream._parts(str(tmp_path / "file.jsonl"), 10 + seed, "setting")
    copies = [
        stream._fetch(part, tmp_path / str(i), Fields(), "setting").path.read_bytes()
        for i, part in enumerate(parts)
    ]
    assert len(parts) > 20
    assert b"".join(copies) == content
    assert all(copy.endswith(b"\n") for copy in list(filter(None, copies))[:-1])


def test_sequences_do_not_depend_on_the_order_of_access(files, tmp_path):
    """Also if a chunk is needed again after it was removed."""
    n = num_sequences(source := opened(tmp_path))
    in_order = [source.train[i]["tokens"].tobytes() for i in range(n)]
    again = opened(tmp_path)
    for i in random.Random(0).sample(range(n), 60):
        assert again.train[i]["tokens"].tobytes() == in_order[i]
        assert again.train.document_lengths(i).sum() == np.count_nonzero(
            again.train[i]["segment_ids"]
        )


def test_resumed_stream_makes_no_chunk_before_its_position(files, tmp_path, monkeypatch):
    first = opened(tmp_path)
    n = num_sequences(first)
    position = int(0.7 * n)
    meta = json.loads(json.dumps(first.position(position) | {"corpus": first.fingerprint}))
    read, fetch = [], stream._fetch
    monkeypatch.setattr(
        stream, "_fetch", lambda part, *rest: read.append(part) or fetch(part, *rest)
    )
    second = opened(tmp_path)
    second.resume(meta, position)
    for i in (*range(position, n), n, 2 * n + position):
        assert second.train[i]["tokens"].tobytes() == first.train[i]["tokens"].tobytes()
    num_before = len(meta["stream"]["counts"])
    assert 0 < num_before < len(first.train.chunks)
    assert sum(meta["stream"]["counts"]) >= position
    chunks = first.train.chunks
    early = {part for chunk in chunks[: num_before - 1] for part in chunk}
    late = {part for chunk in chunks[num_before - 1 :] for part in chunk}
    wanted = read[: len(late)]
    assert set(wanted) == late and not early & set(wanted)


@pytest.mark.parametrize("name", ["a.jsonl", "c.parquet", "d.JSONL.GZ"])
def test_file_that_changed_is_named(files, tmp_path, name):
    source = opened(tmp_path)
    meta = source.position(1)
    path = tmp_path / "files" / name
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(
        UserError, match=rf"/files/{name} has changed, from \d+ bytes, mtime .* to "
    ):
        num_sequences(source)  # while it is read
    if name != "c.parquet":  # which is damaged
        with pytest.raises(UserError, match=rf"/files/{name} has changed, from "):
            opened(tmp_path).resume(meta, 1)
    path.unlink()
    with pytest.raises(UserError, match=rf"/files/{name} has changed, from .* to nothing"):
        opened(tmp_path).resume(meta, 1)


def test_setting_that_changed_is_named(files, tmp_path):
    meta = opened(tmp_path).position(0)
    with pytest.raises(UserError, match=r"data.seq_len has changed, from 128 to 256: set or put"):
        opened(tmp_path, data__seq_len=256).resume(meta, 0)
    with pytest.raises(UserError, match=r"data.seed has changed, from 3 to 4"):
        opened(tmp_path, data__seed=4).resume(meta, 0)
    (tmp_path / "chats.jsonl").write_bytes(
        lines([[dict(role="user", content="ask"), dict(role="assistant", content="a")]], "messages")
    )
    mixture = dict(chats=dict(paths=str(tmp_path / "chats.jsonl"), chat_format="messages"))
    chats = dict(data__sources=(), data__mixture=mixture)
    meta = opened(tmp_path, data__chat_template="chatml", **chats).position(0)
    with pytest.raises(UserError, match="data.chat_template has changed, from "):
        opened(tmp_path, data__chat_template="llama3", **chats).resume(meta, 0)


def used_bytes(cache: Path) -> int:
    """The space of files in the cache, also of those that are deleted and still open."""
    sizes = {}
    paths = [
        os.path.join(directory, name) for directory, _, names in os.walk(cache) for name in names
    ]
    for path in (*paths, *Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            if str(path) in paths or str(cache) in os.readlink(path):
                stat = os.stat(path)
                sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def test_cache_has_at_most_its_limit_while_all_chunks_are_read(tmp_path):
    (tmp_path / "files").mkdir()
    for name in "abcd":
        (tmp_path / f"files/{name}.jsonl").write_bytes(lines(documents(name, 8000)))
    source = opened(tmp_path)
    used, ends = [], threading.Event()

    def measure() -> None:
        while not ends.wait(0.004):
            used.append(used_bytes(tmp_path / "cache"))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        num_sequences(source)
    finally:
        ends.set()
        thread.join()
    text = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
    assert 2 * text > 2 * 2**20 * MIB * 1024  # tokens of two bytes, twice the limit
    assert 0.3 * 2**20 < max(used) <= 2**20
    source.train._thread.shutdown()  # the last chunk is complete
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("stream-")]


def test_chunk_that_is_larger_than_the_cache_is_refused(tmp_path):
    path = tmp_path / "large.jsonl.gz"
    path.write_bytes(gzip.compress(lines(["text " * 2000] * 100)))
    with pytest.raises(
        UserError, match=r"stream_cache_gib=0.000976562 is too small for a chunk of 0"
    ):
        opened(tmp_path, str(path)).train.at(0)
    (tmp_path / "cache/stream-left/part").mkdir(parents=True)
    os.utime(tmp_path / "cache/stream-left", (0, 0))
    opened(tmp_path, str(path), data__stream_cache_gib=0.01).train.at(0)
    assert not (tmp_path / "cache/stream-left").exists()  # by a process that was killed


def test_directory_that_nfs_keeps_does_not_end_the_run(files, tmp_path, monkeypatch):
    """NFS renames files that are deleted while they are open, so their directory is not empty."""
    rmdir = os.rmdir

    def on_nfs(path, **options):
        if Path(path).name.startswith("stream-"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmdir(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", on_nfs)
        source = opened(tmp_path)
        assert num_sequences(source)
        source.close()
    used, *others = (tmp_path / "cache").glob("stream-*")
    assert others
    (used / ".nfs01").touch()
    for left in (used, *others):
        os.utime(left, (0, 0))
    opened(tmp_path).close()
    assert [used] == [*(tmp_path / "cache").glob("stream-*")]


def test_padding_is_within_one_percent_of_the_whole(tmp_path):
    rng = random.Random(0)
    texts = [f"{i} " + "x" * int(min(rng.lognormvariate(4, 1.2), 3000)) for i in range(6000)]
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jsonl").write_bytes(lines(texts))
    config = load(settings(tmp_path, **WITHOUT_STREAM, data__eval_fraction=0.001))
    whole = open_corpus(config.data).train
    n = num_sequences(source := opened(tmp_path, data__stream_cache_gib=2 * MIB))
    assert source.warnings == () and len(source.train.chunks) > 5
    num_tokens = sum(len(text) + 1 for text in texts)
    paddings = 1 - num_tokens / (n * S), 1 - whole.num_tokens / (whole.num_sequences * S)
    assert paddings[0] <= paddings[1] + 0.01


def test_small_chunks_have_a_warning(files, tmp_path):
    (warning,) = opened(tmp_path, data__seq_len=1024).warnings
    assert "use --config.data.stream_cache_gib=0.016" in warning


def test_chats_of_a_mixture_of_one_source_have_their_loss_mask(tmp_path):
    chat = [dict(role="user", content="ask"), dict(role="assistant", content="answer")]
    (tmp_path / "chats.jsonl").write_bytes(lines([chat] * 20, "messages"))
    (tmp_path / "eval.txt").write_text("held out " * 100)
    mixture = dict(chats=dict(paths=str(tmp_path / "chats.jsonl"), chat_format="messages"))
    source = opened(
        tmp_path,
        data__sources=(),
        data__mixture=mixture,
        data__chat_template="chatml",
        data__eval_sources=(str(tmp_path / "eval.txt"),),
    )
    sequence = source.train[0]
    targets = source.tokenizer.decode(sequence["targets"][sequence["loss_weights"] > 0])
    assert targets.startswith("answer<|im_end|>")
    assert source.heldout is not None and source.heldout.num_tokens == 901


def test_file_of_eval_sources_is_not_trained_on(files, tmp_path):
    """It has a space in its path, and is named by a link; the hidden directory is not listed."""
    (heldout := tmp_path / "heldout.jsonl").symlink_to(tmp_path / "files/b b/b.ndjson")
    (tmp_path / "files/.hidden").mkdir()
    (tmp_path / "files/.hidden/e.jsonl").write_bytes(lines(documents("e", 10)))
    source = opened(tmp_path, data__eval_sources=(str(heldout),), train__eval_sequences=4)
    trained = texts_of(source, range(num_sequences(source)))
    assert trained == Counter(
        text for name, docs in files.items() if name[0] != "b" for text in docs
    )


def test_field_that_is_missing_is_an_error_before_the_run(files, tmp_path):
    source = opened(tmp_path, data__text_field="body")
    with pytest.raises(UserError, match="no field 'body' .* set data.text_field to the field"):
        source.resume({}, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(train__eval_sequences=4),
            "eval_fraction; set --config.data.eval_sources, or --config.train",
        ),
        (
            dict(train__steps=0, train__epochs=1.0),
            "train.epochs; use --config.train.steps or --config.train.tokens",
        ),
        (dict(data__traces=("a.jsonl",), data__sources=()), "data.traces or config.rollouts"),
        (
            dict(data__sources=(), data__mixture=dict(a=dict(paths="a"), b=dict(paths="b"))),
            "several sources in",
        ),
        (
            dict(data__sources=(), data__mixture=dict(a=dict(paths="a", pool="full_length"))),
            "pool='full_length'",
        ),
        (
            dict(
                data__sources=(),
                data__mixture=dict(
                    a=dict(paths="a", chat_format="messages", answer_weights="answer")
                ),
            ),
            "answer_weights='answer'; use token",
        ),
        (dict(data__stream_cache_gib=0.0), "invalid value 0.0 for config.data.stream_cache_gib"),
    ],
)
def test_what_needs_the_whole_corpus_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(UserError) as error:
        load(settings(tmp_path, **changes))
    assert words in str(error.value)


def test_report_and_plans_of_the_corpus_are_refused(files, tmp_path):
    source = opened(tmp_path)
    with pytest.raises(UserError, match="stream with `jaxlc data`, which reads the whole corpus"):
        source.views()
    with pytest.raises(UserError, match="stream where the whole corpus is read; use --config.data"):
        open_corpus(load(settings(tmp_path)).data)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("s3://bucket/directory", "(Install s3fs to access S3): check the name, .* such as s3fs"),
        ("other://bucket", "(Protocol not known: other): check"),
        ("memory://missing/*.jsonl", "/*.jsonl' has no file that data.stream reads (.jsonl,"),
        ("missing/*.jsonl", "'missing/*.jsonl' contains no file with a supported suffix"),
        ("missing.jsonl", "'missing.jsonl' does not exist; use an existing file"),
        ("python-stdlib", "'python-stdlib' has no file that data.stream reads (.jsonl,"),
    ],
)
def test_source_that_cannot_be_listed_is_named(tmp_path, name, words):
    with pytest.raises(UserError) as error:
        opened(tmp_path, name)
    assert all(word in str(error.value) for word in (name, *words.split(" .* ")))


def test_url_without_a_stream_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a URL, .*: set --config.data.stream=True, or copy"):
        data_sources.open(load(settings(tmp_path, "s3://bucket/a.jsonl", **WITHOUT_STREAM)))


def test_files_without_text_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="^data.sources: no document has a length that the source"):
        opened(tmp_path, str(tmp_path / "empty.jsonl")).resume({}, 0)


def test_chunk_without_text_is_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([""] * 9000) + lines(["text"] * 4000))
    source = opened(tmp_path, str(tmp_path / "a.jsonl"))
    assert texts_of(source, range(num_sequences(source))) == {"text": 4000}
    assert 0 in source.train.counts(10**9)


def test_chunk_of_chats_without_a_loss_is_passed_over(tmp_path):
    """Prompts that are longer than a sequence, whose answers are truncated; in all chunks, they are refused."""
    long, short = (
        [dict(role="user", content="ask" * n), dict(role="assistant", content="answer")]
        for n in (S, 1)
    )
    path = tmp_path / "a.jsonl"
    chats = dict(paths=str(path), chat_format="messages", overlong="truncate")
    changes = dict(data__sources=(), data__mixture=dict(chats=chats), data__chat_template="chatml")
    path.write_bytes(lines([long] * 200 + [short] * 2000, "messages"))
    source = opened(tmp_path, **changes)
    assert num_sequences(source) > 0
    assert 0 in source.train.counts(10**9)
    path.write_bytes(lines([long] * 200, "messages"))
    with pytest.raises(UserError, match="no document has .*, or no chat has a token in the loss"):
        opened(tmp_path, **changes).resume({}, 0)


def test_bad_record_is_named_by_its_place_in_the_source(tmp_path):
    (file := tmp_path / "a.jsonl").write_bytes(lines(["text"] * 4000) + b"{\n")
    for max_bad_records, words in ((0, "fix or remove this line; or skip"), (1, r"this line\)$")):
        printed = list[str]()
        changes = dict(data__max_bad_records=max_bad_records)
        config = load(settings(tmp_path, str(file), **changes))
        source = data_sources.open(config, log=printed.append)
        if max_bad_records:
            num_sequences(source)
        else:
            with pytest.raises(UserError) as error:
                num_sequences(source)
            printed.append(str(error.value))
        place = rf"file://{file} from byte [\d,]+:\d+: invalid JSON .*"
        assert any(re.search(place + words, line) for line in printed), printed
