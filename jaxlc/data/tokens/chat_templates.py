"""Chats: renders messages with a chat template (Jinja), and finds the answers in the tokens of the rendered text.

Only the answers of the assistant are trained on. Their place in the rendered text is found in one of two ways:

- A template may have `{% generation %}` ... `{% endgeneration %}` around them, as those that support the assistant
  masks of transformers.
- Otherwise, answer k is the text between the prompt of message k, rendered from the messages before it with
  `add_generation_prompt`, and the end of the text rendered from the messages up to it. White space behind its last
  end-of-turn token belongs to the template and not to the answer. A template may render earlier messages differently,
  for instance without their reasoning; then the answer ends at the next end-of-turn token. If that makes a prompt
  differ, as after a call of a tool and another question, answer k follows the header of an answer number k.

So every answer is trained on as the template renders it at the end of the chat. What it leaves out is counted.

A template fits a tokenizer if its markers, such as <|im_end|>, are single tokens: a model learns to end its answers
with one token, at which inference engines stop.
"""

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlc.config.loading import ADVICE, read_template, template_path
from jaxlc.config.schema import CHAT_TEMPLATES
from jaxlc.core import UserError, errors, reason_of
from jaxlc.data.texts.documents import ASSISTANT, Chat
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.tokens.tokenizers import Tokenizer, named_tokens, read_tokenizer_config

# Tools have the markup of Hermes and Qwen in chatml, and that of Llama 3.1 in llama3, which has one
# call in an answer.
_CHATML = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "# Tools\n\nYou can call these functions:\n<tools>\n{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "</tools>\n\nA call is a JSON object:\n<tool_call>\n"
    '{"name": "NAME OF THE FUNCTION", "arguments": {"NAME": "VALUE"}}'
    "\n</tool_call><|im_end|>{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "You can call these functions:\n\n{% for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}"
    'A call is a JSON object: {"name": "NAME OF THE FUNCTION", "parameters": {"NAME": "VALUE"}}<|eot_id|>{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>{{ '\n\n' + message['content'] }}<|eot_id|>"
    "{% elif message['role'] == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>\n\n{% generation %}"
    "{% if message['tool_calls'] %}{% if message['content'] or message['tool_calls'] | length > 1 %}"
    "{{ raise_exception('an answer of llama3 is text or one call') }}{% endif %}"
    "{% set call = message['tool_calls'][0]['function'] %}"
    "{{ '{\"name\": ' + (call['name'] | tojson) + ', \"parameters\": ' + (call['arguments'] | tojson) + '}' }}"
    "{% else %}{{ message['content'] }}{% endif %}<|eot_id|>{% endgeneration %}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = dict(zip(CHAT_TEMPLATES, (_CHATML, _LLAMA3), strict=True))


ROLES = ("system", "developer", "user", ASSISTANT, "tool")  # that any template may have
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which mark answers in rendered text
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # such as <|im_end|>, </s>, [/INST]
_END_OF_TURN = re.compile(f"({_MARKER.pattern})$")
_MAX_SOURCE_CHARACTERS = 1 << 18
# the messages of a chat that shows which markers a template has
_QUESTION, _ANSWER = "Question", "Answer"
_STAND_IN = "\ufdd2"  # an answer that no other text contains
# A tag, or a comment, which may contain the text of one.
_COMMENT_OR_TAG = re.compile(r"\{#.*?#\}|\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", re.DOTALL)
_NO_TEXT = ("role", "name", "tool_call_id")  # fields of messages that templates need not render
_ADVICE = "use a template with {% generation %} in data.chat_template"


class MarkedText(NamedTuple):
    """A text and its answers; `data.tokens.encoder` encodes it."""

    text: str
    where: str  # FILE:NUMBER of its record, for warnings and errors
    answers: tuple[tuple[int, int], ...] = ()  # begin and end of each one in the text, in order
    left_out: tuple[str, ...] = ()  # what of the chat is not in the text


class ChatTemplate:
    """A chat template in Jinja, rendered in a sandbox with the settings and functions that
    transformers has.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], name: str = "the chat template"
    ):
        """
        Args:
          special_tokens: variables of the template, such as bos_token.
          name: of the template, for errors.
        Raises:
          UserError: the package jinja2 is missing, or the source is not a template.
        """
        errors.require("jinja2", "a source of chats")
        from jaxlc.data.tokens.template_sandbox import environment

        self.name = name
        self.source = source
        self._special_tokens = special_tokens
        # what the rendered text depends on
        self.identity = (source, sorted(special_tokens.items()))
        env = environment(_BEGIN, _END)
        try:
            if len(source) > _MAX_SOURCE_CHARACTERS:
                raise ValueError(f"it has more than {_MAX_SOURCE_CHARACTERS:,} characters")
            self._template = env.from_string(source)
            self._has_markers = "generation" in {token for _, _, token in env.lex(source)}
        except (
            Exception
        ) as error:  # SyntaxError, MemoryError, ValueError and others of Python's compiler, too
            raise UserError(f"{name} is not a valid Jinja template ({reason_of(error)})") from error

    def render(self, chat: Chat, where: str) -> MarkedText:
        """Renders a chat.

        Args:
          where: FILE:NUMBER of the record, for errors.
        Raises:
          BadRecord: the template raises an error for the messages or does not know a part of them, or it renders an
            answer as nothing.
        """
        messages, _, masked = chat
        numbers = [
            number for number, message in enumerate(messages) if message["role"] == ASSISTANT
        ]
        if masked.issuperset(numbers):
            roles = dict.fromkeys(message["role"] for message in messages)
            kind = f"no message has the role {ASSISTANT!r}, only {', '.join(map(repr, roles))}"
            kind = "all answers have no loss" if numbers else kind
            raise BadRecord(f"{where}: {kind}, so there is nothing to train on")
        self._check(chat, where)
        marked = self._render(chat, where)
        parts = re.split(f"[{_BEGIN}{_END}]", marked)
        text = "".join(parts)
        if self._has_markers:
            ends = np.cumsum([len(part) for part in parts]).tolist()
            spans = list(zip(ends[0::2], ends[1::2]))
        else:
            numbers = [number for number in numbers if number not in masked]
            spans = self._answers_by_prompts(marked, chat, numbers, where)
            spans = spans or self._answers_by_header(text, chat, numbers, where)
        if len(spans) == len(numbers):
            for number, span in zip(numbers, spans):
                answer = text[slice(*span)]
                has_text = any(part in answer for _, part in _parts(messages[number]))
                if not _MARKER.sub("", answer).strip() and not has_text:
                    raise BadRecord(f"{where}: {self.name} renders no answer for message {number}")
            spans = [span for number, span in zip(numbers, spans) if number not in masked]
        elif masked:
            raise BadRecord(
                f"{where}: {self.name} renders {len(spans)} answers of {len(numbers)} messages of the role"
                f" {ASSISTANT!r}, so that it is unknown which of them have a loss"
            )
        answers = tuple((begin, end) for begin, end in spans if begin < end)
        if not answers:
            raise BadRecord(f"{where}: {self.name} renders no answer for message {numbers[0]}")
        return MarkedText(text, where, answers, left_out=_left_out(chat, text))

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        """The markers of a chat of one question and its answer, in order, such as <|im_start|> and
        <|im_end|>.
        """
        return tuple(dict.fromkeys(_MARKER.findall(self._examples[0])))

    @functools.cached_property
    def end_of_turn(self) -> str:
        """The marker that follows an answer, such as <|im_end|>, after which generation stops; ""
        if there is none.
        """
        marker = _MARKER.match(self._examples[0].rpartition(_ANSWER)[2].lstrip())
        return marker[0] if marker else ""

    @functools.cached_property
    def _header(self) -> str:
        """What precedes every answer, such as <|im_start|>assistant and a newline; "" if there is
        nothing.
        """
        answered, question, prompt, following = self._examples
        texts = (answered, prompt, following)
        if not all(text.startswith(question) for text in texts):
            return ""
        start = os.path.commonprefix([text[len(question) :] for text in texts])
        return re.sub(r"[<\[][^<>\[\]\s]*$", "", start)  # without the start of a marker

    @functools.cached_property
    def _examples(self) -> Sequence[str]:
        """A question and its answer, the question, its prompt, and both with another question; ""
        where the template raises an error.
        """
        question = dict(role="user", content=_QUESTION)
        chat = Chat([question, dict(role=ASSISTANT, content=_ANSWER), question])
        texts = []
        for cut in ((2, False), (1, False), (1, True), (3, False)):
            texts.append("")
            with contextlib.suppress(BadRecord):
                texts[-1] = self._text(chat, *cut)
        return texts

    def _text(
        self, chat: Chat, num_messages: int | None, has_prompt: bool, where: str = "example"
    ) -> str:
        self._check(chat, where)
        return re.sub(f"[{_BEGIN}{_END}]", "", self._render(chat, where, num_messages, has_prompt))

    def _check(self, chat: Chat, where: str) -> None:
        """Raises BadRecord for a chat that cannot be rendered."""
        messages, tools, _ = chat
        try:
            text = json.dumps([messages, tools], ensure_ascii=False, default=str)
        except RecursionError as error:
            raise BadRecord(
                f"{where}: the messages are nested too deeply ({reason_of(error)})"
            ) from error
        if _BEGIN in text or _END in text:
            raise BadRecord(
                f"{where}: the messages contain the Unicode noncharacter U+FDD0 or U+FDD1; remove it"
            )
        for number, role in enumerate(message["role"] for message in messages):
            is_named = any(f"{quote}{role}{quote}" in self.source for quote in "'\"")
            if role not in ROLES and not is_named:
                raise BadRecord(
                    f"{where}: message {number} has the unknown role {role!r}, expected one of {', '.join(ROLES)}, or"
                    f" a role that {self.name} names"
                )
        has_calls = any("tool_calls" in message for message in messages)
        for part, is_used in (("tool_calls", has_calls), ("tools", tools)):
            if is_used and part not in self.source:
                raise BadRecord(
                    f"{where}: {self.name} does not render {part}; set data.chat_template to one that does, such as"
                    " chatml"
                )

    def prompt(
        self, chat: Chat, where: str = "prompt", *, continues_last: bool = False
    ) -> MarkedText:
        """The prompt of a chat, up to the start of the next answer, or with `continues_last` of the
        last message.

        Raises:
          BadRecord: the template raises an error or does not know a part of the chat.
        """
        text = self._text(chat, None, not continues_last, where)
        if continues_last:
            last = chat.messages[-1]["content"]  # which templates may strip
            text = "".join(text.rpartition(last if last in text else last.strip())[:2])
        return MarkedText(text, where, left_out=_left_out(chat, text))

    def continuation(self, new: Chat, where: str) -> str:
        """The text from the end of an answer to the start of the next one, after new messages.

        Templates may render an answer differently once messages follow it, so the text is what
        follows an answer that stands for any other.

        Raises:
          BadRecord: the template raises an error, or does not render the answer.
        """
        messages = [dict(role="user", content=_QUESTION), dict(role=ASSISTANT, content=_STAND_IN)]
        text = self._text(Chat([*messages, *new.messages], new.tools), None, True, where)
        _, found, after = text.partition(_STAND_IN)
        if not found:
            raise BadRecord(f"{where}: {self.name} does not render an answer before other messages")
        return after

    def _answers_by_prompts(
        self, text: str, chat: Chat, numbers: Sequence[int], where: str
    ) -> list[tuple[int, int]] | None:
        """The begin and end of each answer in the rendered text, for a template without markers;
        None: a prompt is not the start of the text.

        Args:
          numbers: of the messages that are answers.
        """
        spans = []
        for number in numbers:
            prompt = self._render(chat, where, number, has_prompt=True)
            through = self._render(chat, where, number + 1)
            if not text.startswith(prompt) or not through.startswith(prompt):
                # The prompt of the template may begin the answer, for instance with an empty
                # reasoning.
                prompt = os.path.commonprefix([prompt, through])
                if not text.startswith(prompt):
                    return None
            answer = through[len(prompt) :].rstrip()
            end = len(prompt) + len(answer)
            if not text.startswith(through):
                end_of_turn = _END_OF_TURN.search(answer)
                begin = text.find(end_of_turn[0], len(prompt)) if end_of_turn else -1
                if begin < 0:
                    raise BadRecord(
                        f"{where}: the end of message {number} cannot be found; {_ADVICE}"
                    )
                end = begin + len(end_of_turn[0])
            spans.append((len(prompt), end))
        return spans

    def _answers_by_header(
        self, text: str, chat: Chat, numbers: Sequence[int], where: str
    ) -> list[tuple[int, int]]:
        roles = [message["role"] for message in chat.messages]
        found = []
        if self._header and self.end_of_turn:
            header, end = map(re.escape, (self._header, self.end_of_turn))
            found = [x.span(1) for x in re.finditer(f"{header}(.*?{end})", text, re.DOTALL)]
        if len(found) != roles.count(ASSISTANT):
            raise BadRecord(
                f"{where}: {self.name} renders a message differently in its prompt and in the chat, and its answers"
                f" cannot be found by their headers; {_ADVICE}"
            )
        return [found[roles[:number].count(ASSISTANT)] for number in numbers]

    def _render(
        self, chat: Chat, where: str, num_messages: int | None = None, has_prompt: bool = False
    ) -> str:
        """The text of the first messages, or of all, with the marks of answers.

        Raises:
          BadRecord: the template raises an error, or exceeds a limit of `template_sandbox`.
        """
        from jaxlc.data.tokens.template_sandbox import MAX_TEXT_CHARACTERS

        parts = []
        num_characters = 0
        try:
            for part in self._template.generate(
                messages=chat.messages[:num_messages],
                tools=chat.tools,
                documents=None,
                add_generation_prompt=has_prompt,
                **self._special_tokens,
            ):
                parts.append(part)
                num_characters += len(part)
                if num_characters > MAX_TEXT_CHARACTERS:
                    raise OverflowError(
                        f"the text has more than {MAX_TEXT_CHARACTERS:,} characters"
                    )
        except Exception as error:  # it may contain any expression
            raise BadRecord(
                f"{where}: {self.name} raises an error for the messages ({reason_of(error)})"
            ) from error
        return "".join(parts)


def _left_out(chat: Chat, text: str) -> tuple[str, ...]:
    """The fields of messages, and tools, that have a text which is not in the rendered one; white
    space is ignored.
    """
    functions = [tool.get("function", tool) for tool in chat.tools or ()]
    names = [
        str(function["name"])
        for function in functions
        if isinstance(function, dict) and "name" in function
    ]
    missing = dict.fromkeys([] if all(name in text for name in names) else ["tools"])
    squeezed = _squeezed(text)
    for message in chat.messages:
        for field, part in _parts(message):
            forms = part, json.dumps(part, ensure_ascii=False)[1:-1]
            if not any(_squeezed(form) in squeezed for form in forms):
                missing[f"{field} of {message['role']}"] = None
    return tuple(missing)


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts of a message with their fields, without white space around them."""
    for field, value in message.items():
        if field not in _NO_TEXT:
            for text in _strings(value):
                if text.strip():
                    yield (field, text.strip())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([x for name, x in value.items() if name not in ("id", "type")])
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_strings, value))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def load_chat_template(
    setting: str, tokenizer_file: Path | None, *, advice: str = ADVICE
) -> ChatTemplate:
    """The template of data.chat_template, or else of the tokenizer.

    Args:
      setting: data.chat_template: a path, a key of TEMPLATES, the text of a template, or "".
      tokenizer_file: the tokenizer.json, next to which tokenizer_config.json and chat_template.jinja are; None: bytes.
      advice: how to set a template, for errors.
    Raises:
      UserError: there is no template, or it cannot be read.
    """
    values = read_tokenizer_config(tokenizer_file.parent) if tokenizer_file else {}
    special_tokens = named_tokens(values)
    if setting in TEMPLATES:
        return ChatTemplate(TEMPLATES[setting], special_tokens, f"the template {setting!r}")
    path = template_path(setting)
    if setting and path is None:
        return ChatTemplate(setting, special_tokens, "the chat template of the run")
    path = path or tokenizer_file and tokenizer_file.parent / "chat_template.jinja"
    if path and (setting or path.is_file()):
        return ChatTemplate(read_template(path, advice), special_tokens, str(path))
    template = values.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(f"data.tokenizer has no chat template, which chats need: {advice}")
    return ChatTemplate(template, special_tokens, "the chat template of data.tokenizer")


def fitting_template(
    setting: str, tokenizer: Tokenizer, *, flag: str = "--config.data.chat_template"
) -> ChatTemplate:
    """The template of data.chat_template, or else of the tokenizer.

    Bytes have no special tokens, so every template fits them.

    Args:
      setting: as in `load_chat_template`.
      flag: that sets a template, for errors.
    Raises:
      UserError: there is no template, it cannot be read, or it does not fit; the message names those that fit.
    """
    named = (load_chat_template(name, tokenizer.file) for name in TEMPLATES)
    fitting = [
        name
        for name, template in zip(TEMPLATES, named)
        if not _split_markers(template, name, tokenizer)
    ]
    advice = f"set {flag} to {', '.join(fitting)}{' or ' if fitting else ''}a Jinja file"
    template = load_chat_template(setting, tokenizer.file, advice=advice)
    if split := _split_markers(template, setting, tokenizer):
        raise UserError(
            f"{template.name} has {' and '.join(split)}, which the tokenizer {tokenizer.name!r} splits into several"
            f" tokens: {advice} whose markers are tokens of this tokenizer"
        )
    return template


def end_of_turn_id(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer; None: the template has no such marker, or the tokenizer splits
    it.
    """
    return _token_id(template.end_of_turn, tokenizer)


def _split_markers(template: ChatTemplate, setting: str, tokenizer: Tokenizer) -> list[str]:
    """The markers that are not single tokens: all of a template in TEMPLATES; of other templates,
    the one that ends an answer, because published ones have headers of several tokens."""
    markers = template.markers if setting in TEMPLATES else [template.end_of_turn]
    return [
        x for x in markers if x and tokenizer.file is not None and _token_id(x, tokenizer) is None
    ]


def _token_id(marker: str, tokenizer: Tokenizer) -> int | None:
    ((ids, _),) = tokenizer.encode_with_offsets([marker], special_tokens=True)
    return int(ids[0]) if len(ids) == 1 else None


def without_generation_tags(source: str) -> str:
    """A template that renders the same text and has no tags `generation`, which most inference
    engines cannot parse.

    Each tag becomes an empty comment, which removes the white space around it as the tag does.
    """

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("{#") else f"{{#{match[1]} {match[2]}#}}"

    return _COMMENT_OR_TAG.sub(replaced, source)
