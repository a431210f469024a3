"""Lists source files and reads documents from them, in an order and under names that are equal on every machine.

A source is a file, a directory (read recursively, without hidden directories), a glob (`**` matches any depth), or the
built-in `python-stdlib`: the source files of Python's standard library, which exist wherever Python is installed.

    .txt .py .md .rst     one document per file
    .jsonl .jsonl.gz      one document per line, in the field `text_field`
    .parquet              one document per record, in the column `text_field`
"""

import glob
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxlc.core import extras
from jaxlc.core.errors import UserError, reason_of

PYTHON_STDLIB = "python-stdlib"
_BLOCK_BYTES = 1 << 20  # text of a file in memory at one time
_TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
_JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (*_TEXT_SUFFIXES, *_JSON_SUFFIXES, ".parquet")
COMPRESSED_SUFFIXES = (".jsonl.gz", ".parquet")
_INSTALLED_PACKAGES = ("site-packages", "dist-packages")  # not the standard library, and different on every machine


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    name: str  # path relative to its source, with forward slashes
    path: Path
    size_bytes: int
    modified_ns: int
    setting: str = "data.sources"  # that lists it; named in errors


class FileList(NamedTuple):
    files: list[SourceFile]
    num_duplicates: int  # files that a source lists although an earlier one already has; they are not repeated


@dataclass(frozen=True, kw_only=True)
class Document:
    name: str  # the file's name; `name:number` (from 1) of the line or record if a file holds several documents
    # The text, to be read once, before the next document. No UTF-8 sequence crosses the end of a block, so each can be
    # decoded on its own, also if the text contains invalid UTF-8. The first one is not empty.
    blocks: Iterable[bytes]


def list_files(sources: Sequence[str], setting: str = "data.sources") -> FileList:
    """Lists the files of `sources`, sorted by name within a source, each file once even if sources overlap.

    Args:
      setting: that lists the sources; named in errors.
    Raises:
      UserError: a source does not exist, contains no file of a supported type, or cannot be read.
    """
    files: dict[Path, SourceFile] = {}  # by real path
    num_listed = 0
    for source in sources:
        named_paths = _stdlib_files() if source == PYTHON_STDLIB else _files_of(source, setting)
        if not named_paths:
            raise UserError(
                f"{setting}: {source!r} contains no file with a supported suffix ({', '.join(_SUFFIXES)});"
                " use a different source"
            )
        num_listed += len(named_paths)
        for name, path in sorted(named_paths):
            # Before resolve(), because it reports unreadable files and link loops.
            file = _source_file(name, path, setting)
            files.setdefault(path.resolve(), file)
    return FileList(list(files.values()), num_listed - len(files))


def read_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    """Yields the documents of a file in order and skips empty ones. Memory: one block of text, or one batch of records.

    Raises:
      UserError: the file cannot be read or decoded, or a record has no text in `text_field`.
    """
    try:
        if file.path.name.endswith(_JSON_SUFFIXES):
            documents = _jsonl_documents(file, text_field)
        elif file.path.name.endswith(".parquet"):
            documents = _parquet_documents(file, text_field)
        else:
            documents = _text_file_documents(file)
        yield from documents
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file.path, error, file.setting) from error


def split_hash(name: str) -> float:
    """A number in [0, 1) that depends only on a document's name; documents below `eval_fraction` are held out."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:6]) / 2**48


def _unreadable(path: Path, error: Exception, setting: str) -> UserError:
    return UserError(f"cannot read {str(path)!r} ({reason_of(error)}); fix it or remove it from {setting}")


def _source_file(name: str, path: Path, setting: str) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error, setting) from error
    return SourceFile(name=name, path=path, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns, setting=setting)


def _stdlib_files() -> list[tuple[str, Path]]:
    files = _files_below(Path(sysconfig.get_paths()["stdlib"]))
    return [
        (name, path)
        for name, path in files
        if name.endswith(".py") and not any(part in _INSTALLED_PACKAGES for part in path.parts)
    ]


def _files_of(source: str, setting: str) -> list[tuple[str, Path]]:
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it does not raise for an unknown user
    if path.is_dir():
        return _files_below(path)
    if path.is_file():
        return [(path.name, path)] if path.name.endswith(_SUFFIXES) else []
    if not glob.has_magic(source):
        raise UserError(f"{setting}: {source!r} does not exist; use an existing file, directory or glob")
    root = Path(*_parts_before_wildcard(path))
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return [(m.relative_to(root).as_posix(), m) for m in matches if m.is_file() and m.name.endswith(_SUFFIXES)]


def _parts_before_wildcard(path: Path) -> Iterator[str]:
    """Yields the directories of a glob before its first wildcard."""
    for part in path.parts[:-1]:
        if glob.has_magic(part):
            return
        yield part


def _files_below(root: Path) -> list[tuple[str, Path]]:
    named_paths = []
    for directory, subdirectories, file_names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".") and name != "__pycache__"]
        paths = [Path(directory, name) for name in file_names if name.endswith(_SUFFIXES)]
        named_paths += [(path.relative_to(root).as_posix(), path) for path in paths]
    return named_paths


def _text_file_documents(file: SourceFile) -> Iterator[Document]:
    with open(file.path, "rb") as opened:
        if first := opened.read(_BLOCK_BYTES):
            yield Document(name=file.name, blocks=_blocks(first, opened))


def _blocks(first: bytes, opened: BinaryIO) -> Iterator[bytes]:
    """Yields the rest of a file of which `first` is read; see `Document.blocks`."""
    block = first
    while following := opened.read(_BLOCK_BYTES):
        # The last sequence may continue: it starts with the last byte of 0xC0 or more, at most 3 bytes before the end.
        end = next((i for i in range(len(block) - 1, max(len(block) - 4, -1), -1) if block[i] >= 0xC0), len(block))
        if end:
            yield block[:end]
        block = block[end:] + following
    yield block


def _jsonl_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    opener = gzip.open if file.path.name.endswith(".gz") else open
    with opener(file.path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
                raise UserError(
                    f"{file.path}:{number}: invalid JSON ({reason_of(error)}); fix or remove this line"
                ) from error
            if not isinstance(record, dict):
                raise UserError(
                    f"{file.path}:{number}: expected a JSON object, not a {type(record).__name__};"
                    " fix or remove this line"
                )
            if text_field not in record:
                raise _no_text_field(f"{file.path}:{number}", text_field, list(record))
            if text := _encoded(file, number, record[text_field], text_field):
                yield Document(name=f"{file.name}:{number}", blocks=[text])


def _parquet_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    extras.require("pyarrow", f"the Parquet file {str(file.path)!r}")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            columns = table.schema_arrow.names
            if text_field not in columns:
                raise _no_text_field(str(file.path), text_field, columns)
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0):
                    number += 1
                    if text := _encoded(file, number, value.as_py(), text_field):
                        yield Document(name=f"{file.name}:{number}", blocks=[text])
    except pyarrow.ArrowException as error:
        raise UserError(
            f"cannot read {str(file.path)!r} as Parquet ({reason_of(error)}); fix it or remove it from {file.setting}"
        ) from error


def _no_text_field(where: str, text_field: str, fields: list[str]) -> UserError:
    return UserError(
        f"{where}: no field {text_field!r} (the fields are {fields}); set data.text_field to the field that holds the"
        " document"
    )


def _encoded(file: SourceFile, number: int, text: object, text_field: str) -> bytes:
    """The text of record `number` as UTF-8."""
    if not isinstance(text, str):
        value = "null" if text is None else f"a {type(text).__name__}"
        raise UserError(
            f"{file.path}:{number}: the field {text_field!r} is {value}, expected text; fix or remove this record, or"
            " set data.text_field to another field"
        )
    return text.encode(errors="replace")  # JSON can contain lone surrogates, which UTF-8 cannot encode
