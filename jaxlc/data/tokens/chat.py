"""Chats: renders messages with a chat template (Jinja), and finds the answers in the tokens of the rendered text.

Only the answers of the assistant are trained on. Their place in the rendered text is found in one of two ways:

- A template may have `{% generation %}` ... `{% endgeneration %}` around them, as those that support the assistant
  masks of transformers.
- Otherwise, answer k is the text between the prompt of message k, rendered from the messages before it with
  `add_generation_prompt`, and the end of the text rendered from the messages up to it. White space behind its last
  end-of-turn token belongs to the template and not to the answer. A template may render earlier messages differently,
  for instance without their reasoning; then the answer ends at the next end-of-turn token.

A token is trained on if it contains a character of an answer. Text is encoded as a whole, with special tokens.
"""

import contextlib
import functools
import json
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxlc.config.chat_template_file import ADVICE, read_template, template_path
from jaxlc.core import extras
from jaxlc.core.errors import UserError, reason_of
from jaxlc.data.texts.chats import ASSISTANT
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.tokens.named_templates import TEMPLATES
from jaxlc.data.tokens.template_process import RenderError, TemplateError, TemplateProcess
from jaxlc.data.tokens.tokenizers import named_tokens, read_tokenizer_config

if TYPE_CHECKING:
    from jaxlc.data.tokens.tokenizers import Tokenizer

ROLES = ("system", "developer", "user", ASSISTANT, "tool")  # that any template may have
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which mark answers in rendered text
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # such as <|im_end|>, </s>, [/INST]
_END_OF_TURN = re.compile(f"({_MARKER.pattern})$")
_MAX_SOURCE_CHARACTERS = 1 << 18
_QUESTION, _ANSWER = "Question", "Answer"  # the messages of a chat that shows which markers a template has


class RenderedChat(NamedTuple):
    text: str
    answers: tuple[tuple[int, int], ...]  # begin and end of each answer in the text, in order


class ChatTemplate:
    """A chat template in Jinja, rendered in a sandbox with the settings and functions that transformers has."""

    def __init__(self, source: str, special_tokens: dict[str, str], name: str = "the chat template"):
        """
        Args:
          special_tokens: variables of the template, such as bos_token.
          name: of the template, for errors.
        Raises:
          UserError: the package jinja2 is missing, or the source is not a template.
        """
        extras.require("jinja2", "a source of chats")
        import jinja2

        from jaxlc.data.tokens.chat_environment import environment

        self.name, self.source = name, source
        self._special_tokens = special_tokens
        self.identity = (source, sorted(special_tokens.items()))  # what the rendered text depends on
        env = environment(_BEGIN, _END)
        try:
            if len(source) > _MAX_SOURCE_CHARACTERS:
                raise ValueError(f"it has more than {_MAX_SOURCE_CHARACTERS:,} characters")
            env.parse(source)  # not compiled, since the compiler computes constant expressions
            self._has_markers = "generation" in {token for _, _, token in env.lex(source)}
        except (jinja2.TemplateError, ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits
            raise UserError(f"{name} is not a valid Jinja template ({reason_of(error)})") from error
        self._template = env.from_string(source) if source in TEMPLATES.values() else None
        self._process = TemplateProcess(source, special_tokens, _BEGIN, _END)  # if it is not one of these

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str, dict[str, str], str]]:
        return ChatTemplate, (self.source, self._special_tokens, self.name)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> RenderedChat:
        """Renders a chat.

        Args:
          where: FILE:NUMBER of the record, for errors.
        Raises:
          BadRecord: the template raises an error for the messages or does not know a part of them, or it renders an
            answer as nothing.
        """
        question = self._question(messages, tools, where)
        if isinstance(question, BadRecord):
            raise question
        return self._answered(question)

    def render_all(
        self, chats: Iterable[tuple[list[dict[str, Any]], list[Any] | None, str]]
    ) -> Iterator[RenderedChat | BadRecord]:
        """Renders several chats, the arguments of `render`, and yields its results or errors. A template that is
        rendered in another process works on the next ones in the meantime."""
        questions = [self._question(*chat) for chat in chats]
        if self._template is None and len(questions) > 1:
            asked = [(x.json, x.renderings) for x in questions if isinstance(x, _Question)]
            with self._errors(""):
                self._process.ask(asked)
        for question in questions:
            if isinstance(question, _Question):
                try:
                    yield self._answered(question)
                except BadRecord as error:
                    yield error
            else:
                yield question

    def _question(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> "_Question | BadRecord":
        try:
            text = _json_of(messages, tools)
        except RecursionError as error:
            return BadRecord(f"{where}: the messages are nested too deeply ({reason_of(error)})")
        if _BEGIN in text or _END in text:
            return BadRecord(f"{where}: the messages contain the Unicode noncharacter U+FDD0 or U+FDD1; remove it")
        for problem in self._problems(messages, tools):
            return BadRecord(f"{where}: {problem}")
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        prompts = [x for number in numbers for x in ((number, True), (number + 1, False))] * (not self._has_markers)
        return _Question(messages, tools, where, text, numbers, [(len(messages), False), *prompts])

    def _answered(self, question: "_Question") -> RenderedChat:
        where, numbers = question.where, question.numbers
        with contextlib.closing(self._render(*question)) as texts:
            marked = next(texts)
            parts = re.split(f"[{_BEGIN}{_END}]", marked)
            if self._has_markers:
                ends = np.cumsum([len(part) for part in parts]).tolist()
                spans = list(zip(ends[0::2], ends[1::2]))
            else:
                spans = list(self._answers_by_prompts(marked, zip(numbers, texts, texts), where))
        answers = tuple((begin, end) for begin, end in spans if begin < end)
        empty = [number for number, (begin, end) in zip(numbers, spans) if begin == end]
        if not answers or (empty and len(spans) == len(numbers)):
            raise BadRecord(f"{where}: {self.name} renders no answer for message {(empty or numbers)[0]}")
        return RenderedChat("".join(parts), answers)

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        """The markers of a chat of one question and its answer, in order, such as <|im_start|> and <|im_end|>."""
        return tuple(dict.fromkeys(_MARKER.findall(self._example)))

    @functools.cached_property
    def end_of_turn(self) -> str:
        """The marker that follows an answer, such as <|im_end|>, after which generation stops; "" if there is none."""
        marker = _MARKER.match(self._example.rpartition(_ANSWER)[2].lstrip())
        return marker[0] if marker else ""

    @functools.cached_property
    def _example(self) -> str:
        """A rendered chat; "" if the template raises an error for it."""
        messages = [dict(role="user", content=_QUESTION), dict(role=ASSISTANT, content=_ANSWER)]
        try:
            [marked] = self._render(messages, None, "example", _json_of(messages, None), [], [(len(messages), False)])
            return re.sub(f"[{_BEGIN}{_END}]", "", marked)
        except BadRecord:
            return ""

    def _problems(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Iterator[str]:
        """What of a chat has no loss, or would be left out."""
        if not any(message["role"] == ASSISTANT for message in messages):
            yield f"no message has the role {ASSISTANT!r}, so there is nothing to train on"
        for number, role in enumerate(message["role"] for message in messages):
            if role not in ROLES and f"'{role}'" not in self.source and f'"{role}"' not in self.source:
                yield (
                    f"message {number} has the unknown role {role!r}, expected one of {', '.join(ROLES)}, or a role"
                    f" that {self.name} names"
                )
        advice = "set data.chat_template to one that does, such as chatml"
        if any("tool_calls" in message for message in messages) and "tool_calls" not in self.source:
            yield f"{self.name} does not render tool_calls; {advice}"
        if tools and "tools" not in self.source:
            yield f"{self.name} does not render tools; {advice}"

    def prompt(self, messages: list[dict[str, Any]], *, continues_last: bool = False) -> str:
        """The prompt of a chat, up to the start of the next answer, or with `continues_last` of the last message.

        Raises:
          BadRecord: the template raises an error.
        """
        renderings = [(len(messages), not continues_last)]
        [marked] = self._render(messages, None, "prompt", _json_of(messages, None), [], renderings)
        text = re.sub(f"[{_BEGIN}{_END}]", "", marked)
        if continues_last:
            last = messages[-1]["content"]  # which templates may strip
            text = "".join(text.rpartition(last if last in text else last.strip())[:2])
        return text

    def _answers_by_prompts(
        self, text: str, rendered: Iterable[tuple[int, str, str]], where: str
    ) -> Iterator[tuple[int, int]]:
        """Yields the begin and end of each answer in the rendered text, for a template without markers.

        Args:
          rendered: the number of the message, its prompt, and the text up to the end of the message.
        """
        advice = "use a template with {% generation %} in data.chat_template"
        for number, prompt, through in rendered:
            if not text.startswith(prompt) or not through.startswith(prompt):
                # The prompt of the template may begin the answer, for instance with an empty reasoning.
                prompt = _common_start(prompt, through)
                if not text.startswith(prompt):
                    raise BadRecord(
                        f"{where}: {self.name} renders message {number} differently in its prompt and in the chat;"
                        f" {advice}"
                    )
            answer = through[len(prompt) :].rstrip()
            if text.startswith(through):
                yield len(prompt), len(prompt) + len(answer)
            else:
                end_of_turn = _END_OF_TURN.search(answer)
                end = text.find(end_of_turn[0], len(prompt)) if end_of_turn else -1
                if end_of_turn is None or end < 0:
                    raise BadRecord(f"{where}: the end of message {number} cannot be found; {advice}")
                yield len(prompt), end + len(end_of_turn[0])

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        where: str,
        chat: str,
        numbers: list[int],
        renderings: Sequence[tuple[int, bool]],
    ) -> Generator[str, None, None]:
        """Yields the texts of several renderings of a chat, a `_Question`; see `TemplateProcess.render`.

        Raises:
          BadRecord: the template raises an error, or needs more time or memory than it may use.
          UserError: the template does not compile.
        """
        from jaxlc.data.tokens.chat_environment import render

        with self._errors(where):
            if self._template is None:
                yield from self._process.render(chat, renderings)
                return
            for number, has_prompt in renderings:
                yield render(self._template, messages[:number], tools, has_prompt, **self._special_tokens)

    @contextlib.contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        import jinja2

        try:
            yield
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise BadRecord(f"{where}: {self.name} raises an error for the messages ({reason_of(error)})") from error
        except RenderError as error:
            raise BadRecord(f"{where}: {self.name} {error}") from None
        except TemplateError as error:
            raise UserError(f"{self.name} is not a valid Jinja template: it {error}") from None


class _Question(NamedTuple):
    """A chat, and what is asked of its template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    where: str
    json: str  # messages and tools
    numbers: list[int]  # of the answers among the messages
    renderings: list[tuple[int, bool]]  # see `TemplateProcess.render`


def _json_of(messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    return json.dumps([messages, tools], ensure_ascii=False, default=str)


def _common_start(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:length]


def load_chat_template(setting: str, tokenizer_file: Path | None, *, advice: str = ADVICE) -> ChatTemplate:
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
        named = (item for item in template if isinstance(item, dict) and item.get("name") == "default")
        template = next((item.get("template") for item in named), None)
    if not isinstance(template, str):
        raise UserError(f"data.tokenizer has no chat template, which chats need: {advice}")
    return ChatTemplate(template, special_tokens, "the chat template of data.tokenizer")


def encode_chats(chats: Sequence[RenderedChat], tokenizer: "Tokenizer") -> list[tuple[np.ndarray, np.ndarray]]:
    """The token IDs, int32 [tokens], and the answers, int64 [answers, 2], begin and end in the tokens, of each chat."""
    encoded = tokenizer.encode_with_offsets([chat.text for chat in chats])
    return [(ids, _token_spans(offsets, chat.answers)) for (ids, offsets), chat in zip(encoded, chats)]


def _token_spans(offsets: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """The spans of tokens that contain a character of each span of characters.

    Args:
      offsets: int [tokens, 2], begin and end of each token in the text, increasing.
    """
    spans = np.array(answers, np.int64).reshape(-1, 2)
    begins = np.searchsorted(offsets[:, 1], spans[:, 0], side="right")
    ends = np.searchsorted(offsets[:, 0], spans[:, 1], side="left")
    begins[1:] = np.maximum(begins[1:], ends[:-1])  # a token belongs to one answer
    return np.stack([begins, ends], axis=1)[begins < ends]
