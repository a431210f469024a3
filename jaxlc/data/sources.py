"""Where documents come from: files on disk, in an order and under names that are the same on every machine.

A source is a file, a directory (read recursively, hidden directories left out), a glob (`**` for any depth), or
the built-in `python-stdlib`: the standard library's own sources, whole files, there wherever Python is.

    .txt .py .md .rst     one document a file
    .jsonl .jsonl.gz      one document a line, in the field `text_field`
    .parquet              one document a record, in the column `text_field`
"""

import glob
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxlc.config.schema import DataConfig
from jaxlc.core import extras
from jaxlc.core.errors import UserError

PYTHON_STDLIB = "python-stdlib"
_TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
_JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (*_TEXT_SUFFIXES, *_JSON_SUFFIXES, ".parquet")
_INSTALLED_PACKAGES = ("site-packages", "dist-packages")  # not the standard library, and different everywhere


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    name: str  # path relative to its source, with forward slashes
    path: Path
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Document:
    name: str  # the file's name, and `:line` or `:row` (from 1) where a file holds many
    text: bytes


def list_files(config: DataConfig) -> list[SourceFile]:
    """All files of `config.sources`, each once, sorted by name within a source.

    Raises:
      UserError: a source that does not exist, holds no file of a known kind, or cannot be read.
    """
    files: dict[Path, SourceFile] = {}  # by real path, so that overlapping sources do not repeat a document
    for source in config.sources:
        found = _stdlib_files() if source == PYTHON_STDLIB else _files_of(source)
        if not found:
            raise UserError(f"data.sources {source!r} holds no file that ends in {', '.join(_SUFFIXES)}; give another")
        for name, path in sorted(found):
            file = _source_file(name, path)  # first: it tells of files that cannot be read, loops of links among them
            files.setdefault(path.resolve(), file)
    return list(files.values())


def read_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    """The documents of one file in their order, those without text left out. Memory: one document or record batch.

    Raises:
      UserError: the file cannot be read or decoded, or a record has no text in `text_field`.
    """
    try:
        if file.path.name.endswith(_JSON_SUFFIXES):
            documents = _jsonl_documents(file, text_field)
        elif file.path.name.endswith(".parquet"):
            documents = _parquet_documents(file, text_field)
        else:
            documents = iter([Document(name=file.name, text=file.path.read_bytes())])
        yield from (document for document in documents if document.text)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {str(file.path)!r} ({error}); mend it or leave it out of data.sources") from error


def split_hash(name: str) -> float:
    """A number in [0, 1) that depends on a document's name alone; below `eval_fraction` it is held out."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:6]) / 2**48


def _source_file(name: str, path: Path) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(
            f"cannot read {str(path)!r} ({error.strerror}); mend it or leave it out of data.sources"
        ) from error
    return SourceFile(name=name, path=path, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)


def _stdlib_files() -> list[tuple[str, Path]]:
    files = _files_below(Path(sysconfig.get_paths()["stdlib"]))
    return [
        (name, path)
        for name, path in files
        if name.endswith(".py") and not any(part in _INSTALLED_PACKAGES for part in path.parts)
    ]


def _files_of(source: str) -> list[tuple[str, Path]]:
    path = Path(source).expanduser()
    if path.is_dir():
        return _files_below(path)
    if path.is_file():
        return [(path.name, path)] if path.name.endswith(_SUFFIXES) else []
    if not glob.has_magic(source):
        raise UserError(f"data.sources names {source!r}, which does not exist; give a file, a directory or a glob")
    root = Path(*_parts_without_magic(path))
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return [(m.relative_to(root).as_posix(), m) for m in matches if m.is_file() and m.name.endswith(_SUFFIXES)]


def _parts_without_magic(path: Path) -> Iterator[str]:
    """The directories of a glob before its first wildcard."""
    for part in path.parts[:-1]:
        if glob.has_magic(part):
            return
        yield part


def _files_below(root: Path) -> list[tuple[str, Path]]:
    found = []
    for directory, subdirectories, file_names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".") and name != "__pycache__"]
        paths = [Path(directory, name) for name in file_names if name.endswith(_SUFFIXES)]
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    return found


def _jsonl_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    opener = gzip.open if file.path.name.endswith(".gz") else open
    with opener(file.path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{file.name}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise UserError(
                    f"line {number} of {str(file.path)!r} is not JSON ({error}); mend or remove it"
                ) from error
            fields = record if isinstance(record, dict) else {}
            yield _text_document(name, fields.get(text_field), text_field, list(fields))


def _parquet_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    extras.require("pyarrow", f"the Parquet file {str(file.path)!r}")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            columns = table.schema_arrow.names
            if text_field not in columns:
                _text_document(f"{file.name}:1", None, text_field, columns)
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    yield _text_document(f"{file.name}:{row}", value.as_py(), text_field, columns)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{str(file.path)!r} is not a Parquet file ({error}); mend or remove it") from error


def _text_document(name: str, text: object, text_field: str, fields: list[str]) -> Document:
    if not isinstance(text, str):
        raise UserError(
            f"record {name} has no text in the field {text_field!r} (its fields are {fields});"
            " set data.text_field to the one that holds the document"
        )
    return Document(name=name, text=text.encode(errors="replace"))  # JSON can spell lone surrogates, UTF-8 cannot
