"""Reads the documents of files: text, token ids, or chats, as the messages that chat templates take.

The formats of chats in records:

messages  {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}: as the API of OpenAI. The content may
          be a list of parts, of which all are text; it is null in a message of the assistant with `tool_calls`.
sharegpt  {"conversations": [{"from": "human", "value": "..."}, ...], "system": "...", "tools": [...]}
alpaca    {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["...", "..."], ...]}: a
          question and its answer, after earlier ones
completion {"prompt": ..., "completion": ...}: texts or lists of messages, as in TRL; only the completion has a loss

`tools` and the arguments of a call may be JSON in a string, which is parsed, because templates write them as JSON. A
message with one of the flags `LOSS_FLAGS` set to false or 0 has no loss. Fields of other programs that change what is
trained on (`_UNSUPPORTED`) are refused.
"""

import codecs
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxlc.config.schema import SourceConfig
from jaxlc.core import UserError
from jaxlc.core.files import displayed, parse_json
from jaxlc.data.texts.records import (
    MEGATRON_SUFFIX,
    RECORD_SUFFIXES,
    BadRecord,
    Record,
    field_of,
    has_suffix,
    kind_of,
    read_records,
    reading,
    token_ids,
)
from jaxlc.data.texts.sources import SourceFile

ASSISTANT = "assistant"
# Format -> the field of the chat, unless chat_field is set.
CHAT_FIELDS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "alpaca": "instruction",
    "completion": "completion",
}
# Other fields of a record that each format uses.
OTHER_FIELDS = {
    "messages": ("tools", "system"),
    "sharegpt": ("tools", "system"),
    "alpaca": ("tools", "system", "input", "output", "history"),
    "completion": ("tools", "system", "prompt"),
}
# names in OpenAI's API, ms-swift and Axolotl
LOSS_FLAGS = ("weight", "loss", "train", "training", "trainable")
_KTO_LABELS = ("label", "kto_tag")
# Field of a record or message -> what to do instead.
_UNSUPPORTED = {
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"), "only text can be trained on"
    ),
    **dict.fromkeys(
        ("train_detail", "training_detail", "loss_scale"),
        "only whole messages can be without a loss",
    ),
    **dict.fromkeys(("function_call", "functions"), "write tool_calls and tools"),
    **dict.fromkeys(
        ("rejected_response", "rejected_messages"), "write pairs as prompt, chosen and rejected"
    ),
    **dict.fromkeys(
        _KTO_LABELS,
        "false marks an answer to be avoided; write pairs as prompt, chosen and rejected",
    ),
    "chat_template_kwargs": "write a template with these values",
}
UNSUPPORTED_FIELDS = tuple(_UNSUPPORTED)
# Format of a conversation -> fields of its items, and what they are, for errors.
_ITEMS = {
    "messages": (("role",), "message", "with role and content"),
    "sharegpt": (("from", "value"), "turn", "with from and value"),
}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    ASSISTANT: ASSISTANT,
    "tool": "tool",
}


class Chat(NamedTuple):
    # role and content, and what else a message has, such as tool_calls
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    masked: frozenset[int] = frozenset()  # numbers of the messages that have no loss


def is_chat(value: Any) -> bool:
    """Whether a value is a message or a list of messages, with role and content or with from and
    value.
    """
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(
        isinstance(x, dict) and (x.get("role") or x.get("from")) for x in items
    )


def read_chat(
    value: Any, values: Mapping[str, Any], chat_format: str, field: str, where: str
) -> Chat:
    """The chat of a record.

    Args:
      value: of the field `field`.
      values: all fields of the record.
      chat_format: a key of CHAT_FIELDS; "": messages or sharegpt.
      where: FILE:NUMBER of the record, for errors.
    Raises:
      BadRecord: the record has another form, a part of it cannot be trained on, or an answer is empty.
    """
    if chat_format == "completion":
        return read_answer(values, field, where)
    with located(where):
        if chat_format == "alpaca":
            messages = _alpaca(value, values, field)
        elif chat_format:
            messages = _conversation(value, values, field, chat_format)
        else:
            messages = _turns(value, field, "user")
        return _chat(messages, values)


def read_answer(values: Mapping[str, Any], field: str, where: str) -> Chat:
    """The chat of a prompt and its answer; only the answer has a loss.

    The answer may repeat the prompt: start with its messages, or have a message with its text.
    Without a prompt, only the last answer of a pair has a loss.

    Args:
      field: of the answer.
    Raises:
      BadRecord: as `read_chat`, or the answer starts with another prompt.
    """
    with located(where):
        prompt = next(
            (values[name] for name in ("prompt", "messages", "conversations") if name in values),
            None,
        )
        before = _turns(prompt, "prompt", "user")
        turns = _turns(values[field], field, ASSISTANT)
        num_before = len(before)
        contents = [message.get("content") for message in turns.values()]
        if list(turns.values())[:num_before] == list(before.values()):
            before = {}
        elif isinstance(prompt, str) and prompt in contents:
            before = {}
            num_before = contents.index(prompt) + 1
        elif before and next(iter(turns.values()))["role"] != ASSISTANT:
            raise BadRecord(f"the messages of {field!r} are another chat than those of the prompt")
        chat = _chat(before | turns, values)
        answers = [
            number for number, message in enumerate(chat.messages) if message["role"] == ASSISTANT
        ]
        # with the message of the field system
        first = num_before + len(chat.messages) - len(before | turns)
        first = first if num_before or field == "completion" else max(answers, default=0)
        return chat._replace(masked=chat.masked | {number for number in answers if number < first})


def check_fields(values: Mapping[str, Any], path: str = "") -> None:
    """Raises BadRecord if a record or a message has a field that is unsupported."""
    for name in _UNSUPPORTED.keys() & values.keys():
        value = values[name]
        is_set = len(value) > 0 if hasattr(value, "__len__") else value not in (None, False)
        if value is False if name in _KTO_LABELS else is_set:
            raise BadRecord(f"unsupported: the field {path + name!r}: {_UNSUPPORTED[name]}")


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Adds the place to errors."""
    try:
        yield
    except BadRecord as error:
        raise BadRecord(f"{where}: {error}") from None


def _chat(messages: "_Messages", values: Mapping[str, Any]) -> Chat:
    check_fields(values)
    if system := values.get("system"):
        first = next(iter(messages.values()))
        if first["role"] != "system":
            messages = {"system": {"role": "system", "content": system}} | messages
        elif first.get("content") != system:
            raise BadRecord(
                "the field 'system' and the first message, of the system, differ: remove one of them"
            )
    checked = [_checked(message, path) for path, message in messages.items()]
    masked = frozenset(number for number, (_, has_loss) in enumerate(checked) if not has_loss)
    tools = _parsed(values.get("tools") or None)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise BadRecord("the field 'tools' is not a list of JSON objects")
    return Chat([message for message, _ in checked], tools or None, masked)


# Path of a message in the record, for errors -> the message.
_Messages = dict[str, dict[str, Any]]


def _conversation(value: Any, values: Mapping[str, Any], field: str, chat_format: str) -> _Messages:
    """The messages of a list: messages with role and content, or turns of sharegpt."""
    is_sharegpt = chat_format == "sharegpt"
    keys, items, rest = _ITEMS[chat_format]
    others = [
        name
        for name, (others, *_) in _ITEMS.items()
        if name != chat_format and _starts_with(value, others[0])
    ]
    if isinstance(value, str) and "output" in values:
        others.append("alpaca")
    advice = f"; set chat_format={others[0]} for such records" if others else ""
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else kind_of(value)
        raise BadRecord(
            f"the field {field!r} is {kind}, expected a list of {items}s {rest}{advice}"
        )
    messages = _Messages()
    for i, message in enumerate(value):
        path = f"{field}[{i}]"
        is_dict = isinstance(message, dict)
        if not is_dict or not {*keys} <= message.keys() or message[keys[0]] is None:
            kind = f"a dictionary with the fields {[*message]}" if is_dict else kind_of(message)
            raise BadRecord(f"{path} is {kind}, expected a {items} {rest}{advice}")
        if is_sharegpt:
            sender = str(message["from"])
            if sender not in _SHAREGPT_ROLES:
                raise BadRecord(
                    f"{path}.from is {sender!r}, expected one of {', '.join(_SHAREGPT_ROLES)}"
                )
            others = {name: x for name, x in message.items() if name not in keys}
            role = _SHAREGPT_ROLES[sender]
            message = {"role": role, "content": message["value"], **others}
        messages[path] = message
    return messages


def _alpaca(value: Any, values: Mapping[str, Any], field: str) -> _Messages:
    texts = {}
    for i, pair in enumerate(values.get("history") or ()):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord(f"history[{i}] is {kind_of(pair)}, expected a question and its answer")
        texts |= {f"history[{i}][0]": pair[0], f"history[{i}][1]": pair[1]}
    texts |= {field: value, "output": values.get("output")}
    more = values.get("input") or ""
    for name, text in (texts | {"input": more}).items():
        if not isinstance(text, str):
            raise BadRecord(f"the field {name!r} is {kind_of(text)}, expected text")
    if more:
        texts[field] = f"{value}\n\n{more}"
    roles = itertools.cycle(("user", ASSISTANT))
    return {
        name: {"role": role, "content": text} for (name, text), role in zip(texts.items(), roles)
    }


def _turns(value: Any, field: str, role: str) -> "_Messages":
    """The messages of a field: a text of `role`, a message, or a list of messages with role and
    content or with from and value; none without the field."""
    if value is None or (isinstance(value, list) and not value):
        return {}
    if isinstance(value, str):
        return {field: {"role": role, "content": value}}
    turns = [value] if isinstance(value, dict) else value
    return _conversation(
        turns, {}, field, "sharegpt" if _starts_with(turns, "from") else "messages"
    )


def _starts_with(value: Any, key: str) -> bool:
    """Whether a value is a list whose first item is a dictionary with this key."""
    return isinstance(value, list) and any(isinstance(x, dict) and key in x for x in value[:1])


def _checked(message: dict[str, Any], path: str) -> tuple[dict[str, Any], bool]:
    """A message with its content as one text and with the arguments of its calls as dictionaries,
    without empty fields and flags, and whether it has a loss.

    Args:
      path: of the message in the record, for errors.
    """
    message = {
        name: x for name, x in message.items() if x is not None and (name, x) != ("tool_calls", [])
    }
    check_fields(message, f"{path}.")
    content = message.get("content")
    is_answer = message["role"] == ASSISTANT
    if content is None and not (is_answer and "tool_calls" in message):
        raise BadRecord(f"{path}.content is null, expected text{' or tool_calls' * is_answer}")
    flags = {name: message.pop(name) for name in LOSS_FLAGS if name in message}
    for name, flag in flags.items():
        if flag not in (0, 1) or (flag and not is_answer and name != "weight"):
            raise BadRecord(
                f"{path}.{name} is {flag!r}: {'expected 0 or 1' if is_answer else 'only answers have a loss'}"
            )
    message["content"] = content if content is None else _text(content, f"{path}.content")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    if is_answer and not any(x for name, x in message.items() if name not in ("role", "name")):
        raise BadRecord(f"{path} is an empty answer")
    return message, all(flags.values())


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"{path} is {kind_of(content)}, expected text or a list of parts of text")
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str()}:
                continue
            case dict():
                kind = f"a part of the type {part.get('type')!r}"
            case _:
                kind = kind_of(part)
        raise BadRecord(f"{path}[{i}] is {kind}, expected a part of the type 'text' with text")
    return "".join(part["text"] for part in content)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRecord(f"{path} is {kind_of(calls)}, expected a list of calls")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f"{path}[{i}] is {kind_of(call)} without the name of a function")
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise BadRecord(
                f"{path}[{i}]: the arguments of {function['name']!r} are not a JSON object"
            )
        outer = call if function is not call else {"type": "function"}
        checked.append({**outer, "function": {**function, "arguments": arguments}})
    return checked


def _parsed(value: Any) -> Any:
    """The value of JSON in a text; other values and texts as they are."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


# Fields beside token IDs -> the value of tokens that are not in the loss.
_MASKS = {"labels": -100} | dict.fromkeys(
    ("loss_mask", "attention_mask", "completion_mask", "assistant_masks"), 0
)
_SKIP_ADVICE = "or skip such records with data.max_bad_records"
_BLOCK_BYTES = 1 << 20  # text of a file in memory at one time


EVAL_SETTING = "data.eval_sources"


class Fields(NamedTuple):
    """Which field of a record holds the document; one of `tokens` and `chat` may be set, which
    replaces `text`.
    """

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
        """The setting that names the field of the files that `files_setting` lists:
        "data.text_field".
        """
        name = "token_field" if self.tokens else "chat_field" if self.chat else "text_field"
        if self.chat and files_setting == EVAL_SETTING:
            name = "eval_chat_field"
        is_mixture = files_setting.startswith("data.mixture.")
        section = files_setting if is_mixture else files_setting.rpartition(".")[0]
        return f"{section}.{name}" if section else name


class Document(NamedTuple):
    """A document; of `blocks`, `ids` and `chat`, one is set."""

    # the file's name; `name:number` (from 1) of the line or record if a file holds several
    # documents
    name: str
    where: str = ""  # FILE:NUMBER of its record, for errors
    # The text, to be read once, before the next document. No UTF-8 sequence crosses the end of a block, so each can be
    # decoded on its own, also if the text contains invalid UTF-8. The first one is not empty.
    blocks: Iterable[bytes] = ()
    ids: np.ndarray | None = None  # int [tokens]
    chat: Chat | None = None


BAD_RECORDS = "skipped records"
LISTED = "; all of them: "
# Text that is not UTF-8, such as latin-1 or UTF-16: documents with it, and characters that decoding
# replaces.
INVALID_DOCUMENTS = "documents that are not valid UTF-8"
INVALID_CHARACTERS = "invalid characters"


@dataclass
class Notes:
    """What was noticed in documents: a sentence -> how often, and the first place."""

    max_bad_records: int = 0
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)
    out: BinaryIO | None = None  # gets one line for each bad record
    listed_in: Path | None = None  # the file with these lines, to be named

    def add(self, note: str, where: str, number: int = 1) -> None:
        before, first = self.counts.get(note, (0, ""))
        self.counts[note] = (before + number, first or where)

    def update(self, counts: dict[str, tuple[int, str]]) -> None:
        for note, (number, first) in counts.items():
            self.add(note, first, number)

    def skip(self, error: BadRecord) -> None:
        """Counts a bad record, and writes it to the file.

        Raises:
          UserError: there are more than `max_bad_records`.
        """
        self.add(BAD_RECORDS, str(error))
        number, first = self.counts[BAD_RECORDS]
        if number > self.max_bad_records:
            skipped = f"{number:,} records cannot be used, more than data.max_bad_records={self.max_bad_records}"
            advice = f"{skipped} (the first: {first})" if self.max_bad_records else _SKIP_ADVICE
            raise UserError(f"{error}; {advice}") from None
        if self.out is not None:
            self.out.write(f"{error}\n".encode(errors="backslashreplace"))

    def lines(self, setting: str) -> list[str]:
        """Warnings, one line each; not those of invalid text."""
        lines = []
        for note, (number, first) in self.counts.items():
            if note not in (INVALID_DOCUMENTS, INVALID_CHARACTERS):
                is_listed = note == BAD_RECORDS and self.listed_in
                listed = f"{LISTED}{displayed(self.listed_in)}" if is_listed else ""
                lines.append(f"{setting}: {note}: {number:,} (the first: {first}){listed}")
        return lines


def read_documents(file: SourceFile, fields: Fields, notes: Notes) -> Iterator[Document]:
    """Yields the documents of a file in order and skips empty ones. Memory: one block of text, or
    one batch of records.

    Raises:
      UserError: the file cannot be read or decoded, or it has more bad records than allowed.
    """
    if has_suffix(file.path, RECORD_SUFFIXES):
        yield from _record_documents(file, fields, notes)
        return
    if fields.tokens or fields.chat:
        raise UserError(
            f"{file.setting}: {str(file.path)!r} is text without fields, and the documents are in the field"
            f" {fields.document!r}; remove it from {file.setting}"
        )
    with reading(file.path, file.setting), open(file.path, "rb") as opened:
        if first := opened.read(_BLOCK_BYTES).removeprefix(codecs.BOM_UTF8):
            yield Document(name=file.name, blocks=_blocks(first, opened))


def _blocks(first: bytes, opened: BinaryIO) -> Iterator[bytes]:
    """Yields the rest of a file of which `first` is read; see `Document.blocks`."""
    block = first
    while following := opened.read(_BLOCK_BYTES):
        # The last sequence may continue: it starts with the last byte of 0xC0 or more, at most 3
        # bytes before the end.
        end = next(
            (i for i in range(len(block) - 1, max(len(block) - 4, -1), -1) if block[i] >= 0xC0),
            len(block),
        )
        if end:
            yield block[:end]
        block = block[end:] + following
    yield block


def _record_documents(file: SourceFile, fields: Fields, notes: Notes) -> Iterator[Document]:
    if has_suffix(file.path, MEGATRON_SUFFIX) and not fields.tokens:
        raise UserError(
            f"{file.setting}: {str(file.path)!r} contains token IDs: set token_field=tokens of its source in"
            " config.data.mixture"
        )
    field_setting = fields.setting(file.setting)
    records = read_records(
        file.path, fields.document, others=fields.others, setting=file.setting, lines=file.lines
    )
    for record in records:
        try:
            document = _document(file, record, fields, field_setting)
        except BadRecord as error:
            notes.skip(error)
        else:
            if document is not None:
                yield document


def _document(
    file: SourceFile, record: Record, fields: Fields, field_setting: str
) -> Document | None:
    """The document of a record; None if it is empty.

    Raises:
      BadRecord: the record has no document.
    """
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
        setting = "a source of config.data.mixture with chat_field"
        if file.setting == EVAL_SETTING:
            setting = "config.data.eval_chat_field"
        raise BadRecord(
            f"{record.where}: the field {fields.text!r} is a chat; use {setting}={fields.text}"
        )
    if not isinstance(value, str):
        raise BadRecord(
            f"{record.where}: the field {fields.text!r} is {kind_of(value)}, expected text; fix or remove this record,"
            f" or set {field_setting} to another field"
        )
    if not value:
        return None
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return Document(name=name, where=record.where, blocks=[value.encode(errors="replace")])
