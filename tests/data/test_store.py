import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data import store as store_module
from jaxlc.data.store import open_store
from jaxlc.data.tokenizers import load_tokenizer

TEXTS = {"a.txt": b"alpha", "b.txt": b"be", "c.txt": b"gamma rays"}
BYTES = load_tokenizer("bytes")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_bytes(text)
    return DataConfig(sources=(str(tmp_path / "docs"),), cache_dir=str(tmp_path / "cache"))


def files_in(config: DataConfig) -> list[str]:
    return sorted(os.listdir(config.cache_dir))


def assert_whole(store) -> None:
    documents = [store.tokens[begin:end].tolist() for begin, end in itertools.pairwise(store.offsets)]
    assert documents == [[*text, 256] for text in TEXTS.values()]


def test_documents_and_their_ends(config: DataConfig):
    store = open_store(config, BYTES)
    assert_whole(store)
    assert store.num_documents == 3 and store.tokens.dtype == np.uint16 and isinstance(store.tokens, np.memmap)
    assert [name.split(".", 1)[1] for name in files_in(config)] == ["index.npz", "tokens.npy"]


def test_batches_of_documents_keep_their_order(config: DataConfig, monkeypatch):
    monkeypatch.setattr(store_module, "_BATCH_BYTES", 6)
    assert_whole(open_store(config, BYTES))


def test_second_time_reads_the_cache(config: DataConfig, monkeypatch):
    first = open_store(config, BYTES)
    monkeypatch.setattr(store_module, "_tokenized", None)
    again = open_store(config, BYTES)
    assert_whole(again)
    assert again.fingerprint == first.fingerprint and (again.split_hashes == first.split_hashes).all()


def test_progress_counts_bytes(config: DataConfig):
    calls = []
    open_store(config, BYTES, lambda done, total: calls.append((done, total)))
    assert calls == [(5, 17), (7, 17), (17, 17), (17, 17)]


def test_appears_all_at_once(config: DataConfig):
    seen = []
    open_store(config, BYTES, lambda done, total: seen.append(all(name.endswith(".tmp") for name in files_in(config))))
    assert seen == [True, True, True, False]


def test_a_changed_file_makes_another_store(config: DataConfig):
    before = open_store(config, BYTES)
    Path(config.sources[0], "b.txt").write_bytes(b"it")
    after = open_store(config, BYTES)
    assert after.tokens[6:9].tolist() == [*b"it", 256] and before.fingerprint != after.fingerprint
    assert_whole(before)


def test_fingerprint_is_of_the_content(config: DataConfig, tmp_path: Path):
    """Touched or moved, it is the same corpus: a checkpoint goes on with it on another machine."""
    before = open_store(config, BYTES)
    os.utime(Path(config.sources[0], "a.txt"), (1, 1))
    os.rename(config.sources[0], tmp_path / "moved")
    moved = DataConfig(sources=(str(tmp_path / "moved"),), cache_dir=config.cache_dir)
    assert open_store(moved, BYTES).fingerprint == before.fingerprint


@pytest.mark.parametrize("suffix", ["tokens.npy", "index.npz"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage", "zeros", "shorter"])
def test_damaged_cache_is_made_again(config: DataConfig, suffix: str, damage: str):
    open_store(config, BYTES)
    (path,) = Path(config.cache_dir).glob(f"*.{suffix}")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":  # whole, but of another corpus
        if suffix == "tokens.npy":
            np.save(path, np.array([1, 2, 256], np.uint16))
        else:
            np.savez(path, offsets=[0, 6], split_hashes=[0.5], fingerprint="other")
    else:
        broken = {"empty": b"", "truncated": content[:-3], "garbage": b"no", "zeros": content[:-4] + bytes(4)}
        path.write_bytes(broken[damage])
    assert_whole(open_store(config, BYTES))


def test_processes_race(config: DataConfig):
    code = (
        "import sys; from jaxlc.config.schema import DataConfig; from jaxlc.data.store import open_store;"
        "from jaxlc.data.tokenizers import load_tokenizer;"
        "s = open_store(DataConfig(sources=(sys.argv[1],), cache_dir=sys.argv[2]), load_tokenizer('bytes'));"
        "print(s.fingerprint, s.tokens.sum())"
    )
    command = [sys.executable, "-c", code, config.sources[0], config.cache_dir]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {racer.communicate(timeout=60)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0] and len(outputs) == 1
    assert len(files_in(config)) == 2


def test_unwritable_cache(config: DataConfig, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.cache_dir .*/file/cache' cannot be written \(Not a directory\)"):
        open_store(DataConfig(sources=config.sources, cache_dir=str(tmp_path / "file" / "cache")), BYTES)


def test_a_failure_leaves_nothing_behind(config: DataConfig):
    Path(config.sources[0], "z.jsonl").write_text("no json")
    with pytest.raises(UserError, match="is not JSON"):
        open_store(config, BYTES)
    assert files_in(config) == []


def test_a_corpus_without_text(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="all documents are empty"):
        open_store(DataConfig(sources=(str(tmp_path),), cache_dir=str(tmp_path / "cache")), BYTES)
