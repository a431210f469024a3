"""Records of files that hold several documents each: JSON lines, CSV, Parquet, Arrow, and
Megatron's indexed datasets.

.jsonl .ndjson .jsonl.gz .jsonl.zst    one record per line; a list of messages is a record with the field `messages`
.json                          a list of such records, or one per line; read only where it is named, not in directories
.csv                           one record per row, whose fields the first row names; read as .json
.parquet                       one record per row
.arrow                         one record per row: a directory that the package `datasets` saved
.idx with .bin                 one record per document of an indexed dataset of Megatron-LM, with the field `tokens`
"""

import codecs
import csv
import functools
import gzip
import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxlc.core import UserError, errors, reason_of
from jaxlc.core.files import Arrays, check_unique, parse_json, read_limited

LINES_SUFFIXES = (".jsonl", ".ndjson")  # which can be cut after any line
JSON_SUFFIXES = (*LINES_SUFFIXES, ".jsonl.gz", ".jsonl.zst")
MEGATRON_SUFFIX = ".idx"
ARRAY_SUFFIX = ".json"
CSV_SUFFIX = ".csv"
LISTED_SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".arrow", MEGATRON_SUFFIX)  # in directories
NAMED_SUFFIXES = (ARRAY_SUFFIX, CSV_SUFFIX)  # read only where files are named
RECORD_SUFFIXES = (*LISTED_SUFFIXES, *NAMED_SUFFIXES)
_CHATS = {"messages", "conversations"}  # the usual fields of chats
_RECORDS_AT_ONCE = 256
_NESTED_RECORDS_AT_ONCE = 32
# A file may be much smaller than its records: compressed ones are read in a stream, and each record
# has these limits.
MAX_LINE_BYTES = 128 << 20
_MAX_ARRAY_BYTES = 1 << 30  # a list in a .json file is read as a whole
_MAX_TOKEN_BYTES = 1 << 30  # of a document of Megatron-LM
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# code in the .idx file -> dtype
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


class BadRecord(UserError):
    """A record without a document that can be used; `data.max_bad_records` of them are skipped."""


class Record(NamedTuple):
    where: str  # FILE:NUMBER, for errors
    number: int  # from 1
    values: dict[str, Any] | BadRecord  # by field


def has_suffix(name: str | Path, suffixes: str | tuple[str, ...]) -> bool:
    """Whether a file has one of the suffixes; upper and lower case are equal, as on the hub."""
    return str(name).lower().endswith(suffixes)


def read_records(
    path: Path,
    field: str,
    *,
    others: Sequence[str] | None = (),
    setting: str,
    lines: tuple[int, int, int] | None = None,
) -> Iterator[Record]:
    """Yields the records of a file in order; of columns, only those that `field` needs are read,
    and `others`; all of them if there is no such column.

    Args:
      field: dotted name of the field that holds the document; "": there is none.
      others: names of fields that a record need not have; None: all columns.
      setting: that lists the file; named in errors.
      lines: as `SourceFile.lines`.
    Raises:
      UserError: the file cannot be read.
    """
    with reading(path, setting):
        items = _list_in(path) if has_suffix(path, ARRAY_SUFFIX) else None
        if has_suffix(path, CSV_SUFFIX):
            items = _csv_records(path)
        elif has_suffix(path, MEGATRON_SUFFIX):
            items = _megatron_records(path)
        elif not has_suffix(path, (*JSON_SUFFIXES, ARRAY_SUFFIX)):
            needed = functools.partial(needed_columns, path, field, others)
            items = _column_records(path, needed, setting)
        for number, values in _json_records(path, lines) if items is None else enumerate(items, 1):
            where = f"{path}:{number}"
            yield Record(where, number, _fields(values, where))


@contextmanager
def reading(path: Path, setting: str) -> Iterator[None]:
    """Raises errors of reading a file of data as UserErrors, and one for UTF-16.

    Args:
      setting: that lists the file.
    """
    try:
        with open(path, "rb") as file:
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(
                    f"{path} is UTF-16, and only UTF-8 is read: convert it, such as with `iconv -f UTF-16 -t UTF-8`"
                )
        yield
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise unreadable(path, error, setting) from error


def unreadable(path: Path, error: Exception, setting: str) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(
        f"cannot read {str(path)!r} ({reason_of(error)}); fix it or remove it from {setting}"
    )


def field_of(record: Record, field: str, field_setting: str) -> Any:
    """The value of a field: of this name, or else, if the name has dots, of a field of a field.

    Args:
      field_setting: that has the value `field`; named in errors.
    Raises:
      BadRecord: the record is bad or has no such field.
    """
    if isinstance(record.values, BadRecord):
        raise record.values
    if field in record.values:
        return record.values[field]
    value: Any = record.values
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            fields = list(value) if isinstance(value, dict) else [type(value).__name__]
            advice = f"set {field_setting} to the field that holds the document"
            if not _CHATS.isdisjoint(fields):
                advice += ", or for chats chat_format of a source in config.data.mixture"
            raise BadRecord(
                f"{record.where}: no field {field!r} (the fields are {fields}); {advice}"
            )
        value = value[name]
    return value


def _json_records(path: Path, span: tuple[int, int, int] | None) -> Iterator[tuple[int, Any]]:
    """The value of each line, and its number."""
    with _opened(path) as lines:
        begin, end, first = span or (0, None, 1)
        if span:
            lines.seek(begin)
        for number in itertools.count(first):
            if end is not None and begin >= end:
                return
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"{path}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes; split the record"
                )
            begin += len(line)
            if line.strip():
                try:
                    yield number, parse_json(line)
                except ValueError as error:
                    advice = "fix or remove this line"
                    if has_suffix(path, ARRAY_SUFFIX):
                        advice = "expected a list of records, or one on each line"
                    yield number, BadRecord(f"invalid JSON ({reason_of(error)}); {advice}")


def _fields(values: Any, where: str) -> dict[str, Any] | BadRecord:
    """The fields of a record; an error gets the place of the record."""
    if isinstance(values, BadRecord):
        return BadRecord(f"{where}: {values}")
    if (
        isinstance(values, list)
        and values
        and all(isinstance(x, dict) and "role" in x for x in values)
    ):
        return {"messages": values}
    if not isinstance(values, dict):
        advice = "fix or remove this record"
        if isinstance(values, list):
            advice += f", or change the suffix to {ARRAY_SUFFIX} if the file is one list of records"
        return BadRecord(f"{where}: expected a JSON object, not {kind_of(values)}; {advice}")
    return values


def _list_in(path: Path) -> list[Any] | None:
    """The items of a JSON file that is a list of records; None: it has JSON lines."""
    with open(path, "rb") as file:
        if file.read(1000).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
            return None
    try:
        items = parse_json(read_limited(path, _MAX_ARRAY_BYTES))
    except ValueError:
        return None
    return [items] if isinstance(_fields(items, ""), dict) else items


def _csv_records(path: Path) -> Iterator[dict[str, str] | BadRecord]:
    """The rows of a CSV file after its first one, which has the names of the fields."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        rows = csv.reader(lines, strict=True)
        names = next(rows, [])
        _check_unique(path, names)
        for row in rows:
            if len(row) != len(names):
                if row:  # not an empty line
                    yield BadRecord(
                        f"{len(row)} values for the {len(names)} fields {names}; fix this row, or separate values"
                        " with commas"
                    )
                continue
            try:
                "".join(row).encode()  # bytes that are not UTF-8 are surrogates
                yield dict(zip(names, row))
            except UnicodeEncodeError:
                yield BadRecord("it is not UTF-8; convert the file, or remove this row")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file of lines, decompressed."""
    if has_suffix(path, ".gz"):
        with gzip.open(path, "rb") as lines:
            yield lines
    elif has_suffix(path, ".zst"):
        errors.require("pyarrow", f"the compressed file {str(path)!r}")
        import pyarrow

        with open(path, "rb") as raw, pyarrow.CompressedInputStream(raw, "zstd") as lines:
            yield io.BufferedReader(lines)  # a stream of pyarrow has no lines of its own
    else:
        with open(path, "rb") as lines:
            yield lines


def kind_of(value: Any) -> str:
    """The type of a value in words, for an error."""
    name = type(value).__name__
    return "null" if value is None else f"an {name}" if name == "int" else f"a {name}"


def array_of(value: Any) -> np.ndarray:
    """The value as an array; of no numeric dtype if lists in it have different lengths."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(value, object)


def token_ids(value: Any, name: str, where: str, expected: str) -> np.ndarray:
    """The value as an array of integers, which may be empty.

    Raises:
      BadRecord: it is something else.
    """
    ids = array_of(value)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise BadRecord(f"{where}: {name} is {kind_of(value)}, expected {expected}")
    return ids


def _column_records(
    path: Path, needed: Callable[[list[str]], list[str]], setting: str
) -> Iterator[dict[str, Any] | BadRecord]:
    """The rows of a Parquet or Arrow file."""
    errors.require("pyarrow", f"the file {str(path)!r}")
    import pyarrow

    try:
        for batch in _batches(path, needed):
            for row in range(batch.num_rows):
                try:
                    yield {name: _value(batch.column(name)[row]) for name in batch.schema.names}
                except UnicodeDecodeError as error:
                    yield BadRecord(f"invalid text ({reason_of(error)}); fix or remove this row")
    except pyarrow.ArrowException as error:
        raise unreadable(path, error, setting) from error


def _value(scalar: Any) -> Any:
    """A value of a column as a Python object, and a list of integers as an array.

    Dictionaries in lists, such as messages, have all fields of the column, null where the record
    has none; such fields are removed.
    """
    import pyarrow

    is_list = pyarrow.types.is_list(scalar.type) or pyarrow.types.is_large_list(scalar.type)
    if is_list and pyarrow.types.is_integer(scalar.type.value_type) and scalar.is_valid:
        return scalar.values.to_numpy(zero_copy_only=False)
    return _without_nulls(scalar.as_py())


def _without_nulls(value: Any, in_list: bool = False) -> Any:
    """`value` without null fields of dictionaries in lists."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(x, in_list)
            for name, x in value.items()
            if x is not None or not in_list
        }
    return [_without_nulls(x, in_list=True) for x in value] if isinstance(value, list) else value


def _batches(path: Path, needed: Callable[[list[str]], list[str]]) -> Iterator[Any]:
    """Batches of rows with the columns that are needed of all."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if has_suffix(path, ".parquet"):
        schema = pyarrow.parquet.read_schema(path)
        columns = needed(schema.names)
        # A text that is stored once and repeated in many rows is not copied: a small file could
        # need much memory.
        texts = [name for name in columns if pyarrow.types.is_string(schema.field(name).type)]
        types = [schema.field(name).type for name in columns]
        at_once = _RECORDS_AT_ONCE
        if any(map(pyarrow.types.is_nested, types)):
            at_once = _NESTED_RECORDS_AT_ONCE
        if any(map(pyarrow.types.is_binary, types)):  # such as recorded experts, of 10s of MiB
            at_once = 1
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as table:
            yield from table.iter_batches(at_once, columns=columns)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        # Of Arrow's streaming format, which `datasets` writes, or of its file format.
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        if is_file:
            opened = pyarrow.ipc.open_file(mapped)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            batches = opened = pyarrow.ipc.open_stream(mapped)
        columns = needed(opened.schema.names)
        for batch in batches:
            selected = batch.select(columns)
            selected.validate(full=True)  # wrong offsets would be read outside of the file
            for begin in range(0, batch.num_rows, _RECORDS_AT_ONCE):
                yield selected.slice(begin, _RECORDS_AT_ONCE)


def needed_columns(
    path: Path, field: str, others: Sequence[str] | None, columns: list[str]
) -> list[str]:
    column = field if field in columns else field.partition(".")[0]
    names = columns
    if others is not None and (not field or column in columns):
        names = [column, *others]
    needed = [name for name in dict.fromkeys(names) if name in columns]
    _check_unique(path, [name for name in columns if name in needed])
    return needed


def _check_unique(path: Path, names: Sequence[str]) -> None:
    try:
        check_unique(names)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _megatron_records(path: Path) -> Iterator[Arrays]:
    """The documents of an indexed dataset of Megatron-LM, as arrays in the field `tokens`.

    The .idx file has a magic number, the version (u8), the code of the dtype (u1), the numbers of
    sequences and of document boundaries (u8 each), the length of each sequence (i4), its offset in
    bytes in the .bin file (i8), and the index of the first sequence of each document (i8), with one
    more at the end.

    Raises:
      UserError: the .idx file is not of this format, or one of the files is truncated.
    """
    with open(path, "rb") as index:
        header = index.read(34)
    magic, version, code, num_sequences, num_boundaries = struct.unpack(
        "<9sQBQQ", header.ljust(34, b"\0")
    )
    if magic != _MEGATRON_MAGIC or version != 1 or code not in _MEGATRON_TYPES:
        raise UserError(
            f"{str(path)!r} is not an index of Megatron-LM of version 1 with integer tokens; convert it to Parquet"
            " or JSON lines"
        )
    try:
        lengths = np.memmap(path, "<i4", "r", 34, (num_sequences,))
        offsets = np.memmap(path, "<i8", "r", 34 + 4 * num_sequences, (num_sequences,))
        boundaries = np.memmap(path, "<i8", "r", 34 + 12 * num_sequences, (num_boundaries,))
        tokens = np.memmap(
            path.with_suffix(".bin"), np.dtype(_MEGATRON_TYPES[code]).newbyteorder("<"), "r"
        )
    except (ValueError, OverflowError) as error:  # a file that is shorter than the array, or empty
        raise UserError(
            f"{str(path)!r} or its .bin file is truncated ({reason_of(error)}); copy both again"
        ) from error
    for number in range(1, num_boundaries):
        first, end = (int(x) for x in boundaries[number - 1 : number + 1])
        counts = lengths[first:end].astype(np.int64)
        begins = offsets[first:end] // tokens.itemsize
        ends = begins + counts
        is_inside = (
            0 <= first <= end <= num_sequences
            and min(counts.min(initial=0), begins.min(initial=0)) >= 0
            and ends.max(initial=0) <= len(tokens)
        )
        if not is_inside or counts.sum() * tokens.itemsize > _MAX_TOKEN_BYTES:
            raise UserError(
                f"{path}:{number}: the document is outside of the .bin file, or has more than {_MAX_TOKEN_BYTES:,}"
                " bytes; copy both files again"
            )
        parts = [tokens[begin:stop] for begin, stop in zip(begins, ends)]
        yield {"tokens": np.concatenate([tokens[:0], *parts])}
