"""The Jinja environment of chat templates: settings, functions and the tag `generation` of published templates.

As a program it renders a template for `template_process`. It imports nothing else of jaxlc, to start soon.
"""

import contextlib
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# A tag, or a comment, which may contain the text of one.
_COMMENT_OR_TAG = re.compile(r"\{#.*?#\}|\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", re.DOTALL)


def environment(begin: str, end: str) -> jinja2.Environment:
    """A sandbox in which `{% generation %}text{% endgeneration %}` renders as begin + text + end.

    `strftime_now` is undefined, so that templates with a date use their fixed one, and tokens do not depend on the day.
    """
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.globals.update(
        raise_exception=_raise,
        mark_generation=lambda caller: f"{begin}{caller()}{end}",
    )
    env.filters["tojson"] = _to_json
    return env


def without_generation_tags(source: str) -> str:
    """A template that renders the same text and has no tags `generation`, which most inference engines cannot parse.

    Each tag becomes an empty comment, which removes the white space around it as the tag does.
    """

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("{#") else f"{{#{match[1]} {match[2]}#}}"

    return _COMMENT_OR_TAG.sub(replaced, source)


class _GenerationTag(jinja2.ext.Extension):
    """Parses `{% generation %}` blocks into calls of `mark_generation`."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = jinja2.nodes.Call(jinja2.nodes.Name("mark_generation", "load"), [], [], None, None)
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def render(
    template: jinja2.Template,
    messages: list[Any],
    tools: list[Any] | None,
    add_generation_prompt: bool,
    **variables: Any,
) -> str:
    """The text of a chat. Any exception may be raised, since the template may contain any expression."""
    return template.render(
        messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **variables
    )


def _serve() -> None:
    """Answers the questions of `template_process.TemplateProcess`, one per line."""
    lines = sys.stdin.buffer
    first = json.loads(lines.readline())
    _limit_memory(first["max_data_bytes"])
    answer = functools.partial(_answer, max_error_bytes=first["max_error_bytes"])
    try:
        with _limited_cpu(first["cpu_seconds"]):
            template = environment(first["begin"], first["end"]).from_string(first["source"])
    except Exception as error:
        answer(error)
        return
    answer("")
    for line in lines:
        question = json.loads(line)
        messages, tools = question["chat"]
        with _limited_cpu(question["cpu_seconds"]):
            for number, has_prompt in question["renderings"]:
                try:
                    text = render(template, messages[:number], tools, has_prompt, **first["variables"])
                    if len(text) > first["max_text_characters"]:
                        raise ValueError(f"the text has more than {first['max_text_characters']:,} characters")
                except Exception as error:
                    answer(error)
                    break  # the parent does not read further answers
                answer(text)
                del text  # before the next one needs memory


def _limit_memory(num_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    with contextlib.suppress(ValueError, OSError):  # not supported by every system
        resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))


@contextlib.contextmanager
def _limited_cpu(seconds: float) -> Iterator[None]:
    """SIGPROF, whose default action ends the process also within a function in C, after this CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(answer: str | Exception, max_error_bytes: int) -> None:
    """Writes a line, "text" or "error" and its size in bytes, and the bytes."""
    if isinstance(answer, str):
        content = answer.encode(errors="surrogatepass")
    else:
        reason = " ".join(str(answer)[:max_error_bytes].split()) or type(answer).__name__
        content = reason.encode(errors="replace")[:max_error_bytes]
    kind = "error" if isinstance(answer, Exception) else "text"
    sys.stdout.buffer.write(f"{kind} {len(content)}\n".encode())
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
