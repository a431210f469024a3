"""Small files that expand, repeat or lead elsewhere: bounds of memory, and paths."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxlc.config.models.pretrained import copy_file
from jaxlc.core.errors import UserError
from jaxlc.core.files import file_inside, parse_json, read_arrays, read_limited
from jaxlc.data.texts import records
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.hf.files import TensorFiles
from jaxlc.train.stage import prepare_workdir
from tests.fuzz.readers import READERS

# Prints the error, and the MiB by which the peak memory grows.
_READ = """
import resource, sys
from pathlib import Path
from jaxlc.data.texts.records import read_records
import pyarrow.parquet
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
before = peak()
try:
    for record in read_records(Path(sys.argv[1]), "text", setting="data.sources"):
        record.values
except ValueError as error:
    print(error)
print(peak() - before)
"""


def read_alone(path: Path) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", _READ, str(path)], capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_line_has_a_limit(kind, tmp_path):
    """400 MiB in one line, of which at most 128 MiB are read, and twice that is held while they are
    joined.
    """
    path, zeros = tmp_path / f"a.jsonl.{kind}", bytes(20 << 20)
    if kind == "gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(20):
                file.write(zeros)
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            for _ in range(20):
                file.write(zeros)
    assert path.stat().st_size < 3 << 20
    error, grown_mib = read_alone(path)
    assert error == f"{path}:1: the line has more than 134,217,728 bytes; split the record"
    assert int(grown_mib) < 320


def test_compressed_lines_are_read_in_a_stream(tmp_path):
    path, line = tmp_path / "a.jsonl.gz", json.dumps(dict(text="a" * (1 << 20))).encode() + b"\n"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(line)
    (grown_mib,) = read_alone(path)
    assert int(grown_mib) < 50


def test_text_of_parquet_that_is_stored_once_is_not_repeated_in_memory(tmp_path):
    """256 texts of 4 MiB, which are one value in a file of less than 1 KiB."""
    values = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 256, pyarrow.int32()), ["a" * (4 << 20)]
    )
    table = pyarrow.table({"text": values})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30
    )
    assert path.stat().st_size < 1024
    (grown_mib,) = read_alone(path)
    assert int(grown_mib) < 200


def test_nested_json_is_invalid():
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)


def test_index_of_megatron_that_repeats_its_tokens_is_refused(tmp_path, monkeypatch):
    """A small index can name the same tokens any number of times."""
    monkeypatch.setattr(records, "_MAX_TOKEN_BYTES", 1000)
    num = 50
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x04" + num.to_bytes(8, "little")
    arrays = [np.full(num, 7, "<i4"), np.zeros(num, "<i8"), np.array([0, num], "<i8")]
    content = header + (2).to_bytes(8, "little") + b"".join(array.tobytes() for array in arrays)
    (tmp_path / "a.idx").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(np.arange(7, dtype="<i4").tobytes())
    with pytest.raises(UserError, match="a.idx:1: the document .*1,000 bytes"):
        list(records.read_records(tmp_path / "a.idx", "tokens", setting="x"))


def test_token_ids_with_a_large_gap_are_refused(tmp_path):
    """The package tokenizers writes a line for each missing ID."""
    for name, content in READERS["tokenizer.json"].files().items():
        (tmp_path / name).write_bytes(content)
    values = json.loads((tmp_path / "tokenizer.json").read_bytes())
    values["model"]["vocab"]["a"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="has the token ID 2147483648"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), end_token="</s>")


def test_arrays_that_are_pickled_or_compressed_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{}], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(path)
    np.savez_compressed(path, x=np.zeros(100))
    with pytest.raises(ValueError, match="compressed"):
        read_arrays(path)


def test_large_or_special_file_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_limited(tmp_path / "a", 10)
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a regular file"):
        read_limited(tmp_path / "zero", 10)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b", "..", "", "a\0b", 3, None])
def test_name_of_a_file_with_a_path_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="not the name of a file"):
        file_inside(tmp_path, name)


def test_index_that_leads_elsewhere_is_refused(tmp_path):
    outside = tmp_path / "secret.safetensors"
    outside.write_bytes(READERS["safetensors"].files()["model-1.safetensors"])
    directory = tmp_path / "model"
    directory.mkdir()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map=dict(a="../secret.safetensors"))))
    with pytest.raises(UserError, match="secret.safetensors' is not the name of a file"):
        TensorFiles(directory)
    index.write_text(json.dumps(dict(weight_map=dict(a="b.safetensors"))))
    (directory / "b.safetensors").symlink_to(outside)
    with pytest.raises(
        UserError, match="b.safetensors is a symbolic link to .*secret.safetensors, outside of"
    ):
        TensorFiles(directory)


def test_links_in_the_cache_of_the_hub_are_followed(tmp_path):
    blob, snapshot = (
        tmp_path / "models--a--b" / "blobs" / "0",
        tmp_path / "models--a--b" / "snapshots" / "1",
    )
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/0")
    copy_file(snapshot, "config.json", tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b"{}"


def test_linked_file_is_neither_copied_nor_written(tmp_path):
    secret, model, workdir = tmp_path / "secret", tmp_path / "model", tmp_path / "workdir"
    secret.write_text("secret")
    model.mkdir()
    workdir.mkdir()
    (model / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(UserError, match="symbolic link"):
        copy_file(model, "chat_template.jinja", workdir)
    (workdir / "config.json").symlink_to(secret)
    (model / "config.json").write_text("{}")
    copy_file(model, "config.json", workdir)  # replaces the link
    assert secret.read_text() == "secret"
    (workdir / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(UserError, match="metrics.jsonl is a symbolic link"):
        prepare_workdir(workdir)
