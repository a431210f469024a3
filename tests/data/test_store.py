import gc
import hashlib
import itertools
import os
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.core.files import locked
from jaxlc.core.text import no_progress
from jaxlc.data.texts import documents
from jaxlc.data.texts.documents import INVALID_CHARACTERS, INVALID_DOCUMENTS, Fields
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens import encoder
from jaxlc.data.tokens import store as cache
from jaxlc.data.tokens import store as store_module
from jaxlc.data.tokens.tokenizers import load_tokenizer

TEXTS = {"a.txt": b"alpha", "b.txt": b"be", "c.txt": b"gamma rays"}
BYTES = load_tokenizer("bytes")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_bytes(text)
    return DataConfig(sources=(str(tmp_path / "docs"),), cache_dir=str(tmp_path / "cache"))


def open_store(config: DataConfig, progress=no_progress):
    return cache.open_store(list_files(config.sources).files, config, Fields(), BYTES, progress)


def files_in(config: DataConfig) -> list[str]:
    return sorted(os.listdir(config.cache_dir))


def assert_intact(store) -> None:
    documents = [
        store.tokens[begin:end].tolist() for begin, end in itertools.pairwise(store.offsets)
    ]
    assert documents == [[*text, 256] for text in TEXTS.values()]


def test_store_documents_end_with_end_token(config: DataConfig):
    store = open_store(config)
    assert_intact(store)
    assert (
        store.num_documents == 3
        and store.tokens.dtype == np.uint16
        and isinstance(store.tokens, np.memmap)
    )
    assert [name.split(".", 1)[1] for name in files_in(config)] == ["index.npz", "tokens.npy"]
    # Checkpoints have the fingerprint, so that it must not change.
    hashed = hashlib.sha256()
    for name, text in TEXTS.items():
        tokens = np.array([*text, 256], np.uint16).tobytes()
        hashed.update(f"{name}\0{len(tokens)}\0".encode() + tokens)
    assert store.fingerprint == hashed.hexdigest()


def test_store_small_batches_keep_document_order(config: DataConfig, monkeypatch):
    monkeypatch.setattr(encoder, "_BATCH_CHARACTERS", 6)
    assert_intact(open_store(config))


def test_store_second_open_reads_cache(config: DataConfig, monkeypatch):
    first = open_store(config)
    monkeypatch.setattr(cache, "tokenized_pieces", None)
    again = open_store(config)
    assert_intact(again)
    assert (
        again.fingerprint == first.fingerprint and (again.split_hashes == first.split_hashes).all()
    )


def test_store_closes_its_file(config: DataConfig):
    """Python warns of a file that nobody closes, which is an error under `python -W error`."""
    store = open_store(config)
    store.read(0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del store
        gc.collect()
    assert not [str(warning.message) for warning in caught]


def test_store_progress_counts_bytes(config: DataConfig):
    calls = []
    open_store(config, lambda done, total: calls.append((done, total)))
    assert calls == [(5, 17), (7, 17), (17, 17), (17, 17)]


def test_store_files_appear_atomically(config: DataConfig):
    is_temporary = []
    open_store(
        config,
        lambda done, total: is_temporary.append(
            all(name.endswith(".tmp") for name in files_in(config))
        ),
    )
    assert is_temporary == [True, True, True, False]


def test_store_changed_file_makes_new_store(config: DataConfig):
    before = open_store(config)
    Path(config.sources[0], "b.txt").write_bytes(b"it")
    after = open_store(config)
    assert after.tokens[6:9].tolist() == [*b"it", 256] and before.fingerprint != after.fingerprint
    assert_intact(before)


def test_store_of_a_file_that_changes_meanwhile_is_refused(config: DataConfig):
    """Its name says when its files changed, so that it would be used if the file is put back."""
    files = list_files(config.sources).files
    path = files[1].path
    os.utime(path, ns=(0, files[1].modified_ns + 1))
    with pytest.raises(UserError, match="data.sources: .*b.txt has changed since it was listed"):
        cache.open_store(files, config, Fields(), BYTES)
    assert not files_in(config)


def test_store_moved_corpus_keeps_fingerprint(config: DataConfig, tmp_path: Path):
    """A run resumes with the same corpus at another path or with other modification times."""
    before = open_store(config)
    os.utime(Path(config.sources[0], "a.txt"), (1, 1))
    os.rename(config.sources[0], tmp_path / "moved")
    moved = DataConfig(sources=(str(tmp_path / "moved"),), cache_dir=config.cache_dir)
    assert open_store(moved).fingerprint == before.fingerprint


@pytest.mark.parametrize("suffix", ["tokens.npy", "index.npz"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage", "zeros", "shorter"])
def test_store_damaged_cache_is_regenerated(config: DataConfig, suffix: str, damage: str):
    open_store(config)
    (path,) = Path(config.cache_dir).glob(f"*.{suffix}")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":  # intact, but of another corpus
        if suffix == "tokens.npy":
            np.save(path, np.array([1, 2, 256], np.uint16))
        else:
            np.savez(path, offsets=[0, 6], split_hashes=[0.5], fingerprint="other")
    else:
        broken = {
            "empty": b"",
            "truncated": content[:-3],
            "garbage": b"no",
            "zeros": content[:-4] + bytes(4),
        }
        path.write_bytes(broken[damage])
    assert_intact(open_store(config))


def test_store_truncated_while_it_is_read_is_an_error(config: DataConfig):
    """One token would be copied to all places of a sequence."""
    store = open_store(config)
    begin, end = store.offsets[:2]
    assert len(store.read(begin, end)) == end - begin > 1
    path = Path(store.tokens.filename)
    os.truncate(path, store.tokens.offset + store.tokens.itemsize)
    with pytest.raises(UserError, match=rf"{path.name} was truncated .* tokenizes it again"):
        store.read(begin, end)


def test_store_unwritable_cache_is_refused(config: DataConfig, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"cannot write to data.cache_dir .*/file/cache' \(Not a directory\)"
    ):
        open_store(DataConfig(sources=config.sources, cache_dir=str(tmp_path / "file" / "cache")))


def test_store_failure_leaves_no_files(config: DataConfig):
    Path(config.sources[0], "z.jsonl").write_text("no json")
    with pytest.raises(UserError, match="invalid JSON"):
        open_store(config)
    assert files_in(config) == []


def test_store_of_other_process_is_not_tokenized_again(config: DataConfig, monkeypatch):
    """This process waits for the lock; meanwhile the other one writes the store."""
    other, lines = DataConfig(sources=config.sources, cache_dir=config.cache_dir), []

    @contextmanager
    def slow_lock(path, on_wait):
        with monkeypatch.context() as context:
            context.setattr(cache, "locked", locked)
            open_store(other)
        monkeypatch.setattr(cache, "tokenized_pieces", None)
        on_wait("process 7 on node1")
        yield

    monkeypatch.setattr(cache, "locked", slow_lock)
    assert_intact(
        cache.open_store(
            list_files(config.sources).files, config, Fields(), BYTES, log=lines.append
        )
    )
    assert lines == [
        f"waiting for process 7 on node1, which tokenizes the same corpus to data.cache_dir {config.cache_dir!r}"
    ]


def test_store_old_leftovers_are_deleted(config: DataConfig):
    open_store(config)
    key = files_in(config)[0].split(".")[0]
    names = [
        f"{key}.tokens.npy.old.tmp",
        f"{key}.index.npz.old.tmp",
        f"{key}.tokens.npy.new.tmp",
        "other.tokens.npy.old.tmp",
    ]
    for name in names:
        (path := Path(config.cache_dir, name)).touch()
        os.utime(path, None if "new" in name else (1, 1))
    assert_intact(open_store(config))
    assert [name for name in files_in(config) if name.endswith(".tmp")] == sorted(names[2:])


def test_store_long_document_equals_short_pieces(config: DataConfig, monkeypatch):
    """Its tokens are written piece by piece, and read again for the fingerprint."""
    text = b"".join(b"line %d of a long document\n" % i for i in range(1000))
    Path(config.sources[0], "b.txt").write_bytes(text)
    expected = open_store(config)
    for name, module, value in (
        ("_HASHED_BYTES", store_module, 100),
        ("_BLOCK_BYTES", documents, 64),
        ("_BATCH_CHARACTERS", encoder, 200),
    ):
        monkeypatch.setattr(module, name, value)
    calls, batch_bytes, encode = [], [], BYTES.encode_pieces
    monkeypatch.setattr(
        BYTES,
        "encode_pieces",
        lambda pieces: batch_bytes.append(sum(map(len, pieces))) or encode(pieces),
        raising=False,
    )
    other_cache = DataConfig(sources=config.sources, cache_dir=config.cache_dir + "2")
    store = open_store(other_cache, lambda done, total: calls.append(done))
    np.testing.assert_array_equal(store.tokens, expected.tokens)
    np.testing.assert_array_equal(store.offsets, expected.offsets)
    assert store.fingerprint == expected.fingerprint
    # so memory does not depend on the length
    assert sum(batch_bytes) == len(text) + 15 and max(batch_bytes) < 300
    assert len(calls) > 300 and calls == sorted(calls) and calls[-1] == len(text) + 15


def test_store_long_piece_is_announced_before_it_is_encoded(config: DataConfig, monkeypatch):
    monkeypatch.setattr(encoder, "_LONG_PIECE", 9)
    lines = []
    cache.open_store(list_files(config.sources).files, config, Fields(), BYTES, log=lines.append)
    assert lines == [
        "warning: 0 million characters of 'c.txt' are tokenized at once, because it has no place to cut it, such as a"
        " letter before a newline or punctuation; this needs about 0 GiB of host memory"
    ]


def test_store_corpus_without_text_is_refused(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="all documents are empty"):
        open_store(DataConfig(sources=(str(tmp_path),), cache_dir=str(tmp_path / "cache")))


def test_store_invalid_utf8_is_counted(config: DataConfig, monkeypatch):
    assert open_store(config).notes.counts == {}
    directory = Path(config.sources[0])
    # one U+FFFD is in the source
    (directory / "d.txt").write_bytes("caf\xe9 na\xefve \ufffd".encode() + b" \xe9\xef")
    (directory / "e.txt").write_bytes(b"\x80t\x80ext")
    counts = {INVALID_DOCUMENTS: (2, "d.txt"), INVALID_CHARACTERS: (4, "d.txt")}
    assert open_store(config).notes.counts == counts
    monkeypatch.setattr(cache, "tokenized_pieces", None)
    assert open_store(config).notes.counts == counts  # from the cache
