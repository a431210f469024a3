"""Formats of records, token IDs, and bad records."""

import dataclasses
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.texts.documents import Fields, Notes, read_documents
from jaxlc.data.texts.sources import list_files
from jaxlc.posttrain.traces import records_of

TEXTS = ["first text", "née", "x" * 3000]


def texts_of(path: Path, field: str = "text") -> dict[str, str]:
    files = list_files([str(path)]).files
    documents = (d for file in files for d in read_documents(file, Fields(field), Notes()))
    return {d.name: b"".join(d.blocks).decode() for d in documents}


def write_arrow(path: Path, columns: dict, is_file: bool) -> None:
    table = pyarrow.table(columns)
    make = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as out, make(out, table.schema) as writer:
        writer.write_table(table)


def write_megatron(path: Path, documents: list[list[list[int]]]) -> None:
    """Documents of sequences of tokens, in the format of an indexed dataset."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    path.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype("<u2").tobytes())
    borders = np.cumsum([0, *map(len, documents)])
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, len(sequences), len(borders))
        + np.array(lengths, "<i4").tobytes()
        + (np.cumsum([0, *lengths[:-1]]) * 2).astype("<i8").tobytes()
        + borders.astype("<i8").tobytes()
    )


def test_records_of_every_format_are_equal(tmp_path: Path):
    lines = "".join(json.dumps({"data": {"text": text}, "id": 1}) + "\n" for text in TEXTS).encode()
    halves = lines[:40], lines[40:]  # two frames, as `cat a.zst b.zst` gives
    compressed = pyarrow.Codec("zstd")
    frames = b"".join(compressed.compress(half, asbytes=True) for half in halves)
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    nested = {"data": [{"text": text, "more": 1} for text in TEXTS], "id": [1, 2, 3]}
    pyarrow.parquet.write_table(pyarrow.table(nested), tmp_path / "c.parquet")
    saved = tmp_path / "saved" / "train"  # as `datasets` saves a DatasetDict
    saved.mkdir(parents=True)
    write_arrow(saved / "data-00000-of-00001.arrow", nested, is_file=False)
    write_arrow(saved / "cache-12ab.arrow", nested, is_file=False)
    write_arrow(tmp_path / "d.arrow", nested, is_file=True)
    (saved / "state.json").write_text("{}")
    names = [
        "a.jsonl",
        "b.jsonl.zst",
        "c.parquet",
        "d.arrow",
        "saved/train/data-00000-of-00001.arrow",
    ]
    assert texts_of(tmp_path, "data.text") == {
        f"{n}:{i + 1}": TEXTS[i] for n in names for i in range(3)
    }


def test_records_field_with_dots_in_its_name_is_read(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a.b": "plain", "a": {"b": "nested"}}\n')
    assert texts_of(tmp_path, "a.b") == {"a.jsonl:1": "plain"}
    with pytest.raises(UserError, match=r"no field 'a.c' \(the fields are \['b'\]\)"):
        texts_of(tmp_path, "a.c")


def test_sources_text_suffixes_add_files(tmp_path: Path):
    for name in ("a.py", "b.C", "c.weird", "d.rs", "e.TXT"):
        (tmp_path / name).write_text("x")
    names = [
        [f.name for f in list_files([str(tmp_path)], text_suffixes=s).files]
        for s in ((), ("code", ".Weird"))
    ]
    assert names == [["a.py", "e.TXT"], ["a.py", "b.C", "c.weird", "d.rs", "e.TXT"]]


def mixture_of(directory: Path, path: Path, **fields) -> DataConfig:
    source = SourceConfig(name="x", paths=(str(path),), **fields)
    return DataConfig(
        mixture=(source,), seq_len=8, cache_dir=str(directory / "cache"), eval_fraction=0.3
    )


IDS = [list(range(5 * i, 5 * i + 9)) for i in range(20)]
END = 256


def test_token_ids_of_every_format_are_stored(tmp_path: Path):
    """Documents that end with the end-of-document token do not get a second one."""
    with_ends = [[*ids, END] if i % 2 else ids for i, ids in enumerate(IDS)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"input_ids": ids}) + "\n" for ids in with_ends)
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"input_ids": with_ends, "text": ["x"] * 20}), tmp_path / "B.PARQUET"
    )
    write_arrow(tmp_path / "c.arrow", {"input_ids": with_ends}, is_file=False)
    write_megatron(tmp_path / "d", [[ids[:4], ids[4:]] for ids in with_ends])
    expected = [token for ids in IDS for token in (*ids, END)]
    for name, field in (
        ("a.jsonl", "input_ids"),
        ("B.PARQUET", "input_ids"),
        ("c.arrow", "input_ids"),
        ("d.idx", "tokens"),
    ):
        store = (
            open_corpus(mixture_of(tmp_path, tmp_path / name, token_field=field))
            .sources[0]
            .train.store
        )
        assert store.tokens.tolist() == expected, name
        assert np.diff(store.offsets).tolist() == [10] * 20


@pytest.mark.parametrize(
    "line, fields, message",
    [
        (
            '{"input_ids": [1, 257]}',
            dict(token_field="input_ids"),
            r"a.jsonl:3: token 257, expected 0 to 256",
        ),
        (
            '{"input_ids": ["a"]}',
            dict(token_field="input_ids"),
            r"a.jsonl:3: the field 'input_ids' is a list",
        ),
        (
            '{"messages": "hi"}',
            dict(chat_field="messages"),
            r"a.jsonl:3: .* is a str, expected a list of messages",
        ),
        (
            '{"messages": [{"from": "gpt"}]}',
            dict(chat_field="messages"),
            r"with the fields \['from'\], expected .* role",
        ),
        ('{"text": [{"role": "user"}]}', {}, "the field 'text' is a chat; use .* chat_field=text"),
        ("{broken", {}, "a.jsonl:3: invalid JSON"),
        ('{"text": null}', {}, "a.jsonl:3: the field 'text' is null"),
    ],
)
def test_bad_records_are_skipped_up_to_the_limit(
    tmp_path: Path, line: str, fields: dict, message: str
):
    pytest.importorskip("jinja2")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    good = json.dumps({"input_ids": [1, 2, 3], "messages": chat, "text": "good"})
    (tmp_path / "a.jsonl").write_text("\n".join([good, good, line, good, line, good]))
    config = dataclasses.replace(
        mixture_of(tmp_path, tmp_path / "a.jsonl", **fields), chat_template="chatml", seq_len=99
    )
    with pytest.raises(
        UserError, match=message + ".*; or skip such records with data.max_bad_records"
    ):
        open_corpus(config)
    with pytest.raises(
        UserError, match="2 records cannot be used, more than data.max_bad_records=1"
    ):
        open_corpus(dataclasses.replace(config, max_bad_records=1))
    corpus = open_corpus(dataclasses.replace(config, max_bad_records=2))
    assert corpus.sources[0].train.store.num_documents == 4
    (warning,) = [warning for warning in corpus.warnings if "skipped" in warning]
    (listed,) = (tmp_path / "cache").glob("*.skipped.txt")
    assert warning.startswith(
        "data.mixture.x: skipped records: 2 (the first: "
    ) and warning.endswith(f": {listed}")
    first, second = listed.read_text().splitlines()
    assert (
        first.partition("a.jsonl:3: ")[2] == second.partition("a.jsonl:5: ")[2] != ""
        and first in warning
    )
    with pytest.raises(UserError, match=message + ".*more than data.max_bad_records=0"):
        open_corpus(config)  # the store is cached


def test_megatron_index_of_other_version_is_refused(tmp_path: Path):
    write_megatron(tmp_path / "a", [[[1, 2]]])
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40))
    with pytest.raises(UserError, match="a.idx' is not an index of Megatron-LM"):
        open_corpus(mixture_of(tmp_path, tmp_path / "a.idx", token_field="tokens"))
    write_megatron(tmp_path / "a", [[[1, 2]]])
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:-8])
    with pytest.raises(UserError, match="a.idx' or its .bin file is truncated"):
        open_corpus(mixture_of(tmp_path, tmp_path / "a.idx", token_field="tokens"))
    with pytest.raises(UserError, match="data.mixture.x: .*set token_field=tokens of its source"):
        open_corpus(mixture_of(tmp_path, tmp_path / "a.idx"))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(UserError, match="is text without fields"):
        open_corpus(mixture_of(tmp_path, tmp_path / "b.txt", token_field="input_ids"))


def test_csv_rows_are_records_and_rows_of_other_lengths_are_bad(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffid,text\r\n1,"first, ""text"""\r\n2,"two\nlines"\r\n3\r\n\r\n4,née\r\n')
    notes = Notes(max_bad_records=1)
    files = list_files([str(path)]).files
    documents = [*read_documents(files[0], Fields("text"), notes)]
    texts = [b"".join(document.blocks).decode() for document in documents]
    assert texts == ['first, "text"', "two\nlines", "née"]
    assert [document.name for document in documents] == ["a.csv:1", "a.csv:2", "a.csv:4"]
    assert notes.counts["skipped records"][1].endswith(
        "a.csv:3: 1 values for the 2 fields ['id', 'text']; fix this row, or separate values with commas"
    )
    assert list_files([str(tmp_path / "*.csv")]).files == files
    with pytest.raises(UserError, match=r"no file with a supported suffix.*\.json or \.csv files"):
        list_files([str(tmp_path)])
    path.write_text('text\n"open')
    with pytest.raises(
        UserError, match=r"cannot read .*a\.csv' \(unexpected end of data\); fix it or remove"
    ):
        texts_of(path)


def test_file_of_traces_that_cannot_be_read_is_named(tmp_path: Path):
    """Its errors are the same as in files of documents."""
    write_megatron(tmp_path / "no_bin.idx", [[[1, 2]]])
    (tmp_path / "no_bin.bin").unlink()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": ""}\n' * 99)[:-12])
    (tmp_path / "open.csv").write_text('prompt\n"open')
    (tmp_path / "other.parquet").write_bytes(b"not parquet")
    for path in tmp_path.iterdir():
        cause = rf"cannot read '{path}' \(.*\); fix it or remove it from data.traces"
        with pytest.raises(UserError, match=cause):
            list(records_of(path))


UTF16 = r"%s is UTF-16, and only UTF-8 is read: convert it"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "\ufefftext".encode(), ""),
        ("a.json", b'\xef\xbb\xbf [\n{"text": "text"}]', ""),
        ("a.txt", "text".encode("utf-16"), UTF16),
        ("a.csv", "text\ntext\n".encode("utf-16"), UTF16),
        ("a.jsonl", "text\n".encode("utf-16"), UTF16),
        ("a.csv", "text\nn\u00e9e\n".encode("latin-1"), "%s:1: it is not UTF-8; convert the file"),
        ("a.csv", b"id\ttext\n1\ta, b\n", r"%s:1: 2 values for the 1 fields \['id\\ttext'\]; fix"),
        ("a.jsonl", b'[{"text": "text"}]', "%s:1: .* not a list; .*change the suffix to .json if"),
        ("a.csv", b"id,text,id\n1,a,2\n", "%s: the field 'id' occurs twice; rename"),
        ("a.jsonl", b'{"text": "a", "text": "b"}', r"%s:1: invalid JSON \(the field 'text' occurs twice"),
        ("a.json", b'{\n"text": "text"}', r"%s:1: invalid JSON \(.*\); expected a list of records, or"),
    ],
)  # fmt: skip
def test_encoding_or_form_of_another_program_is_read_or_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    if not message:
        assert [*texts_of(path).values()] == ["text"]
        return
    with pytest.raises(UserError, match=message % path):
        texts_of(path)


def test_column_of_which_a_file_has_two_is_refused_if_it_is_read(tmp_path: Path):
    path = tmp_path / "a.parquet"
    columns = pyarrow.table([["a"], [1], [2]], names=["text", "id", "id"])
    pyarrow.parquet.write_table(columns, path)
    assert [*texts_of(path).values()] == ["a"]
    with pytest.raises(UserError, match=rf"{path}: the field 'id' occurs twice"):
        texts_of(path, "id")


def test_directory_with_the_splits_of_a_data_set_is_refused(tmp_path: Path):
    """Training on it would include the test split."""
    for name in ("train", "test"):
        (saved := tmp_path / "data" / "saved" / name).mkdir(parents=True)
        write_arrow(saved / "data-00000-of-00001.arrow", {"text": [name]}, is_file=False)
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for path in (saved.parent, tmp_path / "data"):
        with pytest.raises(UserError, match=rf"splits of a data set: .* {saved}, .*/saved/train$"):
            list_files([str(path)])
    assert [*texts_of(saved).values()] == ["test"]


def test_directory_with_shards_of_several_splits_is_refused(tmp_path: Path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(dict(text=name)) + "\n")
    with pytest.raises(UserError, match=rf"name those to use, of {tmp_path}/test-\*, .*/train-\*$"):
        list_files([str(tmp_path)])
    assert len(list_files([f"{tmp_path}/train-*"]).files) == 2
    (tmp_path / "test-00000-of-00001.jsonl").unlink()
    assert len(list_files([str(tmp_path)]).files) == 2


def test_eval_sources_of_chats_have_a_loss_on_answers_only(tmp_path: Path):
    chat = [dict(role="user", content="ask"), dict(role="assistant", content="answer")]
    (tmp_path / "chats.json").write_text(json.dumps([dict(messages=chat)] * 3))
    (tmp_path / "train.txt").write_text("text " * 100)
    config = DataConfig(
        sources=(str(tmp_path / "train.txt"),),
        eval_sources=(str(tmp_path / "chats.json"),),
        eval_chat_format="messages",
        chat_template="chatml",
        cache_dir=str(tmp_path / "cache"),
        seq_len=256,
    )
    corpus = open_corpus(config)
    sequence = corpus.heldout[0]
    answers = sequence["targets"][sequence["loss_weights"] > 0]
    assert corpus.tokenizer.decode(answers) == "answer<|im_end|>" * 3
    with pytest.raises(UserError, match=r"is a chat; use config\.data\.eval_chat_field=messages"):
        open_corpus(dataclasses.replace(config, eval_chat_format="", text_field="messages"))
    with pytest.raises(UserError, match=r"no field 'talk'.*set data\.eval_chat_field to"):
        open_corpus(dataclasses.replace(config, eval_chat_field="talk"))
    with pytest.raises(UserError, match=r"every chat is longer than data\.seq_len=8"):
        open_corpus(dataclasses.replace(config, seq_len=8))
