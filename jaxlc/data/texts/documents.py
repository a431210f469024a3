"""Reads the documents of files: text, token IDs, or chats."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxlc.config.data_schema import SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data.texts.chats import CHAT_FIELDS, OTHER_FIELDS, UNSUPPORTED_FIELDS, Chat, is_chat, read_chat
from jaxlc.data.texts.records import (
    MEGATRON_SUFFIX,
    RECORD_SUFFIXES,
    BadRecord,
    Record,
    field_of,
    kind_of,
    read_records,
    token_ids,
)
from jaxlc.data.texts.sources import SourceFile, unreadable

# Fields beside token IDs -> the value of tokens that are not in the loss.
_MASKS = {"labels": -100} | dict.fromkeys(("loss_mask", "attention_mask", "completion_mask", "assistant_masks"), 0)
_SKIP_ADVICE = "or skip such records with data.max_bad_records"
_BLOCK_BYTES = 1 << 20  # text of a file in memory at one time


class Fields(NamedTuple):
    """Which field of a record holds the document; one of `tokens` and `chat` may be set, which replaces `text`."""

    text: str = "text"
    tokens: str = ""  # token IDs
    chat: str = ""
    chat_format: str = "messages"  # a key of CHAT_FIELDS

    @classmethod
    def from_config(cls, source: SourceConfig) -> "Fields":
        chat_format = source.chat_format or "messages"
        chat = source.chat_field or CHAT_FIELDS[chat_format] if source.has_chats else ""
        return cls(source.text_field, source.token_field, chat, chat_format)

    @property
    def document(self) -> str:
        return self.tokens or self.chat or self.text

    @property
    def others(self) -> tuple[str, ...]:
        """Other fields of the record that the document may need."""
        if self.tokens:
            return tuple(_MASKS)
        return (*OTHER_FIELDS[self.chat_format], *UNSUPPORTED_FIELDS) if self.chat else ()

    def setting(self, files_setting: str) -> str:
        """The setting that names the field of the files that `files_setting` lists: "data.text_field"."""
        name = "token_field" if self.tokens else "chat_field" if self.chat else "text_field"
        is_mixture = files_setting.startswith("data.mixture.")
        section = files_setting if is_mixture else files_setting.rpartition(".")[0]
        return f"{section}.{name}" if section else name


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document; of `blocks`, `ids` and `chat`, one is set."""

    name: str  # the file's name; `name:number` (from 1) of the line or record if a file holds several documents
    where: str = ""  # FILE:NUMBER of its record, for errors
    # The text, to be read once, before the next document. No UTF-8 sequence crosses the end of a block, so each can be
    # decoded on its own, also if the text contains invalid UTF-8. The first one is not empty.
    blocks: Iterable[bytes] = ()
    ids: np.ndarray | None = None  # int [tokens]
    chat: Chat | None = None


@dataclass
class BadRecords:
    """Counts bad records up to a limit, and writes the errors of all to a file."""

    limit: int = 0
    out: BinaryIO | None = None  # the file, with one line per record
    num_records: int = 0
    first: str = ""  # the error of the first one

    def add(self, error: BadRecord) -> None:
        """Counts and writes a bad record.

        Raises:
          UserError: there are more than the limit.
        """
        self.num_records += 1
        self.first = self.first or str(error)
        if self.num_records > self.limit:
            skipped = f"{self.num_records:,} records cannot be used, more than data.max_bad_records={self.limit}"
            advice = f"{skipped} (the first: {self.first})" if self.limit else _SKIP_ADVICE
            raise UserError(f"{error}; {advice}") from None
        if self.out is not None:
            self.out.write(f"{error}\n".encode(errors="backslashreplace"))


def read_documents(file: SourceFile, fields: Fields, bad_records: BadRecords) -> Iterator[Document]:
    """Yields the documents of a file in order and skips empty ones. Memory: one block of text, or one batch of records.

    Raises:
      UserError: the file cannot be read or decoded, or it has more bad records than allowed.
    """
    try:
        if file.path.name.endswith(RECORD_SUFFIXES):
            yield from _record_documents(file, fields, bad_records)
        elif fields.tokens or fields.chat:
            raise UserError(
                f"{file.setting}: {str(file.path)!r} is text without fields, and the documents are in the field"
                f" {fields.document!r}; remove it from {file.setting}"
            )
        else:
            yield from _text_file_documents(file)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(file.path, error, file.setting) from error


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


def _record_documents(file: SourceFile, fields: Fields, bad_records: BadRecords) -> Iterator[Document]:
    if file.path.name.endswith(MEGATRON_SUFFIX) and not fields.tokens:
        is_mixture = file.setting.startswith("data.mixture.")
        advice = f"set config.{file.setting}." if is_mixture else "use a source of config.data.mixture with "
        raise UserError(f"{file.setting}: {str(file.path)!r} contains token IDs: {advice}token_field=tokens")
    field_setting = fields.setting(file.setting)
    records = read_records(
        file.path,
        fields.document,
        others=fields.others,
        setting=file.setting,
        field_setting=field_setting,
        lines=file.lines,
    )
    for record in records:
        try:
            document = _document(file, record, fields)
        except BadRecord as error:
            bad_records.add(error)
        else:
            if document is not None:
                yield document


def _document(file: SourceFile, record: Record, fields: Fields) -> Document | None:
    """The document of a record; None if it is empty.

    Raises:
      BadRecord: the record has no document.
    """
    field_setting = fields.setting(file.setting)
    value = field_of(record, fields.document, field_setting)
    name = f"{file.name}:{record.number}"
    if fields.tokens:
        ids = token_ids(value, f"the field {fields.tokens!r}", record.where, "a list of token IDs")
        for mask, excluded in _MASKS.items():
            mask_values = np.atleast_1d(record.values.get(mask, 1))
            if len(mask_values) > 1 and excluded in mask_values:
                raise BadRecord(
                    f"{record.where}: the field {mask!r} excludes tokens from the loss, which has all of a document:"
                    " use config.data.traces with tokens and loss_mask, or remove the field"
                )
        return Document(name=name, where=record.where, ids=ids) if len(ids) else None
    if fields.chat:
        assert isinstance(record.values, dict), record  # it has the field
        chat = read_chat(value, record.values, fields.chat_format, fields.chat, record.where)
        return Document(name=name, where=record.where, chat=chat)
    if is_chat(value):
        raise BadRecord(
            f"{record.where}: the field {fields.text!r} is a chat; use a source of config.data.mixture with"
            f" chat_field={fields.text}"
        )
    if not isinstance(value, str):
        raise BadRecord(
            f"{record.where}: the field {fields.text!r} is {kind_of(value)}, expected text; fix or remove this record,"
            f" or set {field_setting} to another field"
        )
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return Document(name=name, where=record.where, blocks=[value.encode(errors="replace")]) if value else None
