"""Chats of records as the messages that chat templates take.

messages  {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}: as the API of OpenAI. The content may
          be a list of parts, of which all are text; it is null in a message of the assistant with `tool_calls`.
sharegpt  {"conversations": [{"from": "human", "value": "..."}, ...], "system": "...", "tools": [...]}
alpaca    {"instruction": "...", "input": "...", "output": "...", "system": "..."}: one question and its answer

`tools` and the arguments of a call may be JSON in a string, which is parsed, because templates write them as JSON.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxlc.core.foreign_files import parse_json
from jaxlc.data.texts.records import BadRecord, kind_of

ASSISTANT = "assistant"
# Format -> the field of the chat, unless chat_field is set.
CHAT_FIELDS = {"messages": "messages", "sharegpt": "conversations", "alpaca": "instruction"}
# Other fields of a record that each format uses.
OTHER_FIELDS = {
    "messages": ("tools",),
    "sharegpt": ("tools", "system"),
    "alpaca": ("tools", "system", "input", "output"),
}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "tool": "tool",
}


class Chat(NamedTuple):
    messages: list[dict[str, Any]]  # role and content, and what else a message has, such as tool_calls
    tools: list[Any] | None


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and m.get("role") for m in value)


def read_chat(value: Any, values: Mapping[str, Any], chat_format: str, field: str, where: str) -> Chat:
    """The chat of a record.

    Args:
      value: of the field `field`.
      values: all fields of the record.
      chat_format: a key of CHAT_FIELDS.
      where: FILE:NUMBER of the record, for errors.
    Raises:
      BadRecord: the record has another form, a part of it cannot be trained on, or an answer is empty.
    """
    try:
        messages = _FORMATS[chat_format](value, values, field)
        if values.get("system") and "system" in OTHER_FIELDS[chat_format]:
            messages = {"system": {"role": "system", "content": values["system"]}} | messages
        return Chat([_checked(message, path) for path, message in messages.items()], _tools(values))
    except BadRecord as error:
        raise BadRecord(f"{where}: {error}") from None


# Path of a message in the record, for errors -> the message.
_Messages = dict[str, dict[str, Any]]


def _messages(value: Any, values: Mapping[str, Any], field: str) -> _Messages:
    is_turns = isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "from" in value[0]
    other = "sharegpt" if is_turns else "alpaca" if isinstance(value, str) and "output" in values else ""
    return _items(value, field, ("role",), "message with role and content", other)


def _sharegpt(value: Any, values: Mapping[str, Any], field: str) -> _Messages:
    other = "messages" if is_chat(value) else ""
    messages = _Messages()
    for path, turn in _items(value, field, ("from", "value"), "turn with from and value", other).items():
        role = _SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            raise BadRecord(f"{path}.from is {turn['from']!r}, expected one of {', '.join(_SHAREGPT_ROLES)}")
        rest = {name: x for name, x in turn.items() if name not in ("from", "value")}
        messages[path] = {"role": role, "content": turn["value"], **rest}
    return messages


def _alpaca(value: Any, values: Mapping[str, Any], field: str) -> _Messages:
    texts = {field: value, "input": values.get("input") or "", "output": values.get("output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise BadRecord(f"the field {name!r} is {kind_of(text)}, expected text")
    question = f"{value}\n\n{texts['input']}" if texts["input"] else value
    return {field: {"role": "user", "content": question}, "output": {"role": ASSISTANT, "content": texts["output"]}}


_FORMATS: dict[str, Callable[[Any, Mapping[str, Any], str], _Messages]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
}


def _items(value: Any, field: str, keys: tuple[str, ...], item: str, other_format: str) -> _Messages:
    """The items of `value`, if it is a list of dictionaries with these keys.

    Args:
      item: what they are, in the singular, for errors.
      other_format: the format that the record seems to have, or "".
    """
    advice = f"; set chat_format={other_format} for such records" if other_format else ""
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else kind_of(value)
        name, _, rest = item.partition(" ")
        raise BadRecord(f"the field {field!r} is {kind}, expected a list of {name}s {rest}{advice}")
    for i, x in enumerate(value):
        if not isinstance(x, dict) or not {*keys} <= x.keys() or x[keys[0]] is None:
            kind = f"a dictionary with the fields {[*x]}" if isinstance(x, dict) else kind_of(x)
            raise BadRecord(f"{field}[{i}] is {kind}, expected a {item}{advice}")
    return {f"{field}[{i}]": x for i, x in enumerate(value)}


def _checked(message: dict[str, Any], path: str) -> dict[str, Any]:
    """A message with its content as one text and with the arguments of its calls as dictionaries, without empty fields.

    Args:
      path: of the message in the record, for errors.
    """
    message = {name: x for name, x in message.items() if x is not None and (name, x) != ("tool_calls", [])}
    content, is_answer = message.get("content"), message["role"] == ASSISTANT
    if content is None and not (is_answer and "tool_calls" in message):
        raise BadRecord(f"{path}.content is null, expected text{' or tool_calls' * is_answer}")
    if message.get("weight", 1) != 1:
        raise BadRecord(f"{path}.weight is {message['weight']!r}: every answer is trained on; remove the record")
    message["content"] = content if content is None else _text(content, f"{path}.content")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    if is_answer and not any(x for name, x in message.items() if name not in ("role", "name", "weight")):
        raise BadRecord(f"{path} is an empty answer")
    return message


def _text(content: Any, path: str) -> str:
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise BadRecord(f"{path} is {kind_of(content)}, expected text or a list of parts of text")
        return content
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f"a part of the type {part.get('type')!r}" if isinstance(part, dict) else kind_of(part)
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
        arguments = function.get("arguments") or {}
        arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise BadRecord(f"{path}[{i}]: the arguments of {function['name']!r} are not a JSON object")
        outer = call if function is not call else {"type": "function"}
        checked.append({**outer, "function": {**function, "arguments": arguments}})
    return checked


def _tools(values: Mapping[str, Any]) -> list[Any] | None:
    """The field `tools`; None if it is missing or empty."""
    tools = values.get("tools") or None
    tools = _parsed(tools) if isinstance(tools, str) else tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRecord("the field 'tools' is not a list of JSON objects")
    return tools or None


def _parsed(text: str) -> Any:
    """The value of JSON; the text itself if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return text
